"""Compiled sessions by key, kept warm within a cap of memory."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

from t3c.errors import SpecError

K = TypeVar("K", bound=Hashable)
S = TypeVar("S")
Tell = Callable[[str, Mapping[str, object]], object]


def ignore(name: str, fields: Mapping[str, object]) -> None:
    """Tell nobody."""


class Pool(Generic[K, S]):
    """Sessions that `make` compiles, each once, and that stay for as long as the cap allows.

    What is leased stays. Over the cap the sessions that were idle for longest go, until the rest
    is within it or is one session: the last one used stays whatever it weighs. `tell` hears of
    "compiled" (key, ms, bytes) and "evicted" (key, bytes, why). None of the three callables is
    called under a lock; `make` may not lease the key that it makes.

    >>> pool = Pool(make=str.upper, weigh=len, cap_bytes=100)
    >>> with pool.lease("low") as session:
    ...     session
    'LOW'
    """

    def __init__(
        self,
        make: Callable[[K], S],
        weigh: Callable[[K], int],
        cap_bytes: int | None = None,
        tell: Tell = ignore,
    ) -> None:
        if cap_bytes is not None and cap_bytes < 0:
            raise SpecError(f"cap_bytes must not be negative, got {cap_bytes}")
        self._make, self._weigh, self._tell = make, weigh, tell
        self._cap = math.inf if cap_bytes is None else cap_bytes
        self._lock = threading.Lock()
        self._slots: dict[K, _Slot[K, S]] = {}
        self._dropped: set[_Slot[K, S]] = set()  # left for new leases, still held by older ones
        self._bytes = 0  # of both
        self._turn = 0

    @property
    def resident(self) -> dict[K, int]:
        """Bytes by key, of dropped sessions too while they are held."""
        with self._lock:
            return _sums((slot.key, slot.bytes) for slot in self._all() if slot.made is None)

    @property
    def leased(self) -> dict[K, int]:
        """How many hold, or wait for, a session of each key."""
        with self._lock:
            return _sums((slot.key, slot.leases) for slot in self._all() if slot.leases)

    def lease(self, key: K) -> Lease[K, S]:
        """Hold the session of a key until released: `with pool.lease(key) as session`.

        A cold one is compiled by the first who asks; others who ask for it wait, and an error of
        that compilation is raised to all of them.
        """
        with self._lock:
            slot = self._slots.get(key)
            cold = slot is None
            if slot is None:
                slot = self._slots[key] = _Slot(key)
            slot.leases += 1
            made = slot.made
        if cold:
            self._compile(slot)
        elif made is not None and not self._wait(slot, made):
            return self.lease(key)
        return Lease(self, slot)

    def warm(self, keys: Iterable[K]) -> None:
        """Compile those that are cold, in order."""
        for key in keys:
            self.lease(key).release()

    def drop(self, key: K) -> None:
        """Forget a session: later leases compile anew, and those who hold it keep it."""
        with self._lock:
            slot = self._slots.pop(key, None)
            if slot is None:
                return
            if slot.leases:
                self._dropped.add(slot)
                return
            self._bytes -= slot.bytes
        self._leave([slot], "dropped")

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            keys = list(self._slots)
        for key in keys:
            self.drop(key)

    def _compile(self, slot: _Slot[K, S]) -> None:
        """Fill a slot that is this thread's to fill, and wake those who wait for it."""
        made = slot.made
        assert made is not None
        start = time.perf_counter()
        try:
            session, weight = self._make(slot.key), self._weigh(slot.key)
        except BaseException as error:
            with self._lock:
                if self._slots.get(slot.key) is slot:
                    del self._slots[slot.key]
                self._dropped.discard(slot)
            slot.error = error
            made.set()
            raise
        ms = (time.perf_counter() - start) * 1e3
        with self._lock:
            slot.session, slot.bytes, slot.made = session, weight, None
            self._bytes += weight
            gone = self._overflow()
        made.set()
        try:
            self._tell("compiled", {"key": slot.key, "ms": ms, "bytes": weight})
            self._leave(gone, "cap")
        except BaseException:
            self._release(slot)
            raise

    def _wait(self, slot: _Slot[K, S], made: threading.Event) -> bool:
        """Whether the session is there; False where its compilation was interrupted."""
        try:
            made.wait()
        except BaseException:
            self._release(slot)
            raise
        # An interrupt is for the thread that it stopped: the others try again.
        if isinstance(slot.error, Exception):
            raise slot.error
        return slot.error is None

    def _release(self, slot: _Slot[K, S]) -> None:
        with self._lock:
            slot.leases -= 1
            if slot.leases:
                return
            self._turn += 1
            slot.used = self._turn
            why = "cap"
            if self._dropped and slot in self._dropped:
                self._dropped.remove(slot)
                self._bytes -= slot.bytes
                gone, why = [slot], "dropped"
            elif self._bytes > self._cap:
                gone = self._overflow()
            else:
                return
        self._leave(gone, why)

    def _overflow(self) -> list[_Slot[K, S]]:
        """Take out what is over the cap, the longest idle first; the caller holds the lock."""
        gone: list[_Slot[K, S]] = []
        if self._bytes <= self._cap:
            return gone
        whole = [slot for slot in self._slots.values() if slot.made is None]
        for slot in sorted((s for s in whole if not s.leases), key=lambda s: s.used):
            if self._bytes <= self._cap or len(gone) == len(whole) - 1:
                break
            gone.append(self._slots.pop(slot.key))
            self._bytes -= slot.bytes
        return gone

    def _leave(self, gone: list[_Slot[K, S]], why: str) -> None:
        """Let sessions go that nobody holds, and tell of it: may take time, so under no lock."""
        for slot in gone:
            del slot.session
            self._tell("evicted", {"key": slot.key, "bytes": slot.bytes, "why": why})

    def _all(self) -> list[_Slot[K, S]]:
        return [*self._slots.values(), *self._dropped]


class Lease(Generic[K, S]):
    """A session that stays until released, once; it is one thread's own."""

    __slots__ = ("_pool", "_slot")

    def __init__(self, pool: Pool[K, S], slot: _Slot[K, S]) -> None:
        self._pool = pool
        self._slot: _Slot[K, S] | None = slot

    @property
    def session(self) -> S:
        if self._slot is None:
            raise SpecError("this lease was released: take another")
        return self._slot.session

    def release(self) -> None:
        """Give the session back; nothing where that was done."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._pool._release(slot)

    def __enter__(self) -> S:
        return self.session

    def __exit__(self, *_: object) -> None:
        self.release()


class _Slot(Generic[K, S]):
    """A session, or one in the making: `made` is set, and then None, when that is over."""

    __slots__ = ("bytes", "error", "key", "leases", "made", "session", "used")

    session: S

    def __init__(self, key: K) -> None:
        self.key = key
        self.bytes = 0
        self.leases = 0
        self.used = 0  # the turn in which it became idle
        self.made: threading.Event | None = threading.Event()
        self.error: BaseException | None = None


def _sums(pairs: Iterable[tuple[K, int]]) -> dict[K, int]:
    sums: dict[K, int] = {}
    for key, value in pairs:
        sums[key] = sums.get(key, 0) + value
    return sums
