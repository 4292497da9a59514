"""The local data folder: ResNet-50 with its weights and one image of each ImageNet class."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from t3c.compress.hugging_face import load_model
from t3c.errors import DataError

SIDE = 224
MEAN = (123.68, 116.779, 103.939)  # of red, green and blue, in 0..255

Item = TypeVar("Item")


def data_root() -> Path:
    """The folder that T3C_DATA names."""
    root = os.environ.get("T3C_DATA")
    if not root:
        raise DataError("T3C_DATA is not set: name the folder of local data and weights in it")
    if not Path(root).is_dir():
        raise DataError(f"T3C_DATA names {root}, which is no folder")
    return Path(root)


def data_path(name: str) -> Path:
    """A file or a folder of the local data."""
    path = data_root() / name
    if not path.exists():
        raise DataError(f"{path} is missing: T3C_DATA does not hold {name}")
    return path


def first(items: Sequence[Item], count: int | None, what: str) -> Sequence[Item]:
    """The first `count` items, all of them for None, never fewer than asked for."""
    if count is not None and not 1 <= count <= len(items):
        raise DataError(f"there are {len(items)} {what}, {count} were asked for")
    return items[:count]


def resnet50() -> nn.Module:
    """ResNet-50 v1 trained on ImageNet: images (n, 3, 224, 224) -> logits (n, 1000)."""
    return load_model(str(data_path("resnet50-imagenet"))).model


def imagenet_split(seed: int = 0) -> tuple[list[Path], list[Path]]:
    """The sample's files in two disjoint halves, one to tune on and one to test on."""
    files = _imagenet_files()
    order = np.random.default_rng(seed).permutation(len(files))
    half = len(files) // 2
    return [files[i] for i in order[:half]], [files[i] for i in order[half:]]


def imagenet_sample(
    count: int | None = None, seed: int = 0, *, part: Literal["tune", "test"]
) -> tuple[Tensor, Tensor]:
    """Images (n, 3, 224, 224) and labels (n,) of one half of the split."""
    tune, test = imagenet_split(seed)
    paths = first(tune if part == "tune" else test, count, f"images to {part}")
    return read_images(paths), imagenet_labels(paths)


def imagenet_labels(paths: Sequence[Path]) -> Tensor:
    """Classes (n,): a file is named by its WordNet id, and ids count in sorted order."""
    classes = {path.stem: index for index, path in enumerate(_imagenet_files())}
    return torch.tensor([classes[path.stem] for path in paths])


def read_images(paths: Sequence[Path]) -> Tensor:
    """Centre crops (n, 3, 224, 224), RGB in 0..255 less the mean."""
    pixels = torch.from_numpy(np.stack([_crop(path) for path in paths]))
    images = pixels.permute(0, 3, 1, 2).float().contiguous()
    return images.sub_(torch.tensor(MEAN)[:, None, None])


def _imagenet_files() -> list[Path]:
    return sorted(data_path("imagenet-sample").glob("*.jpg"))


def _crop(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    with Image.open(path) as image:
        left, top = (image.width - SIDE) // 2, (image.height - SIDE) // 2
        return np.array(image.convert("RGB").crop((left, top, left + SIDE, top + SIDE)))
