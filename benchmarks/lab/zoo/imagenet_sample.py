"""ResNet-50 with its weights and one image of each ImageNet class, from the local data folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from t3c.compression.hugging_face import load_model
from t3c.zoo import cifar10
from t3c.zoo.local import data_path, first

SIDE = 224
MEAN = (123.68, 116.779, 103.939)  # of red, green and blue, in 0..255


def resnet50() -> nn.Module:
    """Return ResNet-50 v1 trained on ImageNet: images (n, 3, 224, 224) -> logits (n, 1000)."""
    return load_model(str(data_path("resnet50-imagenet"))).model


def imagenet_split(seed: int = 0) -> tuple[list[Path], list[Path]]:
    """Return the sample's files in two disjoint halves, one to tune on and one to test on."""
    files = _imagenet_files()
    order = np.random.default_rng(seed).permutation(len(files))
    half = len(files) // 2
    return [files[i] for i in order[:half]], [files[i] for i in order[half:]]


def imagenet_sample(
    count: int | None = None, seed: int = 0, *, part: Literal["tune", "test"]
) -> tuple[Tensor, Tensor]:
    """Return images (n, 3, 224, 224) and labels (n,) of one half of the split."""
    tune, test = imagenet_split(seed)
    paths = first(tune if part == "tune" else test, count, f"images to {part}")
    return read_images(paths), imagenet_labels(paths)


def imagenet_labels(paths: Sequence[Path]) -> Tensor:
    """Return classes (n,): a file is named by its WordNet id, and ids count in sorted order."""
    classes = {path.stem: index for index, path in enumerate(_imagenet_files())}
    return torch.tensor([classes[path.stem] for path in paths])


def read_images(paths: Sequence[Path]) -> Tensor:
    """Return centre crops (n, 3, 224, 224), RGB in 0..255 less the mean."""
    pixels = torch.from_numpy(np.stack([_crop(path) for path in paths]))
    images = pixels.permute(0, 3, 1, 2).float().contiguous()
    return images.sub_(torch.tensor(MEAN)[:, None, None])


def imagenet_as_cifar(count: int) -> Tensor:
    """Return images (n, 3, 32, 32) of another data set: the sample's centre crops, made small."""
    tune, test = imagenet_split()  # shuffled: neighbours in the sample are of kindred classes
    paths = first([*tune, *test], count, "ImageNet images")
    return cifar10.normalised(np.stack([_small(path) for path in paths]))


def _imagenet_files() -> list[Path]:
    return sorted(data_path("imagenet-sample").glob("*.jpg"))


def _crop(path: Path) -> cifar10.Pixels:
    return np.array(_centre(path))


def _small(path: Path) -> cifar10.Pixels:
    return np.array(_centre(path).resize((cifar10.SIDE, cifar10.SIDE), Image.Resampling.BOX))


def _centre(path: Path) -> Image.Image:
    with Image.open(path) as image:
        left, top = (image.width - SIDE) // 2, (image.height - SIDE) // 2
        return image.convert("RGB").crop((left, top, left + SIDE, top + SIDE))
