"""Codes of an elastic model settled on data, before its scales are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from t3c.convert.state import state_of
from t3c.errors import SpecError
from t3c.nn.inputs import split_batch
from t3c.nn.observe import observe_moments
from t3c.nn.view import elastic_weights
from t3c.quant.settle import settled
from t3c.quant.straight_through import group_levels, row_scale, view_scale
from t3c.spec import MAX_BITS, MIN_BITS, Kind


def settle_(
    model: nn.Module,
    batches: Iterable[Any],
    bits: Sequence[int] = (5, 6, MAX_BITS),
    *,
    on_layer: Callable[[int, int, str], object] = lambda done, total, name: None,
) -> list[str]:
    """Choose the codes of linear layers so that errors of rounding make up for each other.

    `bits` are the views it is done for, that of the fewest first: it gains most, those of fewer
    bits and of more follow it. The full view in float is then that of the codes, no longer the
    original, from which drift is measured still; factors stay as they are. Tables, and heads tied
    to one, are left alone. The names of the layers that were changed.

    >>> t3c.elasticize_(model, example, calibration=loader)  # doctest: +SKIP
    >>> t3c.settle_(model, loader)  # doctest: +SKIP
    """
    views = sorted(set(bits))
    if not views or views[0] < MIN_BITS or views[-1] != MAX_BITS:
        raise SpecError(f"bits are of {MIN_BITS} to {MAX_BITS} and end there, got {tuple(bits)}")
    state, weights = state_of(model), elastic_weights(model)
    plans = [
        plan
        for plan in state.plan.layers
        if plan.spec.kind is Kind.LINEAR
        and not any(isinstance(state.original.get_submodule(n), nn.Embedding) for n in plan.modules)
    ]
    specs = {name: plan.spec for plan in plans for name in plan.modules}
    moments = observe_moments(state.original, specs, (split_batch(batch)[0] for batch in batches))
    done = [plan.spec.name for plan in plans if plan.spec.name in moments]
    for index, name in enumerate(done):
        on_layer(index, len(done), name)
        weight = weights[name]
        with torch.no_grad():
            dense, gains, group = weight.dense, weight.dense_gains, weight.group
            even = dense if group is None else dense / group_levels(dense, group)
            scales = {q: view_scale(even, gains, q) for q in views}
            dense.copy_(settled(dense, row_scale(even), scales, moments[name], group=group))
    return done
