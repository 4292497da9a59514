"""Requests with deadlines in a queue, answered by a few lanes: in time, smaller, or refused."""

from __future__ import annotations

import asyncio
import bisect
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from t3c.engines.protocol import Array
from t3c.errors import RefusedError, T3CError, UnavailableError
from t3c.runtime.answer import Answer
from t3c.runtime.calls import Chosen, answer_lot
from t3c.runtime.remarks import Remark
from t3c.runtime.runtime import Runtime
from t3c.runtime.signals import Pressure
from t3c.serve.pace import Pace
from t3c.serve.policy import MARGIN, Due, LoadPolicy
from t3c.serve.refusals import Refusal, Refused
from t3c.serve.shadow import Shadow
from t3c.serve.tickets import Served, Ticket
from t3c.spec import Budget

log = logging.getLogger("t3c.serve")

LOAD = "load"  # the source that lowers profiles for load
TICK = 0.25  # seconds


class Scheduler:
    """Answers for one runtime; every method but those of its threads is of the event loop.

    `on_swap` hears of a profile that takes another's place, and why; `on_drift` of a profile and
    how far its answers (n,) were from the largest one's.
    """

    def __init__(
        self,
        runtime: Runtime,
        pace: Pace,
        policy: LoadPolicy,
        *,
        waiting: int = 256,
        shadow: float = 0.0,
        fixed: str | None = None,
        on_swap: Callable[[str, str, Remark], object] = lambda before, after, why: None,
        on_drift: Callable[[str, Sequence[float]], object] = lambda profile, drifts: None,
    ) -> None:
        self.runtime, self.pace, self.policy = runtime, pace, policy
        self.fixed = fixed
        self.serving: str | None = None
        self.ceiling = policy.chain[-1]
        self._most, self._shadow = waiting, Shadow(runtime, policy, shadow)
        self._on_swap, self._on_drift = on_swap, on_drift
        self._queue: list[Ticket] = []
        self._running: dict[int, tuple[float, int]] = {}  # by lane: until when, how many requests
        self._some, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._threads = ThreadPoolExecutor(policy.lanes, thread_name_prefix="lane")
        self._closed = False
        self._lanes = [asyncio.ensure_future(self._lane(index)) for index in range(policy.lanes)]
        for lane in self._lanes:
            lane.add_done_callback(self._ended)
        self._ticking = asyncio.ensure_future(self._tick())

    @property
    def broken(self) -> bool:
        """Whether a lane has ended that should not have."""
        return not self._closed and any(task.done() for task in (*self._lanes, self._ticking))

    @property
    def waiting(self) -> int:
        """Requests that are neither answered nor refused."""
        return len(self._queue) + sum(count for _, count in self._running.values())

    async def answer(
        self,
        arrays: list[Array],
        budget: Budget,
        profile: str | None = None,
        *,
        arrived: float | None = None,
        deadline_ms: float | None = None,
    ) -> Served:
        """The answer to inputs that were checked, or RefusedError as soon as that is known."""
        now = time.monotonic()
        ticket = self._ticket(
            arrays, budget, profile, now if arrived is None else arrived, deadline_ms
        )
        self._admit(ticket, now)
        bisect.insort(self._queue, ticket, key=lambda one: one.deadline)
        self._idle.clear()
        self._some.set()
        expiry = asyncio.get_running_loop().call_later(ticket.due - now, self._expire, ticket)
        try:
            return await ticket.answered
        finally:
            expiry.cancel()

    async def drain(self) -> None:
        """Wait until all that was admitted is answered."""
        await self._idle.wait()

    async def close(self) -> None:
        """Refuse what is new, answer what waits, let threads and sessions go."""
        self._closed = True
        await self.drain()
        tasks = (*self._lanes, self._ticking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(None, self._threads.shutdown)
        self.runtime.signals.post(Pressure(LOAD, 0, "not served"))
        self.runtime.close()

    def _ticket(
        self,
        arrays: list[Array],
        budget: Budget,
        profile: str | None,
        arrived: float,
        deadline_ms: float | None,
    ) -> Ticket:
        promised = self.policy.objective_ms if deadline_ms is None else deadline_ms
        named = self.fixed if profile is None else profile
        return Ticket(
            arrays, budget, named, named or self.runtime.chooser.least(budget), arrived,
            arrived + promised * (1 - MARGIN) / 1e3, arrived + promised / 1e3,
            asyncio.get_running_loop().create_future(),
        )  # fmt: skip

    def _admit(self, ticket: Ticket, now: float) -> None:
        """Refuse what cannot be in time even if all that is before it is served by the smallest."""
        if self._closed or self.broken:
            code = Refused.STOPPING if self._closed else Refused.LANE_ENDED
            raise UnavailableError(Refusal(code))
        hopeless = now + self.pace.possible(ticket.least, ticket.rows) / 1e3 - ticket.due
        if hopeless > 0:  # by itself: that says nothing of load
            takes = self.pace.expected(ticket.least, ticket.rows) / 1e3
            raise ticket.too_late(Refused.TAKES_LONGER, hopeless, takes)
        self.policy.arrived(now, ticket.rows)
        if self.waiting >= self._most:
            raise RefusedError(Refusal(Refused.QUEUE_FULL, self.waiting))
        ticket.tried = not self.waiting
        ahead = sum(max(0.0, until - now) for until, _ in self._running.values())
        for one in self._queue:
            if one.deadline > ticket.deadline:
                break
            ahead += self.pace.expected(one.least, one.rows) / 1e3
        wait, takes = ahead / self.policy.lanes, ticket.seconds(self.pace)
        late = now + wait + takes - ticket.deadline
        if late > 0 and not ticket.tried:
            raise ticket.too_late(Refused.BEHIND_OTHERS, late, takes, wait)

    def _expire(self, ticket: Ticket) -> None:
        """Refuse what still waits when it is due, though every lane is busy."""
        if ticket in self._queue:
            self._queue.remove(ticket)
            ticket.fail(ticket.too_late(Refused.LANES_BUSY, ticket.seconds(self.pace)))
            if not self.waiting:
                self._idle.set()

    async def _lane(self, index: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._some.wait()
            lot, chosen = self._take()
            if not lot:
                continue
            profile, rows = chosen[0].choice.profile, sum(ticket.rows for ticket in lot)
            start = time.monotonic()
            expected = self.pace.expected(profile, rows) / 1e3
            self._running[index] = start + expected, len(lot)
            try:
                answers = await loop.run_in_executor(
                    self._threads, answer_lot, self.runtime, chosen, self.pace.largest
                )
            except asyncio.CancelledError:
                raise
            except Exception as error:  # whatever it is, it is told to those who wait
                for ticket in lot:
                    ticket.fail(error)
            else:
                self._hand_out(lot, answers, start, rows)
                await self._maybe_shadow(index, chosen[0], answers[0])
            self._running.pop(index, None)
            if not self.waiting:
                self._idle.set()

    def _ended(self, lane: asyncio.Task[None]) -> None:
        """A lane that ends before its time leaves nobody waiting for it."""
        if lane.cancelled():
            return
        log.error("a lane has ended", exc_info=lane.exception())
        for ticket in self._queue:
            ticket.fail(UnavailableError(Refusal(Refused.LANE_ENDED)))
        self._queue.clear()
        self._running.clear()
        self._idle.set()

    async def _tick(self) -> None:
        """Go up again also while no request comes."""
        while True:
            await asyncio.sleep(TICK)
            self._set_ceiling(time.monotonic())

    def _take(self) -> tuple[list[Ticket], list[Chosen]]:
        """The next lot: the most urgent request, and others that can run with it."""
        now = time.monotonic()
        self._refuse_late(now)
        if not self._queue:
            self._some.clear()
            if not self.waiting:
                self._idle.set()
            return [], []
        self._set_ceiling(now)
        head = self._queue.pop(0)
        first = self._chosen(head)
        if first is None:
            return [], []
        lot, chosen, rows = [head], [first], head.rows
        left = []
        for ticket in self._queue:
            total = rows + ticket.rows
            also = self._chosen(ticket) if total <= self.pace.largest else None
            took = self.pace.expected(first.choice.profile, total) / 1e3
            if also is None or also.alike != first.alike or now + took > head.deadline:
                left.append(ticket)
                continue
            lot.append(ticket)
            chosen.append(also)
            rows = total
        self._queue = left
        return lot, chosen

    def _refuse_late(self, now: float) -> None:
        """Refuse what waited for so long that no profile answers it in time any more."""
        kept = []
        for ticket in self._queue:
            late = now + ticket.seconds(self.pace) - ticket.due
            if late > 0:
                waited = now - ticket.arrived
                ticket.fail(ticket.too_late(Refused.WAITED, late, wait=waited))
            elif not ticket.answered.done():  # else its client has gone
                kept.append(ticket)
        self._queue = kept

    def _set_ceiling(self, now: float) -> None:
        """Say to the runtime how far up load allows to go."""
        policy = self.policy
        policy.move(now)
        due = [Due(ticket.rows, ticket.arrived, ticket.deadline) for ticket in self._queue]
        name, top = policy.ceiling(now, due), policy.chain[-1]
        if name == self.ceiling:
            return
        self.ceiling = name
        share = policy.utilization(now, top)
        why = f"load would take {share:.0%} of {top}'s time, {len(due)} waiting"
        asked = None if name == top else name
        self.runtime.signals.post(Pressure(LOAD, 0, why, ceiling=asked))

    def _chosen(self, ticket: Ticket) -> Chosen | None:
        """A request with its profile; None where there is none, which its client is told."""
        try:
            if ticket.profile is not None:
                choice = self.runtime.chooser.named(ticket.profile)
            else:
                choice = self.runtime.choose(ticket.budget, ticket.arrays[0])
        except Exception as error:  # whatever it is, it is told to the one who asks
            ticket.fail(error)
            return None
        return Chosen(ticket.arrays, choice, ticket.budget, ticket.profile is not None)

    def _hand_out(
        self, lot: Sequence[Ticket], answers: Sequence[Answer], start: float, rows: int
    ) -> None:
        now = time.monotonic()
        ran = (now - start) * 1e3
        self.pace.saw(answers[0].profile, rows, ran)
        for ticket, answer in zip(lot, answers, strict=True):
            if not ticket.answered.done():
                waited = (start - ticket.arrived) * 1e3
                ticket.answered.set_result(
                    Served(answer, waited, ran, now > ticket.due, ticket.due)
                )
        self._note_swap(answers[-1])

    def _note_swap(self, answer: Answer) -> None:
        before, self.serving = self.serving, answer.profile
        if before not in (None, answer.profile):
            self._on_swap(str(before), answer.profile, answer.reason)

    async def _maybe_shadow(self, index: int, one: Chosen, answer: Answer) -> None:
        """Observe the drift of an answer, while nobody waits for the lane."""
        seconds = self._shadow.seconds(len(one.arrays[0]), answer.profile)
        if seconds is None or self._queue:
            return
        self._running[index] = time.monotonic() + seconds, 0
        loop = asyncio.get_running_loop()
        try:
            drifts = await loop.run_in_executor(
                self._threads, self._shadow.drifts, one.arrays, answer
            )
        except T3CError as error:  # its client has had an answer
            log.warning("no shadow of %s: %s", answer.profile, error)
        else:
            self._on_drift(answer.profile, drifts)
