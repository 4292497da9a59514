"""Text through the runtime: chosen token by token, remembered over all of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import t3c
from conftest import Made
from decoders import MadeDecoder
from t3c.engines import ENGINES, Session
from t3c.engines.decode import Generation
from t3c.engines.protocol import Array
from t3c.errors import DataError, EngineError, SpecError
from t3c.runtime.remarks import Code, Remark
from t3c.runtime.runtime import Runtime
from t3c.runtime.sessions import SessionKey

PROMPT = np.array([[1, 14, 15], [1, 65, 35]])


@pytest.fixture
def rt(decoder: MadeDecoder) -> Runtime:
    return t3c.load(decoder.path, "torch", 1)


def limits(runtime: Runtime) -> tuple[t3c.Budget, t3c.Budget]:
    """Budgets that the smaller and the larger of the two profiles serve."""
    small, large = (candidate.size_mb for candidate in runtime.candidates)
    assert small < large
    return t3c.Budget(size_mb=small), t3c.Budget(size_mb=large)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_it_writes_what_the_original_would(decoder: MadeDecoder, engine: str) -> None:
    runtime = t3c.load(decoder.path, engine, 1)
    writing = runtime.generate(PROMPT, profile="max", tokens=8)
    told = 0
    for token in writing:
        before = torch.from_numpy(writing.ids[:, :-1])
        with torch.no_grad():
            wanted = decoder.original(input_ids=before)[:, -1].numpy()
        assert np.linalg.norm(token.logits - wanted) < 0.15 * np.linalg.norm(wanted)
        off = np.abs(token.logits - wanted).max(axis=1)
        ranked = np.sort(wanted, axis=1)
        clear = ranked[:, -1] - ranked[:, -2] > 2 * off
        np.testing.assert_array_equal(token.ids[clear], wanted.argmax(axis=1)[clear])
        told += int(clear.sum())
    assert told >= 4  # of 16
    assert writing.ids.shape == (2, 11)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_a_budget_that_changes_goes_on_from_the_same_memory(
    decoder: MadeDecoder, engine: str
) -> None:
    runtime = t3c.load(decoder.path, engine, 1)
    small, large = limits(runtime)
    changes: list[Callable[[], None]] = [
        lambda: None, lambda: setattr(writing, "budget", small), lambda: None,
        lambda: setattr(writing, "profile", "max"), lambda: setattr(writing, "budget", small),
        lambda: setattr(writing, "profile", None),
    ]  # fmt: skip
    writing = runtime.generate(PROMPT, large, tokens=6)
    alike = Generation(PROMPT)
    used = ["max", "tiny", "tiny", "max", "tiny", "max"]
    for index, (change, profile) in enumerate(zip(changes, used, strict=True)):
        change()
        token = next(writing)
        wanted = alike.step(runtime.session(profile).run)
        assert (token.index, token.profile) == (index, profile)
        np.testing.assert_array_equal(token.logits, wanted.logits)
        np.testing.assert_array_equal(token.ids, wanted.ids)
    assert list(writing) == []
    alone = list(runtime.generate(PROMPT, profile="max", tokens=6))
    assert not np.allclose(alone[-1].logits, token.logits, atol=1e-3)


def test_tokens_are_calls_that_are_counted_and_leave_nothing_leased(rt: Runtime) -> None:
    small, large = limits(rt)
    writing = rt.generate(PROMPT, large, tokens=5)
    assert rt.counters.snapshot()["calls"] == {}
    next(writing)
    assert rt.profile == "max"
    rt.close()  # between two tokens nothing is held, and the next compiles what it needs
    assert rt.pool.resident == {}
    next(writing)
    writing.budget = small
    list(writing)
    counts = rt.counters.snapshot()
    assert counts["calls"] == {"max": 2, "tiny": 3}
    assert counts["swaps"] == {"tiny": 1}
    assert counts["compiled"] == {"max": 2, "tiny": 1}


def test_certificates_are_of_texts_that_one_profile_reads(decoder: MadeDecoder) -> None:
    rt = t3c.load(decoder.path)
    small, large = limits(rt)
    writing = rt.generate(PROMPT, large, tokens=4)
    first = next(writing)
    assert first.certificate is rt.certificates["max"]
    assert first.certificate is not None
    assert first.warnings == ()
    assert first.reason
    writing.budget = small
    mixed = next(writing)
    assert mixed.certificate is None
    assert mixed.warnings == (Remark(Code.SEVERAL_READERS, names=("max", "tiny")),)
    assert str(mixed.warnings[0]) == ("read by max, tiny: certificates are of texts that one reads")
    writing.budget = large
    assert next(writing).certificate is None
    writing.budget = t3c.Budget(size_mb=1e-6)
    assert next(writing).warnings[0].code is Code.OVER_LIMITS


def test_it_takes_heat_and_what_cannot_run_into_account(
    rt: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = rt.generate(PROMPT, t3c.Budget(size_mb=100), tokens=4)
    assert next(writing).profile == "max"
    rt.signals.post(t3c.Pressure("thermal", steps=1, reason="83 C"))
    assert next(writing).profile == "tiny"
    rt.signals.post(t3c.Pressure("thermal", steps=0, reason="40 C"))
    compile_ = rt.pool._make

    def lacking(key: SessionKey) -> Session:
        if key.profile == "max":
            raise EngineError("no such kernel")
        return compile_(key)

    monkeypatch.setattr(rt.pool, "_make", lacking)
    rt.close()
    token = next(writing)
    assert token.profile == "tiny"
    assert any("max cannot run on torch: no such kernel" in str(w) for w in token.warnings)
    writing.profile = "max"
    before = writing.ids
    with pytest.raises(EngineError, match="max does not run on torch"):
        next(writing)
    np.testing.assert_array_equal(writing.ids, before)
    writing.profile = "tiny"
    assert next(writing).index == 3  # what failed has changed nothing


def test_figures(rt: Runtime) -> None:
    writing = rt.generate(PROMPT.tolist(), tokens=3)
    assert writing.first_seconds is None
    assert writing.tokens_per_second is None
    np.testing.assert_array_equal(writing.ids, PROMPT)
    first = next(writing)
    assert writing.first_seconds == first.seconds > 0
    assert writing.tokens_per_second is None
    later = list(writing)
    assert writing.tokens_per_second == pytest.approx(2 / sum(t.seconds for t in later))
    columns = [token.ids[:, None] for token in (first, *later)]
    np.testing.assert_array_equal(writing.ids, np.concatenate([PROMPT, *columns], axis=1))


def test_it_ends_where_all_rows_have_come_to_a_stop(rt: Runtime) -> None:
    free = [token.ids for token in rt.generate(PROMPT, tokens=8)]
    stop = {int(free[1][0]), int(free[4][1])}
    writing = rt.generate(PROMPT, tokens=8, stop=stop)
    tokens = list(writing)
    assert 2 <= len(tokens) <= 5
    assert tokens[-1].stopped.all()
    assert set(writing.ids[:, -1].tolist()) <= stop
    assert next(writing, None) is None


def test_draws_follow_the_seed(rt: Runtime) -> None:
    def ids(seed: int) -> Array:
        writing = rt.generate(PROMPT, tokens=6, temperature=5.0, seed=seed)
        list(writing)
        return writing.ids

    np.testing.assert_array_equal(ids(1), ids(1))
    assert (ids(1) != ids(2)).any()


def test_what_cannot_be_written_is_refused(rt: Runtime, made: Made) -> None:
    with pytest.raises(SpecError, match="has no states: only a model that has some"):
        t3c.load(made.artifact, "torch", 1).generate(PROMPT, tokens=1)
    with pytest.raises(SpecError, match="tokens must be at least 1, got 0"):
        rt.generate(PROMPT, tokens=0)
    with pytest.raises(SpecError, match="a budget or a profile, not both"):
        rt.generate(PROMPT, t3c.Budget(), tokens=1, profile="max")
    with pytest.raises(SpecError, match="no profile 'huge'"):
        rt.generate(PROMPT, tokens=1, profile="huge")
    with pytest.raises(SpecError, match=r"a budget is a t3c\.Budget, got int"):
        rt.generate(PROMPT, 5, tokens=1)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="temperature"):
        rt.generate(PROMPT, tokens=1, temperature=-1)
    with pytest.raises(DataError, match="dtype float64 does not fit int64"):
        rt.generate(PROMPT + 0.5, tokens=1)
    with pytest.raises(DataError, match=r"shape \(3,\) does not fit \(batch, sequence\)"):
        rt.generate(PROMPT[0], tokens=1)
    for bad in (-1, 100):
        with pytest.raises(DataError, match="ids are of 0 to 99, got"):
            rt.generate([[1, bad]], tokens=1)
    writing = rt.generate(PROMPT, tokens=2, profile="tiny")
    with pytest.raises(SpecError, match="no profile 'huge'"):
        writing.profile = "huge"
    assert next(writing).profile == "tiny"
