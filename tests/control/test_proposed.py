"""A controller over shipped profiles: larger limits never propose smaller ones."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t3c.control.policy import BUDGET_PATH, Policy, _shapes
from t3c.control.proposed import Controlled
from t3c.control.token import RESOURCES, About
from t3c.errors import SpecError
from t3c.spec import Level

Taken = list[tuple[float | None, ...]]
FEATURES = 2


def random_control(rng: np.random.Generator) -> Controlled:
    """Random weights over two units, profiles along their chains, shares in any order."""
    units = {}
    for unit in ("a", "b"):
        ranks = sorted(set(rng.integers(1, 30, rng.integers(2, 9)).tolist()))
        units[unit] = tuple(Level(rank, 8) for rank in ranks)
    about = About(units, ("device",), ("b",) if rng.random() < 0.5 else ())
    arrays = {}
    for name, shape in _shapes(about, 9, 3, FEATURES).items():
        array = rng.normal(size=shape) * 10 ** rng.uniform(-1, 1)
        arrays[name] = np.abs(array) if name in BUDGET_PATH or name == "summary_std" else array
    arrays["reach"] = rng.dirichlet(np.ones(9), 3) * rng.uniform(0.8, 1.5)
    arrays["summary_std"] += 0.1
    # Steps that are taken somewhere along the way, or nothing would ever change.
    arrays["slope"] = arrays["slope"] + 20
    arrays["threshold"] = arrays["slope"] * rng.uniform(0, 1, arrays["slope"].shape)
    levels = np.sort(rng.random((rng.integers(2, 7), 2)), axis=0)
    profiles = {
        f"p{i}": {u: p[int(x * len(p))] for (u, p), x in zip(units.items(), row, strict=True)}
        for i, row in enumerate(levels)
    }
    shares = {name: tuple(unknown(rng, 0.2, rng.uniform(0, 1.2, 3))) for name in profiles}
    return Controlled(Policy(about, **arrays), profiles, shares)  # type: ignore[arg-type]


def unknown(
    rng: np.random.Generator, share: float, values: np.ndarray | list[float]
) -> list[float | None]:
    return [None if rng.random() < share else float(value) for value in values]


def place(control: Controlled, *args: object) -> int:
    return list(control.profiles).index(control.propose(*args))  # type: ignore[arg-type]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=250)
def test_more_is_never_less(seed: int) -> None:
    """In every limit alone and in all, of any quantile, for any input, whatever was measured."""
    rng = np.random.default_rng(seed)
    control = random_control(rng)
    count = len(control.profiles)
    taken: Taken = [tuple(unknown(rng, 0.2, rng.uniform(0.1, 3, 3))) for _ in range(count)]
    factor = rng.choice([1.0, 1.0, 1 + 1e-15, rng.uniform(1, 2)], count)
    strict = [
        (None if row[0] is None else row[0] * f, *row[1:])
        for row, f in zip(taken, factor, strict=True)
    ]
    exact = [value for row in taken for value in row if value is not None] or [1.0]
    tight = [float(rng.choice(exact) if rng.random() < 0.5 else rng.uniform(0, 4)) for _ in "abc"]
    summary = rng.normal(size=FEATURES) if rng.random() < 0.5 else None
    base = place(control, tight, taken, summary)
    assert place(control, tight, strict, summary) <= base
    everything: list[float | None] = []
    for index, limit in enumerate(tight):
        options = [np.nextafter(limit, 9), limit * rng.uniform(1, 1.1), limit + rng.exponential()]
        loose = [None, *map(float, options)][rng.integers(4)]
        everything.append(loose)
        assert place(control, [*tight[:index], loose, *tight[index + 1 :]], taken, summary) >= base
    assert place(control, everything, taken, summary) >= base
    assert place(control, everything, strict, summary) >= place(control, tight, strict, summary)


def simple(count: int = 4, resource: int = 0) -> Controlled:
    """One unit; profile i is wanted from the share i / (count - 1) of the first resource on."""
    points = tuple(Level(i + 1, 8) for i in range(count))
    about = About({"a": points}, ("device",))
    arrays = {n: np.zeros(s) for n, s in _shapes(about, 3, 1, 0).items()}
    arrays["reach"] = np.full((3, 3), 1.0)
    arrays["reach"][resource] = [0.0, 0.5, 0.5]
    arrays["slope"] += 8.0
    arrays["threshold"] = 8.0 * (np.arange(1, count) / (count - 1) - 1e-4)
    share = [i / (count - 1) for i in range(count)]
    return Controlled(
        Policy(about, **arrays),
        {f"p{i}": {"a": p} for i, p in enumerate(points)},
        {
            f"p{i}": tuple(s if r == resource else None for r in range(3))
            for i, s in enumerate(share)
        },  # type: ignore[misc]
    )


def test_limits_are_read_as_shares_off_the_profiles() -> None:
    control = simple()
    taken: Taken = [(ms, 1.0, None) for ms in (2.0, 4.0, 6.0, 8.0)]
    wanted = {0.1: "p0", 2.0: "p0", 3.9: "p0", 4.0: "p1", 7.9: "p2", 8.0: "p3", 99.0: "p3"}
    for limit, profile in wanted.items():
        assert control.propose((limit, None, None), taken) == profile
    # Out of order: a profile counts as slow as the slowest below it.
    taken = [(ms, 1.0, None) for ms in (2.0, 6.0, 4.0, 8.0)]
    assert control.propose((5.9, None, None), taken) == "p0"
    assert control.propose((6.0, None, None), taken) == "p2"
    # What is not known, or has no share, is no limit.
    assert control.propose((1.0, None, None), [(None, 1.0, None)] * 4) == "p3"
    assert control.propose((None, 0.1, 0.1), taken) == "p3"
    # Between those that are known.
    taken = [(2.0, 1.0, None), (None, 1.0, None), (None, 1.0, None), (8.0, 1.0, None)]
    assert control.propose((5.9, None, None), taken) == "p1"
    assert control.propose((6.0, None, None), taken) == "p2"


@pytest.mark.parametrize("resource", range(3))
def test_shares_stay_with_their_profiles(resource: int) -> None:
    """However the shares were ordered."""
    control = simple(resource=resource)
    mixed = replace(control, shares=dict(reversed(control.shares.items())))
    taken: Taken = [(ms, ms, ms) for ms in (2.0, 4.0, 6.0, 8.0)]
    for limit in (1.0, 4.0, 5.0, 6.5, 9.0):
        limits = [limit if r == resource else None for r in range(len(RESOURCES))]
        assert mixed.propose(limits, taken) == control.propose(limits, taken)


def test_controllers_that_cannot_be() -> None:
    control = simple(2)
    top = {"p1": control.profiles["p1"], "p0": control.profiles["p0"]}
    for wrong, message in (
        ({"profiles": {}, "shares": {}}, "needs profiles"),
        ({"profiles": {"p0": control.profiles["p0"]}}, "shares of the same profiles"),
        ({"profiles": top}, "profile 'p0' is not above profile 'p1'"),
        (
            {"profiles": {**control.profiles, "p1": {"x": Level(1, 8)}}},
            "profile 'p1' does not have the controller's units",
        ),
        ({"shares": {**control.shares, "p0": (-0.1, None, None)}}, "'p0' has shares that are neg"),
        ({"shares": {**control.shares, "p0": (math.nan, None, None)}}, "'p0' has shares that are"),
    ):
        with pytest.raises(SpecError, match=message):
            replace(control, **wrong)  # type: ignore[arg-type]
