"""Texts of like length come together, and without padding that none of them needs."""

from __future__ import annotations

import numpy as np
import torch

from t3c.train.lengths import lengths_of, like_lengths, trimmed


def texts(*lengths: int, width: int = 10) -> dict[str, torch.Tensor]:
    mask = torch.tensor([[int(place < n) for place in range(width)] for n in lengths])
    return {"input_ids": mask * 7, "attention_mask": mask, "kinds": torch.zeros(len(lengths), 3)}


def test_each_sample_comes_once_beside_others_of_its_length() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 333)
    batches = like_lengths(lengths, 8, 1, 0)
    rows = np.concatenate(batches)
    assert len(batches) == 41
    assert len(np.unique(rows)) == len(rows) == 328
    spread = np.mean([np.ptp(lengths[batch]) for batch in batches])
    assert spread < 0.2 * np.ptp(lengths)
    again, other = like_lengths(lengths, 8, 1, 0), like_lengths(lengths, 8, 1, 1)
    assert all(np.array_equal(a, b) for a, b in zip(again, batches, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(other, batches, strict=True))


def test_padding_that_no_text_needs_goes() -> None:
    inputs = texts(4, 6, 1)
    found = lengths_of(inputs)
    assert found is not None
    assert found.tolist() == [4, 6, 1]
    short = trimmed(inputs)
    assert isinstance(short, dict)
    assert {name: tuple(value.shape) for name, value in short.items()} == {
        "input_ids": (3, 6), "attention_mask": (3, 6), "kinds": (3, 3)
    }  # fmt: skip
    left = {name: value.flip(1) for name, value in inputs.items()}  # padded in front: all is used
    assert trimmed(left)["input_ids"].shape == (3, 10)  # type: ignore[index, call-overload]
    assert trimmed(texts(0, 0))["input_ids"].shape == (2, 1)  # type: ignore[index, call-overload]


def test_what_has_no_mask_is_left_alone() -> None:
    x = torch.ones(3, 4)
    assert lengths_of(x) is None
    assert trimmed(x) is x
