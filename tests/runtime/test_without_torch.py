"""`pip install t3c[openvino,calibrate]` brings no torch; it runs and calibrates an artifact."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest

import t3c
from conftest import BRIEFLY, Made

CODE = """
import sys, json, numpy as np, t3c
from t3c.errors import MissingExtraError
rt = t3c.load(sys.argv[1])
y = rt(np.load(sys.argv[2])[None], budget=t3c.Budget(size_mb=1000))
try:
    t3c.elasticize_
except MissingExtraError as error:
    message = str(error)
print(json.dumps({"y": y.tolist(), "profile": rt.profile, "epsilon": rt.certificate.epsilon,
                  "torch": "torch" in sys.modules, "message": message}))
"""


def closure(name: str, extras: frozenset[str]) -> dict[str, Distribution]:
    """What installing a distribution with some extras brings, by its own declared needs."""
    from packaging.requirements import Requirement

    found: dict[str, Distribution] = {}
    todo = [(name, extras)]
    while todo:
        current, wanted = todo.pop()
        try:
            dist = distribution(current)
        except PackageNotFoundError:
            continue
        first = found.setdefault(re.sub(r"[-_.]+", "-", current).lower(), dist) is dist
        if not first and not wanted:
            continue
        for text in dist.requires or []:
            need = Requirement(text)
            envs = [{"extra": extra} for extra in wanted or {""}]
            if need.marker is None or any(need.marker.evaluate(e) for e in envs):
                key = re.sub(r"[-_.]+", "-", need.name).lower()
                if key not in found or need.extras:
                    todo.append((need.name, frozenset(need.extras)))
    return found


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds t3c, what it and two of its extras need, and nothing else."""
    home = tmp_path_factory.mktemp("bare")
    venv.create(home, with_pip=False, symlinks=True)
    site = next(home.glob("lib/python*/site-packages"))
    for key, dist in closure("t3c", frozenset({"openvino", "calibrate"})).items():
        if key == "t3c":
            continue
        for file in dist.files or []:
            top = file.parts[0]
            source, target = Path(str(dist.locate_file(top))), site / top
            if top not in ("..", "__pycache__") and source.exists() and not target.exists():
                target.symlink_to(source)
    (site / "t3c").symlink_to(Path(t3c.__file__).parent)
    return home / "bin" / "python"


def test_it_answers_as_it_does_with_torch(made: Made, bare_python: Path) -> None:
    assert subprocess.run([bare_python, "-c", "import torch"], capture_output=True).returncode == 1
    one = made.folder / "one.npy"
    done = subprocess.run(
        [bare_python, "-c", CODE, made.artifact, one], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["torch"] is False
    assert answer["message"] == "torch is not installed: pip install 't3c[train]'"
    here = t3c.load(made.artifact)
    wanted = here(made.digits.test[0][:1].numpy(), budget=t3c.Budget(size_mb=1000))
    assert answer["profile"] == here.profile
    assert here.certificate is not None
    assert answer["epsilon"] == here.certificate.epsilon
    assert answer["y"][0] == pytest.approx(wanted[0].tolist(), abs=1e-3)


def test_its_command_line_works(made: Made, bare_python: Path, tmp_path: Path) -> None:
    run = [bare_python, "-c", "from t3c.cli import main; main()"]
    done = subprocess.run(
        [*run, "run", made.artifact, "--input", made.folder / "one.npy", "--json"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["profile"] == "max"
    copy = shutil.copytree(made.artifact, tmp_path / "copy.t3c")
    few = ["--threads", "1", "--rounds", "1", "--grid", "3", "--busy", "--json"]
    brief = [bare_python, "-c", f"{BRIEFLY}from t3c.cli import main; main()"]
    done = subprocess.run([*brief, "calibrate", copy, *few], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["proxies"].keys() == {"hybrid", "flops", "bytes"}
    done = subprocess.run([*run, "demo"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: torch is not installed: pip install 't3c[train]'\n"
