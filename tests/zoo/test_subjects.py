"""Subjects: parts that share no sample, and batches that a seed repeats."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from t3c.errors import DataError
from t3c.zoo import cifar10 as cifar
from t3c.zoo import subjects
from t3c.zoo.digits import DigitsNet
from t3c.zoo.recipe import Recipe
from t3c.zoo.subjects import SUBJECTS, Labelled, Subject, in_batches


def numbered(count: int, start: int = 0) -> Labelled:
    values = torch.arange(start, start + count)
    return values[:, None].float(), values


@pytest.fixture
def subject() -> Subject:
    return Subject(
        "numbers", nn.Linear(1, 2), numbered(600), numbered(7, 600), numbered(5, 607)[0],
        numbered(9, 612), evaluated=4,
    )  # fmt: skip


def seen(subject: Subject, size: int, seed: int, count: int | None = None) -> list[list[int]]:
    batches = list(subject.batches(size, seed, count))
    assert all(torch.equal(x[:, 0].long(), y) for x, y in batches)
    return [y.tolist() for _, y in batches]


def test_batches_are_of_the_first_samples_in_an_order_of_the_seed(subject: Subject) -> None:
    first = seen(subject, 4, 1, 10)
    assert [len(batch) for batch in first] == [4, 4]  # all alike: the rest is for another round
    assert len({v for batch in first for v in batch} & set(range(10))) == 8
    assert first == seen(subject, 4, 1, 10) != seen(subject, 4, 2, 10)
    assert sorted(v for batch in seen(subject, 100, 1) for v in batch) == list(range(600))
    assert [sorted(b) for b in seen(subject, 64, 1, 3)] == [[0, 1, 2]]  # fewer than a batch
    again = subject.batches(4, 1, 8)
    assert [y.tolist() for _, y in again] != [y.tolist() for _, y in again]


def test_a_part_in_batches_is_the_part_in_order(subject: Subject) -> None:
    batches = subject.in_batches(subject.test)
    assert [len(y) for _, y in batches] == [4, 4, 1]
    for index in (0, 1):
        whole = torch.cat([batch[index] for batch in batches])
        assert torch.equal(whole, subject.test[index])
    assert len(in_batches(numbered(500))) == 2


def test_statistics_are_of_samples_to_train_on(subject: Subject) -> None:
    found = torch.cat([t for t in subject.statistics if isinstance(t, Tensor)])
    assert torch.equal(found, subject.train[0][:512])
    assert torch.equal(subject.example, subject.train[0][:2])


def shared(a: Tensor, b: Tensor) -> int:
    """How many of the samples of one part are in the other."""
    rows = {row.numpy().tobytes() for row in a}
    return sum(row.numpy().tobytes() in rows for row in b)


def test_digits_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects.digit, "DigitsNet", lambda: DigitsNet((8, 8, 8)))
    monkeypatch.setattr(subjects.digit, "train_digits", lambda model, *_: model.eval())
    found = SUBJECTS["digits"]()
    parts = [found.train[0], found.validation[0], found.calibration, found.test[0]]
    assert [len(part) for part in parts] == [600, 97, 600, 500]
    for i, a in enumerate(parts):
        for b in parts[i + 1 :]:
            assert shared(a, b) == 0
    assert all(p.requires_grad for p in found.model.parameters())
    assert found.name == "digits"


def test_cifar10_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every image is told by its first pixel: where it stands in the files."""
    stand = np.arange(50_000)
    pixels = np.zeros((50_000, 1, 1, 3), dtype=np.uint8)
    for channel in range(3):
        pixels[:, 0, 0, channel] = stand // 256**channel % 256

    def fake(part: str) -> Labelled:
        images = torch.from_numpy(pixels if part == "train" else pixels[:10]).float()
        return images, torch.arange(len(images))

    monkeypatch.setattr(cifar, "cifar10", fake)
    monkeypatch.setattr(cifar, "resnet", lambda depth: nn.Linear(depth, 1))
    for depth in (20, 56):
        found = SUBJECTS[f"cifar10-resnet{depth}"]()
        assert found.name == f"cifar10-resnet{depth}"
        assert found.model.in_features == depth
        weights = torch.tensor([1.0, 256.0, 65536.0])
        stands = [
            (part[:, 0, 0] @ weights).long()
            for part in (found.train[0], found.validation[0], found.calibration)
        ]
        assert [len(s) for s in stands] == [45_000, 3_000, 2_000]
        assert torch.equal(torch.cat(stands), torch.arange(50_000))
        assert torch.equal(stands[1], found.validation[1])
        assert len(found.test[0]) == 10


def test_data_that_is_too_short_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small stand-in for CIFAR-10 has nothing to validate on: say so, do not train without."""
    for part, names in cifar.SHEETS.items():
        for name in names:
            Image.new("RGB", (1024, 2)).save(tmp_path / name)
        (tmp_path / cifar.LABELS[part]).write_text(json.dumps([0] * 2 * len(names)))
    monkeypatch.delenv("T3C_DATA", raising=False)
    monkeypatch.setenv("T3C_CIFAR10", str(tmp_path))
    monkeypatch.setattr(cifar, "resnet", lambda depth: nn.Linear(depth, 1))
    with pytest.raises(DataError, match="10 images to train on, 50,000 are needed"):
        SUBJECTS["cifar10-resnet20"]()


def test_stories_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def windows(split: str, count: int, length: int) -> Tensor:
        return torch.arange(count)[:, None].expand(count, length) + (split == "valid") * 10_000

    monkeypatch.setattr(subjects, "stories_tokens", windows)
    monkeypatch.setattr(subjects, "stories15m", lambda: nn.Identity())
    monkeypatch.setattr(subjects, "Decoder", lambda model: model)
    monkeypatch.setattr(subjects, "stories_folder", lambda: Path("stories"))
    found = SUBJECTS["stories15m"]()
    parts = [found.train[0], found.validation[0], found.calibration, found.test[0]]
    ids = torch.cat([part[:, 0] for part in parts])
    assert len(set(ids.tolist())) == len(ids)
    assert all(torch.equal(x, y) for x, y in (found.train, found.validation, found.test))
    assert min(found.calibration[:, 0]) < 10_000 <= min(found.test[0][:, 0])
    assert found.evaluated * 128 * 32_000 * 4 < 2**28, "the logits of a batch fit into memory"
    assert found.text is not None
    assert (found.text.bos, found.text.tokenizer) == (1, Path("stories"))
    assert found.axes == {"input": {1: "sequence"}}


@pytest.mark.parametrize("name", list(SUBJECTS))
def test_every_subject_has_a_recipe(name: str) -> None:
    assert Recipe(name).subject == name
