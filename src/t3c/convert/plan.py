"""What would be converted, and what not, with the reason; nothing is changed by a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import nn

from t3c.convert.config import ElasticConfig, Role
from t3c.convert.eligible import check_patterns, check_weight, reason_to_skip
from t3c.convert.layer import LayerPlan
from t3c.convert.width import check_units, narrow_plan, narrowings
from t3c.errors import ConvertError
from t3c.nn.canonical import canonical
from t3c.nn.inputs import Inputs, check_inputs, evaluating, unlabelled
from t3c.nn.layers import elastic_type, geometry
from t3c.nn.observe import Observed, observe
from t3c.spec import Factorization, Kind, LayerSpec


@dataclass(frozen=True)
class Params:
    """Parameters by how elastic they are."""

    rank_elastic: int
    bit_elastic: int
    untouched: int

    @property
    def total(self) -> int:
        return self.rank_elastic + self.bit_elastic + self.untouched


@dataclass(frozen=True)
class ConversionPlan:
    """What would be converted, and what not, with the reason.

    `params` counts all parameters, `layer_params` those of linear and convolution layers alone.
    `unnarrowed` are the readers of units that are not narrowed although asked for, with the reason.
    """

    layers: tuple[LayerPlan, ...]
    skipped: tuple[tuple[str, str], ...]
    params: Params
    layer_params: Params
    unnarrowed: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        rows = [str(layer) for layer in self.layers]
        rows += [f"{name}: untouched ({reason})" for name, reason in self.skipped]
        rows += [f"{name}: its units stay ({reason})" for name, reason in self.unnarrowed]
        for what, p in (("all", self.params), ("linear and convolution", self.layer_params)):
            rows.append(
                f"{what} parameters: {p.rank_elastic:,} rank-elastic, {p.bit_elastic:,} elastic in "
                f"bits only, {p.untouched:,} untouched"
            )
        return "\n".join(rows)


def plan_conversion(
    model: nn.Module, example: Inputs, config: ElasticConfig | None = None
) -> ConversionPlan:
    """What `elasticize_` would do; changes nothing. Weights may be on the meta device."""
    example = unlabelled(example)
    check_inputs(example, "the example")
    # In evaluation mode from the start: reading a parametrized weight may change its buffers.
    with evaluating(model), canonical(model):
        return plan_canonical(model, example, config or ElasticConfig())


def plan_canonical(model: nn.Module, example: Inputs, config: ElasticConfig) -> ConversionPlan:
    """The plan of a model whose layers are in canonical form."""
    if elastic_type(model) is not None:
        raise ConvertError("the model is a single layer: wrap it in nn.Sequential")
    named = {n: m for n, m in model.named_modules() if elastic_type(m) is not None}
    for name, module in named.items():
        check_weight(name, module)
    check_patterns(config, list(named))
    observed = observe(model, example)
    owners: dict[int, set[str]] = {}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(path)
    check_units(config.widths, named)
    unread = _unread(named, observed, config)
    narrowed, left = narrowings([g for g in config.widths if g.name not in unread])
    blocks, left = _blocks(observed), unread | left
    layers, skipped = [], []
    for name, module in model.named_modules():
        if name not in named and any(True for _ in module.parameters(recurse=False)):
            skipped.append((name, f"{type(module).__name__} has no elastic form"))
    for names in _sharing(named):
        reason = reason_to_skip({n: named[n] for n in names}, observed, config)
        others = owners.get(id(named[names[0]].weight), set()) - set(names)
        if others:
            also = ", ".join(sorted(other or "the model itself" for other in others))
            reason = f"its weight is also that of {also}"
        if reason:
            skipped += [(name, reason) for name in names]
            continue
        plan = _plan_layer(names, named, observed, blocks, config)
        layers.append(
            narrow_plan(plan, narrowed[plan.spec.name]) if plan.spec.name in narrowed else plan
        )
    if not layers:
        shown = [f"{name}: {reason}" for name, reason in skipped[:3]] or ["no parameters"]
        reasons = "; ".join(shown) + ("; ..." if len(skipped) > 3 else "")
        raise ConvertError(f"the model has no layer that can be made elastic ({reasons})")
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    skipped.sort(key=lambda item: order[item[0]])
    counted = _count(named, layers)
    everything = sum(p.numel() for p in model.parameters())
    elastic = [sum(p.weights for p in layers if p.rank_elastic is kind) for kind in (True, False)]
    params = Params(elastic[0], elastic[1], everything - sum(elastic))
    return ConversionPlan(tuple(layers), tuple(skipped), params, counted, tuple(left.items()))


def _unread(
    named: dict[str, nn.Module], observed: Observed, config: ElasticConfig
) -> dict[str, str]:
    """Return why readers of units cannot leave any out: a layer that stays as it is reads all."""
    names = [group.name for group in config.widths]
    reasons = {n: reason_to_skip({n: named[n]}, observed, config) for n in names}
    return {name: f"it reads all of them: {why}" for name, why in reasons.items() if why}


def _blocks(observed: Observed) -> dict[str, str]:
    """Return the attention block of each layer that is in one."""
    blocks: dict[str, str] = {}
    for block in observed.attention_blocks():
        stem = _stem(block)
        same = len({b for b in blocks.values() if b.partition("#")[0] == stem})
        blocks |= dict.fromkeys(block, f"{stem}#{same + 1}" if same else stem)
    return blocks


def _stem(names: Sequence[str]) -> str:
    """The longest path that all names start with, or the first name."""
    parts = [name.split(".") for name in names]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared) or names[0]


def _sharing(named: dict[str, nn.Module]) -> list[list[str]]:
    """Names of layers by the weight they run, in order."""
    sharing: dict[int, list[str]] = {}
    for name, module in named.items():
        sharing.setdefault(id(module.weight), []).append(name)
    return list(sharing.values())


def _plan_layer(
    names: list[str],
    named: dict[str, nn.Module],
    observed: Observed,
    blocks: dict[str, str],
    config: ElasticConfig,
) -> LayerPlan:
    kinds = {name: kind_of(named[name]) for name in names}
    # Of an embedding that is a head too, the head is what costs.
    lead = next((n for n in names if kinds[n] is not Kind.EMBEDDING), names[0])
    runs = [run for n in names if kinds[n] is kinds[lead] for run in observed.runs(n)]
    runs = runs or [run for n in names for run in observed.runs(n)]
    largest = max(runs, key=lambda run: prod(run.in_size))
    bare = LayerSpec(
        name=lead, kind=kinds[lead], factorization=Factorization.NONE, tile=config.tile,
        in_size=largest.in_size, out_size=largest.out_size, runs=len(runs),
        **geometry(named[lead]),  # type: ignore[arg-type]
    )  # fmt: skip
    block = blocks.get(lead, "")
    role = _role(bare, block)
    modules = (lead, *(n for n in names if n != lead))
    rest = {"bits": config.bits, "modules": modules, "role": role, "block": block}
    full = LayerPlan(bare, (bare.full_rank,), shares=(1.0,), **rest)  # type: ignore[arg-type]
    if Kind.EMBEDDING in kinds.values():
        reason = "a table is looked up, not multiplied by"
        return replace(full, reason="it is an embedding too" if len(names) > 1 else reason)
    spec = replace(
        bare, factorization=_factorization(bare, config),
        bit_offsets=config.rank_tied_bits.offsets if config.rank_tied_bits else (),
    )  # fmt: skip
    ladder = _ladder(spec, config, config.rank_caps.get(role, 1.0))
    if not ladder:
        smallest = min(config.tile, spec.full_rank)
        reason = f"no rank of {smallest} or more takes under {config.store_ratio:g} of its weights"
        return replace(full, reason=reason)
    ranks, shares = (*ladder.values(), spec.full_rank), (*ladder, 1.0)
    return LayerPlan(
        spec, ranks, shares=shares, tied_bits=config.rank_tied_bits, **rest  # type: ignore[arg-type]
    )  # fmt: skip


def kind_of(module: nn.Module) -> Kind:
    elastic = elastic_type(module)
    assert elastic is not None
    return elastic.kind


def _role(spec: LayerSpec, block: str) -> Role:
    if spec.kind is Kind.EMBEDDING:
        return Role.EMBEDDING
    if spec.convolution:
        return Role.DEPTHWISE if spec.groups > 1 else Role.CONVOLUTION
    return Role.PROJECTION if block else Role.LINEAR


def _factorization(spec: LayerSpec, config: ElasticConfig) -> Factorization:
    """SVD for matrices, and for kernels whose inputs are too few to reduce or come in groups."""
    if prod(spec.kernel) == 1 or spec.groups > 1 or spec.in_channels <= config.tile:
        return Factorization.SVD
    return config.kernels.get(spec.name, config.convolution)


def _ladder(spec: LayerSpec, config: ElasticConfig, cap: float) -> dict[float, int]:
    """The ranks below full by their share: whole tiles, at most `store_ratio` of the weights."""
    ladder: dict[float, int] = {}
    before: tuple[tuple[int, ...], ...] = ()
    for share in config.rank_fractions:
        rank = max(config.tile, config.tile * round(share * spec.full_rank / config.tile))
        if rank >= spec.full_rank or share > cap:
            continue
        shapes = spec.stage_shapes(rank)
        r_out, r_in = spec.channel_ranks(rank)
        tucker = spec.factorization is Factorization.TUCKER2
        if tucker and (r_out >= spec.out_channels or r_in >= spec.in_channels):
            continue  # a stage of full rank costs and gains nothing
        if sum(map(prod, shapes)) > config.store_ratio * prod(spec.dense_shape):
            continue
        if shapes != before:
            ladder[share] = rank
            before = shapes
    return ladder


def _count(named: dict[str, nn.Module], layers: Sequence[LayerPlan]) -> Params:
    """Parameters of linear and convolution layers, their biases among the untouched."""
    own = {
        id(p): p.numel()
        for module in named.values()
        if kind_of(module) is not Kind.EMBEDDING
        for p in module.parameters(recurse=False)
    }
    mine = [layer for layer in layers if id(named[layer.spec.name].weight) in own]
    counted = [sum(p.weights for p in mine if p.rank_elastic is kind) for kind in (True, False)]
    return Params(counted[0], counted[1], sum(own.values()) - sum(counted))
