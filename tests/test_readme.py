"""What the README and the documents say runs."""

from __future__ import annotations

import ast
import copy
import inspect
import io
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import t3c
from conftest import BRIEFLY
from hurried import hurried
from t3c.cli import main
from t3c.zoo.digits import Digits

# Put before the documents' code, which stays as it is: what it leaves to defaults is made smaller.
LESS_EFFORT = """
from typing import Any

from t3c.evidence.estimates import EstimateConfig
from t3c.exporter import ExportConfig
from t3c.device.calibrate import CalibrationConfig
from t3c.spec import Goal
from t3c.zoo.digits import DigitsNet

def lower(config: type, **defaults: Any) -> None:
    whole = config.__init__
    config.__init__ = lambda self, **given: whole(self, **{**defaults, **given})

lower(CalibrationConfig, rounds=3, grid=3, grid_rounds=3, starts=False)
lower(ExportConfig, goal=Goal(profiles=3))
lower(EstimateConfig, samples=1, path_samples=0)
DigitsNet.__init__.__defaults__ = ((16, 32, 64), 1, (2, 1, 2, 1))
"""
ROOT = Path(__file__).parents[1]


def calls(code: str) -> list[str]:
    """The lines of some code that use the library."""
    return [line for line in code.splitlines() if re.search(r"\bt3c\.[a-z_]\w*\(|\brt\(", line)]


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


def test_the_door_runs_in_three_lines(
    trained: nn.Module, digits: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = blocks("README.md", "python")
    assert len(calls(code)) == 3
    hurried(monkeypatch)
    monkeypatch.chdir(tmp_path)
    x = digits.test[0][:1].numpy()
    names: dict[str, Any] = {"model": copy.deepcopy(trained), "data": [digits.calibration], "x": x}
    exec(code, names)
    assert names["made"].path == Path("resnet.t3c")
    assert names["y"].shape == (1, 10)
    assert names["rt"].profile in {"tiny", "small", "med", "large", "max"}


def test_the_parts_run_in_five_lines(tmp_path: Path) -> None:
    door, code = blocks("docs/compress.md", "python")
    assert len(calls(door)) == 1
    assert len(calls(code)) == 5
    done = subprocess.run(
        [sys.executable, "-c", BRIEFLY + LESS_EFFORT + code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    profile, epsilon = done.stdout.split()
    assert profile in {"tiny", "small", "med", "large", "max"}
    assert 0 < float(epsilon) < 5


@pytest.mark.parametrize("name", ["README.md", "docs/compress.md"])
def test_the_door_takes_what_the_code_gives_it(name: str) -> None:
    given = [
        {word.arg for word in node.keywords}
        for code in blocks(name, "python")
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "t3c.compress"
    ]
    assert given
    for words in given:
        assert words <= set(inspect.signature(t3c.compress).parameters)


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/conversion.md",
        "docs/certificates.md",
        "docs/training.md",
        "docs/text.md",
        "docs/serving.md",
        "docs/compress.md",
    ],
)
def test_commands_and_paths_exist(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / name).read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert (
        set(re.findall(r"\bmake ([a-z-]+)\b(?=[`\n ])", " ".join(blocks(name, "bash")))) <= targets
    )
    for command in set(re.findall(r"\bt3c ([a-z]+) ", " ".join(blocks(name, "bash")))):
        monkeypatch.setattr(sys, "argv", ["t3c", command, "--help"])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 0, command
    for path in re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[^`]*)`", text):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("http") or ((ROOT / name).parent / link).exists(), link


def test_the_docs_code_runs() -> None:
    (code,) = blocks("docs/conversion.md", "python")
    with redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    assert "2: untouched (excluded)" in printed.getvalue()
