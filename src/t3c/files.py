"""Writing files and folders so that a crash leaves the old ones whole, and writers do not meet."""

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

from t3c.errors import ArtifactError, T3CError


@contextmanager
def writing(what: Path, error: type[T3CError] = ArtifactError) -> Iterator[None]:
    """Turn the system's refusals to write into one clear error."""
    try:
        yield
    except OSError as refusal:
        reason = refusal.strerror or refusal
        raise error(f"{what}: cannot be written: {reason}") from refusal


def write_atomic(path: Path, data: bytes, error: type[T3CError] = ArtifactError) -> None:
    """Write one file beside its place and move it there; its folder is made if need be."""
    partial = beside(path, f"{os.getpid()}.partial")
    try:
        with writing(path, error):
            path.parent.mkdir(exist_ok=True)
            with partial.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


@contextmanager
def replacing(final: Path, error: type[T3CError] = ArtifactError) -> Iterator[Path]:
    """A folder to write into, which takes the place of `final` when the block ends well.

    The old folder stays in its place until the new one is whole and on disk; that no one else
    writes `final` meanwhile is for the caller to see to.
    """
    staging = beside(final, f"{os.getpid()}.partial")
    with writing(final, error):
        staging.mkdir()
    try:
        yield staging
        with writing(final, error):
            _sync(staging)
            _exchange(staging, final)
            sync_folder(final.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def locked(final: Path, wait: float = 0.0, error: type[T3CError] = ArtifactError) -> Iterator[None]:
    """Keep other writers of a file or folder out; one that stays for `wait` seconds is an error."""
    until = time.monotonic() + wait
    lock = beside(final, "lock")
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        with writing(final, error):
            handle = os.open(lock, flags, 0o644)
        with os.fdopen(handle) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < until:
                    time.sleep(0.05)
                    continue
                raise error(f"{final}: another process is writing it") from None
            if not _is_at(lock, file):  # its owner removed it before we had it
                continue
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


def beside(path: Path, suffix: str) -> Path:
    """The hidden name next to `path` for what is only passing."""
    return path.parent / f".{path.name}.{suffix}"


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
        previous = beside(final, "previous")
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


def _sync(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            sync_folder(path)
    sync_folder(folder)
