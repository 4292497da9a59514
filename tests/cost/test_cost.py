from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t3c.cost.proxy import FEATURES, PROXIES, best_constant, features, fit_proxy, judge, mape, refit
from t3c.cost.work import layer_work, stored_bytes
from t3c.errors import SpecError
from t3c.spec import Factorization, Form, Kind, LayerPoint, LayerSpec, Profile

LINEAR = LayerSpec("fc", Kind.LINEAR, Factorization.SVD, 30, 20, in_size=(5, 1), out_size=(5, 1))
CONV = LayerSpec(
    "conv", Kind.CONV2D, Factorization.TUCKER2, 32, 16, (3, 3), stride=(2, 2), padding=(1, 1),
    in_size=(8, 8), out_size=(4, 4),
)  # fmt: skip


def test_linear_work_is_that_of_the_paper() -> None:
    dense = layer_work(LINEAR, LayerPoint(20, 8), Form.DENSE)
    assert (dense.flops, dense.launches) == (2 * 30 * 20 * 5, 1)
    low = layer_work(LINEAR, LayerPoint(4, 8), Form.FACTORED)
    assert (low.flops, low.launches) == (2 * (20 + 30) * 4 * 5, 2)
    assert layer_work(LINEAR, LayerPoint(4, 8), Form.DENSE).flops == dense.flops


def test_tucker_work_counts_each_stage_at_its_own_size() -> None:
    low = layer_work(CONV, LayerPoint(16, 8), Form.FACTORED)
    r_out, r_in = CONV.channel_ranks(16)
    assert (r_out, r_in) == (16, 8)
    assert low.flops == 2 * (64 * 16 * 8 + 16 * 16 * 8 * 9 + 16 * 32 * 16)
    assert low.launches == 3


def test_stored_bytes_are_packed() -> None:
    assert stored_bytes(LINEAR, LayerPoint(4, 4)) == (4 * 20 + 30 * 4) // 2 + 4 * (4 + 30)
    assert stored_bytes(LINEAR, LayerPoint(20, 6)) == 30 * 20 * 6 // 8 + 4 * 30


@given(st.integers(1, 29), st.integers(2, 7))
def test_less_rank_or_bits_never_costs_more(rank: int, bits: int) -> None:
    for spec in (LINEAR, CONV):
        k = min(rank, spec.full_rank - 1)
        small = layer_work(spec, LayerPoint(k, bits), Form.FACTORED)
        if k + 1 < spec.full_rank:
            assert small.flops <= layer_work(spec, LayerPoint(k + 1, bits), Form.FACTORED).flops
        assert stored_bytes(spec, LayerPoint(k, bits)) < stored_bytes(spec, LayerPoint(k, bits + 1))


@given(st.integers(0, 1000))
@settings(max_examples=20)
def test_proxy_recovers_a_device_it_can_express(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth = rng.uniform(0.1, 2, len(FEATURES)) * (rng.random(len(FEATURES)) < 0.6)
    truth[0] = 0.5
    rows = [np.concatenate([[1.0], rng.uniform(0, 3, len(FEATURES) - 1)]) for _ in range(90)]
    times = [float(row @ truth) for row in rows]
    proxy = judge(fit_proxy(rows[:80], times[:80]), rows[80:], times[80:], times[:80])
    assert all(value >= 0 for value in proxy.coefficients.values())
    assert proxy.mape is not None
    assert proxy.mape < 1e-3
    assert (proxy.fitted, proxy.held_out) == (80, 10)


def test_a_proxy_uses_only_what_it_is_given() -> None:
    rng = np.random.default_rng(0)
    rows = [np.concatenate([[1.0], rng.uniform(0.1, 3, len(FEATURES) - 1)]) for _ in range(30)]
    times = [float(row.sum()) for row in rows]
    for name, use in PROXIES.items():
        used = {k for k, v in fit_proxy(rows, times, use).coefficients.items() if v}
        assert used <= set(use), name
    both = [judge(fit_proxy(rows, times, PROXIES[n]), rows, times).mape for n in PROXIES]
    assert min(both) == both[0] < 1e-6  # only the hybrid can express this device


@given(st.integers(0, 1000), st.floats(0.2, 5), st.floats(0.2, 5))
@settings(max_examples=30)
def test_three_points_carry_a_proxy_to_another_device(
    seed: int, compute: float, memory: float
) -> None:
    """A device that computes and moves at other speeds is met better than by the proxy as it is."""
    rng = np.random.default_rng(seed)
    truth = rng.uniform(0.1, 2, len(FEATURES))
    size = rng.uniform(0.2, 3, 12)
    rows = [np.concatenate([[1.0], s * rng.uniform(0.5, 1.5, len(FEATURES) - 1)]) for s in size]
    proxy = fit_proxy(rows, [float(row @ truth) for row in rows])
    speeds = np.array([compute if name.endswith(".gflop") else memory for name in FEATURES])
    there = [float(row @ (proxy.vector * speeds)) for row in rows]
    fitted = refit(proxy, rows[:3], there[:3])
    assert all(value >= 0 for value in fitted.coefficients.values())
    before = judge(proxy, rows[3:], there[3:]).mape
    after = judge(fitted, rows[3:], there[3:]).mape
    assert before is not None
    assert after is not None
    assert after <= max(before, 1e-9)
    if compute == memory:
        assert after < 1e-6


def test_a_refit_needs_a_cost_to_scale() -> None:
    rows = [np.ones(len(FEATURES))]
    with pytest.raises(SpecError, match="no cost"):
        refit(fit_proxy(rows, [1.0]).__class__({}, 1), rows, [1.0])


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=30))
def test_no_constant_beats_the_best_constant(values: list[float]) -> None:
    truth = np.array(values)
    best = mape(np.full_like(truth, best_constant(values)), truth)
    for other in values:
        assert best <= mape(np.full_like(truth, other), truth) + 1e-12


def test_bad_measurements_are_refused() -> None:
    row = np.ones(len(FEATURES))
    for times in ([0.0], [float("nan")], [-1.0], [1.0, 2.0]):
        with pytest.raises(SpecError):
            fit_proxy([row], times)


def test_proxy_says_nothing_of_what_it_was_not_tested_on() -> None:
    specs = {"fc": LINEAR}
    row = features(specs, Profile("p", {"fc": LayerPoint(4, 8)}), {"fc": Form.FACTORED})
    proxy = fit_proxy([row], [2.0])
    assert (proxy.r2, proxy.mape) == (None, None)
    assert proxy.predict(row) == pytest.approx(2.0)
    with pytest.raises(SpecError):
        fit_proxy([], [])


def test_work_of_other_stages() -> None:
    cp = replace(CONV, factorization=Factorization.CP, stride=(1, 1), in_size=(4, 4))
    work = layer_work(cp, LayerPoint(8, 8), Form.FACTORED)
    assert work.flops == 2 * 16 * (8 * 16 + 8 * 9 + 32 * 8)
    assert work.launches == 3
    deep = replace(CONV, factorization=Factorization.SVD, in_channels=32, groups=32)
    assert layer_work(deep, LayerPoint(4, 8), Form.FACTORED).flops == 2 * 16 * 32 * 9
    assert stored_bytes(deep, LayerPoint(4, 8)) == 4 * 9 + 32 * 4 + 4 * (4 + 32)
    twice = replace(LINEAR, runs=2)
    once, both = (layer_work(spec, LayerPoint(4, 8), Form.FACTORED) for spec in (LINEAR, twice))
    assert (both.flops, both.launches) == (2 * once.flops, 2 * once.launches)
    assert both.size_bytes == once.size_bytes
    size = (5, 1)
    table = LayerSpec(
        "e", Kind.EMBEDDING, Factorization.NONE, 1000, 64, in_size=size, out_size=size
    )
    looked_up = layer_work(table, LayerPoint(64, 4), Form.DENSE)
    assert looked_up.flops == 0
    assert looked_up.moved_bytes < 1000
    assert looked_up.size_bytes == 1000 * 64 // 2 + 4 * 1000
    tied = replace(LINEAR, bit_offsets=(1, 0))
    assert stored_bytes(tied, LayerPoint(4, 4)) == 4 * 20 * 5 // 8 + 30 * 4 // 2 + 4 * (4 + 30)


def test_kernels_are_told_apart_by_what_engines_have_kernels_for() -> None:
    specs, points = {"conv": CONV}, {"conv": LayerPoint(16, 8)}
    row = features(specs, Profile("p", points), {"conv": Form.FACTORED}, to_float={"conv"})
    named = {name: value for name, value in zip(FEATURES, row, strict=True) if value}
    launches = {name: value for name, value in named.items() if name.endswith("launch")}
    # Tucker-2: a pointwise stage, the core, and a pointwise stage whose output stays float.
    assert launches == {
        "conv2d.launch": 1.0,
        "conv2d pointwise.launch": 1.0,
        "conv2d pointwise to float.launch": 1.0,
    }
    work = layer_work(CONV, points["conv"], Form.FACTORED)
    assert sum(v for n, v in named.items() if n.endswith("gflop")) * 1e9 == pytest.approx(
        work.flops
    )
    assert sum(v for n, v in named.items() if n.endswith("mb")) * 1e6 == pytest.approx(
        work.moved_bytes
    )
