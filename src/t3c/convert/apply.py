"""`elasticize_`: a plan carried out, layer by layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from t3c.convert.config import ElasticConfig
from t3c.convert.layer import LayerPlan
from t3c.convert.plan import ConversionPlan, plan_conversion
from t3c.convert.report import Report
from t3c.convert.state import STATE, ElasticState
from t3c.errors import ConvertError, DataError
from t3c.factor.cp import cp_stages
from t3c.factor.metric import Metric, data_metric
from t3c.factor.svd import balanced, best_balance, svd_stages
from t3c.factor.tucker import tucker1_stages, tucker2_stages
from t3c.factor.width import correction_stages
from t3c.nn.canonical import canonicalize_, restore_
from t3c.nn.hooks import hooked
from t3c.nn.inputs import (
    Inputs,
    check_inputs,
    check_like,
    evaluating,
    first_samples,
    split_batch,
    tensors,
    unlabelled,
)
from t3c.nn.layers import elastic_type
from t3c.nn.observe import (
    MOMENT_BYTES,
    WIDEST,
    observe_adjoints,
    observe_moments,
    run_example,
    use_matters,
)
from t3c.nn.view import replace_
from t3c.nn.weight import ElasticWeight, Product, Spectral
from t3c.spec import Factorization, LayerSpec

SAME = 1e-3  # how far full rank in float32 may be from the original

ADJOINT_SAMPLES = 64  # that a layer's use is learned from

OnLayer = Callable[[int, int, str], object]


class Moments(NamedTuple):
    """Second moments of a layer's inputs, and of the adjoints of its outputs where there are."""

    inputs: Tensor
    outputs: Tensor | None


def elasticize_(
    model: nn.Module,
    example: Inputs,
    config: ElasticConfig | None = None,
    *,
    calibration: Iterable[Any] | None = None,
    on_layer: OnLayer | None = None,
) -> Report:
    """Make the model elastic in place and say what was converted, and why not.

    The model stays at full rank in float, equal to the original to rounding. With `calibration`
    (batches of inputs, or of (inputs, target)) factors are best for the layers' own inputs and
    for what the network does with their outputs, as `config.metric` says; without it for the plain
    norm of the weights. `on_layer(done, total, name)` is told of each.
    The weights the model had become the original's, from which drift is measured.
    """
    config, example = config or ElasticConfig(), unlabelled(example)
    if STATE in model.__dict__:
        raise ConvertError("the model is elastic already")
    if config.spectral and calibration is not None:
        raise ConvertError(
            "spectral factors are orthonormal, those best for data are not: "
            "leave out the calibration data, or spectral=True"
        )
    if isinstance(calibration, Tensor | Mapping):
        raise DataError("calibration data is an iterable of batches: give a loader, or [inputs]")
    check_inputs(example, "the example")
    replaced: dict[str, nn.Module] = {}
    rewritten: dict[str, nn.Module] = {}
    try:
        with torch.no_grad(), evaluating(model):
            _check_loaded(model)
            plan = plan_conversion(model, example, config)
            _check_finite_parameters(model)
            before = _checked_output(model, example)
            rewritten = canonicalize_(model)
            original = _frozen_copy(model, plan)
            done, balance = 0, dict[str, float]()
            for layers, moments in _batches(plan, original, example, calibration, config):
                for layer in layers:
                    if on_layer is not None:
                        on_layer(done, len(plan.layers), layer.spec.name)
                    there, left = _replace_layer_(model, layer, moments, config)
                    replaced |= there
                    balance |= {} if left is None else {layer.spec.name: left}
                    done += 1
            moved = _elastic_output(model, plan, example) - before
            error = float(moved.norm() / before.norm().clamp_min(1e-12))
        if not error <= SAME:
            raise ConvertError(f"the elastic model differs from the original by {error:.3g}")
        model.__dict__[STATE] = ElasticState(original, plan, example)
    finally:
        if STATE not in model.__dict__:
            restore_(model, replaced)
            restore_(model, rewritten)
        else:
            for name, module in {**rewritten, **replaced}.items():
                model.get_submodule(name).train(module.training)
    return Report(plan, error, balance)


def _frozen_copy(model: nn.Module, plan: ConversionPlan) -> nn.Module:
    """A copy that takes over the weights about to be replaced: large models fit in memory once.

    Not those whose memory a parameter that stays uses too: training would move the original.
    """
    weights = [model.get_submodule(p.spec.name).weight for p in plan.layers]
    going = {id(weight) for weight in weights}
    staying = {p.untyped_storage().data_ptr() for p in model.parameters() if id(p) not in going}
    memo: dict[int, Any] = {
        id(w): nn.Parameter(w.detach(), requires_grad=False)
        for w in weights
        if isinstance(w, Tensor) and w.untyped_storage().data_ptr() not in staying
    }
    return copy.deepcopy(model, memo).requires_grad_(False)


def _batches(
    plan: ConversionPlan,
    original: nn.Module,
    example: Inputs,
    calibration: Iterable[Any] | None,
    config: ElasticConfig,
) -> Iterator[tuple[list[LayerPlan], dict[str, Moments]]]:
    """Layers with the moments of their inputs, as many at a time as memory is meant for."""
    if calibration is None:
        yield list(plan.layers), {}
        return
    data = [split_batch(batch)[0] for batch in calibration]
    for batch in data:
        check_like(batch, example, "the calibration data", texts=True)
    waiting: list[LayerPlan] = []
    size = 0
    for layer in plan.layers:
        sides = (_moment_side(layer.spec), min(layer.spec.out_channels, WIDEST))
        more = 8 * sum(side**2 for side in sides) if _needs_moments(layer) else 0
        if waiting and size + more > MOMENT_BYTES:
            yield waiting, _moments(original, waiting, data, config)
            waiting, size = [], 0
        waiting.append(layer)
        size += more
    yield waiting, _moments(original, waiting, data, config)


def _moments(
    model: nn.Module, layers: list[LayerPlan], data: list[Inputs], config: ElasticConfig
) -> dict[str, Moments]:
    specs = {name: p.spec for p in layers if _needs_moments(p) for name in p.modules}
    inputs = observe_moments(model, specs, data)
    few = list(first_samples(data, ADJOINT_SAMPLES))
    count = sum(len(tensors(batch)[0]) for batch in few)
    used = {name: spec for name, spec in specs.items() if use_matters(spec, count)}
    outputs = {}
    if config.metric == "both" and used:
        outputs = observe_adjoints(model, used, few)
    return {name: Moments(moment, outputs.get(name)) for name, moment in inputs.items()}


def _needs_moments(layer: LayerPlan) -> bool:
    """Whether a layer's stages are fitted to data: outputs that are left out need none."""
    return layer.rank_elastic and (not layer.spec.narrows or layer.spec.cuts_inputs)


def _moment_side(spec: LayerSpec) -> int:
    if spec.factorization is not Factorization.SVD:
        return spec.in_channels
    return prod(spec.dense_shape[1:])


def _replace_layer_(
    model: nn.Module, plan: LayerPlan, moments: dict[str, Moments], config: ElasticConfig
) -> tuple[dict[str, nn.Module], float | None]:
    """Put the elastic layers of one weight in place.

    Returns the modules that were there, by name, and what balancing left of the rounding error.
    """
    owner = model.get_submodule(plan.spec.name)
    assert isinstance(owner.weight, Tensor)
    elastic, left = elastic_weight(plan, owner.weight, moments.get(plan.spec.name), config)
    elastic.requires_grad_(owner.weight.requires_grad)
    replaced = {}
    for name in plan.modules:
        module = model.get_submodule(name)
        kind = elastic_type(module)
        assert kind is not None
        layer = kind(elastic, module)
        aliases = [n for n, m in model.named_modules(remove_duplicate=False) if m is module]
        for alias in aliases:
            replaced[alias] = module
            replace_(model, alias, layer)
    return replaced, left


def elastic_weight(
    plan: LayerPlan, weight: Tensor, moments: Moments | None, config: ElasticConfig
) -> tuple[ElasticWeight, float | None]:
    """Return a weight with its factors up to the plan's cap, and what balancing them by measuring
    left of the rounding error; None where they were not."""
    spec, weight, left = plan.spec, weight.detach(), None
    if not plan.rank_elastic:
        return ElasticWeight(spec, weight, None, plan.cap), left
    if spec.narrows:
        return narrow_weight(plan, weight, *(moments or (None, None))), left
    metrics = [None if moment is None else data_metric(moment) for moment in moments or ()]
    stages = factor_stages(spec, weight, plan.cap, *metrics)
    matrix = spec.factorization is Factorization.SVD
    if matrix and not config.spectral:
        moment = None if moments is None else moments.inputs
        reduce, expand = pair = [stage.flatten(1) for stage in stages]
        share = config.balance or 0.0
        if config.balance is None and moment is not None:
            share, error = best_balance(reduce, expand, moment)
            left = error if share else None
        if share:
            pair = [*balanced(reduce, expand, share, moment)]
        stages = tuple(new.reshape(old.shape) for new, old in zip(pair, stages, strict=True))
    factors = Spectral(*stages) if config.spectral and matrix else Product(stages)
    return ElasticWeight(spec, weight, factors, plan.cap), left


def narrow_weight(
    plan: LayerPlan, weight: Tensor, inputs: Tensor | None, outputs: Tensor | None
) -> ElasticWeight:
    """Return a weight that is narrowed, with the corrections of all widths where inputs are known.

    Without their moment nothing is known to make up for what is left out: corrections are zero.
    """
    spec, corrections = plan.spec, dict[int, tuple[Tensor, ...]]()
    for width in plan.ranks[:-1] if spec.correction else ():
        stages = tuple(weight.new_zeros(shape) for shape in spec.stage_shapes(width)[1:])
        if inputs is not None:
            rows = spec.corner(width)[0]
            metric = None if outputs is None else data_metric(outputs[:rows, :rows])
            stages = correction_stages(weight[:rows], inputs, width, spec.correction, metric)
        corrections[width] = stages
    return ElasticWeight(spec, weight, None, plan.cap, corrections)


def factor_stages(
    spec: LayerSpec,
    weight: Tensor,
    rank: int,
    metric: Metric | None = None,
    outputs: Metric | None = None,
) -> tuple[Tensor, ...]:
    """The factored stages of a weight, in order of execution."""
    if spec.factorization is Factorization.TUCKER1:
        return tucker1_stages(weight, rank, metric, outputs)
    if spec.factorization is Factorization.TUCKER2:
        return tucker2_stages(weight, spec.channel_ranks(rank), metric, outputs)
    if spec.factorization is Factorization.CP:
        return cp_stages(weight, rank, *((metric.root, metric.inverse) if metric else ()))
    stages = svd_stages(weight.flatten(1), rank, metric, outputs)
    shapes = spec.stage_shapes(rank)
    return tuple(stage.reshape(shape) for stage, shape in zip(stages, shapes, strict=True))


def _elastic_output(model: nn.Module, plan: ConversionPlan, example: Inputs) -> Tensor:
    """The elastic model's output; every layer that ran before has to run now."""
    ran: set[str] = set()
    names = {name for layer in plan.layers for name in layer.modules[:1]}
    watched = [(model.get_submodule(name), lambda *_, name=name: ran.add(name)) for name in names]
    with hooked(watched):
        output = run_example(model, example)
    for layer in plan.layers:
        if layer.spec.name not in ran:
            raise ConvertError(
                f"layer {layer.spec.name!r} is not called by its name: exclude it with "
                f"ElasticConfig(exclude=({layer.spec.name!r},))"
            )
    return output


def _check_loaded(model: nn.Module) -> None:
    for name, value in model.named_parameters():
        layer, _, what = name.rpartition(".")
        if isinstance(value, nn.parameter.UninitializedParameter):
            raise ConvertError(
                f"layer {layer!r}: its {what} is not initialized: run the model once"
            )
        if value.is_meta:
            raise ConvertError(
                f"layer {layer!r}: its {what} is on the meta device and has no values: "
                "load the weights first"
            )


def _check_finite_parameters(model: nn.Module) -> None:
    for name, value in model.named_parameters():
        if not bool(torch.isfinite(value).all()):
            raise ConvertError(f"parameter {name!r} holds NaN or infinite values")


def _checked_output(model: nn.Module, example: Inputs) -> Tensor:
    output = run_example(model, example)
    batch = tensors(example)[0].shape[0]
    if output.dim() < 2 or output.shape[0] != batch:
        raise ConvertError(
            f"the output has shape {tuple(output.shape)} for {batch} samples: "
            "(samples, outputs, ...) is needed"
        )
    return output
