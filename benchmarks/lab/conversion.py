"""What converting a model costs, and what full rank in float32 changes."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch

from t3c.compression.hugging_face import load_model
from t3c.convert import ElasticState, elasticize_, state_of
from t3c.convert.apply import factor_stages
from t3c.factor.compose import compose
from t3c.nn.inputs import call


def measure_conversion(name: str) -> dict[str, Any]:
    """Convert one model, alone in its process: seconds, peak memory, shares, errors of the output.

    `error` is that of the elastic model, whose full view keeps the dense weights; `factored_error`
    that of the original with every rank-elastic weight put together again from all its factors.
    """
    loaded = load_model(name)
    before = _peak_bytes()
    started = time.perf_counter()
    report = elasticize_(loaded.model, loaded.example)
    seconds = time.perf_counter() - started
    peak = _peak_bytes()
    params = report.plan.layer_params
    return {
        "model": name,
        "parameters": report.params.total,
        "elastic": (params.rank_elastic + params.bit_elastic) / params.total,
        "rank_elastic": params.rank_elastic / params.total,
        "blocks": len({layer.block for layer in report.converted if layer.block}),
        "seconds": seconds,
        "loaded_gb": before / 1e9,
        "peak_gb": peak / 1e9,
        "error": report.error,
        "factored_error": _factored_error(state_of(loaded.model)),
    }


@torch.no_grad()
def _factored_error(state: ElasticState) -> float:
    """Relative change of the example's output when weights are their full-rank factors."""
    before = call(state.original, state.example)
    for layer in state.plan.layers:
        if layer.rank_elastic:
            weight = state.original.get_submodule(layer.spec.name).weight
            assert isinstance(weight, torch.Tensor)
            weight.copy_(compose(factor_stages(layer.spec, weight, layer.spec.full_rank, None)))
    after = call(state.original, state.example)
    return float((after - before).norm() / before.norm().clamp_min(1e-12))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
