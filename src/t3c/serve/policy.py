"""How far down the chain load asks requests to go. Pure: time and what waits are arguments."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from t3c.serve.pace import Pace

# Constants of the policy that docs/serving.md describes; `make bench-serve` tries them under
# changing load.
MARGIN = 0.1  # of the objective, for what the server does not see: sockets, the client
MISS = 0.005  # of random arrivals that may take longer than the objective
WINDOW = 2.0  # seconds over which load is counted
EASY = 0.85  # of what the next larger profile bears, up to which load may rise to it
RESERVE = 0.5  # of a backlog's time, left for what comes while it is worked off


class Due(NamedTuple):
    """A request that waits: its samples, when it came and until when it is to be answered (s)."""

    rows: int
    arrived: float
    deadline: float


def bearable(service_ms: float, within_ms: float, miss: float, lanes: int = 1) -> float:
    """The utilization at which a share `miss` of random arrivals takes longer than `within_ms`.

    Waits in an M/D/1 queue fall off as exp(-x t / s), where utilization is x / (e^x - 1); `lanes`
    servers are taken for one that is as many times faster.

    >>> bearable(1.0, 11.0, math.exp(-5)) > bearable(1.0, 6.0, math.exp(-5))
    True
    """
    left = within_ms - service_ms
    if left <= 0:
        return 0.0
    x = -math.log(miss) * service_ms / lanes / left
    return x / math.expm1(x) if x < 500 else 0.0


class LoadPolicy:
    """The largest profile to serve: a level that moves slowly, and what a backlog asks for.

    `objective_ms` is what a request without a deadline of its own may take. The level is the
    largest profile that bears the load of the last seconds; it falls at once and rises by one after
    `dwell` seconds. A backlog that would be late at that level is worked off by smaller profiles,
    for as long as it is there.
    """

    def __init__(
        self, objective_ms: float, dwell: float, chain: Sequence[str], pace: Pace, lanes: int = 1
    ) -> None:
        self.objective_ms, self.dwell = objective_ms, dwell
        self.chain, self.pace, self.lanes = tuple(chain), pace, lanes
        self.level = len(self.chain) - 1  # an index of the chain
        self._since = -math.inf
        self._arrivals: deque[tuple[float, int]] = deque()
        self._rows = 0

    @property
    def within_ms(self) -> float:
        """Return what the server itself may take."""
        return self.objective_ms * (1 - MARGIN)

    def arrived(self, now: float, rows: int) -> None:
        """Count a request, whether it will be answered or refused."""
        self._arrivals.append((now, rows))
        self._rows += rows
        self._forget(now)

    def rate(self, now: float) -> float:
        """Requests a second."""
        self._forget(now)
        return len(self._arrivals) / WINDOW

    def utilization(self, now: float, profile: str) -> float:
        """The share of the lanes' time that this load would take of a profile."""
        self._forget(now)
        ms = self._rows * self.pace.per_row(profile)
        return ms / 1e3 / WINDOW / self.lanes

    def move(self, now: float) -> None:
        """Set the level for the load as it is."""
        if not self._bears(now, self.level):
            lower = [index for index in range(self.level) if self._bears(now, index)]
            self._set(max(lower, default=0), now)
            return
        above, rested = self.level + 1, now - self._since >= self.dwell
        if above < len(self.chain) and rested and self._bears(now, above, EASY):
            self._set(above, now)

    def ceiling(self, now: float, waiting: Iterable[Due]) -> str:
        """The largest profile, up to the level, that answers all that waits with time to spare;
        else the smallest. What waits goes in the order of its deadlines."""
        due = list(waiting)
        fits = (i for i in range(self.level, 0, -1) if self.in_time(now, due, self.chain[i]))
        return self.chain[next(fits, 0)]

    def in_time(self, now: float, due: Sequence[Due], profile: str) -> bool:
        """Whether a profile answers all of them before their deadlines, less the reserve."""
        at = now
        for one in due:
            at += self.pace.careful(profile, one.rows) / 1e3 / self.lanes
            if at > one.deadline - RESERVE * (one.deadline - one.arrived):
                return False
        return True

    def _bears(self, now: float, index: int, share: float = 1.0) -> bool:
        profile = self.chain[index]
        if not self._arrivals:
            return True
        rows = max(1, round(self._rows / len(self._arrivals)))
        most = bearable(self.pace.expected(profile, rows), self.within_ms, MISS, self.lanes)
        return self.utilization(now, profile) <= share * most

    def _set(self, level: int, now: float) -> None:
        if level != self.level:
            self.level, self._since = level, now

    def _forget(self, now: float) -> None:
        while self._arrivals and self._arrivals[0][0] <= now - WINDOW:
            self._rows -= self._arrivals.popleft()[1]
