"""Which profile serves a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from t3c.spec import Budget


@dataclass(frozen=True)
class Candidate:
    """A profile as the choice sees it; candidates go from the smallest profile to the largest.

    `drift` is the certified epsilon where the profile is certified on this engine and these
    forms, None elsewhere.
    """

    profile: str
    latency_ms: float | None
    size_mb: float
    energy_mj: float | None
    drift: float | None

    def meets(self, budget: Budget) -> bool:
        """Whether every resource limit is known to be kept; what is not known is not kept."""
        mine = (self.latency_ms, self.size_mb, self.energy_mj)
        asked = (budget.latency_ms, budget.size_mb, budget.energy_mj)
        return all(
            limit is None or (value is not None and value <= limit)
            for value, limit in zip(mine, asked, strict=True)
        )


@dataclass(frozen=True)
class Choice:
    """The profile chosen, why, and what the caller should know about it."""

    profile: str
    reason: str
    warnings: tuple[str, ...] = ()


def select(candidates: Sequence[Candidate], budget: Budget) -> Choice:
    """With limits, the least drift that meets them; with a cap alone, the fastest within it.

    Among budgets that limit a resource, more of it is never worse: the candidates that meet a
    looser budget include those that meet a tighter one, and drift falls along the chain; where
    nothing fits, the smallest stands below all. A cap alone asks another question, for speed.
    """
    assert candidates
    if not budget.limited:
        return _within_cap(candidates, budget)
    met = [c for c in candidates if c.meets(budget)]
    if not met:
        missing = _unknown(candidates, budget)
        smallest = candidates[0]
        warning = f"no profile meets the limits{missing}: {smallest.profile}, the smallest, serves"
        return Choice(smallest.profile, "nothing meets the limits", (warning,))
    best = _least_drift(met)
    reason = f"the least drift of {len(met)} profiles within the limits"
    return Choice(best.profile, reason, _cap_warnings(best, budget))


def _within_cap(candidates: Sequence[Candidate], budget: Budget) -> Choice:
    if budget.drift is None:
        return Choice(candidates[-1].profile, "no limit was named: the largest profile")
    within = [c for c in candidates if c.drift is not None and c.drift <= budget.drift]
    if within:
        fastest = min(within, key=lambda c: (c.latency_ms is None, c.latency_ms, c.size_mb))
        return Choice(fastest.profile, f"the fastest with drift within {budget.drift:g}")
    top = candidates[-1]
    return Choice(top.profile, "nothing keeps the drift cap", _cap_warnings(top, budget))


def _least_drift(met: Sequence[Candidate]) -> Candidate:
    """The least certified drift; of equals, and where nothing is certified, the largest profile."""
    certified = [c for c in met if c.drift is not None]
    if not certified:
        return met[-1]
    least = min(c.drift for c in certified if c.drift is not None)
    return [c for c in certified if c.drift == least][-1]


def _cap_warnings(candidate: Candidate, budget: Budget) -> tuple[str, ...]:
    if budget.drift is None:
        return ()
    if candidate.drift is None:
        return (f"{candidate.profile} is not certified here: the drift cap cannot be confirmed",)
    if candidate.drift <= budget.drift:
        return ()
    return (
        f"{candidate.profile} may drift up to {candidate.drift:.3g}, over the cap {budget.drift:g}",
    )


def _unknown(candidates: Sequence[Candidate], budget: Budget) -> str:
    unknown = []
    if budget.latency_ms is not None and all(c.latency_ms is None for c in candidates):
        unknown.append("latency")
    if budget.energy_mj is not None and all(c.energy_mj is None for c in candidates):
        unknown.append("energy")
    return f" ({' and '.join(unknown)} not measured on this device)" if unknown else ""
