"""A conversion plan, as plain values and as a table."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Column, Table

from t3c.convert import ConversionPlan, LayerPlan, Params


@dataclass(frozen=True)
class LayerRow:
    """What one layer may take; `reason` is why it is elastic in bits alone."""

    name: str
    modules: list[str]
    role: str
    factorization: str
    shape: list[int]
    runs: int
    ranks: list[int]
    bits: list[int]
    block: str | None
    reason: str | None


@dataclass(frozen=True)
class SkippedRow:
    name: str
    reason: str


@dataclass(frozen=True)
class LayerParams(Params):
    """Parameters of linear layers and convolutions, and the shares of them that are elastic."""

    elastic: float
    rank_elastic_share: float


@dataclass(frozen=True)
class PlanSummary:
    """Every layer with what it may take, everything left alone with its reason, and the counts."""

    layers: list[LayerRow]
    skipped: list[SkippedRow]
    params: Params
    layer_params: LayerParams


def summarize_plan(plan: ConversionPlan) -> PlanSummary:
    """Return a plan as plain values."""
    return PlanSummary(
        [_layer(layer) for layer in plan.layers],
        [SkippedRow(name, reason) for name, reason in plan.skipped],
        plan.params,
        LayerParams(**vars(plan.layer_params) | _shares(plan.layer_params)),
    )


def print_plan(console: Console, plan: ConversionPlan) -> None:
    """Print the plan as a table, what is left alone, and the counts."""
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


def _layer(layer: LayerPlan) -> LayerRow:
    spec = layer.spec
    return LayerRow(
        spec.name, list(layer.modules), str(layer.role), str(spec.factorization),
        list(spec.dense_shape), spec.runs, list(layer.ranks), list(layer.bits),
        layer.block or None, layer.reason or None,
    )  # fmt: skip


def _shares(params: Params) -> dict[str, float]:
    total = max(1, params.total)
    return {
        "elastic": (params.rank_elastic + params.bit_elastic) / total,
        "rank_elastic_share": params.rank_elastic / total,
    }
