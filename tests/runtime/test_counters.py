from __future__ import annotations

import enum
import json
import logging
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t3c.errors import EngineError, SpecError
from t3c.runtime.counters import NAMES, Counters

LOGGER = "t3c.runtime"


class Form(enum.StrEnum):
    DENSE = "dense"


class Slow(str):
    """A label that lets other threads run whenever it is looked up."""

    __slots__ = ()

    def __hash__(self) -> int:
        time.sleep(0)
        return super().__hash__()


class Untold:
    """Something that must never be asked for its text."""

    def __str__(self) -> str:
        raise AssertionError("formatted")

    __repr__ = __str__


@pytest.fixture
def counters() -> Counters:
    return Counters()


def test_counts_by_name_and_label(counters: Counters) -> None:
    counters.add("calls", "low")
    counters.add("calls", "low", 2)
    counters.add("calls", "high", by=5)
    counters.add("errors")
    before = counters.snapshot()
    assert before == {
        "calls": {"low": 3, "high": 5}, "swaps": {}, "compiled": {}, "evicted": {},
        "fallback": {}, "shift": {}, "errors": {"": 1},
    }  # fmt: skip
    before["calls"]["low"] = 0
    assert counters.snapshot()["calls"]["low"] == 3
    with pytest.raises(SpecError, match="nothing is counted as 'cals': it is one of calls, swaps"):
        counters.add("cals")


def test_no_count_is_lost(counters: Counters) -> None:
    def work(seed: int) -> Counter[tuple[str, str]]:
        rng, mine = random.Random(seed), Counter[tuple[str, str]]()
        for _ in range(500):
            name, label, by = rng.choice(NAMES[:2]), rng.choice("ab"), rng.choice((1, 2))
            counters.add(name, Slow(label), by)
            mine[name, label] += by
        return mine

    with ThreadPoolExecutor(8) as threads:
        total = sum(threads.map(work, range(8)), Counter[tuple[str, str]]())
    found = counters.snapshot()
    assert {(n, str(label)): c for n, by in found.items() for label, c in by.items()} == total


def test_an_event_is_one_line_of_json(counters: Counters, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        counters.event("fallback", **{"why": EngineError("no\nkernel"), "key": "100%s", "from": 1})
    [record] = caplog.records
    line = '{"event": "fallback", "from": 1, "key": "100%s", "why": "EngineError: no\\nkernel"}'
    assert record.getMessage() == line
    assert record.__dict__["t3c"] == json.loads(line)
    assert (record.name, record.levelno) == (LOGGER, logging.WARNING)
    assert record.filename == Path(__file__).name  # whose event it is, not ours
    with pytest.raises(SpecError, match="`event` is the name"):
        counters.event("compiled", event="x")


@pytest.mark.parametrize(
    ("name", "level"),
    [
        *[(name, logging.WARNING) for name in ("fallback", "shift", "warning", "errors")],
        *[(name, logging.INFO) for name in ("compiled", "evicted", "swaps", "calls")],
    ],
)
def test_levels(
    counters: Counters, caplog: pytest.LogCaptureFixture, name: str, level: int
) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        counters.event(name)
    assert [record.levelno for record in caplog.records] == [level]


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (float("nan"), "nan"),
        (-float("inf"), "-inf"),
        (np.float32(0.5), 0.5),
        (np.float64("inf"), "inf"),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (Path("a/b"), "a/b"),
        (Form.DENSE, "dense"),
        ((1, (2.5, None)), [1, [2.5, None]]),
        ({3, 1, 2}, [1, 2, 3]),
        ({1: {"b": Path("x"), "a": KeyError("k")}}, {"1": {"b": "x", "a": "KeyError: 'k'"}}),
        (b"raw", "b'raw'"),
        (np.arange(2), "[0 1]"),
    ],
)
def test_what_json_has_not_is_said_in_what_it_has(
    counters: Counters, caplog: pytest.LogCaptureFixture, value: object, plain: object
) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        counters.event("compiled", value=value)
    [record] = caplog.records
    assert json.loads(record.getMessage())["value"] == plain
    assert record.__dict__["t3c"] == {"event": "compiled", "value": plain}


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text().filter(lambda name: name != "event"), VALUES, max_size=4))
def test_every_event_is_a_line_that_parses(fields: dict[str, object]) -> None:
    records: list[logging.LogRecord] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Kept()
    logger = logging.getLogger(LOGGER)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        Counters().event("compiled", **fields)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
    [record] = records
    line = record.getMessage()
    assert line.splitlines() == [line]

    def refuse(constant: str) -> object:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(line, parse_constant=refuse)
    assert list(found) == sorted({"event", *fields})
    assert found == record.__dict__["t3c"]


@pytest.mark.parametrize(
    ("level", "name"), [(logging.ERROR, "fallback"), (logging.WARNING, "compiled")]
)
def test_what_is_off_is_never_formatted_nor_made(
    counters: Counters,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    level: int,
    name: str,
) -> None:
    logger = logging.getLogger(LOGGER)

    def refuse(*args: object, **kwargs: object) -> logging.LogRecord:
        raise AssertionError("made")

    with caplog.at_level(level, LOGGER):
        monkeypatch.setattr(logger, "makeRecord", refuse)
        counters.event(name, value=Untold(), several={"x": [Untold()]})
    with caplog.at_level(logging.INFO, LOGGER):
        with pytest.raises(AssertionError, match="formatted"):
            counters.event(name, value=Untold())
        with pytest.raises(AssertionError, match="made"):
            counters.event(name)
