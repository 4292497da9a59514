"""`make bench-wheel`: build the wheel, install it where nothing else is, run and serve an artifact.

Everything is made in a temporary folder; packages come from where pip finds them, as pinned by
constraints.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from lab.figures import Figure, finish

OUT = Path("out/bench-wheel.json")
ROOT = Path(__file__).parents[1]
ARTIFACT = ROOT / "tests" / "artifact" / "version1.t3c"
OURS = re.compile(r"t3c/|t3c-[^/]+\.dist-info/")
FOREIGN = re.compile(r"/(lab|baselines|benchmarks|tests)/")
SECONDS = 60  # that a server may take to start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--artifact", type=Path, default=ARTIFACT)
    artifact = parser.parse_args().artifact.resolve()
    with tempfile.TemporaryDirectory(prefix="t3c-wheel-") as name:
        folder = Path(name)
        wheel = build(folder)
        with zipfile.ZipFile(wheel) as packed:
            files = packed.namelist()
        size = wheel.stat().st_size
        strange = [file for file in files if not OURS.match(file) or FOREIGN.search(file)]
        python = empty(folder / "empty")
        install(python, f"{wheel}[openvino]")
        told = command(python, folder, "inspect", str(artifact), "--verify", "--json")
        answered = command(
            python, folder, "run", str(artifact), "--input", str(sample(told, folder)), "--json"
        )
        install(python, f"{wheel}[openvino,serve]")
        served = serve(python, folder, artifact, told)
    ran = np.array(answered["answers"][0]["output"])
    asked = np.array(served["outputs"][0]["data"])
    figures = [
        Figure("wheel.files_that_are_not_ours", len(strange), 0),
        Figure("wheel.served_and_run_apart", float(np.abs(ran.ravel() - asked).max()), 1e-4),
    ]
    tables = {
        "wheel": [{"files": len(files), "bytes": size}],
        "strange": [{"file": f} for f in strange],
    }
    return finish(OUT, figures, tables)


def build(folder: Path) -> Path:
    """Return the wheel that `python -m build` makes of the working tree."""
    python = empty(folder / "build")
    install(python, "build")
    made = [str(python), "-m", "build", "--wheel", "--outdir", str(folder / "dist"), str(ROOT)]
    subprocess.run(made, check=True, env=environment(), stdout=subprocess.DEVNULL)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def empty(folder: Path) -> Path:
    """Return the interpreter of a new virtual environment."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def install(python: Path, *what: str) -> None:
    quiet = ["--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [str(python), "-m", "pip", "install", *quiet, *what], check=True, env=environment()
    )


def environment() -> dict[str, str]:
    """Return an environment in which pip keeps to our pins and nothing of the source is seen."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}


def command(python: Path, folder: Path, *arguments: str) -> dict[str, Any]:
    """Return the JSON that `t3c` prints."""
    done = subprocess.run(
        [str(python.with_name("t3c")), *arguments], cwd=folder, env=environment(),
        check=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def sample(told: dict[str, Any], folder: Path) -> Path:
    """Write one random sample of the artifact's only input."""
    (entry,) = told["model"]["inputs"]
    shape = [size or 1 for size in entry["shape"]]
    path = folder / "sample.npy"
    np.save(path, np.random.default_rng(0).normal(size=shape).astype(entry["dtype"]))
    return path


def serve(python: Path, folder: Path, artifact: Path, told: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a server to one request."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = subprocess.Popen(
        [str(python.with_name("t3c")), "serve", str(artifact), "--port", str(port)],
        cwd=folder, env=environment(),
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}/v2"
    values = np.load(folder / "sample.npy")
    given = {
        "name": told["model"]["inputs"][0]["name"], "datatype": "FP32",
        "shape": values.shape, "data": values.ravel().tolist(),
    }  # fmt: skip
    try:
        wait(f"{url}/health/ready")
        request = urllib.request.Request(
            f"{url}/models/{told['model']['name']}/infer",
            json.dumps({"inputs": [given]}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found
    finally:
        started.terminate()
        started.wait()


def wait(url: str) -> None:
    """Return once a page answers; raise TimeoutError if it does not in time."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(url, timeout=SECONDS).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise TimeoutError(f"{url} does not answer")


if __name__ == "__main__":
    sys.exit(main())
