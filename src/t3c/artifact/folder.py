"""Writing a folder so that a crash leaves the old one whole, and two writers do not meet."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from t3c.errors import ArtifactError

MANIFEST = "manifest.json"


@contextmanager
def writing(what: Path) -> Iterator[None]:
    """Turn the system's refusals to write into one clear error."""
    try:
        yield
    except OSError as error:
        raise ArtifactError(f"{what}: cannot be written: {error.strerror or error}") from error


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
        staging = _beside(final, f"{os.getpid()}.partial")
        with writing(final):
            _restore(final)
            _sweep(final)
            if final.exists() and not _is_artifact(final):
                raise ArtifactError(f"{final} exists and is not an artifact: it is left alone")
            staging.mkdir()
        try:
            yield staging
            with writing(final):
                _sync(staging)
                _exchange(staging, final)
                _sync_folder(final.parent)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def recover(final: Path) -> None:
    """Put the old folder back if a crash fell between the two renames of an exchange."""
    final = final.resolve()
    if final.exists() or not _beside(final, "previous").exists():
        return
    with locked(final), writing(final):
        _restore(final)


def write_atomic(path: Path, data: bytes) -> None:
    """Write one file beside its place and move it there; its folder is made if need be."""
    partial = _beside(path, f"{os.getpid()}.partial")
    try:
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            with partial.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            _sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


@contextmanager
def locked(final: Path, wait: float = 0.0) -> Iterator[None]:
    """Keep other writers of a file or folder out; one that stays for `wait` seconds is an error."""
    until = time.monotonic() + wait
    lock = _beside(final, "lock")
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        with writing(final):
            handle = os.open(lock, flags, 0o644)
        with os.fdopen(handle) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < until:
                    time.sleep(0.05)
                    continue
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
    if _is_artifact(final):
        shutil.rmtree(_beside(final, "previous"), ignore_errors=True)


def _is_artifact(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _sync(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _beside(path: Path, suffix: str) -> Path:
    return path.parent / f".{path.name}.{suffix}"
