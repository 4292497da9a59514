"""Pictures as inputs: how a model's own files say they are prepared, and folders of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from t3c.errors import DataError, SpecError
from t3c.spec import ImageSpec

PICTURES = {".jpeg", ".jpg", ".png"}
CROP_SHARE = 0.875  # of a picture's shorter side, where a ConvNeXt's configuration tells none
SQUEEZED_FROM = 384  # pixels on: a ConvNeXt's pictures are squeezed then, and nothing is cut off
SQUARE = ("ViT", "DeiT")  # processors to which one number is the size of both sides


@dataclass(frozen=True)
class Preprocessing:
    """How a picture becomes an input (3, h, w): resized, cropped, (value * rescale - mean) / std.

    `resize` is the length of the shorter side, or a height and a width that the picture is squeezed
    to; `crop` is the height and width that are cut from the centre. None leaves it as it is.
    """

    resize: int | tuple[int, int] | None = 256
    crop: tuple[int, int] | None = (224, 224)
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    rescale: float = 1 / 255
    resample: Image.Resampling = Image.Resampling.BILINEAR

    def __post_init__(self) -> None:
        lengths = (self.resize,) if isinstance(self.resize, int) else self.resize or ()
        if not all(0 < length <= 8192 for length in (*lengths, *(self.crop or ()))):
            raise SpecError(
                f"an image has sides of 1 to 8192, got resize {self.resize} and crop {self.crop}"
            )
        if self.crop is None and not isinstance(self.resize, tuple):
            raise SpecError("images would differ in size: give crop, or both sides as resize")
        if not len(self.mean) == len(self.std) == 3 or not all(map(math.isfinite, self.mean)):
            raise SpecError(f"three colours have a mean and a std, got {self.mean} and {self.std}")
        if not all(0 < value < math.inf for value in (*self.std, self.rescale)):
            raise SpecError(f"std and rescale are positive, got {self.std} and {self.rescale:g}")

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of an input."""
        size = self.crop or self.resize
        assert isinstance(size, tuple)
        return size

    @property
    def image(self) -> ImageSpec:
        """Size, mean and std of an input whose pixels were scaled to 0..1."""
        unit = 255 * self.rescale
        mean, std = (tuple(v / unit for v in values) for values in (self.mean, self.std))
        return ImageSpec(*self.size, mean, std)


def read_image(path: Path, how: Preprocessing) -> Tensor:
    """An input (3, h, w) of a picture's red, green and blue."""
    try:
        with Image.open(path) as file:
            picture = file.convert("RGB")
    # Pillow says SyntaxError of a broken chunk.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    return prepared(picture, how, str(path))


def prepared(picture: Image.Image, how: Preprocessing, name: str) -> Tensor:
    """Return a picture as an input (3, h, w); `name` is what an error calls it."""
    picture = picture.convert("RGB")
    if how.resize is not None:
        height, width = _resized(picture, how.resize)
        picture = picture.resize((width, height), how.resample)
    if how.crop is not None:
        height, width = how.crop
        left, top = (picture.width - width) // 2, (picture.height - height) // 2
        if min(left, top) < 0:
            raise DataError(
                f"{name} has {picture.width}x{picture.height} pixels, fewer than {width}x{height}"
            )
        picture = picture.crop((left, top, left + width, top + height))
    image = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float().contiguous()
    mean, std = (torch.tensor(values)[:, None, None] for values in (how.mean, how.std))
    return image.mul_(how.rescale).sub_(mean).div_(std)


def _resized(picture: Image.Image, to: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width of a picture once it is resized."""
    if not isinstance(to, int):
        return to
    shorter = min(picture.size)
    return to * picture.height // shorter, to * picture.width // shorter


Size = int | dict[str, int | None]


class _Told(BaseModel):
    """A preprocessor's configuration, of which older files leave out much."""

    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)

    image_processor_type: str | None = None
    feature_extractor_type: str | None = None  # older files
    do_resize: bool | None = None
    do_rescale: bool | None = None
    do_normalize: bool | None = None
    do_center_crop: bool | None = None
    size: Size | None = None
    crop_size: Size | None = None
    crop_pct: float | None = None
    image_mean: tuple[float, float, float] | None = None
    image_std: tuple[float, float, float] | None = None
    rescale_factor: float | None = None
    resample: int | None = None

    @property
    def kind(self) -> str:
        return self.image_processor_type or self.feature_extractor_type or ""


def read_preprocessing(path: Path) -> Preprocessing:
    """The preprocessing that a Hugging Face `preprocessor_config.json` tells."""
    try:
        told = _Told.model_validate_json(path.read_bytes())
        return _preprocessing(told)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        wrong = error.errors()[0]
        at = ".".join(str(part) for part in wrong["loc"])
        raise DataError(f"{path} is no preprocessing: {at} {wrong['msg']}".strip()) from error
    except (SpecError, DataError) as error:
        raise DataError(f"{path}: {error}") from error


def _preprocessing(told: _Told) -> Preprocessing:
    cut = told.crop_pct is not None or told.kind.startswith("ConvNext")
    resize, crop = _sides(told, cut)
    rescale = 1 / 255 if told.rescale_factor is None else told.rescale_factor
    if told.do_normalize is False:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    else:
        mean, std = _need(told, "image_mean"), _need(told, "image_std")
    if told.resample is not None and told.resample not in list(Image.Resampling):
        raise DataError(f"resample {told.resample} is none of Pillow's")
    usual = Image.Resampling.BICUBIC if cut else Image.Resampling.BILINEAR
    return Preprocessing(
        resize, crop, mean, std,
        rescale=1.0 if told.do_rescale is False else rescale,
        resample=usual if told.resample is None else Image.Resampling(told.resample),
    )  # fmt: skip


def _sides(told: _Told, cut: bool) -> tuple[int | tuple[int, int] | None, tuple[int, int] | None]:
    """Return the size to resize to, and the one to cut from the centre."""
    crop = _pair(_need(told, "crop_size")) if told.do_center_crop else None
    if told.do_resize is False:
        return None, crop
    size: Size = _need(told, "size")
    shorter = size.get("shortest_edge") if isinstance(size, dict) else None
    if not cut:
        if isinstance(size, int) and told.kind and not told.kind.startswith(SQUARE):
            raise DataError(f"size {size} of a {told.kind} does not tell which side it is of")
        return shorter or _pair(size), crop
    side = shorter or (size if isinstance(size, int) else _pair(size)[0])
    if side >= SQUEEZED_FROM:
        return (side, side), crop
    share = CROP_SHARE if told.crop_pct is None else told.crop_pct
    if not 0 < share <= 1:
        raise DataError(f"crop_pct must be in (0, 1], got {share:g}")
    return int(side / share), crop or (side, side)


def _pair(size: Size) -> tuple[int, int]:
    """Height and width."""
    if isinstance(size, int):
        return size, size
    height, width = size.get("height"), size.get("width")
    if height is None or width is None:
        raise DataError(f"a size is a number or a height and a width, got {json.dumps(size)}")
    return height, width


def _need(told: _Told, name: str) -> Any:
    """Return a value the configuration must have; raise DataError without it."""
    value = getattr(told, name)
    if value is None:
        raise DataError(f"there is no {name}")
    return value


def listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}") from error


def pictures_of(paths: Sequence[Path]) -> list[Path]:
    """Those that are pictures by name; what begins with a dot is some system's own."""
    return [p for p in paths if p.suffix.lower() in PICTURES and not p.name.startswith(".")]
