"""Which profile serves a request now: the rule, the controller, heat and load, alarms, refusals."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from t3c.control.policy import summarize
from t3c.control.proposed import Controlled
from t3c.engines.protocol import Array
from t3c.errors import EngineError, SpecError
from t3c.runtime.adapt import Alarm, Raised, flagged, held_back, made_safer
from t3c.runtime.remarks import Code, Remark
from t3c.runtime.select import Candidate, Choice, select
from t3c.runtime.signals import Asked, Signals
from t3c.spec import Budget

REMEMBERED = 4096  # choices
NAMED = Remark(Code.NAMED)


class Memory(NamedTuple):
    """Choices by budget, and what they were chosen of: read and replaced as one."""

    of: Sequence[Candidate]
    asked: Asked
    raised: Raised | None
    choices: dict[Budget, Choice]


class Chooser:
    """Chooses among the candidates that the engine can run, which may become fewer."""

    def __init__(
        self,
        engine: str,
        candidates: Sequence[Candidate],
        controller: Controlled | None,
        signals: Signals,
        alarm: Alarm,
    ) -> None:
        self.engine = engine
        self.signals, self.alarm = signals, alarm
        self.candidates = list(candidates)
        self.refused: Mapping[str, Remark] = {}
        self._all = tuple(candidates)
        self._memory = Memory(self.candidates, signals.asked, alarm.raised, {})
        self._lock = threading.Lock()
        self.controller = controller
        self._looks = controller is not None and bool(controller.policy.about.summarized)

    @property
    def known(self) -> Mapping[str, Candidate]:
        """What is known of the profiles, also of those that are refused."""
        return {c.profile: c for c in (*self._all, *self.candidates)}

    def choose(self, budget: Budget, inputs: Array | None = None) -> Choice:
        """The profile for a budget; a choice that does not depend on inputs is remembered."""
        if not isinstance(budget, Budget):
            raise SpecError(f"a budget is a t3c.Budget, got {type(budget).__name__}")
        memory, candidates = self._memory, self.candidates
        asked, raised = self.signals.asked, self.alarm.raised
        same = memory.of is candidates and memory.asked is asked and memory.raised is raised
        if not same or len(memory.choices) >= REMEMBERED:
            self._check_some(candidates)
            memory = self._memory = Memory(candidates, asked, raised, {})
        seen = inputs if self._looks else None
        if seen is None and (known := memory.choices.get(budget)) is not None:
            return known
        choice = select(candidates, budget, self._proposal(budget, seen))
        if (asked.steps or asked.ceilings) and raised is None:
            choice = held_back(choice, candidates, budget, asked)
        if raised is not None:
            choice = made_safer(choice, candidates, budget, raised.trusted)
        if seen is None:
            memory.choices[budget] = choice
        return choice

    def least(self, budget: Budget) -> str:
        """The smallest profile that load may bring a request of this budget to."""
        candidates = self.candidates
        chosen = select(candidates, budget)
        return held_back(chosen, candidates, budget, Asked(len(candidates), ("load",))).profile

    def named(self, profile: str) -> Choice:
        """A profile that was asked for by name; flagged if activations have moved."""
        if profile in self.refused:
            raise EngineError(f"{profile} does not run on {self.engine}: {self.refused[profile]}")
        choice, raised = Choice(profile, NAMED), self.alarm.raised
        return choice if raised is None or profile in raised.trusted else flagged(choice)

    def refuse(self, profile: str, reason: Remark) -> None:
        """Choose it no more."""
        with self._lock:
            self.refused = {**self.refused, profile: reason}
            self.candidates = [c for c in self.candidates if c.profile not in self.refused]

    def check_some_left(self) -> None:
        """Refuse to go on where nothing can run."""
        self._check_some(self.candidates)

    def _check_some(self, candidates: Sequence[Candidate]) -> None:
        if not candidates:
            reason = next(iter(self.refused.values()))
            raise EngineError(f"{self.engine} runs none of its profiles: {reason}")

    def instead(self, choice: Choice) -> Choice:
        """The nearest smaller profile than one just refused; the smallest left if there is none."""
        order = [candidate.profile for candidate in self._all]
        at, left = order.index(choice.profile), self.candidates
        self._check_some(left)
        smaller = [c.profile for c in left if order.index(c.profile) < at]
        taken = smaller[-1] if smaller else left[0].profile
        warning = Remark(
            Code.CANNOT_RUN if smaller else Code.LARGER_SERVES, choice.profile, taken,
            self.engine, causes=(self.refused[choice.profile],),
        )  # fmt: skip
        reason = Remark(Code.STAND_IN, choice.profile, engine=self.engine)
        found = Choice(taken, reason, (*choice.warnings, warning), choice.flagged)
        raised = self.alarm.raised
        doubted = raised is not None and taken not in raised.trusted
        return flagged(found) if doubted and not found.flagged else found

    def _proposal(self, budget: Budget, inputs: Array | None) -> str | None:
        if self.controller is None or not budget.limited:
            return None
        # It knows all profiles, also those that are refused here.
        known = self.known.values()
        return self.controller.propose(
            (budget.latency_ms, budget.size_mb, budget.energy_mj),
            [(c.latency_ms(budget.quantile), c.size_mb, c.energy_mj) for c in known],
            None if inputs is None else summarize(inputs),
        )
