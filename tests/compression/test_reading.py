"""Data of a path: pictures by class or flat, arrays, texts, running text; refusals in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from folders import make_stories, make_texts
from t3c.compression.pictures import Preprocessing
from t3c.compression.reading import read_data
from t3c.compression.source import Source, Task, open_source
from t3c.errors import DataError

HOW = Preprocessing(resize=(8, 8), crop=None)


def vision() -> Source:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2)).eval()
    model(torch.zeros(1, 3, 8, 8))
    return Source("net", model, torch.zeros(2, 3, 8, 8), Task.IMAGES, ("cat", "dog"), HOW)


def pictures(folder: Path, *names: str) -> None:
    for index, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (10, 12), (20 * index, 0, 0)).save(path)


def test_folders_are_classes_by_name_number_or_order(tmp_path: Path) -> None:
    for names in (("Dog", "cat"), ("1", "0"), ("x2", "x1")):
        folder = tmp_path / names[0]
        pictures(folder, f"{names[0]}/a.png", f"{names[1]}/b.png", f"{names[1]}/c.jpg")
        data = read_data(vision(), folder)
        assert data.labels is not None
        assert sorted(data.labels.tolist()) == [0, 0, 1]
        assert tuple(data.inputs.shape) == (3, 3, 8, 8)  # type: ignore[union-attr]


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png", "b.png")
    assert read_data(vision(), tmp_path).labels is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), r"has no pictures"),
        (("cat/a.png",), "fewer than two classes"),
        (("cat/a.png", "cow/b.png", "dog/c.png"), r"cow: the model has no class 'cow'"),
    ],
)
def test_folders_that_cannot_be(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    pictures(tmp_path, *names)
    with pytest.raises(DataError, match=message) as caught:
        read_data(vision(), tmp_path)
    assert "\n" not in str(caught.value)


def test_arrays(tmp_path: Path) -> None:
    source = vision()
    x, y = np.zeros((4, 3, 8, 8), np.float32), np.array([0, 1, 0, 1])
    np.savez(tmp_path / "a.npz", x=x, y=y)
    found = read_data(source, tmp_path / "a.npz")
    assert found.labels is not None
    assert found.labels.tolist() == [0, 1, 0, 1]
    np.savez(tmp_path / "b.npz", x=x, y=y + 5)
    with pytest.raises(DataError, match=r"0 to 1, got 5 to 6"):
        read_data(source, tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", x=x[:, :, :4], y=y)
    with pytest.raises(DataError, match=r"the data has inputs of"):
        read_data(source, tmp_path / "c.npz")
    np.savez(tmp_path / "d.npz", x=x * np.nan)
    with pytest.raises(DataError, match="NaN or infinite"):
        read_data(source, tmp_path / "d.npz")
    (tmp_path / "e.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:100])
    with pytest.raises(DataError, match=r"e.npz: not readable"):
        read_data(source, tmp_path / "e.npz")
    np.savez(tmp_path / "f.npz", y=y)
    with pytest.raises(DataError, match="no array of inputs"):
        read_data(source, tmp_path / "f.npz")


def test_what_does_not_suit_the_model(tmp_path: Path) -> None:
    plain = Source("net", vision().model, torch.zeros(2, 3, 8, 8), Task.OUTPUTS)
    with pytest.raises(DataError, match="does not say how pictures are prepared"):
        read_data(plain, tmp_path)
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(DataError, match="does not read text"):
        read_data(vision(), tmp_path / "a.txt")
    with pytest.raises(DataError, match="no such file or folder"):
        read_data(vision(), tmp_path / "none")


def test_texts_are_filled_up_to_what_the_model_reads(tmp_path: Path) -> None:
    model, data = make_texts(tmp_path)
    source = open_source(str(model))
    assert source.most_tokens == 40
    read = read_data(source, data)
    assert isinstance(read.inputs, dict)
    assert {name: value.shape for name, value in read.inputs.items()} == {
        "input_ids": (180, 40), "attention_mask": (180, 40)
    }  # fmt: skip
    assert read.inputs["attention_mask"].sum(dim=1).tolist() == [10] * 180
    assert read.labels is not None
    assert set(read.labels.tolist()) == {0, 1}
    example = source.like(read.at(slice(2)).inputs).example
    assert isinstance(example, dict)
    assert example["input_ids"].shape == (2, 40)
    with pytest.raises(DataError, match="reads at most 40 tokens: give --length 40 or less"):
        read_data(source, data, length=41)


def test_of_two_texts_a_token_says_which_it_is_of(tmp_path: Path) -> None:
    model, _ = make_texts(tmp_path)
    source, data = open_source(str(model)), tmp_path / "pairs.tsv"
    data.write_text("sentence1\tsentence2\tlabel\nw1 w2\tw3\tbad\nw4\tw5 w6 w7\tgood")
    read = read_data(source, data, length=10)
    assert isinstance(read.inputs, dict)
    assert read.inputs["token_type_ids"].sum(dim=1).tolist() == [2, 4]


def test_running_text_is_windows_that_begin_alike(tmp_path: Path) -> None:
    model, data = make_stories(tmp_path)
    read = read_data(open_source(str(model)), data, length=8)
    assert isinstance(read.inputs, dict)
    ids = read.inputs["input_ids"]
    assert ids.shape == (214, 8)
    assert set(ids[:, 0].tolist()) == {1}
    assert ids[:, 1:].flatten().tolist() == [int(w[1:]) for w in data.read_text().split()][:1498]


def test_rows_of_a_data_set_are_read_as_files_are(tmp_path: Path) -> None:
    model, data = make_texts(tmp_path)
    source, lines = open_source(str(model)), data.read_text().splitlines()
    names = lines[0].split("\t")
    rows = [dict(zip(names, line.split("\t"), strict=True)) for line in lines[1:]]
    read, wanted = read_data(source, rows), read_data(source, data)
    assert read.keys() == wanted.keys()
    assert read.labels is not None
    assert wanted.labels is not None
    assert read.labels.tolist() == wanted.labels.tolist()
    with pytest.raises(DataError, match="the data, row 1: the text is empty"):
        read_data(source, [rows[0], {**rows[1], names[0]: " ", names[1]: " "}])
    with pytest.raises(DataError, match="does not read rows of texts"):
        read_data(vision(), rows)


def test_rows_of_pictures_have_classes_by_name_or_number() -> None:
    pictures = [Image.new("L", (9, 9), 40 * i) for i in range(3)]
    for labels in ((1, 0, 1), ("dog", "cat", "dog")):
        rows = [{"image": p, "label": n} for p, n in zip(pictures, labels, strict=True)]
        read = read_data(vision(), rows)
        assert tuple(read.inputs.shape) == (3, 3, 8, 8)  # type: ignore[union-attr]
        assert read.labels is not None
        assert read.labels.tolist() == [1, 0, 1]
    assert read_data(vision(), [{"image": pictures[0]}]).labels is None
    with pytest.raises(DataError, match="row 0: the model has no class 'cow'"):
        read_data(vision(), [{"image": pictures[0], "label": "cow"}])
    plain = Source("net", vision().model, torch.zeros(2, 3, 8, 8), Task.OUTPUTS)
    with pytest.raises(DataError, match="does not say how pictures are prepared"):
        read_data(plain, [{"image": pictures[0]}])
