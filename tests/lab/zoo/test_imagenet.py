"""ImageNet folders of every form: the right class for each picture, read as it should be."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from lab.zoo import imagenet, imagenet_sample
from lab.zoo.imagenet import Batches, Samples, find_samples
from t3c.compression import pictures
from t3c.compression.pictures import Preprocessing, read_image
from t3c.errors import DataError, SpecError
from t3c.zoo import local

IDS = ("n01440764", "n01443537", "n02012849", "n09999999")
PLAIN = Preprocessing(resize=None, crop=(4, 4), mean=(0, 0, 0), std=(1, 1, 1), rescale=1.0)


def picture(path: Path, shade: int = 0, size: tuple[int, int] = (4, 4)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, shade).save(path, format="JPEG", quality=100)
    return path


def noise(path: Path, width: int, height: int) -> np.ndarray:
    """A lossless picture of random colours, and its pixels (h, w, 3)."""
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(DataError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def told(samples: Samples, root: Path) -> dict[str, int]:
    names = [str(path.relative_to(root)) for path in samples.paths]
    assert names == sorted(names)
    return dict(zip(names, samples.labels, strict=True))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Class folders below `val`: two pictures, one, none, one; and things that are no pictures."""
    for name in (
        f"{IDS[0]}/ILSVRC2012_val_00000009.JPEG", f"{IDS[0]}/ILSVRC2012_val_00000002.JPEG",
        f"{IDS[1]}/b.jpg", f"{IDS[3]}/a.png",
    ):  # fmt: skip
        picture(tmp_path / "val" / name)
    (tmp_path / "val" / IDS[2]).mkdir()
    (tmp_path / "val" / IDS[1] / "._b.jpg").write_bytes(b"some system's own")
    (tmp_path / "val" / IDS[1] / "notes.txt").write_text("mine")
    (tmp_path / "val" / "others").mkdir()
    return tmp_path


@pytest.mark.parametrize("inside", ["", "val"])
def test_class_folders_in_the_order_that_is_given(tree: Path, inside: str) -> None:
    expected = {
        f"val/{IDS[0]}/ILSVRC2012_val_00000002.JPEG": 3,
        f"val/{IDS[0]}/ILSVRC2012_val_00000009.JPEG": 3,
        f"val/{IDS[1]}/b.jpg": 2,
        f"val/{IDS[3]}/a.png": 0,
    }
    assert told(find_samples(tree / inside, IDS[::-1]), tree) == expected


def test_all_ids_tell_their_classes_by_themselves(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imagenet, "CLASSES", 4)
    # An empty folder counts: the ids after it keep their places.
    assert find_samples(tree).labels == (0, 0, 1, 3)
    (tree / "val" / IDS[2]).rmdir()
    assert "holds 3 of the 4 WordNet ids" in refusal(lambda: find_samples(tree))


def test_a_thousand_pictures_named_by_id(tmp_path: Path) -> None:
    names = [f"n{7 * index:08}" for index in range(1000)]
    for name in reversed(names):
        (tmp_path / f"{name}.jpg").touch()
    samples = find_samples(tmp_path)
    assert [path.stem for path in samples.paths] == names
    assert samples.labels == tuple(range(1000))
    (tmp_path / f"{names[5]}.jpg").rename(tmp_path / "n99999999_a_picture.JPEG")
    labels = told(find_samples(tmp_path), tmp_path)
    assert (labels["n99999999_a_picture.JPEG"], labels[f"{names[6]}.jpg"]) == (999, 5)


def test_ids_that_cannot_be_ranked(tree: Path, tmp_path: Path) -> None:
    for action in (lambda: find_samples(tree), lambda: find_samples(tree, IDS[:3])):
        assert str(tree / "val") in refusal(action)
    assert "give all ids in order as classes" in refusal(lambda: find_samples(tree))
    assert f"{IDS[3]} is none of the 3 classes" in refusal(lambda: find_samples(tree, IDS[:3]))
    assert "5 classes were given, 4" in refusal(lambda: find_samples(tree, (*IDS, IDS[0])))


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    for index in (3, 1, 2):
        picture(tmp_path / "val" / f"ILSVRC2012_val_{index:08}.JPEG")
    return tmp_path


NUMBERS = "".join(
    f"ILSVRC2012_val_0000000{i}.JPEG {label}\n" for i, label in enumerate((7, 999, 0, 5))
)
SOLUTION = "ImageId,PredictionString\n" + "".join(
    f"ILSVRC2012_val_0000000{i},{name} 85 1 499 272 {name} 1 2 3 4 \n"
    for i, name in ((2, IDS[0]), (1, IDS[3]), (3, IDS[1]))
)


@pytest.mark.parametrize("beside", ["", "val"])
def test_numbered_pictures_with_numbers(numbered: Path, beside: str) -> None:
    (numbered / beside / "val.txt").write_text(NUMBERS)
    assert find_samples(numbered).labels == (999, 0, 5)
    assert "00000001.JPEG is of class 999, not 0 to 3" in refusal(
        lambda: find_samples(numbered, IDS)
    )


def test_numbered_pictures_with_ids(numbered: Path) -> None:
    file = numbered / "LOC_val_solution.csv"
    file.write_text(SOLUTION)
    assert find_samples(numbered, IDS).labels == (3, 0, 1)
    assert f"{file} holds 3 of the 1,000" in refusal(lambda: find_samples(numbered))
    file.rename(numbered / "elsewhere.csv")
    assert "has no val.txt or LOC_val_solution.csv" in refusal(lambda: find_samples(numbered, IDS))
    found = find_samples(numbered, IDS, numbered / "elsewhere.csv")
    assert found.labels == (3, 0, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no label of ILSVRC2012_val_00000001.JPEG, and 2 others"),
        (NUMBERS.replace(" 999", " 1000"), "00000001.JPEG is of class 1000, not 0 to 999"),
        (NUMBERS.replace(" 999", " -1"), "is no picture's name and its class"),
        (NUMBERS.replace(" 999", ""), "'ILSVRC2012_val_00000001.JPEG' is no picture's name"),
        (NUMBERS.replace(" 999", " 1 2"), "is no picture's name and its class"),
        (NUMBERS + "ILSVRC2012_val_00000001.JPEG 4", "00000001 is of class 999 and of 4"),
    ],
)
def test_labels_that_cannot_be(numbered: Path, text: str, message: str) -> None:
    (numbered / "val.txt").write_text(text)
    said = refusal(lambda: find_samples(numbered))
    assert message in said
    assert str(numbered / "val.txt") in said


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"a,b\nILSVRC2012_val_00000001\n", b'a,b\n"x'])
def test_solutions_that_cannot_be(numbered: Path, raw: bytes) -> None:
    (numbered / "LOC_val_solution.csv").write_bytes(raw)
    assert str(numbered / "LOC_val_solution.csv") in refusal(lambda: find_samples(numbered, IDS))


def test_folders_of_something_else(tmp_path: Path) -> None:
    assert "none cannot be read: No such file" in refusal(lambda: find_samples(tmp_path / "none"))
    picture(tmp_path / "cat.jpg")
    assert f"{tmp_path} holds no ImageNet" in refusal(lambda: find_samples(tmp_path))


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("T3C_DATA", "T3C_IMAGENET"):
        monkeypatch.delenv(name, raising=False)
    assert "T3C_IMAGENET" in refusal(imagenet.imagenet_folder)
    monkeypatch.setenv("T3C_IMAGENET", str(tmp_path / "none"))
    assert "none, which is no folder" in refusal(imagenet.imagenet_folder)
    monkeypatch.setenv("T3C_IMAGENET", str(tmp_path))
    assert imagenet.imagenet_folder() == tmp_path
    monkeypatch.setenv("T3C_DATA", str(tmp_path))
    (tmp_path / "imagenet").mkdir()
    assert imagenet.imagenet_folder() == tmp_path / "imagenet"


def samples(count: int) -> Samples:
    return Samples(tuple(Path(f"{i}.jpg") for i in range(count)), tuple(range(count)))


@given(st.integers(2, 60), st.data(), st.integers(0, 9))
def test_a_split_shares_nothing_and_loses_nothing(
    count: int, data: st.DataObject, seed: int
) -> None:
    whole = samples(count)
    tune = data.draw(st.none() | st.integers(1, count - 1))
    parts = whole.split(tune, seed)
    assert len(parts[0]) == (count // 2 if tune is None else tune)
    assert sorted(parts[0].labels + parts[1].labels) == list(range(count))
    assert all(
        path.stem == str(n) for p in parts for path, n in zip(p.paths, p.labels, strict=True)
    )
    assert whole.split(tune, seed) == parts


def test_a_split_follows_its_seed_and_leaves_something() -> None:
    assert samples(50).split(seed=1) != samples(50).split(seed=2)
    for tune in (0, 50, 51, -1):
        assert f"{tune} of 50 pictures" in refusal(lambda tune=tune: samples(50).split(tune))
    assert samples(5).first(2).labels == (0, 1)
    assert samples(5).first(None) == samples(5)
    assert "there are 5 pictures, 6" in refusal(lambda: samples(5).first(6))


def test_the_sample_is_split_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was tuned on with one loader is not tested on with the other."""
    for index in range(9):
        (tmp_path / "imagenet-sample").mkdir(exist_ok=True)
        picture(tmp_path / "imagenet-sample" / f"n{index:08}.jpg")
    monkeypatch.setenv("T3C_DATA", str(tmp_path))
    monkeypatch.setattr(imagenet, "CLASSES", 9)
    parts = find_samples(tmp_path / "imagenet-sample").split(seed=3)
    for part, paths in zip(parts, imagenet_sample.imagenet_split(seed=3), strict=True):
        assert list(part.paths) == paths
        assert list(part.labels) == imagenet_sample.imagenet_labels(paths).tolist()


def test_batches_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    paths = [picture(tmp_path / f"{shade}.jpg", shade) for shade in (10, 20, 30, 40, 50)]
    batches = Batches(Samples(tuple(paths), (1, 2, 3, 4, 5)), PLAIN, size=2)
    paths[3].write_bytes(b"")
    turns = iter(batches)
    images, labels = next(turns)
    assert images.shape == (2, 3, 4, 4)
    assert (images[:, 0, 0, 0].tolist(), labels.tolist()) == ([10, 20], [1, 2])
    assert str(paths[3]) in refusal(lambda: next(turns))
    picture(paths[3], 40)
    assert len(batches) == 3
    for _ in range(2):  # as often as one likes
        assert [x[:, 2, 3, 3].tolist() for x, _ in batches] == [[10, 20], [30, 40], [50]]
        assert [y.tolist() for _, y in batches] == [[1, 2], [3, 4], [5]]
    with pytest.raises(SpecError, match="at least one picture, got 0"):
        replace(batches, size=0)


def by_hand(pixels: np.ndarray, how: Preprocessing) -> Tensor:
    values = pixels.astype(np.float64) * how.rescale
    return torch.from_numpy(((values - how.mean) / how.std).transpose(2, 0, 1)).float()


def test_the_centre_is_cropped_and_normalised(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    pixels = noise(path, 13, 9)
    how = Preprocessing(None, (4, 6), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), rescale=1 / 100)
    # Rows (9 - 4) // 2 = 2 on, columns (13 - 6) // 2 = 3 on.
    torch.testing.assert_close(read_image(path, how), by_hand(pixels[2:6, 3:9], how))


def blocks(path: Path, small: np.ndarray, height: int, width: int) -> None:
    """A picture in which a pixel of `small` is a block: a box filter gives it back exactly."""
    Image.fromarray(small.repeat(height, 0).repeat(width, 1)).save(path)


@pytest.mark.parametrize("upright", [False, True])
def test_the_shorter_side_is_resized(tmp_path: Path, upright: bool) -> None:
    small = noise(tmp_path / "small.png", *((4, 6) if upright else (6, 4)))
    blocks(tmp_path / "a.png", small, 2, 2)
    how = Preprocessing(4, (4, 4), resample=Image.Resampling.BOX)
    cut = small[1:5] if upright else small[:, 1:5]
    torch.testing.assert_close(read_image(tmp_path / "a.png", how), by_hand(cut, how))


def test_both_sides_are_squeezed(tmp_path: Path) -> None:
    small = noise(tmp_path / "small.png", 3, 2)
    blocks(tmp_path / "a.png", small, 2, 4)
    how = Preprocessing((2, 3), None, resample=Image.Resampling.BOX)
    torch.testing.assert_close(read_image(tmp_path / "a.png", how), by_hand(small, how))


@pytest.mark.parametrize(
    ("size", "to", "expected"),
    [((500, 375), 256, (256, 341)), ((375, 500), 256, (341, 256)), ((7, 7), 9, (9, 9))],
)
def test_the_longer_side_keeps_its_share(
    size: tuple[int, int], to: int, expected: tuple[int, int]
) -> None:
    assert pictures._resized(Image.new("L", size), to) == expected


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGBA", "P", "1"])
def test_any_kind_of_picture_has_three_colours(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    Image.new("RGB", (4, 4), (255, 255, 255)).convert(mode).save(path)
    torch.testing.assert_close(read_image(path, PLAIN), torch.full((3, 4, 4), 255.0))


@pytest.mark.parametrize("kept", [0, 2, 30, 0.5, 0.9])
def test_a_broken_picture_is_named(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "a.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    assert f"{path} cannot be read" in refusal(lambda: read_image(path, PLAIN))


def test_what_is_too_small_or_not_there_is_named(tmp_path: Path) -> None:
    path = picture(tmp_path / "a.jpg", size=(4, 3))
    assert f"{path} has 4x3 pixels, fewer than 4x4" in refusal(lambda: read_image(path, PLAIN))
    assert "none.jpg cannot be read" in refusal(lambda: read_image(tmp_path / "none.jpg", PLAIN))


BAD: Sequence[dict[str, object]] = (
    {"resize": 0}, {"resize": (224, -1)}, {"crop": (0, 4)}, {"crop": (9000, 4)},
    {"crop": None}, {"resize": None, "crop": None}, {"mean": (0.5,)}, {"std": (1.0, 1.0)},
    {"std": (1.0, 1.0, 0.0)}, {"mean": (0.0, 0.0, float("nan"))}, {"rescale": 0.0},
    {"rescale": float("inf")},
)  # fmt: skip


@pytest.mark.parametrize("settings", BAD, ids=str)
def test_preprocessing_that_cannot_be(settings: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        Preprocessing(**settings)  # type: ignore[arg-type]


def test_an_image_spec_says_the_same_of_pixels_up_to_one() -> None:
    how = Preprocessing(mean=(120.0, 110.0, 100.0), std=(2.0, 3.0, 4.0), rescale=0.5)
    spec = how.image
    assert (spec.height, spec.width) == (224, 224)
    pixels = np.random.default_rng(0).integers(0, 256, (1, 5, 3))
    found = (pixels / 255 - spec.mean) / spec.std
    np.testing.assert_allclose(found, (pixels * 0.5 - how.mean) / how.std)


@pytest.mark.data
@pytest.mark.skipif(not os.environ.get("T3C_DATA"), reason="T3C_DATA is not set")
def test_the_sample_is_read_as_before() -> None:
    found = find_samples(local.data_path("imagenet-sample")).split(seed=1)[1].first(3)
    how = Preprocessing(mean=imagenet_sample.MEAN, std=(1.0, 1.0, 1.0), rescale=1.0)
    images, labels = next(iter(Batches(found, how)))
    expected, classes = imagenet_sample.imagenet_sample(3, seed=1, part="test")
    torch.testing.assert_close(images, expected)
    assert labels.tolist() == classes.tolist()
