"""Width: units by what their loss costs, and what the kept ones can make up for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from t3c.factor.compose import compose
from t3c.factor.metric import data_metric
from t3c.factor.width import channels, compensation, correction_stages, unit_order


def drawn(seed: int, inputs: int = 24, outputs: int = 10, taps: int = 1) -> tuple[Tensor, Tensor]:
    """Return a weight (outputs, inputs, taps) and correlated inputs (rows, inputs) in float64."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(inputs, inputs // 2, generator=generator, dtype=torch.float64)
    hidden = torch.randn(400, inputs // 2, generator=generator, dtype=torch.float64)
    noise = torch.randn(400, inputs, generator=generator, dtype=torch.float64)
    weight = torch.randn(outputs, inputs, taps, generator=generator, dtype=torch.float64)
    return weight, (hidden @ mixing.T).relu() + 0.3 * noise


def moment_of(rows: Tensor) -> Tensor:
    return rows.T @ rows / len(rows)


def error(weight: Tensor, narrow: Tensor, rows: Tensor, kept: int) -> float:
    """Return the mean square by which a narrow weight's outputs are off, over all taps."""
    off = torch.einsum("oit,ni->not", weight, rows)
    off = off - torch.einsum("oit,ni->not", narrow, rows[:, :kept])
    return float(off.square().mean())


@given(seed=st.integers(0, 10_000), kept=st.integers(1, 23), taps=st.sampled_from([1, 3]))
def test_compensation_is_never_worse_than_none(seed: int, kept: int, taps: int) -> None:
    """On the inputs it is fitted to, for every tap of a kernel; nor is any rank of it."""
    weight, rows = drawn(seed, taps=taps)
    moment = moment_of(rows)
    left_out = error(weight, weight[:, :kept], rows, kept)
    change = compensation(weight, moment, kept)
    exact = error(weight, weight[:, :kept] + change, rows, kept)
    assert exact <= left_out * (1 + 1e-3)
    best = left_out
    for rank in (1, 4, 10):
        stages = correction_stages(weight, moment, kept, rank)
        near = error(weight, weight[:, :kept] + compose(stages).reshape(change.shape), rows, kept)
        assert near <= best * (1 + 1e-2) + 1e-9
        best = near
    assert best == pytest.approx(exact, rel=1e-3, abs=1e-6)  # rank 10 of 10 outputs is all of it


def test_inputs_that_others_tell_cost_nothing() -> None:
    """Copies of other inputs come last, and the kept ones make up for them entirely."""
    weight, rows = drawn(1, inputs=12)
    doubled = torch.cat([rows, rows[:, :4]], dim=1)
    weight = torch.cat([weight, weight[:, 4:8]], dim=1)
    moment = moment_of(doubled)
    order = unit_order(weight, moment)
    pairs = [{j, 12 + j} for j in range(4)]
    last = set(order[-4:].tolist())
    assert all(len(pair & last) == 1 for pair in pairs)
    weight, doubled = weight[:, order], doubled[:, order]
    change = compensation(weight, moment_of(doubled), 12)
    left = error(weight, weight[:, :12] + change, doubled, 12)
    assert left < 1e-2 * error(weight, weight[:, :12], doubled, 12)


@given(seed=st.integers(0, 10_000), block=st.sampled_from([1, 2, 3, 4]))
def test_an_order_is_a_permutation_and_beats_chance(seed: int, block: int) -> None:
    weight, rows = drawn(seed)
    moment, units = moment_of(rows), 24 // block
    order = unit_order(weight, moment, block)
    assert order.sort().values.tolist() == list(range(units))
    assert unit_order(weight, moment, block).tolist() == order.tolist()

    def lost(units_kept: Tensor) -> float:
        places = channels(units_kept, block)
        kept = len(places) // 2
        there, x = weight[:, places], rows[:, places]
        change = compensation(there, moment_of(x), kept)
        return error(there, there[:, :kept] + change, x, kept)

    generator = torch.Generator().manual_seed(seed)
    chance = [lost(torch.randperm(units, generator=generator)) for _ in range(8)]
    assert lost(order) <= sorted(chance)[len(chance) // 2]


def test_what_outputs_are_used_for_decides_too() -> None:
    """An input that reaches only an output nobody uses is the first to go."""
    weight, rows = drawn(2, inputs=8)
    rows = torch.randn(400, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weight[:, 5] = 0.0
    weight[9] = 0.0
    weight[9, 5] = 50.0
    used = torch.eye(10, dtype=torch.float64)
    used[9, 9] = 0.0
    assert unit_order(weight, moment_of(rows))[0] == 5
    assert unit_order(weight, moment_of(rows), outputs=data_metric(used, 1e-6))[-1] == 5
