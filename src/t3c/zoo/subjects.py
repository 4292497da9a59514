"""The subjects a recipe can train: a network with its data in parts that nothing shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from t3c.compression.decoder import Decoder
from t3c.errors import DataError
from t3c.nn.inputs import Inputs
from t3c.spec import ImageSpec
from t3c.zoo import cifar10 as cifar
from t3c.zoo import digits as digit
from t3c.zoo.text import BOS, stories15m, stories_folder, stories_tokens

Labelled = tuple[Tensor, Tensor]
STATISTICS = 512  # samples that factors are made to suit
EVALUATED = 250  # samples of a batch where nothing is trained


@dataclass(frozen=True)
class Running:
    """How a language model reads running text: the token that windows begin with, `bos`, and the
    folder of its tokenizer."""

    bos: int
    tokenizer: Path


@dataclass(frozen=True)
class Subject:
    """A trained network and its data: to train on, to validate on, to calibrate with, to test.

    `text` is there of a language model alone.
    """

    name: str
    model: nn.Module
    train: Labelled
    validation: Labelled
    calibration: Tensor
    test: Labelled
    image: ImageSpec | None = None
    classes: tuple[str, ...] | None = None
    evaluated: int = EVALUATED
    observed: int = STATISTICS
    text: Running | None = None

    @property
    def axes(self) -> dict[str, dict[int, str]] | None:
        """Axes of the input that are free besides the batch: how long a text is."""
        return None if self.text is None else {"input": {1: "sequence"}}

    @property
    def example(self) -> Tensor:
        return self.train[0][:2]

    @property
    def statistics(self) -> list[Inputs]:
        """Samples that factors suit, in batches."""
        return list(torch.split(self.train[0][: self.observed], min(64, self.evaluated)))

    def batches(
        self, size: int, seed: int, count: int | None = None
    ) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled batches of the training part, or of its first `count` samples; all alike."""
        generator = torch.Generator().manual_seed(seed)
        data = TensorDataset(*(part[:count] for part in self.train))
        return DataLoader(
            data, min(size, len(data)), shuffle=True, drop_last=True, generator=generator
        )

    def in_batches(self, part: Labelled) -> list[Labelled]:
        """A part in order, in batches whose outputs fit into memory."""
        return in_batches(part, self.evaluated)


def in_batches(part: Labelled, size: int = EVALUATED) -> list[Labelled]:
    """A part in order, in batches."""
    return list(zip(*(torch.split(values, size) for values in part), strict=True))


def digits() -> Subject:
    """A residual network trained on scikit-learn's digits: 600 to train, 97 to validate."""
    data = digit.load_digits()
    torch.manual_seed(digit.SEED)
    model = digit.DigitsNet()
    images, labels = data.train
    held = len(labels) - 97
    mine = replace(data, train=(images[:held], labels[:held]))
    digit.train_digits(model, mine, digit.EPOCHS, digit.SEED)
    return Subject(
        "digits", model.requires_grad_(True), (images[:held], labels[:held]),
        (images[held:], labels[held:]), data.calibration[0], data.test, digit.IMAGE, digit.CLASSES,
    )  # fmt: skip


def cifar10(depth: cifar.Depth) -> Subject:
    """A residual network for CIFAR-10: 45,000 images to train, 3,000 to validate, 2,000 spare.

    Its weights came from all 50,000, so that validation and what is calibrated with the spare ones
    are of images it knows; the test part is not.
    """
    images, labels = cifar.cifar10("train")
    if len(labels) < 50_000:
        raise DataError(f"there are {len(labels)} images to train on, 50,000 are needed")
    parts = {"train": slice(45_000), "validation": slice(45_000, 48_000)}
    train, validation = ((images[p], labels[p]) for p in parts.values())
    return Subject(
        f"cifar10-resnet{depth}", cifar.resnet(depth), train, validation, images[48_000:],
        cifar.cifar10("test"), cifar.IMAGE, cifar.CLASSES,
    )  # fmt: skip


def stories(windows: int = 2800, length: int = 128) -> Subject:
    """A language model of TinyStories, read token by token; targets are the tokens themselves.

    It was trained on stories like those it is validated on here; the test part is the first of the
    validation text, which it was not.
    """
    tokens, held = stories_tokens("train", windows, length), windows - 220
    parts = (slice(held), slice(held, held + 100), slice(held + 100, None))
    train, validation, calibration = (tokens[part] for part in parts)
    test = stories_tokens("valid", 40, length)
    return Subject(
        "stories15m", Decoder(stories15m()), (train, train), (validation, validation), calibration,
        (test, test), evaluated=8,  # 32,000 logits for each token
        observed=160, text=Running(BOS, stories_folder()),
    )  # fmt: skip


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "digits": digits,
    "cifar10-resnet20": lambda: cifar10(20),
    "cifar10-resnet56": lambda: cifar10(56),
    "stories15m": stories,
}
