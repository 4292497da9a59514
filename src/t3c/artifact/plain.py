"""Read the plain JSON files of an artifact: records of known fields, or one clear error."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from t3c.errors import ArtifactError, CorruptError

LARGEST_PLAIN = 2**26  # bytes of a file that is read as a whole

T = TypeVar("T", bound="Record")


class Record(BaseModel):
    """A JSON object of an artifact: immutable, and nothing in it that is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def read_plain(path: Path) -> bytes:
    """Return the bytes of a plain file of an artifact; a link could lead out of the folder."""
    check_plain(path)
    try:
        if path.stat().st_size > LARGEST_PLAIN:
            raise CorruptError(f"{path}: larger than {LARGEST_PLAIN} bytes")
        return path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error


def check_plain(path: Path) -> None:
    """Raise for what is missing, a link or no file."""
    if path.is_symlink() or not path.is_file():
        raise CorruptError(f"{path}: missing, or not a plain file")


def parse(kind: type[T], raw: bytes, path: Path) -> T:
    """Return a record from the bytes of a file, or one clear error."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CorruptError(f"{path}: {where}: {first['msg']}") from error
