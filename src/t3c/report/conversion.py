"""A conversion plan, as JSON and as a table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from t3c.convert import ConversionPlan, LayerPlan, Params


def plan_json(plan: ConversionPlan) -> dict[str, Any]:
    """Every layer with what it may take, everything left alone with its reason, and the counts."""
    return {
        "layers": [_layer(layer) for layer in plan.layers],
        "skipped": [{"name": name, "reason": reason} for name, reason in plan.skipped],
        "params": asdict(plan.params),
        "layer_params": asdict(plan.layer_params) | _shares(plan.layer_params),
    }


def print_plan(console: Console, plan: ConversionPlan) -> None:
    """The plan as a table, what is left alone, and the counts."""
    names = ("kind", "shape", "stored as", "ranks", "budget shared in, or why bits only")
    table = Table(Column("layer", overflow="fold"), *names)
    for layer in plan.layers:
        shape = "x".join(map(str, layer.spec.dense_shape))
        ranks = ", ".join(map(str, layer.ranks)) if layer.rank_elastic else "bits only"
        name = " = ".join(layer.modules)
        note = layer.block or layer.reason
        kind = f"{layer.role} x{layer.spec.runs}" if layer.spec.runs > 1 else str(layer.role)
        table.add_row(name, kind, shape, str(layer.spec.factorization), ranks, note)
    console.print(table)
    if plan.skipped:
        left = Table(Column("left as it is", overflow="fold"), "reason")
        for name, reason in plan.skipped:
            left.add_row(name, reason)
        console.print(left)
    for what, params in (("all", plan.params), ("linear and convolution", plan.layer_params)):
        shares = _shares(params)
        console.print(
            f"{what} parameters: {params.total:,}, of which {shares['elastic']:.1%} elastic "
            f"({shares['rank_elastic_share']:.1%} in rank and bits, the rest in bits alone)",
            soft_wrap=True,
        )


def _layer(layer: LayerPlan) -> dict[str, Any]:
    return {
        "name": layer.spec.name,
        "modules": list(layer.modules),
        "role": str(layer.role),
        "factorization": str(layer.spec.factorization),
        "shape": list(layer.spec.dense_shape),
        "runs": layer.spec.runs,
        "ranks": list(layer.ranks),
        "bits": list(layer.bits),
        "block": layer.block or None,
        "reason": layer.reason or None,
    }


def _shares(params: Params) -> dict[str, float]:
    total = max(1, params.total)
    return {
        "elastic": (params.rank_elastic + params.bit_elastic) / total,
        "rank_elastic_share": params.rank_elastic / total,
    }
