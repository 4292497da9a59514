"""Pictures as a model's own file says they are prepared: read, resized, cropped, normalised."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor

from t3c.compression import pictures
from t3c.compression.pictures import Preprocessing, read_image, read_preprocessing
from t3c.errors import DataError, SpecError

ImageNet = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
BICUBIC, BILINEAR = Image.Resampling.BICUBIC, Image.Resampling.BILINEAR
CROPPED: Mapping[str, Any] = {
    "feature_extractor_type": "ConvNextFeatureExtractor", "crop_pct": 0.875, "size": 32,
    "resample": 3, **ImageNet,
}  # fmt: skip
SQUEEZED: Mapping[str, Any] = {
    "image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32},
    "resample": 2, "do_rescale": True, "rescale_factor": 1 / 255, **HALF,
}  # fmt: skip


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


@pytest.mark.parametrize("told", [CROPPED, SQUEEZED], ids=["cropped", "squeezed"])
def test_pictures_are_those_of_the_library_itself(tmp_path: Path, told: Mapping[str, Any]) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(told))
    kind = transformers.ViTImageProcessorPil
    if told is CROPPED:
        kind = transformers.ConvNextImageProcessorPil
    processor, how = (
        kind.from_pretrained(tmp_path),
        read_preprocessing(tmp_path / "preprocessor_config.json"),
    )
    for width, height in ((50, 40), (45, 61)):
        noise(tmp_path / "a.png", width, height)
        pixels = processor(Image.open(tmp_path / "a.png"), return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(
            read_image(tmp_path / "a.png", how), pixels[0], atol=2e-6, rtol=1e-5
        )


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


READ = [
    (CROPPED, Preprocessing(36, (32, 32), resample=BICUBIC)),
    ({**CROPPED, "size": {"shortest_edge": 224}, "crop_pct": 0.95}, (235, (224, 224))),
    ({**CROPPED, "size": {"shortest_edge": 384}}, ((384, 384), None)),
    ({**ImageNet, "image_processor_type": "ConvNextImageProcessor", "size": 224},
     (256, (224, 224))),
    ({**ImageNet, "size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": 224},
     (256, (224, 224))),
    (
        {**ImageNet, "size": {"height": 256, "width": 250}, "do_center_crop": True,
         "crop_size": {"height": 224, "width": 220}, "feature_extractor_type": "DeiT"},
        ((256, 250), (224, 220)),
    ),
    ({**ImageNet, "do_resize": False, "do_center_crop": True, "crop_size": 20}, (None, (20, 20))),
    ({"do_normalize": False, "size": 8}, Preprocessing((8, 8), None, (0, 0, 0), (1, 1, 1))),
    ({"do_normalize": False, "do_rescale": False, "size": 8},
     Preprocessing((8, 8), None, (0, 0, 0), (1, 1, 1), 1.0)),
    ({**HALF, "rescale_factor": 1 / 127.5, "size": 8, "resample": 0},
     Preprocessing((8, 8), None, (0.5,) * 3, (0.5,) * 3, 1 / 127.5, Image.Resampling.NEAREST)),
]  # fmt: skip


@pytest.mark.parametrize(("told", "expected"), READ)
def test_preprocessing_is_read(tmp_path: Path, told: dict[str, Any], expected: Any) -> None:
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(told))
    found = read_preprocessing(path)
    if isinstance(expected, tuple):
        assert (found.resize, found.crop) == expected
        assert (found.mean, found.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        assert found.rescale == 1 / 255
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no preprocessing"),
        ("[1]", "is no preprocessing"),
        ('{"size": 224', "is no preprocessing"),
        ('{"size": "224"}', "is no preprocessing: size"),
        ('{"size": 224, "image_mean": [0.5], "image_std": [0.5]}', "image_mean"),
        ('{"size": 224}', "there is no image_mean"),
        ('{"do_normalize": false}', "there is no size"),
        ('{"do_normalize": false, "size": {"longest_edge": 4}}', 'got {"longest_edge": 4}'),
        ('{"do_normalize": false, "size": -4}', "sides of 1 to 8192"),
        ('{"do_normalize": false, "size": {"shortest_edge": 4}}', "would differ in size"),
        ('{"do_normalize": false, "do_center_crop": true, "size": 4}', "there is no crop_size"),
        ('{"do_normalize": false, "size": 4, "crop_pct": 0}', "crop_pct must be in (0, 1], got 0"),
        ('{"do_normalize": false, "size": 4, "resample": 9}', "resample 9 is none of Pillow's"),
        (
            '{"do_normalize": false, "size": 4, "image_processor_type": "CLIPImageProcessor"}',
            "size 4 of a CLIPImageProcessor does not tell which side",
        ),
    ],
)
def test_preprocessing_that_cannot_be_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "preprocessor_config.json"
    path.write_text(text)
    said = refusal(lambda: read_preprocessing(path))
    assert said.startswith(str(path))
    assert message in said


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    assert "none.json cannot be read: No such" in refusal(
        lambda: read_preprocessing(tmp_path / "none.json")
    )
