"""Any nn.Module to an elastic one: plan, apply, report."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from t3c.errors import ConvertError, SpecError
from t3c.factor.svd import svd_stages
from t3c.factor.tucker import tucker2_stages
from t3c.nn.inputs import Inputs, call, check_finite, tensors
from t3c.nn.layers import ELASTIC
from t3c.nn.observe import Sizes, kind_of, observe_moments, observe_sizes
from t3c.nn.view import replace_
from t3c.spec import MAX_BITS, MIN_BITS, Factorization, Kind, LayerSpec

STATE = "_t3c_state"
SAME = 1e-3  # how far full rank in float32 may be from the original


@dataclass(frozen=True)
class ElasticConfig:
    """What may become elastic, and which ranks and bits a layer is offered.

    `store_ratio` caps factored ranks: the factored copy of a layer takes at most this share of its
    dense weights, so that an artifact with both stays under 1.4 times its largest profile.
    """

    bits: tuple[int, ...] = (4, 5, 6, 8)
    rank_fractions: tuple[float, ...] = (1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8)
    tile: int = 8
    store_ratio: float = 0.4
    min_weights: int = 512

    def __post_init__(self) -> None:
        if not self.bits or sorted(set(self.bits)) != list(self.bits) or self.bits[-1] != MAX_BITS:
            raise SpecError(f"bits must rise and end with {MAX_BITS}, got {self.bits}")
        if self.bits[0] < MIN_BITS:
            raise SpecError(f"bits must be at least {MIN_BITS}, got {self.bits}")
        rising = sorted(set(self.rank_fractions)) == list(self.rank_fractions)
        if not rising or not all(0 < f < 1 for f in self.rank_fractions):
            raise SpecError(f"rank_fractions must rise between 0 and 1, got {self.rank_fractions}")
        if self.tile < 1:
            raise SpecError(f"tile must be at least 1, got {self.tile}")
        if not 0 < self.store_ratio <= 1:
            raise SpecError(f"store_ratio must be in (0, 1], got {self.store_ratio:g}")


@dataclass(frozen=True)
class LayerPlan:
    """One layer to convert: its geometry, the ranks (full rank last) and bits it may take.

    `reason` says why a layer is elastic in bits alone; it is empty for a rank-elastic one.
    """

    spec: LayerSpec
    ranks: tuple[int, ...]
    bits: tuple[int, ...]
    reason: str = ""

    @property
    def cap(self) -> int:
        """The largest rank stored factored; full rank where none is."""
        return self.ranks[-2] if len(self.ranks) > 1 else self.ranks[-1]

    @property
    def weights(self) -> int:
        return prod(self.spec.dense_shape)


@dataclass(frozen=True)
class ConversionPlan:
    """What would be converted, and what not, with the reason."""

    layers: tuple[LayerPlan, ...]
    skipped: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Params:
    """Parameters by how elastic they are."""

    rank_elastic: int
    bit_elastic: int
    untouched: int


@dataclass(frozen=True)
class Report:
    """What `elasticize_` did; `error` is the relative difference to the example's output."""

    converted: tuple[LayerPlan, ...]
    skipped: tuple[tuple[str, str], ...]
    params: Params
    error: float

    def __str__(self) -> str:
        rows = [
            f"{p.spec.name}: {p.spec.factorization}, ranks {', '.join(map(str, p.ranks))}"
            if len(p.ranks) > 1
            else f"{p.spec.name}: bits only ({p.reason})"
            for p in self.converted
        ]
        rows += [f"{name}: untouched ({reason})" for name, reason in self.skipped]
        p = self.params
        rows.append(
            f"parameters: {p.rank_elastic:,} rank-elastic, {p.bit_elastic:,} elastic in bits only, "
            f"{p.untouched:,} untouched"
        )
        return "\n".join(rows)


@dataclass
class ElasticState:
    """What an elastic model remembers: the original, frozen, and the plan it was converted by."""

    original: nn.Module
    plan: ConversionPlan
    example: Inputs = field(repr=False)


def state_of(model: nn.Module) -> ElasticState:
    """The state `elasticize_` left on the model."""
    state = model.__dict__.get(STATE)
    if not isinstance(state, ElasticState):
        raise ConvertError("the model is not elastic: call t3c.elasticize_(model, example) first")
    return state


def plan_conversion(
    model: nn.Module, example: Inputs, config: ElasticConfig | None = None
) -> ConversionPlan:
    """What `elasticize_` would do; changes nothing."""
    config = config or ElasticConfig()
    if kind_of(model) is not None:
        raise ConvertError("the model is a single layer: wrap it in nn.Sequential")
    shared = _shared_weights(model)
    sizes = observe_sizes(model, example)
    layers, skipped = [], []
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind is None:
            if any(True for _ in module.parameters(recurse=False)):
                skipped.append((name, f"{type(module).__name__} has no elastic form"))
            continue
        reason = _reason_to_skip(module, name, shared, sizes, config)
        if reason:
            skipped.append((name, reason))
        else:
            layers.append(_plan_layer(name, module, kind, sizes[name][0], config))
    if not layers:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped) or "no parameters"
        raise ConvertError(f"the model has no layer that can be made elastic ({reasons})")
    return ConversionPlan(tuple(layers), tuple(skipped))


def elasticize_(
    model: nn.Module,
    example: Inputs,
    config: ElasticConfig | None = None,
    *,
    calibration: Iterable[Any] | None = None,
) -> Report:
    """Make the model elastic in place and say what was converted, and why not.

    The model stays at full rank in float, equal to the original to rounding. With `calibration`
    (batches of inputs, or of (inputs, target)) factors are best for the layers' own inputs,
    without it for the plain norm of the weights.
    """
    if STATE in model.__dict__:
        raise ConvertError("the model is elastic already")
    check_finite(example, "the example")
    training = model.training
    model.eval()
    replaced: dict[str, nn.Module] = {}
    try:
        plan = plan_conversion(model, example, config)
        _check_parameters(model)
        original = copy.deepcopy(model).requires_grad_(False)
        factored = [p.spec for p in plan.layers if p.spec.factorization is not Factorization.NONE]
        moments = {} if calibration is None else observe_moments(model, factored, calibration)
        with torch.no_grad():
            before = _checked_output(original, example)
            for layer in plan.layers:
                name = layer.spec.name
                replaced[name] = model.get_submodule(name)
                replace_(model, name, _elastic(layer, replaced[name], moments.get(name)))
            error = _relative(call(model, example), before)
        if not error <= SAME:
            raise ConvertError(f"the elastic model differs from the original by {error:.3g}")
        model.__dict__[STATE] = ElasticState(original, plan, example)
    finally:
        if STATE not in model.__dict__:
            for name, module in replaced.items():
                replace_(model, name, module)
        model.train(training)
    return Report(plan.layers, plan.skipped, _count(original, plan), error)


def _check_parameters(model: nn.Module) -> None:
    for name, value in model.named_parameters():
        if not bool(torch.isfinite(value).all()):
            raise ConvertError(f"parameter {name!r} holds NaN or infinite values")


def _checked_output(model: nn.Module, example: Inputs) -> Tensor:
    output = call(model, example)
    batch = tensors(example)[0].shape[0]
    if output.dim() < 2 or output.shape[0] != batch:
        raise ConvertError(
            f"the output has shape {tuple(output.shape)} for {batch} samples: "
            "(samples, outputs, ...) is needed"
        )
    return output


def _relative(output: Tensor, wanted: Tensor) -> float:
    return float((output - wanted).norm() / wanted.norm().clamp_min(1e-12))


def _reason_to_skip(
    module: nn.Module,
    name: str,
    shared: dict[str, str],
    sizes: dict[str, list[Sizes]],
    config: ElasticConfig,
) -> str:
    weight = module.weight
    assert isinstance(weight, Tensor)
    if weight.is_meta or weight.is_quantized or not weight.is_floating_point():
        raise ConvertError(f"layer {name!r}: its weight is {weight.dtype} on {weight.device}")
    if not bool(torch.isfinite(weight).all()):
        raise ConvertError(f"layer {name!r}: its weight holds NaN or infinite values")
    if weight.dtype != torch.float32:
        raise ConvertError(
            f"layer {name!r}: its weight is {weight.dtype}: call model.float() first"
        )
    if not isinstance(module._parameters.get("weight"), nn.Parameter):
        return "its weight is computed from others"
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has hooks of its own"
    if name in shared:
        return f"its weight is that of {shared[name]}"
    if name not in sizes:
        return "the example does not reach it"
    if len(sizes[name]) > 1:
        return f"it runs {len(sizes[name])} times in one pass"
    if weight.numel() < config.min_weights:
        return f"{weight.numel()} weights are fewer than min_weights={config.min_weights}"
    if isinstance(module, nn.Conv2d) and module.padding_mode != "zeros":
        return f"padding_mode={module.padding_mode!r}"
    if isinstance(module, nn.Conv2d) and isinstance(module.padding, str):
        return f"padding={module.padding!r}"
    return ""


def _shared_weights(model: nn.Module) -> dict[str, str]:
    """Modules whose weight stands under another name too, and that name."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    tied = [group for group in names.values() if len(group) > 1]
    return {name: next(n for n in group if n != name) for group in tied for name in set(group)}


def _plan_layer(
    name: str, module: nn.Module, kind: Kind, seen: Sizes, config: ElasticConfig
) -> LayerPlan:
    weight = module.weight
    assert isinstance(weight, Tensor)
    geometry: dict[str, Any] = {"in_channels": weight.shape[1]}
    if isinstance(module, nn.Conv2d):
        geometry = {
            "in_channels": module.in_channels,
            "kernel": module.kernel_size,
            "stride": module.stride,
            "padding": module.padding,
            "dilation": module.dilation,
            "groups": module.groups,
        }
    base = {
        "name": name, "kind": kind, "out_channels": weight.shape[0], "tile": config.tile,
        "in_size": seen[0], "out_size": seen[1], **geometry,
    }  # fmt: skip
    bits_only = LayerSpec(factorization=Factorization.NONE, **base)
    full = (bits_only.full_rank,)
    if bits_only.groups > 1:
        return LayerPlan(bits_only, full, config.bits, f"{bits_only.groups} groups")
    wide = bits_only.kernel != (1, 1)
    spec = LayerSpec(factorization=Factorization.TUCKER2 if wide else Factorization.SVD, **base)
    ranks = _ladder(spec, config)
    if not ranks:
        smallest = min(config.tile, spec.full_rank)
        reason = f"no rank of {smallest} or more takes under {config.store_ratio:g} of its weights"
        return LayerPlan(bits_only, full, config.bits, reason)
    return LayerPlan(spec, (*ranks, spec.full_rank), config.bits)


def _ladder(spec: LayerSpec, config: ElasticConfig) -> tuple[int, ...]:
    """The ranks below full, whole tiles, that take at most `store_ratio` of the dense weights."""
    ranks: list[int] = []
    for fraction in config.rank_fractions:
        rank = max(config.tile, config.tile * round(fraction * spec.full_rank / config.tile))
        if rank >= spec.full_rank:
            continue
        shapes = spec.stage_shapes(rank)
        r_out, r_in = spec.channel_ranks(rank)
        if r_out >= spec.out_channels or r_in >= spec.in_channels:
            continue  # a stage of full rank costs and gains nothing
        if sum(map(prod, shapes)) > config.store_ratio * prod(spec.dense_shape):
            continue
        if not ranks or shapes != spec.stage_shapes(ranks[-1]):
            ranks.append(rank)
    return tuple(ranks)


def _elastic(plan: LayerPlan, module: nn.Module, moment: Tensor | None) -> nn.Module:
    spec = plan.spec
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    stages: tuple[Tensor, ...]
    if spec.factorization is Factorization.TUCKER2:
        stages = tucker2_stages(weight, moment)
    elif spec.factorization is Factorization.SVD:
        stages = svd_stages(weight.flatten(1), moment)
        if spec.kind is Kind.CONV2D:
            stages = tuple(stage[..., None, None] for stage in stages)
    else:
        stages = (weight,)
    return ELASTIC[spec.kind](spec, stages, bias, plan.cap).train(module.training)


def _count(original: nn.Module, plan: ConversionPlan) -> Params:
    rank = sum(p.weights for p in plan.layers if len(p.ranks) > 1)
    bits = sum(p.weights for p in plan.layers if len(p.ranks) == 1)
    total = sum(p.numel() for p in original.parameters())
    return Params(rank, bits, total - rank - bits)
