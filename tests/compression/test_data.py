"""Data of a user: gathered, split by content, labels split off and never traced."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from t3c.compression import data as module
from t3c.compression.data import Data, gathered, joined, split
from t3c.errors import DataError


def numbers(count: int, start: int = 0) -> Data:
    values = torch.arange(start, start + count, dtype=torch.float32)[:, None].repeat(1, 3)
    return Data(values, torch.arange(start, start + count))


def test_a_mapping_of_a_loader_has_its_labels_split_off() -> None:
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long), "labels": torch.tensor([0, 1])}
    found = gathered([batch, batch])
    assert isinstance(found.inputs, dict)
    assert list(found.inputs) == ["input_ids"]
    assert found.labels is not None
    assert found.labels.tolist() == [0, 1, 0, 1]


def test_pairs_tensors_and_arrays_are_batches_too() -> None:
    assert len(gathered([(torch.ones(3, 2), torch.zeros(3))])) == 3
    assert gathered([torch.ones(3, 2)]).labels is None
    assert len(gathered(np.ones((5, 2), np.float32))) == 5
    columns = {"x": np.ones((2, 3), np.float32), "label": [0, 1]}
    assert gathered([columns]).labels is not None


def test_an_iterator_that_was_read_and_one_too_large_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def batches() -> Iterator[torch.Tensor]:
        yield torch.ones(10, 100)

    once = batches()
    assert len(gathered(once)) == 10
    with pytest.raises(DataError, match="read before has nothing left"):
        gathered(once)
    monkeypatch.setattr(module, "MOST_BYTES", 1 << 10)
    with pytest.raises(DataError, match="give fewer samples"):
        gathered(batches())
    with pytest.raises(DataError, match="got int"):
        gathered(3)


def test_rows_of_a_data_set_are_kept_for_the_model_to_encode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [{"sentence": f"film {i}", "label": i % 2} for i in range(3)]
    assert gathered(iter(rows)) == rows
    monkeypatch.setattr(module, "MOST_ROWS", 2)
    with pytest.raises(DataError, match="more than 2 rows: give some"):
        gathered(rows)


def test_samples_of_an_encoded_data_set_are_put_together() -> None:
    samples = [{"input_ids": [1, 2, i], "labels": i % 2} for i in range(4)]
    found = gathered(samples)
    assert isinstance(found, Data)
    assert isinstance(found.inputs, dict)
    assert found.inputs["input_ids"].shape == (4, 3)
    assert found.labels is not None
    assert found.labels.tolist() == [0, 1, 0, 1]
    with pytest.raises(DataError, match="a batch of the data"):
        gathered([*samples, {"input_ids": [1, 2], "labels": 0}])
    with pytest.raises(DataError, match="'input_ids' is no array"):
        gathered([{"input_ids": [[1, 2], [3]], "labels": [0, 1]}])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(DataError, match="NaN or infinite"):
        gathered([torch.full((2, 2), value)])


@given(st.integers(120, 400), st.randoms(use_true_random=False))
def test_no_two_parts_share_a_sample_and_order_does_not_matter(count: int, random: object) -> None:
    data = numbers(count)
    parts = split(data)
    shuffled = list(range(count))
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    again = split(data.at(torch.tensor(shuffled)))
    seen: set[str] = set()
    for name in parts.sizes():
        part, other = getattr(parts, name), getattr(again, name)
        keys = set(part.keys())
        assert keys == set(other.keys())
        assert not keys & seen
        seen |= keys
    assert len(seen) == count


def test_copies_stay_together_and_a_test_set_is_kept_out_of_the_rest() -> None:
    data = numbers(300)
    doubled = split(joined([data, data.at(slice(100))]))
    everywhere = [set(getattr(doubled, name).keys()) for name in doubled.sizes()]
    assert sum(map(len, everywhere)) == len(set().union(*everywhere)) == 300
    own = numbers(50, 280)  # 20 of them are in the data too
    parts = split(data, own)
    assert parts.test is own
    rest = set().union(*(getattr(parts, n).keys() for n in parts.sizes() if n != "test"))
    assert len(rest) == 280
    assert not rest & set(own.keys())


def test_too_few_samples_are_refused_with_how_many_are_needed() -> None:
    with pytest.raises(DataError, match="at least 116 are needed"):
        split(numbers(100))


def test_batches_go_through_all_samples_with_their_labels() -> None:
    batches = numbers(10).batches(4)
    assert [len(labels) for _, labels in batches] == [4, 4, 2]  # type: ignore[misc]
    unlabelled = Data(torch.ones(3, 1)).batches(2)
    assert all(isinstance(batch, torch.Tensor) for batch in unlabelled)
