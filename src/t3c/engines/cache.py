"""Compiled engine graphs on disk: they save time and are never the truth.

An entry is one file: a header of 256 bytes (magic, sha256 of the payload, key, engine version)
and the payload an engine wrote. The header is checked whole before an engine sees the payload: a
damaged one could crash the process. Whatever goes wrong, the graph is compiled as without a cache.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import mmap
import os
import re
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from t3c.errors import ArtifactError, EngineError, SpecError
from t3c.files import beside, locked, write_atomic
from t3c.measure.processor import cpu_identity

MAGIC = b"T3C compiled 1\n\0"
HEADER = struct.Struct("16s32s32s176s")  # keeps the payload at a multiple of 64 bytes
ENDING = ".compiled"
OURS = re.compile(rf"[0-9a-f]{{64}}{ENDING}|\.[0-9a-f]{{64}}{ENDING}\.(lock|\d+\.partial)")
STALE = 3600 * 10**9  # nanoseconds after which an unfinished file is no one's

Blob = npt.NDArray[np.uint8]
Compiled = TypeVar("Compiled")

log = logging.getLogger("t3c.runtime")


@dataclass(frozen=True)
class Entry:
    """All that decides what an engine makes of a graph; `graph` is the sha256 of its bytes."""

    engine: str
    version: str
    threads: int
    config: tuple[tuple[str, object], ...]
    graph: str
    shapes: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def key(self) -> str:
        """64 hexadecimal digits; the processor counts too."""
        parts = [
            self.engine, self.version, self.threads, sorted(map(repr, self.config)), self.graph,
            self.shapes, cpu_identity(),
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()

    def header(self, payload: bytes | memoryview) -> bytes:
        """Return the header of an entry with this payload."""
        version = self.version.encode()[:176]
        digest = hashlib.sha256(payload).digest()
        return HEADER.pack(MAGIC, digest, bytes.fromhex(self.key), version)


def graph_digest(raw: bytes) -> str:
    """The sha256 of a serialized graph, its weights included."""
    return hashlib.sha256(raw).hexdigest()


def default_folder() -> Path:
    """$T3C_CACHE, else t3c in the user's cache folder, else one of this user's in /tmp."""
    if chosen := os.environ.get("T3C_CACHE"):
        return Path(chosen)
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if caches.is_absolute():
        return caches / "t3c"
    try:
        return Path.home() / ".cache" / "t3c"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / f"t3c-{os.geteuid()}"


class CompileCache:
    """A folder of compiled graphs; those not used for longest go when it exceeds `most_bytes`.

    Only files of this user count, in a folder that no one else may write to. A problem is logged
    once and never raised.
    """

    def __init__(self, folder: Path, most_bytes: int = 4 << 30) -> None:
        if most_bytes <= 0:
            raise SpecError(f"most_bytes must be positive, got {most_bytes}")
        self.folder = folder.absolute()
        self.most_bytes = most_bytes
        self._told: set[str] = set()

    def path(self, entry: Entry) -> Path:
        return self.folder / f"{entry.key}{ENDING}"

    def recall(self, entry: Entry, restore: Callable[[Blob], Compiled]) -> Compiled | None:
        """Return what `restore` makes of an entry's payload; None where there is no entry of use.

        The payload has to outlive what is made of it, if that reads from it.
        """
        blob = self.load(entry)
        if blob is None:
            return None
        try:
            return restore(blob)
        except EngineError as refusal:
            self.tell(f"{self.path(entry)}: {refusal}")
            return None

    def load(self, entry: Entry) -> Blob | None:
        """The payload of an entry, mapped from disk and checked; None where there is none."""
        path = self.path(entry)
        if not self._usable():
            return None
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                blob = _mapped(file, path, entry)
                with suppress(OSError):
                    os.utime(file)  # used just now
            finally:
                os.close(file)
        except FileNotFoundError:
            return None
        except ArtifactError as error:
            self.tell(str(error))
            return None
        except OSError as refusal:
            linked = refusal.errno == errno.ELOOP
            self.tell(f"{path}: {'is a link' if linked else refusal.strerror or refusal}")
            return None
        return blob

    def store(self, entry: Entry, payload: bytes) -> None:
        """Write or replace an entry, and make room for it."""
        path, whole = self.path(entry), entry.header(payload) + payload
        if len(whole) > self.most_bytes:
            return
        try:
            with suppress(FileExistsError):
                self.folder.mkdir(mode=0o700, parents=True)
            if not self._usable():
                return
            with locked(path):
                for partial in self.folder.glob(beside(path, "*.partial").name):
                    partial.unlink(missing_ok=True)  # of a process that was killed
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()
                write_atomic(path, whole)
            self._make_room(path)
        except OSError as refusal:
            self.tell(f"{self.folder}: cannot be written: {refusal.strerror or refusal}")
        except ArtifactError as error:
            refused = error.__cause__
            if isinstance(refused, OSError):  # else another process is writing the same entry
                self.tell(f"{self.folder}: cannot be written: {refused.strerror or refused}")

    def tell(self, problem: str) -> None:
        """Log a problem, if it is a new one."""
        if problem not in self._told:
            self._told.add(problem)
            log.warning("compiled without the cache: %s", problem)

    def _usable(self) -> bool:
        """Whether there is a folder, and one where no one else may put files."""
        try:
            found = self.folder.stat()
        except (FileNotFoundError, NotADirectoryError):  # to be made, or told of when that fails
            return False
        except OSError as refusal:
            self.tell(f"{self.folder}: {refusal.strerror or refusal}")
            return False
        if not stat.S_ISDIR(found.st_mode):
            self.tell(f"{self.folder}: is not a folder")
            return False
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            self.tell(f"{self.folder}: others may write to it")
            return False
        return True

    def _make_room(self, newest: Path) -> None:
        """Remove what was used longest ago until the rest fits, and what killed processes left."""
        files = sorted(_files(self.folder), key=lambda file: (file[0] == newest, file[1]))
        total = sum(size for _, _, size in files)
        for path, used, size in files:
            finished = path.suffix == ENDING
            if total > self.most_bytes if finished else used < time.time_ns() - STALE:
                with suppress(OSError):
                    path.unlink()
                total -= size


def _mapped(file: int, path: Path, entry: Entry) -> Blob:
    """The payload of an open entry; raises where it is not exactly what was written."""
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise ArtifactError(f"{path}: is not a file")
    if found.st_uid != os.geteuid():
        raise ArtifactError(f"{path}: belongs to another user")
    if found.st_size <= HEADER.size:
        raise ArtifactError(f"{path}: is cut short")
    # A private copy on write: engines want memory they may write to, the file stays as it is.
    whole = np.frombuffer(mmap.mmap(file, 0, access=mmap.ACCESS_COPY), dtype=np.uint8)
    head, payload = whole[: HEADER.size], whole[HEADER.size :]
    if head.tobytes() != entry.header(payload.data):
        raise ArtifactError(f"{path}: is damaged, or of another graph or engine")
    return payload


def _files(folder: Path) -> Iterator[tuple[Path, int, int]]:
    """(path, last use in ns, bytes) of the cache's files in a folder, as far as they stay there."""
    with os.scandir(folder) as items:
        for item in items:
            with suppress(OSError):
                if OURS.fullmatch(item.name) and item.is_file(follow_symlinks=False):
                    found = item.stat(follow_symlinks=False)
                    yield Path(item.path), found.st_mtime_ns, found.st_size
