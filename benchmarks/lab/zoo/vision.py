"""Image classifiers of ImageNet by name, each with the preprocessing that it was trained with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from lab.zoo import imagenet_sample
from lab.zoo.imagenet import SHORTER, SIDE, Preprocessing
from t3c.errors import DataError, SpecError
from t3c.zoo.hugging_face import load_model
from t3c.zoo.local import data_root

PREPROCESSOR = "preprocessor_config.json"
CROP_SHARE = 0.875  # of a picture's shorter side, where a ConvNeXt's configuration tells none
SQUEEZED_FROM = 384  # pixels on: a ConvNeXt's pictures are squeezed then, and nothing is cut off
SQUARE = ("ViT", "DeiT")  # processors to which one number is the size of both sides

BICUBIC = Image.Resampling.BICUBIC
CROPPED = Preprocessing(resize=SHORTER, crop=(SIDE, SIDE), resample=BICUBIC)
SQUEEZED = Preprocessing(resize=(SIDE, SIDE), crop=None, resample=BICUBIC)
HALVES = Preprocessing(
    resize=(SIDE, SIDE), crop=None, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
)  # fmt: skip
RAW = Preprocessing(mean=imagenet_sample.MEAN, std=(1.0, 1.0, 1.0), rescale=1.0)


class Classifier(nn.Module):
    """A Hugging Face classifier as a plain one: images (n, 3, h, w) -> logits (n, classes)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=images).logits
        return logits


@dataclass(frozen=True)
class Vision:
    """A trained classifier in evaluation mode and how its pictures are read.

    `classes` are the WordNet ids of its outputs, where its configuration names outputs so.
    """

    name: str
    model: Classifier
    preprocessing: Preprocessing
    classes: tuple[str, ...] | None


@dataclass(frozen=True)
class Known:
    """What a name stands for: a class of transformers, its place on the hub, its preprocessing.

    `folders` are other names of a folder in T3C_DATA, each with the preprocessing of its weights.
    """

    kind: str
    hub: str
    preprocessing: Preprocessing
    folders: Mapping[str, Preprocessing] = field(default_factory=dict)


RESNET, VIT = "ResNetForImageClassification", "ViTForImageClassification"
KNOWN = {
    "resnet-50": Known(RESNET, "microsoft/resnet-50", CROPPED, {"resnet50-imagenet": RAW}),
    "resnet-101": Known(RESNET, "microsoft/resnet-101", CROPPED),
    "convnext-tiny": Known("ConvNextForImageClassification", "facebook/convnext-tiny-224", CROPPED),
    "vit-base": Known(VIT, "google/vit-base-patch16-224", HALVES),
    "vit-large": Known(VIT, "google/vit-large-patch16-224", HALVES),
    "swin-tiny": Known(
        "SwinForImageClassification", "microsoft/swin-tiny-patch4-window7-224", SQUEEZED
    ),
}


def load_vision(name: str) -> Vision:
    """Return a classifier with the weights of its folder in T3C_DATA, or else of the hub."""
    if name not in KNOWN:
        raise DataError(f"no classifier {name!r}: known are {', '.join(KNOWN)}")
    known = KNOWN[name]
    folder, how = _found(name, known)
    loaded = load_model(known.hub if folder is None else str(folder))
    source = folder or known.hub
    if not loaded.pretrained:
        raise DataError(f"{source} holds a configuration and no weights")
    kind = type(loaded.model).__name__
    if kind != known.kind:
        raise DataError(f"{source} holds a {kind}, and {name} is a {known.kind}")
    if folder is not None and (folder / PREPROCESSOR).is_file():
        how = read_preprocessing(folder / PREPROCESSOR)
    config: Any = loaded.model.config
    _check_size(str(source), config, how)
    return Vision(name, Classifier(loaded.model).eval(), how, _wordnet_ids(config.id2label))


VISION: dict[str, Callable[[], Vision]] = {name: partial(load_vision, name) for name in KNOWN}


def _found(name: str, known: Known) -> tuple[Path | None, Preprocessing]:
    """Return the first folder of T3C_DATA that is there, and the preprocessing of its weights."""
    if os.environ.get("T3C_DATA"):
        for folder, how in {name: known.preprocessing, **known.folders}.items():
            if (data_root() / folder).is_dir():
                return data_root() / folder, how
    return None, known.preprocessing


def _check_size(source: str, config: Any, how: Preprocessing) -> None:
    """Raise for pictures of another size where places in the picture are learned."""
    if config.model_type not in ("vit", "swin"):
        return
    size = config.image_size
    if how.size != ((size, size) if isinstance(size, int) else tuple(size)):
        height, width = how.size
        raise DataError(
            f"{source} takes images of {size}, its preprocessing gives {height}x{width}"
        )


def _wordnet_ids(labels: Mapping[int, str]) -> tuple[str, ...] | None:
    """Return the labels in order, if all of them are WordNet ids."""
    names = tuple(labels[index] for index in sorted(labels))
    return names if all(len(n) == 9 and n[0] == "n" and n[1:].isdecimal() for n in names) else None


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
    """Return the preprocessing that a Hugging Face `preprocessor_config.json` tells."""
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
    """Return what pictures are resized to and what is cut from their centre."""
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
    """Return height and width."""
    if isinstance(size, int):
        return size, size
    height, width = size.get("height"), size.get("width")
    if height is None or width is None:
        raise DataError(f"a size is a number or a height and a width, got {json.dumps(size)}")
    return height, width


def _need(told: _Told, name: str) -> Any:
    """Return what the configuration has to tell."""
    value = getattr(told, name)
    if value is None:
        raise DataError(f"there is no {name}")
    return value
