"""Text token by token: what is remembered gives what reading all of it again gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import t3c
from decoders import MadeDecoder
from t3c.engines import ENGINES, Session
from t3c.engines.decode import Generation, Run, Step, completed, empty_states
from t3c.engines.protocol import Array
from t3c.errors import DataError, SpecError
from t3c.runtime.runtime import Runtime

PROMPT = np.array([[3, 14, 15], [92, 65, 35]])
TOKENS = 6


@pytest.fixture
def path(decoder: MadeDecoder) -> Path:
    return decoder.path


def empty(runtime: Runtime, batch: int = 2) -> list[Array]:
    return empty_states(runtime.artifact.manifest.model.states, batch)


def steps_of(run: Run, ids: Array, tokens: int, **settings: Any) -> Iterator[Step]:
    """So many tokens of a text, all of one session."""
    generation = Generation(ids, **settings)
    return (generation.step(run) for _ in range(tokens))


def reread(session: Session, runtime: Runtime, ids: Array) -> Array:
    """Logits (batch, vocabulary) of the last of the ids, all of them read at once."""
    return session.run([ids, *empty(runtime, len(ids))])[0][:, -1]


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("rows", [1, 2])
def test_remembering_is_reading_again(path: Path, engine: str, rows: int) -> None:
    runtime = t3c.load(path, engine, 1)
    session = runtime.session("tiny")
    text = PROMPT[:rows]
    steps = steps_of(session.run, text, TOKENS, states=empty(runtime, rows))
    for count, step in enumerate(steps):
        wanted = reread(session, runtime, text)
        # A number that is near the middle of two steps of the grid may go either way.
        assert np.linalg.norm(step.logits - wanted) < 0.02 * np.linalg.norm(wanted)
        np.testing.assert_array_equal(step.ids, wanted.argmax(axis=-1))
        text = np.concatenate([text, step.ids[:, None]], axis=1)
        assert step.index == count
    assert text.shape == (rows, PROMPT.shape[1] + TOKENS)
    assert len(set(text[0, PROMPT.shape[1] :].tolist())) > 1


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_states_that_are_not_given_are_empty(path: Path, engine: str) -> None:
    runtime = t3c.load(path, engine, 1)
    session = runtime.session("max")
    bare, given = session.run([PROMPT]), session.run([PROMPT, *empty(runtime)])
    for a, b in zip(bare, given, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(runtime(PROMPT, profile="max"), bare[0])


def test_a_call_may_bring_its_states(path: Path) -> None:
    runtime = t3c.load(path, "torch", 1)
    session = runtime.session("max")
    _, *states = session.run([PROMPT])
    names = [state.input for state in runtime.artifact.manifest.model.states]
    more = np.array([[7], [8]])
    answer = runtime({"input_ids": more, **dict(zip(names, states, strict=True))}, profile="max")
    np.testing.assert_array_equal(answer, session.run([more, *states])[0])
    assert not np.allclose(answer, session.run([more])[0], atol=1e-3)
    np.testing.assert_array_equal(answer, runtime((more, *states), profile="max"))
    np.testing.assert_array_equal(
        runtime((PROMPT, *empty(runtime)), profile="max"), runtime(PROMPT, profile="max")
    )
    with pytest.raises(DataError, match="the past is 3 in input 'past_0_key' and 2 in"):
        runtime((more, states[0], states[1][:, :, :2]))
    with pytest.raises(DataError, match="1 inputs are needed, got 2"):
        runtime((more, states[0]))


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_another_profile_goes_on_from_what_the_first_remembers(path: Path, engine: str) -> None:
    runtime = t3c.load(path, engine, 1)
    sessions = [runtime.session(name) for name in ("max", "tiny", "tiny", "max")]
    generation = Generation(PROMPT, states=empty(runtime))
    inputs: list[Array] = [PROMPT, *empty(runtime)]
    for session in sessions:
        step = generation.step(session.run)
        logits, *states = session.run(inputs)
        np.testing.assert_array_equal(step.logits, logits[:, -1])
        inputs = [step.ids[:, None], *states]
    lengths = {state.shape[2] for state in generation.states}
    assert lengths == {PROMPT.shape[1] + len(sessions) - 1}
    alone = list(steps_of(sessions[1].run, PROMPT, 4, states=empty(runtime)))
    assert not np.allclose(alone[-1].logits, step.logits, atol=1e-3)


class Scripted:
    """A session that says what it is told to; its one state counts the tokens read."""

    def __init__(self, tokens: Sequence[Sequence[int]], vocabulary: int = 10) -> None:
        self.tokens, self.vocabulary = tokens, vocabulary
        self.calls: list[tuple[int, ...]] = []

    def run(self, inputs: list[Array]) -> list[Array]:
        ids, *past = inputs
        self.calls.append(ids.shape)
        logits = np.zeros((*ids.shape, self.vocabulary), np.float32)
        logits[np.arange(len(ids)), -1, list(self.tokens[len(self.calls) - 1])] = 5.0
        return [logits, np.concatenate([*past, ids], axis=1)]


def test_rows_that_have_stopped_repeat_what_they_stopped_at() -> None:
    session = Scripted([[1, 2], [9, 3], [4, 5], [6, 8]])
    steps = list(steps_of(session.run, PROMPT, 4, stop=(8, 9)))
    assert [step.ids.tolist() for step in steps] == [[1, 2], [9, 3], [9, 5], [9, 8]]
    assert [step.stopped.tolist() for step in steps] == [
        [False, False], [True, False], [True, False], [True, True],
    ]  # fmt: skip
    assert session.calls == [(2, 3), (2, 1), (2, 1), (2, 1)]


def test_draws_follow_the_softmax_and_the_seed() -> None:
    odds = np.log(np.array([0.1, 0.2, 0.7], dtype=np.float32))

    def run(inputs: list[Array]) -> list[Array]:
        return [np.broadcast_to(odds / 2, (*inputs[0].shape, 3)), inputs[0]]

    rows = np.ones((4000, 1), np.int64)
    (step,) = steps_of(run, rows, 1, temperature=0.5, seed=1)
    shares = np.bincount(step.ids, minlength=3) / len(rows)
    np.testing.assert_allclose(shares, [0.1, 0.2, 0.7], atol=0.03)
    (same,) = steps_of(run, rows, 1, temperature=0.5, seed=1)
    (other,) = steps_of(run, rows, 1, temperature=0.5, seed=2)
    assert (same.ids == step.ids).all()
    assert (other.ids != step.ids).any()


def test_what_cannot_be_decoded_is_refused() -> None:
    run = Scripted([[1, 1]]).run
    for temperature in (-0.1, np.nan, np.inf):
        with pytest.raises(SpecError, match="temperature must be at least 0"):
            Generation(PROMPT, temperature=temperature)
    with pytest.raises(SpecError, match="seed must be at least 0, got -1"):
        Generation(PROMPT, seed=-1)
    for ids in (PROMPT[0], PROMPT[:, :0], PROMPT.astype(np.float32)):
        with pytest.raises(DataError, match="whole numbers"):
            Generation(ids)
    with pytest.raises(DataError, match="carries no states"):
        Generation(PROMPT).step(lambda inputs: run(inputs)[:1])


def test_only_states_are_filled_in() -> None:
    declared = {
        "input_ids": ([None, None], np.int64),
        "mask": ([None, None], np.int64),
        "past_0_key": ([None, 2, None, 4], np.float32),
    }
    ids = np.ones((3, 5), np.int64)
    assert len(completed([ids], declared)) == 1
    whole = completed([ids, ids], declared)
    assert [value.shape for value in whole] == [(3, 5), (3, 5), (3, 2, 0, 4)]
    assert whole[2].dtype == np.float32
    assert len(completed(whole, declared)) == 3
