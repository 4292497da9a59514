"""CIFAR-100's binary files: every byte in its place, and nothing that is not whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from t3c.cli import app
from t3c.errors import DataError
from t3c.zoo import cifar100 as zoo
from t3c.zoo import fetch

COUNTS = {"train": 5, "test": 3}
STD, MEAN = (torch.tensor(v)[:, None, None] for v in (zoo.IMAGE.std, zoo.IMAGE.mean))


def records(part: str) -> np.ndarray:
    """Bytes (n, 3074) of a part, no two images alike."""
    count = COUNTS[part]
    rng = np.random.default_rng(count)
    labels = rng.integers(0, [20, 100], (count, 2))
    labels[-1] = 19, 99
    return np.hstack([labels, rng.integers(0, 256, (count, 3072))]).astype(np.uint8)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(zoo, "COUNTS", COUNTS)
    monkeypatch.delenv("T3C_DATA", raising=False)
    monkeypatch.delenv("T3C_CIFAR100", raising=False)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "source"
    folder.mkdir()
    for part in COUNTS:
        records(part).tofile(folder / f"{part}.bin")
    return folder


@pytest.fixture
def folder(source: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("T3C_CIFAR100", str(source))
    return source


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(DataError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_whole_is_of_this_size() -> None:
    assert zoo.COUNTS == {"train": 50_000, "test": 10_000}
    assert zoo.RECORD == 3074
    assert list(zoo.CLASSES) == sorted(set(zoo.CLASSES))
    assert len(zoo.CLASSES) == 100


@pytest.mark.parametrize("part", ["train", "test"])
def test_colours_lie_one_after_the_other(folder: Path, part: zoo.Part) -> None:
    images, labels = zoo.cifar100(part)
    expected = torch.from_numpy(records(part)[:, 2:].reshape(-1, 3, 32, 32)).float()
    torch.testing.assert_close((images * STD + MEAN) * 255, expected, atol=1e-3, rtol=0)
    assert labels.tolist() == records(part)[:, 1].tolist()
    assert labels.dtype == torch.int64


def test_a_known_pixel_is_where_it_belongs(folder: Path) -> None:
    raw = np.zeros((3, 3074), np.uint8)
    raw[1, 2 + 2 * 1024 + 5 * 32 + 7] = 255  # blue, line 5, column 7 of the second image
    raw.tofile(folder / "test.bin")
    images, _ = zoo.cifar100("test")
    pixels = images * STD + MEAN
    assert (pixels.abs() > 1e-5).nonzero().tolist() == [[1, 2, 5, 7]]
    assert pixels[1, 2, 5, 7].item() == pytest.approx(1)


def test_the_first_of_them(folder: Path) -> None:
    whole, part = zoo.cifar100("train"), zoo.cifar100("train", 2)
    assert all(torch.equal(a[:2], b) for a, b in zip(whole, part, strict=True))
    assert "there are 5 train images, 6" in refusal(lambda: zoo.cifar100("train", 6))
    assert "parts of CIFAR-100" in refusal(lambda: zoo.cifar100("valid"))  # type: ignore[arg-type]


def test_where_it_is(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "run `t3c data get cifar100 --from FOLDER`" in refusal(zoo.cifar100_folder)
    fetch.cifar100(None, source)
    assert zoo.cifar100_folder() == zoo.FETCHED
    monkeypatch.setenv("T3C_CIFAR100", str(source))
    assert zoo.cifar100_folder() == source
    shutil.copytree(source, tmp_path / "cifar100")
    monkeypatch.setenv("T3C_DATA", str(tmp_path))
    assert zoo.cifar100_folder() == tmp_path / "cifar100"


def spoil(path: Path, how: str) -> None:
    raw = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
        return
    if how == "coarse":
        raw[3074] = 20
    elif how == "fine":
        raw[2 * 3074 + 1] = 100
    else:
        raw = raw[: int(how)]
    path.write_bytes(raw)


SPOILT = [
    ("test.bin", "gone", "test.bin", "lacks test.bin"),
    ("train.bin", "0", "has 0 bytes, 5 images of 3,074 bytes are 15,370", ""),
    ("train.bin", "-3074", "has 12,296 bytes", ""),
    ("test.bin", "-1", "has 9,221 bytes", ""),
    ("train.bin", "coarse", "image 1 has the coarse label 20, the last is 19", ""),
    ("test.bin", "fine", "image 2 has the fine label 100, the last is 99", ""),
]


@pytest.mark.parametrize(("name", "how", "message", "copied"), SPOILT)
def test_what_is_not_whole_is_refused(
    folder: Path, tmp_path: Path, name: str, how: str, message: str, copied: str
) -> None:
    to = tmp_path / "data" / "cifar100"
    fetch.cifar100(to, folder)
    before = {path.name: path.read_bytes() for path in to.iterdir()}
    spoil(folder / name, how)
    said = refusal(lambda: zoo.cifar100(name.removesuffix(".bin")))  # type: ignore[arg-type]
    assert said.startswith(str(folder / name))
    assert message in said
    said = refusal(lambda: fetch.cifar100(to, folder))
    assert (copied or message) in said
    assert said.startswith(str(folder))
    # The older copy is still there, and nothing else.
    assert {path.name: path.read_bytes() for path in to.iterdir()} == before
    assert [path.name for path in to.parent.iterdir()] == ["cifar100"]


def test_it_is_copied_from_a_folder(source: Path, tmp_path: Path) -> None:
    (source / "fine_label_names.txt").write_text("apple\n")
    heard: list[str] = []
    to = tmp_path / "to"
    assert fetch.DATASETS["cifar100"](to, source, heard.append) == to
    assert heard == [f"copying from {source}"]
    assert {p.name for p in to.iterdir()} == {"train.bin", "test.bin"}
    assert all(
        (to / n).read_bytes() == (source / n).read_bytes() for n in ("train.bin", "test.bin")
    )
    fetch.cifar100(to, to)  # onto itself
    (to / "thesis.tex").write_text("years of work")
    assert "holds something else" in refusal(lambda: fetch.cifar100(to, source))


def test_it_is_not_downloaded(tmp_path: Path) -> None:
    said = refusal(lambda: fetch.cifar100(tmp_path / "to"))
    assert said == "cifar100 cannot be fetched: name a folder of train.bin and test.bin with --from"
    assert not list(tmp_path.iterdir())


def test_by_the_command(source: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["data", "get", "cifar100", "--from", str(source)])
    assert (done.exit_code, done.stdout) == (0, "out/data/cifar100\n")
    assert (tmp_path / "out/data/cifar100/test.bin").read_bytes() == records("test").tobytes()
