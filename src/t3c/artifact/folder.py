"""The place of an artifact: a folder that is replaced as a whole, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from t3c.errors import ArtifactError
from t3c.files import beside, locked, replacing, writing

MANIFEST = "manifest.json"
WORK = ".work"


def work_of(artifact: Path) -> Path:
    """Return the folder that compressing keeps its stages in, and what it was judged by."""
    return artifact.with_name(artifact.name + WORK)


def kept_beside(artifact: Path) -> Path:
    """Return where the original and data of an artifact are: its work folder, else its own."""
    work = work_of(artifact)
    return work if work.is_dir() else artifact.parent


@contextmanager
def staged(final: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of `final` when the block ends well.

    The old folder stays in its place until the new one is whole and on disk. If the block fails,
    or the process dies, the old one is still there.
    """
    final = final.resolve()
    with writing(final):
        final.parent.mkdir(parents=True, exist_ok=True)
    with locked(final):
        with writing(final):
            _restore(final)
            _sweep(final)
            if final.exists() and not _is_artifact(final):
                raise ArtifactError(f"{final} exists and is not an artifact: it is left alone")
        with replacing(final) as staging:
            yield staging


def recover(final: Path) -> None:
    """Put the old folder back if a crash fell between the two renames of an exchange."""
    final = final.resolve()
    if final.exists() or not beside(final, "previous").exists():
        return
    with locked(final), writing(final):
        _restore(final)


def _restore(final: Path) -> None:
    previous = beside(final, "previous")
    if previous.exists() and not final.exists():
        previous.rename(final)


def _sweep(final: Path) -> None:
    """Remove what writers that died left; the lock says that none is alive."""
    for stale in final.parent.glob(f".{final.name}.*.partial"):
        shutil.rmtree(stale, ignore_errors=True)
    if _is_artifact(final):
        shutil.rmtree(beside(final, "previous"), ignore_errors=True)


def _is_artifact(path: Path) -> bool:
    return (path / MANIFEST).is_file()
