"""Which profile serves a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from t3c.runtime.remarks import Code, Remark
from t3c.spec import QUANTILES, Budget, Latency

UNLIMITED, NOTHING_FITS = Remark(Code.UNLIMITED), Remark(Code.NOTHING_FITS)


@dataclass(frozen=True)
class Candidate:
    """A profile as the choice sees it; candidates go from the smallest profile to the largest.

    `guard` is what is added to measured latencies, as a share of them, before they are held
    against a limit: how far they moved while they were measured. `drift` is the certified epsilon
    where the profile is certified on this engine and these forms, None elsewhere; `drop` is how far
    its quality was measured to be below the original's, in the same way.
    """

    profile: str
    latency: Latency | None
    size_mb: float
    energy_mj: float | None
    drift: float | None
    guard: float = 0.0
    drop: float | None = None

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
        """Return whether every resource limit is known to be kept."""
        return not self.objections(budget)

    def objections(self, budget: Budget) -> list[Remark]:
        """Return why the profile does not meet the limits, one remark a limit."""
        needed = self.latency_ms(budget.quantile)
        limits = (
            ("latency", needed, budget.latency_ms, "ms"),
            ("size", self.size_mb, budget.size_mb, "MB"),
            ("energy", self.energy_mj, budget.energy_mj, "mJ"),
        )
        raised = []
        for what, value, limit, unit in limits:
            if limit is None or (value is not None and value <= limit):
                continue
            if value is None:
                raised.append(Remark(Code.UNKNOWN, self.profile, names=(what,)))
                continue
            slow = what == "latency"
            code, name = (Code.TOO_SLOW, budget.quantile) if slow else (Code.OVER_LIMIT, what)
            guard = self.guard if slow else 0.0
            remark = Remark(code, self.profile, "", "", (name,), 0, value, limit, guard, unit)
            raised.append(remark)
        return raised


@dataclass(frozen=True)
class Choice:
    """The profile chosen, why, and what the caller should know about it.

    `flagged` is an answer not to rely on: activations have moved, and nothing safer fits.
    """

    profile: str
    reason: Remark
    warnings: tuple[Remark, ...] = ()
    flagged: bool = False


def select(candidates: Sequence[Candidate], budget: Budget, proposal: str | None = None) -> Choice:
    """With limits, the largest that meets them; with caps alone, the fastest within them.

    Drift falls along the chain, certified or not: the largest drifts least. A controller's
    `proposal` is taken instead if it meets the limits, is smaller, and takes no more than any
    larger profile that meets them; else the next above it of which that is true.

    Among budgets that limit a resource, more of it is never less, whatever was measured and is
    proposed, if proposals do not shrink. Where nothing fits, the smallest stands below all. Say
    the looser budget got the smaller profile. It takes no more than the larger, so it met the
    tighter limits too, and nothing that met them undercut it; it is no smaller than the proposal,
    so the tighter budget had no reason to go beyond it. Caps alone ask another question, for
    speed: there a larger `max_drop` never gives a slower profile.
    """
    assert candidates
    if not budget.limited:
        return _within_caps(candidates, budget)
    met = [c for c in candidates if c.meets(budget)]
    if not met:
        smallest = candidates[0].profile
        unknown = _unknown(candidates, budget)
        code = Code.NOT_MEASURED if unknown else Code.OVER_LIMITS
        return Choice(smallest, NOTHING_FITS, (Remark(code, smallest, names=unknown),))
    chosen, reason = met[-1], Remark(Code.LEAST_DRIFT, count=len(met))
    names = [candidate.profile for candidate in candidates]
    if proposal in names:
        enough = names[names.index(proposal) :]
        wanted = next((c for c in _in_order(met) if c.profile in enough), chosen)
        if wanted is not chosen:
            exact = wanted.profile == proposal
            chosen, reason = wanted, Remark(Code.PROPOSED if exact else Code.ABOVE_PROPOSED)
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


def explain(
    candidates: Sequence[Candidate], budget: Budget, chosen: str
) -> dict[str, list[Remark]]:
    """Return why each profile was or was not chosen."""
    met = {c.profile for c in candidates if c.meets(budget)}
    names = [candidate.profile for candidate in candidates]
    told = {}
    for candidate in candidates:
        name = candidate.profile
        against = candidate.objections(budget)
        against += cap_warnings(candidate, budget) if not budget.limited else ()
        code = Code.OTHER_PREFERRED
        if name == chosen:
            against, code = [], Code.CHOSEN
        elif chosen in met and budget.limited:
            larger = names.index(chosen) > names.index(name)
            code = Code.LARGER_DRIFTS_LESS if larger else Code.CONTROLLER_CONTENT
        told[name] = against or [Remark(code, name, chosen)]
    return told


def _within_caps(candidates: Sequence[Candidate], budget: Budget) -> Choice:
    """The fastest within the caps; the largest where none is, or none is named.

    A measured loss is no reason to serve what is both smaller and slower than the largest: that one
    is nearer to the original, and came out behind by the samples it was measured on.
    """
    top = candidates[-1]
    if not budget.capped:
        return Choice(top.profile, UNLIMITED)
    within = [c for c in candidates if not over_caps(c, budget)]
    if budget.max_drop is not None:
        within = [c for c in within if _speed(c) <= _speed(top)]
    if within:
        return Choice(min(within, key=_speed).profile, _fastest(budget))
    names = ("the drift cap",) * (budget.drift is not None)
    names += ("max_drop",) * (budget.max_drop is not None)
    reason = Remark(Code.NOTHING_WITHIN_CAP, names=names)
    return Choice(top.profile, reason, cap_warnings(top, budget))


def _fastest(budget: Budget) -> Remark:
    """The reason for the fastest within the caps of a budget."""
    if budget.max_drop is None:
        return Remark(Code.FASTEST_WITHIN_CAP, limit=budget.drift or 0.0)
    if budget.drift is None:
        return Remark(Code.FASTEST_WITHIN_DROP, limit=budget.max_drop)
    return Remark(Code.FASTEST_WITHIN_CAPS, value=budget.drift, limit=budget.max_drop)


def _speed(candidate: Candidate) -> tuple[float, float]:
    latency = candidate.latency_ms()
    return (float("inf") if latency is None else latency), candidate.size_mb


def cap_warnings(candidate: Candidate, budget: Budget) -> tuple[Remark, ...]:
    """Return the warnings of a profile against the caps of a budget, if there are any."""
    return tuple(over_caps(candidate, budget).values())


def over_caps(candidate: Candidate, budget: Budget) -> dict[str, Remark]:
    """Return by name the caps that a profile is not known to keep, with what to say of each."""
    caps = (
        ("drift", candidate.drift, budget.drift, Code.CAP_UNCONFIRMED, Code.OVER_CAP),
        ("max_drop", candidate.drop, budget.max_drop, Code.DROP_UNCONFIRMED, Code.OVER_DROP),
    )
    broken, profile = {}, candidate.profile
    for name, value, cap, unknown, over in caps:
        if cap is not None and value is None:
            broken[name] = Remark(unknown, profile)
        elif cap is not None and value is not None and value > cap:
            broken[name] = Remark(over, profile, value=value, limit=cap)
    return broken


def _unknown(candidates: Sequence[Candidate], budget: Budget) -> tuple[str, ...]:
    """Return which of the limited resources were measured of no profile on this device."""
    latency = budget.latency_ms is not None and all(c.latency is None for c in candidates)
    energy = budget.energy_mj is not None and all(c.energy_mj is None for c in candidates)
    return ("latency",) * latency + ("energy",) * energy
