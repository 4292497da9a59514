"""Image classifiers of ImageNet by name, each with the preprocessing that it was trained with."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from lab.zoo import imagenet_sample
from lab.zoo.imagenet import SHORTER, SIDE
from t3c.compression.hugging_face import load_model
from t3c.compression.pictures import Preprocessing, read_preprocessing
from t3c.compression.source import Classifier
from t3c.errors import DataError
from t3c.zoo.local import data_root

PREPROCESSOR = "preprocessor_config.json"

BICUBIC = Image.Resampling.BICUBIC
CROPPED = Preprocessing(resize=SHORTER, crop=(SIDE, SIDE), resample=BICUBIC)
SQUEEZED = Preprocessing(resize=(SIDE, SIDE), crop=None, resample=BICUBIC)
HALVES = Preprocessing(
    resize=(SIDE, SIDE), crop=None, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
)  # fmt: skip
RAW = Preprocessing(mean=imagenet_sample.MEAN, std=(1.0, 1.0, 1.0), rescale=1.0)


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
