"""What each part of the allocation is worth: the same trained network, the same cost (Fig. 4, F.4).

Each variant allocates the points of one trained network by its own rule, at the cost of a profile
that was shipped, and is tested on the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from lab.allocation.greedy import greedy, uniform
from lab.paths import within
from lab.subjects import Labelled
from t3c.artifact.devices import LayerTiming
from t3c.certify.sensitivity import layer_sensitivities
from t3c.control.knapsack import Allocation, allocations
from t3c.control.menu import Option, chain
from t3c.control.options import Shares, layer_profile, unit_options
from t3c.convert import state_of, units
from t3c.cost.work import stored_bytes
from t3c.exporter.allocate import affordable, measured_shares
from t3c.nn.inputs import Inputs, select
from t3c.spec import Profile
from t3c.zoo.views import outputs, paired_difference

Options = Mapping[str, Sequence[Option]]
Path = list[Allocation]
Watch = Callable[[str, int, int], object]
MB = 1e6


def _held(options: Options, axis: str) -> dict[str, tuple[Option, ...]]:
    """Chains of the options that have the most rank, or the most bits."""
    kept = {}
    for name, mine in options.items():
        top = max(getattr(o.point, axis) for o in mine)
        kept[name] = chain([o for o in mine if getattr(o.point, axis) == top])
    return kept


def _all(options: Options) -> dict[str, tuple[Option, ...]]:
    return {name: chain(mine) for name, mine in options.items()}


VARIANTS: Mapping[str, tuple[str, Callable[[Options], Path]]] = {
    "joint": ("ranks and bits by the knapsack", lambda o: allocations(_all(o))),
    "rank-only": ("8 bits, ranks by the knapsack", lambda o: allocations(_held(o, "bits"))),
    "bit-only": ("full rank, bits by the knapsack", lambda o: allocations(_held(o, "level"))),
    "uniform": ("one level for all layers, no allocation", lambda o: uniform(_all(o))),
    "greedy": ("the next best step, no hull", lambda o: greedy(_all(o))),
}


def ablation_rows(
    model: nn.Module,
    samples: Inputs,
    timings: Sequence[LayerTiming],
    shipped: Profile,
    size_weight: float,
    test: Labelled,
    *,
    watch: Watch = lambda what, done, total: None,
) -> list[dict[str, Any]]:
    """Every variant at the cost of a shipped profile; `p50` are summed layer times, in ms.

    Accuracy is of the stored weights with activations in float. A variant whose cheapest point
    costs more than the shipped profile violates the budget.
    """
    plans = state_of(model).plan.layers
    shared = {unit.name: unit for unit in units(plans)}
    shares = measured_shares(plans, timings)
    sensitivities = layer_sensitivities(model, select(samples, slice(0, affordable(plans))))
    offered = unit_options(
        shared, shares, lambda name, point: sensitivities[name].squared_drift(point), size_weight
    )
    best = {(t.layer, t.rank): min(t.ms.values()) for t in timings}
    specs = {plan.spec.name: plan.spec for plan in plans}
    target = _cost(shipped, shares, size_weight)
    full = outputs(state_of(model).original, None, test).argmax(-1) == test[1]
    rows = []
    for index, (name, (detail, allocated)) in enumerate(VARIANTS.items()):
        watch(f"ablation {name}", index, len(VARIANTS))
        found = within(allocated(offered), target * (1 + 1e-9))
        profile = layer_profile(shared, found.points, name)
        right = outputs(model, profile, test).argmax(-1) == test[1]
        gap = paired_difference(full.numpy(), right.numpy())
        points = profile.points.items()
        rows.append(
            {
                "variant": name, "detail": detail, "accuracy": float(right.float().mean()),
                "drop": gap.difference, "drop_low": gap.low, "drop_high": gap.high,
                "p50": math.fsum(specs[n].runs * best[n, p.rank] for n, p in points),
                "size_mb": sum(stored_bytes(specs[n], p) for n, p in points) / MB,
                "violations": int(found.cost > target * (1 + 1e-6)),
                "first_order": found.drift, "samples": len(right),
            }
        )  # fmt: skip
    return rows


def _cost(profile: Profile, shares: Shares, size_weight: float) -> float:
    taken = [shares(name, point) for name, point in profile.points.items()]
    latency, size = (math.fsum(t[i] for t in taken) for i in (0, 1))
    return (1 - size_weight) * latency + size_weight * size
