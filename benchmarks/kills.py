"""`make bench-kills`: the demo is killed without warning at random moments and started again.

At the end it must finish, its artifact must verify, and no stage that was finished may have been
done again. A demo that finishes before its kills are used up starts anew in another folder.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.figures import Figure, finish
from t3c.compression.stages import RESULT

OUT = Path("out/bench-kills.json")
T3C = (sys.executable, "-m", "t3c.cli")


def results(folder: Path) -> dict[Path, int]:
    """Return when each finished stage was finished."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob(f"*-*/{RESULT}")}


@dataclass
class Trial:
    """One demo in a folder, from its first start to its end."""

    folder: Path
    finished: dict[Path, int] = field(default_factory=dict)
    redone: set[Path] = field(default_factory=set)

    def start(self, seconds: float | None) -> int | None:
        """Return the exit code, None if it was killed after some seconds."""
        command = [*T3C, "demo", "--out", str(self.folder)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        now = results(self.folder)
        self.redone |= {path for path, when in self.finished.items() if now.get(path) != when}
        self.finished |= now
        return code

    def verified(self) -> bool:
        """Return whether the artifact's hashes are right."""
        command = [*T3C, "inspect", str(self.folder / "digits.t3c"), "--verify"]
        return subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0


def main(arguments: Sequence[str]) -> int:
    """Kill demos until all kills are used up, let the last one finish, and check all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/bench-kills"))
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=90.0, help="the longest a start lives")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    shutil.rmtree(asked.out, ignore_errors=True)
    random.seed(asked.seed)
    rows: list[dict[str, Any]] = []
    trials, killed, failed = [Trial(asked.out / "demo-1")], 0, 0
    while True:
        trial, last = trials[-1], killed == asked.kills
        seconds = None if last else random.uniform(0, asked.seconds)
        code = trial.start(seconds)
        told = "killed" if code is None else f"exit {code}"
        rows.append(
            {"demo": len(trials), "seconds": seconds, "end": told, "stages": len(trial.finished)}
        )
        print(rows[-1], flush=True)
        killed += code is None
        failed += code not in (None, 0)
        if last or failed:
            break
        if code == 0:
            trials.append(Trial(asked.out / f"demo-{len(trials) + 1}"))
    done = [trial for trial in trials if (trial.folder / "digits.t3c").exists()]
    figures = [
        Figure("kills", killed, asked.kills, at_least=True),
        Figure("failed_starts", failed, 0),
        Figure("demos_not_finished", len(trials) - len(done), 0),
        Figure("artifacts_not_verified", sum(not trial.verified() for trial in done), 0),
        Figure("stages_done_again", sum(len(trial.redone) for trial in trials), 0),
    ]
    return finish(OUT, figures, {"starts": rows})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
