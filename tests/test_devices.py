"""Conversion, training and export of a model that is not on the CPU.

There is no GPU here, so it is a device of our own that refuses what a GPU refuses. Torch keeps
such a device until the process ends, so these tests run in one of theirs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def test_the_whole_path_on_a_second_device() -> None:
    folders = [str(TESTS), str(TESTS / "compression"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
         str(TESTS / "second_device_paths.py")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
