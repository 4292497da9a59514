"""The local data folder that T3C_DATA names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from t3c.errors import DataError

Item = TypeVar("Item")


def data_root() -> Path:
    """The folder that T3C_DATA names."""
    root = os.environ.get("T3C_DATA")
    if not root:
        raise DataError("T3C_DATA is not set: name the folder of local data and weights in it")
    if not Path(root).is_dir():
        raise DataError(f"T3C_DATA names {root}, which is no folder")
    return Path(root)


def data_path(name: str) -> Path:
    """A file or a folder of the local data."""
    path = data_root() / name
    if not path.exists():
        raise DataError(f"{path} is missing: T3C_DATA does not hold {name}")
    return path


def first(items: Sequence[Item], count: int | None, what: str) -> Sequence[Item]:
    """The first `count` items, all of them for None, never fewer than asked for."""
    if count is not None and not 1 <= count <= len(items):
        raise DataError(f"there are {len(items)} {what}, {count} were asked for")
    return items[:count]
