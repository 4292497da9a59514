"""Which profile serves a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from t3c.spec import Budget, Latency


@dataclass(frozen=True)
class Candidate:
    """A profile as the choice sees it; candidates go from the smallest profile to the largest.

    `guard` is what is added to measured latencies, as a share of them, before they are held
    against a limit: how far they moved while they were measured. `drift` is the certified epsilon
    where the profile is certified on this engine and these forms, None elsewhere.
    """

    profile: str
    latency: Latency | None
    size_mb: float
    energy_mj: float | None
    drift: float | None
    guard: float = 0.0

    def latency_ms(self, quantile: str = "p50") -> float | None:
        """What the profile is taken to need, the guard included."""
        return None if self.latency is None else self.latency.at(quantile) * (1 + self.guard)

    def meets(self, budget: Budget) -> bool:
        """Whether every resource limit is known to be kept; what is not known is not kept."""
        return not self.objections(budget)

    def objections(self, budget: Budget) -> list[str]:
        """Why the profile does not meet the limits, in figures."""
        mine = {
            "latency": (self.latency_ms(budget.quantile), budget.latency_ms, "ms"),
            "size": (self.size_mb, budget.size_mb, "MB"),
            "energy": (self.energy_mj, budget.energy_mj, "mJ"),
        }
        found = []
        for what, (value, limit, unit) in mine.items():
            if limit is None:
                continue
            if value is None:
                found.append(f"its {what} is not known here")
            elif value > limit:
                how = (
                    f" ({budget.quantile} and {self.guard:.1%} guard)" if what == "latency" else ""
                )
                found.append(f"{what} {value:.4g} {unit}{how} over {limit:.4g}")
        return found


@dataclass(frozen=True)
class Choice:
    """The profile chosen, why, and what the caller should know about it."""

    profile: str
    reason: str
    warnings: tuple[str, ...] = ()


def select(candidates: Sequence[Candidate], budget: Budget, proposal: str | None = None) -> Choice:
    """With limits, the least drift that meets them; with a cap alone, the fastest within it.

    A controller's `proposal` within the limits is taken if it is no larger than that; so the
    choice is the smaller of two that each grow with the budget, and grows with it too.

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
    names = [candidate.profile for candidate in candidates]
    wanted = next((c for c in met if c.profile == proposal), None)
    if wanted is not None and names.index(wanted.profile) < names.index(best.profile):
        reason = "the controller's proposal, which is within the limits"
        return Choice(wanted.profile, reason, _cap_warnings(wanted, budget))
    reason = f"the least drift of {len(met)} profiles within the limits"
    return Choice(best.profile, reason, _cap_warnings(best, budget))


def explain(candidates: Sequence[Candidate], budget: Budget, chosen: str) -> dict[str, str]:
    """Why each profile was or was not chosen."""
    told = {}
    met = {c.profile for c in candidates if c.meets(budget)}
    names = [candidate.profile for candidate in candidates]
    for candidate in candidates:
        if candidate.profile == chosen:
            told[chosen] = "chosen"
            continue
        over = candidate.objections(budget)
        capped = _cap_warnings(candidate, budget) if not budget.limited else ()
        if over or capped:
            told[candidate.profile] = "; ".join([*over, *capped])
        elif chosen in met and budget.limited:
            larger = names.index(chosen) > names.index(candidate.profile)
            why = f"{chosen} is larger and drifts less" if larger else f"{chosen} was proposed"
            told[candidate.profile] = f"within the limits, but {why}"
        else:
            told[candidate.profile] = f"{chosen} is preferred"
    return told


def _within_cap(candidates: Sequence[Candidate], budget: Budget) -> Choice:
    if budget.drift is None:
        return Choice(candidates[-1].profile, "no limit was named: the largest profile")
    within = [c for c in candidates if c.drift is not None and c.drift <= budget.drift]
    if within:
        fastest = min(within, key=_speed)
        return Choice(fastest.profile, f"the fastest with drift within {budget.drift:g}")
    top = candidates[-1]
    return Choice(top.profile, "nothing keeps the drift cap", _cap_warnings(top, budget))


def _speed(candidate: Candidate) -> tuple[float, float]:
    latency = candidate.latency_ms()
    return (float("inf") if latency is None else latency), candidate.size_mb


def _least_drift(met: Sequence[Candidate]) -> Candidate:
    """The least certified drift; of equals, and where not all are certified, the largest profile:
    drift falls along the chain, whether or not it is certified here."""
    drifts = [c.drift for c in met if c.drift is not None]
    if len(drifts) < len(met):
        return met[-1]
    return [c for c in met if c.drift == min(drifts)][-1]


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
    if budget.latency_ms is not None and all(c.latency is None for c in candidates):
        unknown.append("latency")
    if budget.energy_mj is not None and all(c.energy_mj is None for c in candidates):
        unknown.append("energy")
    return f" ({' and '.join(unknown)} not measured on this device)" if unknown else ""
