"""A request in the queue of a server, and its answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

from t3c.engines.protocol import Array
from t3c.errors import RefusedError
from t3c.runtime.answer import Answer
from t3c.serve.pace import Pace
from t3c.serve.refusals import Refusal, Refused
from t3c.spec import Budget


class Served(NamedTuple):
    """An answer, how long it waited and ran, and whether it is too late by now."""

    answer: Answer
    waited_ms: float
    ran_ms: float
    late: bool
    due: float

    def told(self, now: float) -> Served:
        """Return the same as it is at a later time."""
        return self._replace(late=now > self.due)


@dataclass(eq=False)
class Ticket:
    """A request in the queue. `deadline` is what the server plans by, `due` what was promised;
    `least` is the smallest profile that may serve it. One that came to an idle server is tried
    as long as that is not hopeless: otherwise an estimate made under load would never be
    corrected."""

    arrays: list[Array]
    budget: Budget
    profile: str | None
    least: str
    arrived: float
    deadline: float
    due: float
    answered: asyncio.Future[Served] = field(repr=False)
    tried: bool = False

    @property
    def rows(self) -> int:
        return len(self.arrays[0])

    def seconds(self, pace: Pace) -> float:
        """Return what the smallest profile that may serve it takes."""
        known = pace.possible if self.tried else pace.expected
        return known(self.least, self.rows) / 1e3

    def fail(self, error: Exception) -> None:
        """Tell its client an error, if that still waits."""
        if not self.answered.done():
            self.answered.set_exception(error)

    def too_late(
        self, code: Refused, late: float, takes: float = 0.0, wait: float = 0.0
    ) -> RefusedError:
        """Return the refusal of what would be `late` seconds late."""
        promised = (self.due - self.arrived) * 1e3
        return RefusedError(Refusal(code, 0, promised, self.least, takes * 1e3, wait * 1e3), late)
