"""CIFAR-10 and two residual networks trained on it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from t3c.errors import DataError
from t3c.spec import ImageSpec
from t3c.zoo.local import data_path, first

SIDE = 32
# ImageNet's mean and std: ResNet-20 scores 91.73% with them, 91.69% with CIFAR-10's own.
IMAGE = ImageSpec(SIDE, SIDE, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
FETCHED = Path("out/data/cifar10")
SHEETS = {
    "train": tuple(f"data_batch_{index}.png" for index in range(1, 6)),
    "test": ("test_batch.png",),
}
LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # the package's own spelling

Depth = Literal[20, 56]
Part = Literal["train", "test"]
Pixels = npt.NDArray[np.uint8]


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut without weights."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.stride, self.added = stride, out - into

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))

    def shortcut(self, x: Tensor) -> Tensor:
        """Every stride-th pixel, with half of the added channels, all zero, on either side."""
        if self.stride == 1 and self.added == 0:
            return x
        half = self.added // 2
        picked = x[:, :, :: self.stride, :: self.stride]
        return F.pad(picked, (0, 0, 0, 0, half, self.added - half))


class CifarResNet(nn.Module):
    """The residual network of He et al. for CIFAR: images (n, 3, 32, 32) -> logits (n, 10)."""

    def __init__(self, depth: Depth) -> None:
        super().__init__()
        if depth not in get_args(Depth):
            raise DataError(f"a ResNet for CIFAR-10 has a depth of 20 or 56, got {depth}")
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, 1, blocks)
        self.layer2 = _stage(16, 32, 2, blocks)
        self.layer3 = _stage(32, 64, 2, blocks)
        self.linear = nn.Linear(64, len(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(x.mean(dim=(2, 3)))
        return logits


def _stage(into: int, out: int, stride: int, blocks: int) -> nn.Sequential:
    rest = [Block(out, out, 1) for _ in range(blocks - 1)]
    return nn.Sequential(Block(into, out, stride), *rest)


def resnet(depth: Depth) -> nn.Module:
    """ResNet-20 or ResNet-56 with its weights, in evaluation mode."""
    model = CifarResNet(depth)
    path = data_path(f"cifar10-resnets/resnet{depth}.safetensors")
    try:
        model.load_state_dict(load_file(path))
    except (SafetensorError, OSError, RuntimeError) as error:
        raise DataError(f"{path} holds no weights of ResNet-{depth}: {_line(error)}") from error
    return model.eval()


def cifar10(part: Part, count: int | None = None) -> tuple[Tensor, Tensor]:
    """The first `count` images (n, 3, 32, 32), normalised, and labels (n,) of a part."""
    if part not in SHEETS:
        raise DataError(f"the parts of CIFAR-10 are train and test, got {part!r}")
    pixels, labels = _read(cifar10_folder(), part)
    chosen = first(labels, count, f"{part} images")
    return normalised(pixels[: len(chosen)]), torch.tensor(chosen)


def cifar10_folder() -> Path:
    """Where CIFAR-10 is: in T3C_DATA, in T3C_CIFAR10, or where `t3c data get cifar10` puts it."""
    root, named = os.environ.get("T3C_DATA"), os.environ.get("T3C_CIFAR10")
    if root and (Path(root) / "cifar10").is_dir():
        return Path(root) / "cifar10"
    folder = Path(named) if named else FETCHED
    if not folder.is_dir():
        raise DataError(
            f"CIFAR-10 is not in T3C_DATA, and {folder} is no folder: run `t3c data get cifar10`"
        )
    return folder


def check_folder(folder: Path) -> None:
    """Refuse a folder that does not hold every sheet and label of both parts."""
    for part in SHEETS:
        _read(folder, part)


def normalised(pixels: Pixels) -> Tensor:
    """Pixels (n, 32, 32, 3) in 0..255 as images (n, 3, 32, 32), (value / 255 - mean) / std."""
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().contiguous()
    mean, std = (torch.tensor(v)[:, None, None] for v in (IMAGE.mean, IMAGE.std))
    return images.div_(255).sub_(mean).div_(std)


def _read(folder: Path, part: str) -> tuple[Pixels, list[int]]:
    """Return all images (n, 32, 32, 3) and labels of a part, as many of one as of the other."""
    labels = _labels(folder / LABELS[part])
    pixels = np.concatenate([_sheet(folder / name) for name in SHEETS[part]])
    if len(pixels) != len(labels):
        raise DataError(f"{folder} has {len(pixels)} {part} images and {len(labels)} labels")
    return pixels, labels


def _labels(path: Path) -> list[int]:
    try:
        labels = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {_line(error)}") from error
    known = range(len(CLASSES))
    if not isinstance(labels, list) or not all(type(v) is int and v in known for v in labels):
        raise DataError(f"{path} is no list of classes 0 to {len(CLASSES) - 1}")
    return labels


def _sheet(path: Path) -> Pixels:
    """Images (n, 32, 32, 3): a row of the sheet is an image's pixels, line after line."""
    sheet = _picture(path)
    if sheet.width != SIDE * SIDE:
        raise DataError(f"{path} has rows of {sheet.width} pixels, an image has {SIDE * SIDE}")
    return np.array(sheet).reshape(-1, SIDE, SIDE, 3)


def _picture(path: Path) -> Image.Image:
    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    # Pillow says SyntaxError of a broken chunk.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
