"""Which profile serves a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from t3c.spec import QUANTILES, Budget, Latency


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

    @property
    def costs(self) -> tuple[float, ...]:
        """All that a limit can be set on; what is not known is over any limit."""
        latencies = (self.latency_ms(quantile) for quantile in QUANTILES)
        known = (*latencies, self.size_mb, self.energy_mj)
        return tuple(math.inf if cost is None else cost for cost in known)

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
    """The profile chosen, why, and what the caller should know about it.

    `flagged` is an answer not to rely on: activations have moved, and nothing safer fits.
    """

    profile: str
    reason: str
    warnings: tuple[str, ...] = ()
    flagged: bool = False


def select(candidates: Sequence[Candidate], budget: Budget, proposal: str | None = None) -> Choice:
    """With limits, the largest that meets them; with a cap alone, the fastest within it.

    Drift falls along the chain, certified or not: the largest drifts least. A controller's
    `proposal` is taken instead if it meets the limits, is smaller, and takes no more than any
    larger profile that meets them; else the next above it of which that is true.

    Among budgets that limit a resource, more of it is never less, whatever was measured and is
    proposed, if proposals do not shrink. Where nothing fits, the smallest stands below all. Say
    the looser budget got the smaller profile. It takes no more than the larger, so it met the
    tighter limits too, and nothing that met them undercut it; it is no smaller than the proposal,
    so the tighter budget had no reason to go beyond it. A cap alone asks another question, for
    speed.
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
    chosen, reason = met[-1], f"the least drift of {len(met)} profiles within the limits"
    names = [candidate.profile for candidate in candidates]
    if proposal in names:
        enough = names[names.index(proposal) :]
        wanted = next((c for c in _in_order(met) if c.profile in enough), chosen)
        if wanted is not chosen:
            exact = wanted.profile == proposal
            reason = "the controller's proposal" if exact else "the next above the controller's"
            chosen, reason = wanted, f"{reason}, which is within the limits"
    return Choice(chosen.profile, reason, cap_warnings(chosen, budget))


def _in_order(met: Sequence[Candidate]) -> list[Candidate]:
    """Those that take no more of anything than any larger one: as no tighter budget that admits
    a larger one leaves them out, to be content with them is never to fall behind it."""
    kept: list[Candidate] = []
    least = (math.inf,) * len(met[-1].costs)
    for candidate in reversed(met):
        if all(mine <= other for mine, other in zip(candidate.costs, least, strict=True)):
            kept.append(candidate)
        least = tuple(map(min, candidate.costs, least))
    return kept[::-1]


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
        capped = cap_warnings(candidate, budget) if not budget.limited else ()
        if over or capped:
            told[candidate.profile] = "; ".join([*over, *capped])
        elif chosen in met and budget.limited:
            larger = names.index(chosen) > names.index(candidate.profile)
            why = f"{chosen} is larger and drifts less"
            if not larger:
                why = f"the controller asks for no more than {chosen}"
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
    return Choice(top.profile, "nothing keeps the drift cap", cap_warnings(top, budget))


def _speed(candidate: Candidate) -> tuple[float, float]:
    latency = candidate.latency_ms()
    return (float("inf") if latency is None else latency), candidate.size_mb


def cap_warnings(candidate: Candidate, budget: Budget) -> tuple[str, ...]:
    """What to say of a profile's drift against the cap of a budget, if there is something."""
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
