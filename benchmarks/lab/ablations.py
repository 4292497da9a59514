"""What each part of the allocation is worth: the same trained network, the same cost (Fig. 4, F.4).

Each variant changes one thing of how `t3c.compress` allocates the points of the network it trained,
at the cost of a profile that was shipped, and is tested on the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from lab.allocation.greedy import greedy, uniform
from lab.paths import within
from lab.subjects import Subject
from t3c.artifact.devices import LayerTiming
from t3c.certify.sensitivity import layer_sensitivities
from t3c.compression.data import Data
from t3c.compression.improve import SIZE_WEIGHT
from t3c.compression.pipeline import Compression, Options
from t3c.compression.plan import plan_run
from t3c.compression.source import open_source
from t3c.compression.stages import Stages
from t3c.control.knapsack import Allocation, allocations
from t3c.control.menu import Option, chain
from t3c.control.options import Shares, layer_profile, unit_options
from t3c.convert import state_of, units
from t3c.cost.work import stored_bytes
from t3c.engines.protocol import Array
from t3c.exporter.allocate import affordable, measured_shares
from t3c.nn.inputs import Inputs, batches_of, call, evaluating, select
from t3c.nn.view import at
from t3c.progress import Show
from t3c.spec import Profile
from t3c.zoo.views import paired_difference

Offered = Mapping[str, Sequence[Option]]
Path = list[Allocation]
Watch = Callable[[str, int, int], object]
MB = 1e6
BATCH = 32


def _held(options: Offered, axis: str) -> dict[str, tuple[Option, ...]]:
    """Chains of the options that have the most rank, or the most bits."""
    kept = {}
    for name, mine in options.items():
        top = max(getattr(o.point, axis) for o in mine)
        kept[name] = chain([o for o in mine if getattr(o.point, axis) == top])
    return kept


def _all(options: Offered) -> dict[str, tuple[Option, ...]]:
    return {name: chain(mine) for name, mine in options.items()}


VARIANTS: Mapping[str, tuple[str, Callable[[Offered], Path]]] = {
    "joint": ("ranks and bits by the knapsack", lambda o: allocations(_all(o))),
    "rank-only": ("8 bits, ranks by the knapsack", lambda o: allocations(_held(o, "bits"))),
    "bit-only": ("full rank, bits by the knapsack", lambda o: allocations(_held(o, "level"))),
    "uniform": ("one level for all layers, no allocation", lambda o: uniform(_all(o))),
    "greedy": ("the next best step, no hull", lambda o: greedy(_all(o))),
}


def retrained(subject: Subject, options: Options, stages: Stages) -> nn.Module:
    """Return the elastic model that the door trained, from the stages it keeps."""
    source = open_source(subject.fresh(), subject.source.example)
    plan = plan_run(source, subject.parts, options.minutes, 0.0)
    Compression(source, subject.parts, options, stages, Show(False), plan).train()
    return source.model


def ablation_rows(
    model: nn.Module,
    samples: Inputs,
    timings: Sequence[LayerTiming],
    shipped: Profile,
    test: Data,
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
        shared, shares, lambda name, point: sensitivities[name].squared_drift(point), SIZE_WEIGHT
    )
    best = {(t.layer, t.rank): min(t.ms.values()) for t in timings}
    specs = {plan.spec.name: plan.spec for plan in plans}
    target = _cost(shipped, shares)
    full = _right(state_of(model).original, None, test)
    rows = []
    for index, (name, (detail, allocated)) in enumerate(VARIANTS.items()):
        watch(f"ablation {name}", index, len(VARIANTS))
        found = within(allocated(offered), target * (1 + 1e-9))
        profile = layer_profile(shared, found.points, name)
        right = _right(model, profile, test)
        gap = paired_difference(full, right)
        points = profile.points.items()
        rows.append(
            {
                "variant": name, "detail": detail, "accuracy": float(right.mean()),
                "drop": gap.difference, "drop_low": gap.low, "drop_high": gap.high,
                "p50": math.fsum(specs[n].runs * best[n, p.rank] for n, p in points),
                "size_mb": sum(stored_bytes(specs[n], p) for n, p in points) / MB,
                "violations": int(found.cost > target * (1 + 1e-6)),
                "first_order": found.drift, "samples": len(right),
            }
        )  # fmt: skip
    return rows


@torch.no_grad()
def _right(model: nn.Module, profile: Profile | None, test: Data) -> Array:
    """Return which samples (n,) a view gets right; without a profile the model itself."""
    assert test.labels is not None
    with evaluating(model), at(model, profile):
        answers = [call(model, batch).argmax(-1) for batch in batches_of(test.inputs, BATCH)]
    return np.asarray((torch.cat(answers) == test.labels).numpy())


def _cost(profile: Profile, shares: Shares) -> float:
    taken = [shares(name, point) for name, point in profile.points.items()]
    latency, size = (math.fsum(t[i] for t in taken) for i in (0, 1))
    return (1 - SIZE_WEIGHT) * latency + SIZE_WEIGHT * size
