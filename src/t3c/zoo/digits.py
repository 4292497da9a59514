"""Handwritten digits: real data that needs no download, and a residual network for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from t3c.errors import MissingExtraError
from t3c.spec import ImageSpec
from t3c.train.precision import Precision, multiplying

SIDE = 32
CALIBRATION, TEST = 600, 500
EPOCHS, SEED = 6, 3407  # of the network that demo and recipes start from
IMAGE = ImageSpec(SIDE, SIDE, mean=(0.3,), std=(0.35,))
CLASSES = tuple("0123456789")


@dataclass(frozen=True)
class Digits:
    """Images (n, 1, 32, 32) and labels (n,), in three disjoint parts."""

    train: tuple[Tensor, Tensor]
    calibration: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def loader(self, batch: int = 32, seed: int = 0) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled batches of the training part."""
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(TensorDataset(*self.train), batch, shuffle=True, generator=generator)

    def shifted(self, batch: int = 32, seed: int = 0) -> Shifted:
        """Shuffled batches of the training part, each shifted by up to two pixels."""
        return Shifted(self.loader(batch, seed), np.random.default_rng(seed))


@dataclass(frozen=True)
class Shifted:
    """Batches whose pictures are moved a little, anew each time they are gone through."""

    batches: DataLoader[tuple[Tensor, ...]]
    rng: np.random.Generator

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in self.batches:
            shift = tuple(int(v) for v in self.rng.integers(-2, 3, size=2))
            yield torch.roll(images, shift, dims=(2, 3)), labels

    def __len__(self) -> int:
        return len(self.batches)


def load_digits(seed: int = 0) -> Digits:
    """Scikit-learn's 1,797 digits at 32x32: 697 to train, 600 to calibrate, 500 to test."""
    try:
        from sklearn.datasets import load_digits as bundled
    except ImportError as missing:
        raise MissingExtraError("scikit-learn", "train") from missing
    data = bundled()
    order = np.random.default_rng(seed).permutation(len(data.target))
    images = torch.tensor(data.images[order] / 16.0, dtype=torch.float32)[:, None]
    images = F.interpolate(images, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    images = (images - IMAGE.mean[0]) / IMAGE.std[0]
    labels = torch.tensor(data.target[order])
    held = TEST + CALIBRATION
    parts = [slice(0, TEST), slice(TEST, held), slice(held, None)]
    test, calibration, train = ((images[p].contiguous(), labels[p]) for p in parts)
    return Digits(train, calibration, test)


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = (
            nn.Identity()
            if into == out and stride == 1
            else nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class DigitsNet(nn.Module):
    """A residual network of 64 to 256 channels for images (n, 1, 32, 32) -> logits (n, 10).

    Three stages of `depth` blocks; `strides` are those of the stem and of each stage.
    """

    classes, image = CLASSES, IMAGE  # for the artifact made of it

    def __init__(
        self,
        widths: tuple[int, int, int] = (64, 128, 256),
        depth: int = 1,
        strides: tuple[int, int, int, int] = (2, 1, 2, 1),
    ) -> None:
        super().__init__()
        first, *stages = strides
        self.stem = nn.Conv2d(1, widths[0], 3, first, 1, bias=False)
        self.bn = nn.BatchNorm2d(widths[0])
        blocks, into = [], widths[0]
        for width, stride in zip(widths, stages, strict=True):
            blocks += [Block(into, width, stride)]
            blocks += [Block(width, width, 1) for _ in range(depth - 1)]
            into = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(into, len(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn(self.stem(x))))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def train_digits(
    model: nn.Module,
    digits: Digits,
    epochs: int,
    seed: int = 0,
    on_step: Callable[[int, int, float], object] | None = None,
    *,
    precision: Precision = "float",
) -> None:
    """Train a classifier of digits in place, on shifted pictures."""
    torch.manual_seed(seed)
    batches = digits.shifted(seed=seed)
    total = epochs * len(batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=total)
    model.train()
    step = 0
    for _ in range(epochs):
        for images, labels in batches:
            with multiplying(precision):
                logits = model(images)
            loss = F.cross_entropy(logits.float(), labels, label_smoothing=0.05)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            step += 1
            if on_step is not None:
                on_step(step, total, float(loss.detach()))
    model.eval()
