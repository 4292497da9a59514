"""What the README says runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


def test_the_code_runs(tmp_path: Path) -> None:
    (code,) = blocks("README.md", "python")
    calls = [line for line in code.splitlines() if re.search(r"\bt3c\.\w+\(|\brt\(", line)]
    assert len(calls) == 5
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    profile, epsilon = done.stdout.split()
    assert profile in {"tiny", "small", "med", "large", "max"}
    assert 0 < float(epsilon) < 5


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", "docs/conversion.md", "docs/certificates.md"]
)
def test_commands_and_paths_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert (
        set(re.findall(r"\bmake ([a-z-]+)\b(?=[`\n ])", " ".join(blocks(name, "bash")))) <= targets
    )
    for command in set(re.findall(r"\bt3c ([a-z]+) ", " ".join(blocks(name, "bash")))):
        done = subprocess.run(
            [sys.executable, "-c", "from t3c.cli import main; main()", command, "--help"],
            capture_output=True,
        )
        assert done.returncode == 0, command
    for path in re.findall(r"`((?:src|tests|docs|benchmarks)/[^`]*)`", text):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("http") or ((ROOT / name).parent / link).exists(), link


def test_the_docs_code_runs(tmp_path: Path) -> None:
    (code,) = blocks("docs/conversion.md", "python")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "2: untouched (excluded)" in done.stdout
