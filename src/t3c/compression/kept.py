"""What a compression keeps beside its artifact, for what is done with the artifact later."""

from __future__ import annotations

from pathlib import Path

from t3c.errors import DataError

WORK = ".work"
ORIGINAL, TEST, CALIBRATION, BENCH = "original.onnx", "test.npz", "calibration.npz", "bench.json"


def work_of(artifact: Path) -> Path:
    """Return the work folder of an artifact: NAME.t3c.work."""
    path = artifact if artifact.name else artifact.resolve()
    return path.with_name(path.name + WORK)


def find_kept(artifact: Path, name: str, option: str, *, beside: bool = True) -> Path:
    """Return a file of an artifact's work folder, or, as the demo has it, one beside the artifact.

    `option` is what else names it.
    """
    work = work_of(artifact)
    places = [work, work.parent] if beside else [work]
    for folder in places:
        if (folder / name).is_file():
            return folder / name
    tried = f"{work}" + (" or beside the artifact" if beside else "")
    raise DataError(f"{artifact}: there is no {name} in {tried}: give one with {option}")
