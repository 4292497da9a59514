"""What heat, load and moved activations make of a choice. A request's own limits are kept."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from t3c.runtime.remarks import Code, Remark
from t3c.runtime.select import Candidate, Choice, cap_warnings, over_caps
from t3c.runtime.signals import Asked
from t3c.spec import Budget


def held_back(
    choice: Choice, candidates: Sequence[Candidate], budget: Budget, asked: Asked
) -> Choice:
    """As many profiles below the choice as is asked for, none above a ceiling, as far as the
    request allows.

    A smaller profile that breaks a limit or a cap, which the choice keeps, is passed over.
    So is, under limits, one that takes more of anything than some larger one: which are passed
    over is then the same for all budgets, and more of a budget is never less.
    """
    names = [candidate.profile for candidate in candidates]
    at = names.index(choice.profile)
    wished = [(at - asked.steps, asked.reasons[0])] if asked.steps else []
    wished += [(names.index(name), why) for name, why in asked.ceilings if name in names]
    most, cause = min(wished, default=(at, ""))
    if most >= at:
        return choice
    fit = [
        i
        for i in range(at)
        if _keeps(candidates[i], candidates[at], budget)
        and (not budget.limited or _least(candidates[i], candidates[i + 1 :]))
    ]
    if not fit:
        return choice
    below = [i for i in fit if i <= most]
    taken = candidates[max(below) if below else min(fit)]
    reason = Remark(Code.HELD_BACK, choice.profile, causes=(cause,))
    return Choice(taken.profile, reason, cap_warnings(taken, budget))


def made_safer(
    choice: Choice, candidates: Sequence[Candidate], budget: Budget, floor: Sequence[str]
) -> Choice:
    """The smallest of the profiles in `floor` within the limits; else the largest within them.

    Of those within limits one that takes more of anything than some larger one is passed over:
    else a looser budget could end at a smaller profile than a tighter one that leaves it out. A
    choice that stays below the floor is flagged: it is no answer to rely on.
    """
    if choice.profile in floor:
        return choice
    names = [candidate.profile for candidate in candidates]
    at = names.index(choice.profile)
    larger = [c for c in candidates[at + 1 :] if c.meets(budget)]
    within = [c for c in larger if _keeps(c, candidates[at], budget)]
    if not within:
        return flagged(choice)
    safe = [c for c in within if c.profile in floor]
    if budget.limited:
        safe = [c for i, c in enumerate(safe) if _least(c, safe[i + 1 :])]
    taken = safe[0] if safe else within[-1]
    reason = Remark(Code.SAFER, choice.profile)
    moved = Choice(taken.profile, reason, cap_warnings(taken, budget))
    return moved if safe else flagged(moved)


def flagged(choice: Choice) -> Choice:
    """Return the same choice, with the warning that its certificate may not hold."""
    warning = Remark(Code.UNTRUSTED, choice.profile)
    return replace(choice, warnings=(*choice.warnings, warning), flagged=True)


def _keeps(candidate: Candidate, chosen: Candidate, budget: Budget) -> bool:
    """Whether a candidate keeps what the chosen one does: the limits, and each cap."""
    limits = candidate.meets(budget) or not chosen.meets(budget)
    return limits and over_caps(candidate, budget).keys() <= over_caps(chosen, budget).keys()


def _least(candidate: Candidate, larger: Sequence[Candidate]) -> bool:
    """Whether it takes no more of anything than any of the larger ones."""
    return all(
        mine <= other
        for one in larger
        for mine, other in zip(candidate.costs, one.costs, strict=True)
    )


@dataclass(frozen=True)
class Raised:
    """An alarm: the profiles that are still trusted, the smallest first; None may be left."""

    trusted: tuple[str, ...]


class Alarm:
    """Which profiles are trusted since activations moved, until they have been calm for a while.

    An alarm of a profile leaves those above it; `hold` watched samples without another end it.
    """

    def __init__(self, chain: Sequence[str], hold: int) -> None:
        self.raised: Raised | None = None  # replaced as a whole: reading takes no lock
        self._chain, self._hold = tuple(chain), hold
        self._calm = 0
        self._lock = threading.Lock()

    def strike(self, profile: str) -> None:
        """Take the alarm of a profile."""
        with self._lock:
            above = self._chain[self._chain.index(profile) + 1 :]
            if self.raised is not None and len(self.raised.trusted) < len(above):
                above = self.raised.trusted
            self.raised, self._calm = Raised(above), 0

    def saw(self, samples: int) -> bool:
        """Take watched samples that gave no alarm; whether that ended one."""
        if self.raised is None:
            return False
        with self._lock:
            self._calm += samples
            if self.raised is None or self._calm < self._hold:
                return False
            self.raised = None
            return True

    def clear(self) -> None:
        """Trust all again."""
        with self._lock:
            self.raised = None
