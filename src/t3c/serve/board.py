"""The board of an application's replicas: standing budgets, and what they tell of themselves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pydantic import BaseModel

from t3c.serve.schema import BudgetBody, LiveView
from t3c.spec import Budget

NAMESPACE = "t3c"  # of Ray: boards have their names in it
BEAT = 0.5  # seconds between what a replica tells the board
GONE = 3.0  # seconds without a beat after which a replica is no longer listed
WATCHED = 90.0  # seconds that views are sent for once somebody looked: scrapes are rarer than polls


class Row(BaseModel):
    """A replica: where it runs, what it serves requests without a budget by, and its load."""

    replica: str
    node: str
    pid: int
    state: str
    version: str
    profile: str
    ceiling: str
    budget: BudgetBody
    requests_per_s: float
    waiting: int


class Rows(BaseModel):
    replicas: list[Row]


@dataclass(frozen=True)
class Order:
    """A standing budget of one replica, or of all. A larger number is a later order."""

    number: int
    budget: Budget
    replica: str | None = None


@dataclass(frozen=True)
class Beat:
    """What a replica tells: itself, the order and reload it has followed, and, if somebody looks,
    its live view and its page of metrics."""

    row: Row
    order: Order
    loads: int
    view: LiveView | None = None
    page: bytes = b""


@dataclass(frozen=True)
class Told:
    """What a replica is told: the order it goes by, reloads so far, whether somebody looks."""

    order: Order
    loads: int
    watched: bool


class Board:
    """Standing budgets and heartbeats of an application's replicas; an actor that may be started
    anew at any time, and then learns from the replicas what they were told."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._orders: dict[str | None, Order] = {None: Order(0, Budget())}
        self._beats: dict[str, tuple[float, Beat]] = {}
        self._loads, self._watched = 0, -math.inf

    def beat(self, beat: Beat) -> Told:
        """Take a heartbeat."""
        self._beats[beat.row.replica] = self._clock(), beat
        self._loads = max(self._loads, beat.loads)
        known = self._orders.get(beat.order.replica)
        if known is None or known.number < beat.order.number:
            self._orders[beat.order.replica] = beat.order
        return self.told(beat.row.replica)

    def told(self, replica: str) -> Told:
        """What a replica is to go by: the later one of its own order and that of all."""
        orders = [self._orders[whose] for whose in (None, replica) if whose in self._orders]
        latest = max(orders, key=lambda order: order.number)
        return Told(latest, self._loads, self._clock() < self._watched)

    def order(self, budget: Budget, whose: str | None = None) -> Order:
        """Set the budget of a replica, or of all."""
        # By the clock, so that a board that forgot all does not number its orders below old ones.
        last = max(order.number for order in self._orders.values())
        made = self._orders[whose] = Order(max(time.time_ns(), last + 1), budget, whose)
        return made

    def reload(self) -> int:
        """Have every replica read the artifact anew."""
        self._loads += 1
        return self._loads

    def beats(self, look: bool = False) -> list[Beat]:
        """The last beat of every replica that is there; to `look` is to have views, from now on."""
        now = self._clock()
        if look:
            self._watched = now + WATCHED
        for name in [name for name, (at, _) in self._beats.items() if now - at > GONE]:
            self.leave(name)
        last = [beat for _, (_, beat) in sorted(self._beats.items())]
        return last if look else [replace(beat, view=None, page=b"") for beat in last]

    def leave(self, replica: str) -> None:
        """Forget a replica."""
        self._beats.pop(replica, None)
        self._orders.pop(replica, None)


def board_name(app: str) -> str:
    """What the board of an application is called in Ray."""
    return f"t3c-board-{app}"
