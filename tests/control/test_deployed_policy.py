"""The deployed controller: larger budgets never find smaller points, whatever its weights."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t3c.control.policy import (
    ARRAYS,
    BUDGET_PATH,
    Policy,
    Wish,
    _shapes,
    nearest_profile,
    summarize,
)
from t3c.control.token import RESOURCES, About, Token
from t3c.errors import BudgetError, DataError, SpecError
from t3c.spec import Level


def random_policy(
    seed: int, *, scale: float = 10.0, features: int = 3, coarse: bool = False
) -> Policy:
    """A policy of random shapes and weights; coarse ones are halves, so that scores tie."""
    rng = np.random.default_rng(seed)
    units = {}
    for unit in range(rng.integers(1, 5)):
        rises = rng.integers(0, 4, (rng.integers(0, 6), 2)).cumsum(axis=0)
        pairs = {(1, 2): None} | {(1 + int(k), int(min(8, 2 + q))): None for k, q in rises}
        units[f"unit{unit}"] = tuple(Level(k, q) for k, q in pairs)
    names = tuple(units)
    kind = "scalar" if rng.random() < 0.25 else "tuple"
    devices = tuple(f"device{i}" for i in range(rng.integers(1, 4)))
    about = About(units, devices, names[: rng.integers(0, len(names) + 1)], kind)
    shapes = _shapes(about, int(rng.integers(2, 12)), int(rng.integers(1, 9)), features)
    arrays = {}
    for name, shape in shapes.items():
        array = rng.normal(size=shape) * scale ** rng.uniform(-2, 1)
        array = np.round(2 * array) / 2 if coarse else array
        arrays[name] = np.abs(array) if name in BUDGET_PATH or name == "summary_std" else array
    arrays["reach"] = rng.dirichlet(np.ones(shapes["reach"][1]), 3) * rng.uniform(0.3, 1.5)
    arrays["summary_std"] += 0.1
    return Policy(about, **arrays)


grid = st.integers(0, 8).map(lambda n: n / 8) | st.floats(0, 1.2)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def token_pairs(draw: st.DrawFn) -> tuple[Token, Token]:
    """Two tokens, the second nowhere below the first."""
    below, above = {}, {}
    for name in RESOURCES:
        low, high = sorted((draw(grid), draw(grid)))
        below[name], above[name] = (
            low,
            draw(st.sampled_from([high, high, None, np.nextafter(low, 2)])),
        )
    return Token(**below), Token(**above)


def falls(policy: Policy, pair: tuple[Token, Token], seed: int) -> set[str]:
    """By which of its answers a policy gives less for the larger token."""
    rng = np.random.default_rng(seed)
    device = rng.choice([*policy.about.devices, "unknown"])
    summary = rng.normal(size=policy.summary_mean.shape) * 5 if rng.random() < 0.7 else None
    units = policy.about.units
    nested = np.sort(rng.random((4, len(units))), axis=0)
    profiles = [
        {u: p[int(share * len(p))] for (u, p), share in zip(units.items(), row, strict=True)}
        for row in nested
    ]
    answers = []
    for token in pair:
        points = policy.points(token, device, summary)
        projected = policy.project(policy.proposals(token, device))
        answers.append(
            {
                "index": policy.indices(token, device, summary),
                "point": points,
                "proposal": projected,
                "profile": {"": nearest_profile(points, profiles)},
                "proposed profile": {"": nearest_profile(projected, profiles)},
            }
        )
    low, high = answers
    return {kind for kind in low if any(not low[kind][u] <= high[kind][u] for u in low[kind])}


@given(seeds, token_pairs(), seeds, st.booleans())
@settings(max_examples=250, deadline=None)
def test_more_budget_is_never_less_whatever_the_weights(
    seed: int, pair: tuple[Token, Token], other: int, coarse: bool
) -> None:
    assert not falls(random_policy(seed, coarse=coarse), pair, other)


def test_a_negative_weight_would_break_it_and_is_refused() -> None:
    """The property above can fail: each array of the budget path, negated, breaks it somewhere."""
    rng = np.random.default_rng(0)
    pairs = [(Token(*low), Token(*(low + 1) / 2)) for low in rng.random((6, 3)) / 2]
    for name in BUDGET_PATH:
        broken: set[str] = set()
        seeds = iter(range(60))
        while not broken or (name == "reach" and len(broken) < 5):  # reach is in every answer
            seed = next(seeds)
            policy = random_policy(seed)
            negative = -getattr(policy, name) * 4
            if not negative.any():
                continue
            with pytest.raises(SpecError, match=f"^{name} is on the path of the budget"):
                replace(policy, **{name: negative})
            object.__setattr__(policy, name, negative)
            for pair in pairs:
                broken |= falls(policy, pair, seed)


def test_the_formulas() -> None:
    """One unit by hand, without the network; then the network alone."""
    about = About({"u": (Level(1, 4), Level(2, 4), Level(4, 8))}, ("d",), ("u",))
    arrays = {n: np.zeros(s) for n, s in _shapes(about, 3, 2, 1).items()}
    arrays |= {"reach": np.array([[0, 0.5, 0.5], [0, 0.1, 0.9], [1, 0, 0]])}
    arrays |= {"slope": np.array([2, 8]), "threshold": np.array([0.5, 6.0])}
    arrays |= {"summary": np.array([[1.0], [0.0]]), "summary_std": np.array([2.0])}
    policy = Policy(about, **arrays)
    # latency 0.6 reaches 0.6 and size 0.75 reaches 0.1 + 0.9 / 2 = 0.55, energy never limits
    logits = np.cumsum(policy.scores(Token(0.6, 0.75, 0.0)))
    np.testing.assert_allclose(logits, [2 * 0.55 - 0.5, 0.6 + 8 * 0.55 - 6], atol=1e-6)
    assert policy.points(Token(0.6, 0.75, 0.0)) == {"u": Level(2, 4)}
    assert policy.points(Token()) == {"u": Level(4, 8)}
    shifted = np.cumsum(policy.scores(Token(0.6, 0.75, 0.0), summary=np.array([-100.0])))
    np.testing.assert_allclose(shifted - logits, [-4, -4], atol=1e-6)  # clipped at 4
    network = {
        "inward": np.array([[1.0, 0, 0], [0, 2, 0]]),
        "device": np.array([[0.5, -1.0]]),
        "onward": np.array([[1.0, 0.5], [0, 1]]),
        "onward_bias": np.array([0.1, -0.2]),
        "lift": np.array([[1.0, 0], [0, 3]]),
        "wish_lift": np.array([[[1.0, 0], [0, 2]]]),
    }
    policy = Policy(about, **(arrays | network | {"slope": np.zeros(2), "threshold": np.zeros(2)}))
    first = np.tanh([0.3 + 0.5, 2 * 0.8 - 1])
    hidden = np.tanh([first[0] + 0.5 * first[1] + 0.1, first[1] - 0.2])
    logits = np.cumsum(policy.scores(Token(0.3, 0.8), "d"))
    np.testing.assert_allclose(logits, [hidden[0], hidden[0] + 3 * hidden[1]], atol=1e-6)
    wish = policy.proposals(Token(0.3, 0.8), "d")["u"]
    shares = 1 / (1 + np.exp(-hidden * [1, 2]))
    np.testing.assert_allclose([wish.level, wish.bits], shares * [4, 8], atol=1e-5)
    assert policy.project({"u": Wish(3, 6)})["u"] == Level(4, 8)  # a tie goes up


def test_a_scalar_token_is_the_least_share() -> None:
    policy = random_policy(5)
    scalar = replace(policy, about=replace(policy.about, token="scalar"))
    for share in (0.1, 0.4, 0.9):
        same = policy.scores(Token(share, share, share))
        np.testing.assert_array_equal(scalar.scores(Token(0.95, share, None)), same)


def test_an_unknown_device_is_the_mean_of_the_known() -> None:
    policy = random_policy(3)
    several = next(p for p in map(random_policy, range(50)) if len(p.about.devices) == 3)
    mean = several.device.mean(axis=0, dtype=float)
    one = replace(several, device=np.tile(mean, (3, 1)))
    token = Token(0.4, 0.7)
    expected = one.scores(token, one.about.devices[1])
    np.testing.assert_allclose(several.scores(token, "never seen"), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(several.scores(token), several.scores(token, "never seen"))
    assert policy.indices(token) == policy.indices(token, "never seen")


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_round_trip(seed: int) -> None:
    policy = random_policy(seed)
    again = Policy.from_tensors(policy.tensors(), policy.about)
    assert all(a.dtype == np.float32 for a in again.tensors().values())
    assert all(np.array_equal(again.tensors()[n], a) for n, a in policy.tensors().items())
    token, summary = Token(0.3, None, 0.9), np.ones(3)
    np.testing.assert_array_equal(
        again.scores(token, None, summary), policy.scores(token, None, summary)
    )


def test_what_is_refused() -> None:
    policy = random_policy(1)
    tensors = policy.tensors()
    with pytest.raises(ValueError, match="read-only"):
        policy.slope[...] = -1
    for name in ARRAYS:
        with pytest.raises(SpecError, match="missing or unknown: " + name):
            Policy.from_tensors({n: a for n, a in tensors.items() if n != name}, policy.about)
        with pytest.raises(SpecError, match="float32"):
            Policy.from_tensors(tensors | {name: tensors[name].astype(float)}, policy.about)
        if tensors[name].size:
            with pytest.raises(SpecError, match=f"{name} is not finite"):
                Policy.from_tensors(
                    tensors | {name: tensors[name] * np.float32(np.nan)}, policy.about
                )
    with pytest.raises(SpecError, match="onward must have shape"):
        replace(policy, onward=policy.onward[:, :0])
    for share in (-0.1, float("nan")):
        with pytest.raises(BudgetError, match="size must be 0 or more"):
            Token(size=share)
    with pytest.raises(SpecError, match="summarized"):
        replace(policy.about, summarized=("nobody",))
    with pytest.raises(DataError, match="summary"):
        next(p for p in map(random_policy, range(50)) if p.summary.size).scores(
            Token(), None, np.ones(2)
        )


def test_summaries() -> None:
    x = np.random.default_rng(0).normal(size=(4, 3, 5, 5)).astype(np.float32)
    expected = [*(x[:, c].mean() for c in range(3)), *(x[:, c].std() for c in range(3))]
    np.testing.assert_allclose(summarize(x), expected, rtol=1e-4, atol=1e-6)
    tokens = np.array([[5, 6, 0, 0], [7, 0, 0, 0]])
    np.testing.assert_allclose(summarize(tokens), [3 / 8, np.log(4)])
    with pytest.raises(DataError, match="not finite"):
        summarize(np.full((2, 2), np.nan))
    with pytest.raises(DataError, match="two axes"):
        summarize(np.ones(3))


def test_nearest_profile() -> None:
    low, high = {"a": Level(2, 4)}, {"a": Level(8, 8)}
    assert nearest_profile({"a": Level(4, 5)}, [low, high]) == 0
    assert nearest_profile({"a": Level(5, 6)}, [low, high]) == 1  # as near to both
    with pytest.raises(SpecError, match="nested"):
        nearest_profile(low, [high, low])
    with pytest.raises(SpecError, match="units"):
        nearest_profile({"b": Level(1, 4)}, [low])


def test_deciding_needs_no_torch() -> None:
    code = "import sys, t3c.control.policy; assert not {'torch', 'scipy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
