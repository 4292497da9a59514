"""Writing a folder so that a crash leaves the old one whole, and two writers do not meet."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from t3c.errors import ArtifactError


@contextmanager
def staged(final: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of `final` when the block ends well.

    The old folder stays in its place until the new one is whole and on disk. If the block fails,
    or the process dies, the old one is still there.
    """
    final = final.absolute()
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final):
            _restore(final)
            _sweep(final)
            if final.exists() and not (final / "manifest.json").is_file():
                raise ArtifactError(f"{final} exists and is not an artifact: it is left alone")
            staging = _beside(final, f"{os.getpid()}.partial")
            staging.mkdir()
            try:
                yield staging
                _sync(staging)
                _exchange(staging, final)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise ArtifactError(f"{final}: cannot be written: {error.strerror or error}") from error


def recover(final: Path) -> None:
    """Put the old folder back if a crash fell between the two renames of an exchange."""
    final = final.absolute()
    if final.exists() or not _beside(final, "previous").exists():
        return
    with _locked(final):
        _restore(final)


def write_atomic(path: Path, data: bytes) -> None:
    """Write one file beside its place and move it there."""
    partial = _beside(path, f"{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _locked(final: Path) -> Iterator[None]:
    lock = _beside(final, "lock")
    while True:
        with lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ArtifactError(f"{final}: another process is writing it") from None
            if not _is_at(lock, file):  # its owner removed it before we had it
                continue
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


def _is_at(path: Path, file: IO[str]) -> bool:
    try:
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False


def _exchange(staging: Path, final: Path) -> None:
    """Put `staging` in the place of `final`: in one step where the system can, else in two."""
    if not final.exists():
        staging.rename(final)
    elif not _swap(staging, final):
        previous = _beside(final, "previous")
        final.rename(previous)
        staging.rename(final)
        shutil.rmtree(previous, ignore_errors=True)


def _swap(a: Path, b: Path) -> bool:
    """Exchange two folders atomically (Linux, most file systems); False where that is not to be."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(renameat2(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0)


def _restore(final: Path) -> None:
    previous = _beside(final, "previous")
    if previous.exists() and not final.exists():
        previous.rename(final)


def _sweep(final: Path) -> None:
    """Remove what writers that died left; the lock says that none is alive."""
    for stale in final.parent.glob(f".{final.name}.*.partial"):
        shutil.rmtree(stale, ignore_errors=True)
    if final.exists():
        shutil.rmtree(_beside(final, "previous"), ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _beside(path: Path, suffix: str) -> Path:
    return path.parent / f".{path.name}.{suffix}"
