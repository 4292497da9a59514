from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t3c.errors import EngineError, SpecError
from t3c.runtime.pool import Lease, Pool

SOON = 10.0  # seconds after which a test that waits has failed
WEIGHTS = {"a": 1, "b": 2, "c": 3, "d": 5, "e": 9}


@dataclass(eq=False)
class Fake:
    """A session that knows which it is, and whether the pool said that it is gone."""

    key: str
    serial: int
    gone: bool = False


@dataclass
class Maker:
    """Makes sessions and hears what the pool tells; a key is never made twice at once."""

    pause: float = 0.0
    made: list[Fake] = field(default_factory=list)
    told: list[tuple[str, Mapping[str, object]]] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    under_way: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def pool(self, cap: int | None = None) -> Pool[Fake]:
        return Pool(self.make, WEIGHTS.__getitem__, cap, self.tell)

    def make(self, key: str) -> Fake:
        with self.lock:
            if key in self.under_way:
                self.mixed.append(f"{key} was made twice at once")
            self.under_way.add(key)
        time.sleep(self.pause)
        with self.lock:
            self.under_way.discard(key)
            self.made.append(Fake(key, len(self.made)))
            return self.made[-1]

    def tell(self, name: str, fields: Mapping[str, object]) -> None:
        with self.lock:
            self.told.append((name, fields))
            if name == "evicted":
                # Without drops one of a key is there at a time, so the oldest is the one meant.
                next(s for s in self.made if s.key == fields["key"] and not s.gone).gone = True

    def names(self, name: str) -> list[str]:
        return [str(fields["key"]) for told, fields in self.told if told == name]


class Gated:
    """Makes "slow" when told to, and what else there is at once."""

    def __init__(self, outcome: Callable[[int], object] = lambda attempt: object()) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.attempts: list[str] = []
        self.outcome = outcome
        self.pool: Pool[object] = Pool(self.make, len)

    def make(self, key: str) -> object:
        self.attempts.append(key)
        if key != "slow":
            return key
        attempt = self.attempts.count("slow")
        self.entered.set()
        assert self.go.wait(SOON)
        return self.outcome(attempt)

    def waiting(self, threads: ThreadPoolExecutor, count: int) -> list[Future[object]]:
        """Leases of the slow one by so many threads, all of which wait; the first one compiles."""
        first = threads.submit(self.used)
        assert self.entered.wait(SOON)
        rest = [threads.submit(self.used) for _ in range(count - 1)]
        until(lambda: self.pool.leased == {"slow": count})
        return [first, *rest]

    def used(self) -> object:
        with self.pool.lease("slow") as session:
            return session


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


class Yielding:
    """A lock that lets other threads run after it was held: what they may break then, they do."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()
        time.sleep(0)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_session_is_compiled_once_and_told_of() -> None:
    maker = Maker(pause=0.01)
    pool = maker.pool()
    with pool.lease("c") as first:
        assert (pool.resident, pool.leased) == ({"c": 3}, {"c": 1})
        with pool.lease("c") as second:
            assert second is first is maker.made[0]
            assert pool.leased == {"c": 2}
    assert (pool.resident, pool.leased) == ({"c": 3}, {})
    pool.warm(["c", "a"])
    [(name, fields), (_, other)] = maker.told
    assert name == "compiled"
    assert set(fields) == {"key", "ms", "bytes"}
    assert (fields["key"], fields["bytes"]) == ("c", 3)
    assert 9 <= float(str(fields["ms"])) < 1e3 * SOON
    assert other["key"] == "a"


def test_a_lease_is_released_once() -> None:
    pool = Maker().pool()
    held, lease = pool.lease("a"), pool.lease("a")
    lease.release()
    lease.release()
    assert pool.leased == {"a": 1}
    with pytest.raises(SpecError, match="released"), lease:
        pass
    with pytest.raises(ZeroDivisionError), pool.lease("a"):
        _ = 1 / 0
    assert pool.leased == {"a": 1}
    held.release()
    assert pool.leased == {}


def test_what_is_leased_stays_and_goes_when_released() -> None:
    maker = Maker()
    pool = maker.pool(cap=5)
    c, d = pool.lease("c"), pool.lease("d")
    assert pool.resident == {"c": 3, "d": 5}  # over the cap, for both are in use
    c.release()
    assert (pool.resident, maker.names("evicted")) == ({"d": 5}, ["c"])
    d.release()
    assert pool.resident == {"d": 5}
    assert maker.told[-1] == ("evicted", {"key": "c", "bytes": 3, "why": "cap"})


def test_one_over_the_cap_serves_and_stays_until_another_is_used() -> None:
    maker = Maker()
    pool = maker.pool(cap=4)
    pool.warm(["a", "e", "e"])
    assert (pool.resident, maker.names("compiled")) == ({"e": 9}, ["a", "e"])
    pool.warm(["a", "c"])
    assert pool.resident == {"a": 1, "c": 3}
    with pytest.raises(SpecError, match="cap_bytes must not be negative, got -1"):
        maker.pool(cap=-1)


def test_the_last_one_used_is_not_given_up_for_one_in_the_making(
    threads: ThreadPoolExecutor,
) -> None:
    gated = Gated()
    pool = gated.pool = Pool(gated.make, len, 2)
    [slow] = gated.waiting(threads, 1)
    pool.warm(["large"])
    assert pool.resident == {"large": 5}
    gated.go.set()
    slow.result(SOON)
    assert pool.resident == {"slow": 4}


def test_the_one_idle_for_longest_goes_first() -> None:
    maker = Maker()
    pool = maker.pool(cap=6)
    first = pool.lease("a")
    pool.warm(["b", "c"])
    first.release()  # used until now, though leased first
    pool.warm(["a"])
    pool.warm(["d"])
    assert (pool.resident, maker.names("evicted")) == ({"a": 1, "d": 5}, ["b", "c"])


def test_what_was_dropped_is_compiled_anew_and_holders_keep_theirs() -> None:
    maker = Maker()
    pool = maker.pool()
    pool.warm(["a"])
    pool.drop("a")
    pool.drop("never there")
    assert (pool.resident, maker.names("evicted")) == ({}, ["a"])
    with pool.lease("b") as old:
        pool.drop("b")
        with pool.lease("b") as new:
            assert new is not old
            assert (pool.resident, pool.leased) == ({"b": 4}, {"b": 2})
    assert (pool.resident, maker.names("evicted")) == ({"b": 2}, ["a", "b"])
    with pool.lease("b") as again:
        assert again is new
        pool.warm(["c"])
        pool.clear()
        assert pool.resident == {"b": 2}
    assert (pool.resident, pool.leased) == ({}, {})
    assert {fields["why"] for name, fields in maker.told if name == "evicted"} == {"dropped"}


def test_an_evicted_session_is_let_go_before_it_is_told() -> None:
    alive: list[bool] = []
    made: list[weakref.ref[Fake]] = []

    def make(key: str) -> Fake:
        session = Fake(key, 0)
        made.append(weakref.ref(session))
        return session

    def tell(name: str, fields: Mapping[str, object]) -> None:
        if name == "evicted":
            alive.append(made[0]() is not None)

    pool = Pool(make, WEIGHTS.__getitem__, 1, tell)
    lease = pool.lease("a")
    lease.release()
    assert made[0]() is not None
    pool.warm(["b"])
    assert alive == [False]


def test_others_wait_for_one_compilation_and_warm_keys_for_none(
    threads: ThreadPoolExecutor,
) -> None:
    gated = Gated()
    gated.pool.warm(["warm"])
    waiting = gated.waiting(threads, 5)

    def others() -> list[object]:
        with gated.pool.lease("warm") as warm, gated.pool.lease("cold") as cold:
            return [warm, cold]

    assert threads.submit(others).result(SOON) == ["warm", "cold"]
    assert gated.pool.resident == {"warm": 4, "cold": 4}
    assert not any(future.done() for future in waiting)
    gated.go.set()
    assert len({id(future.result(SOON)) for future in waiting}) == 1
    assert gated.attempts == ["warm", "slow", "cold"]
    assert gated.pool.leased == {}


def test_a_failing_compilation_is_raised_to_all_who_wait_and_forgotten(
    threads: ThreadPoolExecutor,
) -> None:
    def outcome(attempt: int) -> object:
        if attempt == 1:
            raise EngineError("no kernel")
        return "second"

    gated = Gated(outcome)
    gated.pool.warm(["warm"])
    waiting = gated.waiting(threads, 4)
    gated.go.set()
    assert [str(future.exception(SOON)) for future in waiting] == ["no kernel"] * 4
    assert all(isinstance(future.exception(), EngineError) for future in waiting)
    assert (gated.pool.resident, gated.pool.leased) == ({"warm": 4}, {})
    assert gated.used() == "second"
    assert gated.attempts == ["warm", "slow", "slow"]


def test_an_interrupt_is_for_the_thread_that_compiles(threads: ThreadPoolExecutor) -> None:
    def outcome(attempt: int) -> object:
        if attempt == 1:
            raise KeyboardInterrupt
        return "second"

    gated = Gated(outcome)
    first, *rest = gated.waiting(threads, 4)
    gated.go.set()
    assert isinstance(first.exception(SOON), KeyboardInterrupt)
    assert [future.result(SOON) for future in rest] == ["second"] * 3
    assert gated.attempts == ["slow", "slow"]
    assert gated.pool.leased == {}


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_dropped_in_the_making_serves_those_who_wait(
    threads: ThreadPoolExecutor, fails: bool
) -> None:
    def outcome(attempt: int) -> object:
        if fails and attempt == 1:
            raise EngineError("no kernel")
        return attempt

    gated = Gated(outcome)
    old = gated.waiting(threads, 2)
    gated.pool.drop("slow")
    new = threads.submit(gated.used)
    until(lambda: gated.attempts == ["slow", "slow"])
    gated.go.set()
    found = [future.exception(SOON) or future.result() for future in old]
    assert str(found[0]) == str(found[1])
    assert isinstance(found[0], EngineError) == fails
    assert new.result(SOON) not in found
    assert (gated.pool.resident, gated.pool.leased) == ({"slow": 4}, {})


def test_a_weight_that_fails_is_a_compilation_that_fails() -> None:
    pool = Pool(str.upper, lambda key: {"a": 1}[key])
    with pytest.raises(KeyError):
        pool.lease("b")
    assert (pool.resident, pool.leased) == ({}, {})
    pool.warm(["a"])
    assert pool.resident == {"a": 1}


def test_callables_are_called_under_no_lock(threads: ThreadPoolExecutor) -> None:
    seen: list[str] = []

    def look(name: str, fields: Mapping[str, object]) -> None:
        # Another thread gets in, and so does this one.
        assert isinstance(threads.submit(lambda: pool.resident).result(SOON), dict)
        assert isinstance(pool.leased, dict)
        seen.append(f"{name} {fields['key']}")

    def make(key: str) -> str:
        look("make", {"key": key})
        return key

    def weigh(key: str) -> int:
        look("weigh", {"key": key})
        return 1

    pool = Pool(make, weigh, 1, look)
    threads.submit(pool.warm, ["a", "b"]).result(3 * SOON)
    pool.drop("b")
    assert seen == [
        "make a", "weigh a", "compiled a", "make b", "weigh b", "compiled b", "evicted a",
        "evicted b",
    ]  # fmt: skip


def test_who_hears_and_fails_costs_no_lease() -> None:
    def tell(name: str, fields: Mapping[str, object]) -> None:
        raise EngineError(name)

    pool = Pool(str.upper, len, None, tell)
    with pytest.raises(EngineError, match="compiled"):
        pool.lease("a")
    assert (pool.resident, pool.leased) == ({"a": 1}, {})
    with pool.lease("a") as session:
        assert session == "A"


@pytest.mark.parametrize("drops", [False, True])
def test_many_threads_lose_and_mix_nothing(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, drops: bool
) -> None:
    maker = Maker(pause=1e-4)
    cap, rounds = 6, 150
    pool = maker.pool(cap)
    monkeypatch.setattr(pool, "_lock", Yielding())

    def work(seed: int) -> tuple[int, list[str]]:
        rng = random.Random(seed)
        uses, wrong = 0, []
        for _ in range(rounds):
            key = rng.choice(list(WEIGHTS))
            with pool.lease(key) as session:
                uses += 1
                for _ in range(3):
                    time.sleep(0)
                    if session.key != key or (session.gone and not drops):
                        wrong.append(f"{key}: {session}")
            if drops and rng.random() < 0.1:
                pool.drop(rng.choice(list(WEIGHTS)))
        return uses, wrong

    results = [future.result(6 * SOON) for future in [threads.submit(work, s) for s in range(8)]]
    assert results == [(rounds, [])] * 8
    assert drops or not maker.mixed
    assert pool.leased == {}
    resident = pool.resident
    assert sum(resident.values()) <= cap or len(resident) == 1
    assert sorted(maker.names("compiled")) == sorted(s.key for s in maker.made)
    assert sorted([*maker.names("evicted"), *resident]) == sorted(s.key for s in maker.made)
    assert len(maker.made) > 2 * len(WEIGHTS)  # the cap was at work


@dataclass(eq=False)
class Entry:
    key: str
    serial: int
    holders: int = 0
    dropped: bool = False


class Model:
    """The same pool as one list, from what was idle for longest to what was used last."""

    def __init__(self, cap: int | None) -> None:
        self.cap = cap
        self.entries: list[Entry] = []
        self.made = 0
        self.evicted: list[str] = []

    def lease(self, key: str) -> Entry:
        found = [e for e in self.entries if e.key == key and not e.dropped]
        if not found:
            found = [Entry(key, self.made)]
            self.made += 1
            self.entries += found
        found[0].holders += 1
        self.shrink()
        return found[0]

    def release(self, entry: Entry) -> None:
        entry.holders -= 1
        if not entry.holders:
            self.entries.remove(entry)
            self.entries.append(entry)
            if entry.dropped:
                self.evict(entry)
            self.shrink()

    def drop(self, key: str) -> None:
        for entry in [e for e in self.entries if e.key == key and not e.dropped]:
            entry.dropped = True
            if not entry.holders:
                self.evict(entry)

    def evict(self, entry: Entry) -> None:
        self.entries.remove(entry)
        self.evicted.append(entry.key)

    def shrink(self) -> None:
        while self.cap is not None and sum(WEIGHTS[e.key] for e in self.entries) > self.cap:
            current = [e for e in self.entries if not e.dropped]
            idle = [e for e in current if not e.holders]
            if not idle or len(current) == 1:
                return
            self.evict(idle[0])

    def sums(self, value: Callable[[Entry], int]) -> dict[str, int]:
        keys = {e.key for e in self.entries}
        sums = {key: sum(value(e) for e in self.entries if e.key == key) for key in keys}
        return {key: total for key, total in sums.items() if total}


OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["lease", "use", "use", "drop"]), st.sampled_from(list(WEIGHTS))),
    st.tuples(st.just("release"), st.integers(0, 9)),
    st.tuples(st.just("clear"), st.none()),
)


@given(st.none() | st.integers(0, 12), st.lists(OPERATIONS, max_size=40))
def test_it_does_what_the_simple_model_does(
    cap: int | None, operations: list[tuple[str, str | int | None]]
) -> None:
    maker, model = Maker(), Model(cap)
    pool = Pool(maker.make, WEIGHTS.__getitem__, cap, lambda *told: maker.told.append(told))
    held: list[tuple[Lease[Fake], Entry]] = []
    for name, what in operations:
        if isinstance(what, int):
            if held:
                lease, entry = held.pop(what % len(held))
                lease.release()
                model.release(entry)
        elif what is None:
            pool.clear()
            for key in [e.key for e in model.entries]:
                model.drop(key)
        elif name == "drop":
            pool.drop(what)
            model.drop(what)
        else:
            held.append((pool.lease(what), model.lease(what)))
            lease, entry = held[-1]
            assert lease.session.serial == entry.serial
            if name == "use":
                held.pop()[0].release()
                model.release(entry)
        assert pool.resident == model.sums(lambda e: WEIGHTS[e.key])
        assert pool.leased == model.sums(lambda e: e.holders)
        assert all(lease.session.serial == entry.serial for lease, entry in held)
        if name != "clear":  # which is in no order
            assert maker.names("evicted") == model.evicted
        else:
            assert sorted(maker.names("evicted")) == sorted(model.evicted)
            model.evicted = maker.names("evicted")
