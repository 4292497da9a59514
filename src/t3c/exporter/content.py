"""The content of an artifact: packed layers, topology, other tensors, activation ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from onnx import GraphProto
from torch import nn

from t3c.artifact.draft import Draft, drafted
from t3c.artifact.graph import Axes, Traced, trace
from t3c.artifact.manifest import (
    CONTROLLER,
    ELASTIC_DOMAIN,
    NORMS,
    RANGES,
    ControllerEntry,
    KernelEntry,
    LayerEntry,
    Manifest,
    NumericsEntry,
    UnitEntry,
    elastic_layer,
    layer_entry,
)
from t3c.artifact.reader import Artifact
from t3c.artifact.store import Floats, StageCodes, Tensors, pack_layer, stage_names
from t3c.artifact.trim import part_of
from t3c.artifact.upgrade import SCHEMA_VERSION
from t3c.artifact.writer import write_content
from t3c.certify.slices import sample_keys
from t3c.convert import state_of
from t3c.engines import ENGINES
from t3c.engines.torch import TorchSession
from t3c.engines.torch_operations import OPERATIONS
from t3c.errors import ConvertError
from t3c.evidence.drifts import arrays
from t3c.evidence.original import refuse_batch_statistics
from t3c.exporter.allocate import Allocated
from t3c.exporter.described import Described
from t3c.exporter.norms import normed_by, stored_norms
from t3c.graph.aligning import align_layer, from_reduced, kept_columns
from t3c.graph.assemble import assemble, quantized_inputs, summed_inputs
from t3c.nn.inputs import Inputs, batches_of
from t3c.nn.view import dense_copy, elastic_weights
from t3c.nn.weight import ElasticWeight
from t3c.quant.ranges import Spread
from t3c.quant.straight_through import (
    VIEWS,
    group_levels,
    group_shares,
    row_scale,
    view_scale,
)
from t3c.spec import CORRECTION_BITS, Form, LayerPoint, Level, Profile
from t3c.version import __version__

BATCH = 64
COUNTED = 16  # samples of each batch whose values are counted; the extremes are those of all


def topology(model: nn.Module, axes: Axes | None = None) -> Traced:
    """The topology of an elastic model; refused if the reference engine lacks an operation."""
    refuse_batch_statistics(state_of(model).original)
    specs = {name: weight.spec for name, weight in elastic_weights(model).items()}
    traced = trace(dense_copy(model), state_of(model).example, specs, axes)
    kinds = {node.op_type for node in traced.model.graph.node if node.domain != ELASTIC_DOMAIN}
    missing = sorted(kinds - OPERATIONS.keys())
    if missing:
        raise ConvertError(
            f"the model uses {', '.join(missing)}, which the torch reference engine does not have: "
            "add it to OPERATIONS in t3c/engines/torch_operations.py"
        )
    return traced


def pack(described: Described, allocated: Allocated) -> Draft:
    """Round the layers of a model to codes that all profiles read; no profile has ranges yet."""
    traced, weights = described.traced, elastic_weights(described.model)
    entries, factors, normed = [], Tensors(), normed_by(described.model, traced)
    dense: Tensors = dict(traced.dense)
    for profile, norms in allocated.norms.items():
        dense[f"{NORMS}{profile}"] = stored_norms(described.model, traced, normed, norms)
    for name, weight in weights.items():
        entry = _entry(weight, allocated, traced)
        codes = _pack(entry, weight, traced)
        if not described.weight_only:
            assert weight.group is None, f"{name}: its kernels have one grid a row"
            points = [profile.points[name] for profile in allocated.profiles]
            unrounded = partial(_float_weight, weight, traced)
            entry, pivots = align_layer(codes, entry, points, unrounded)
            dense |= pivots
        entries.append(entry)
        factors |= codes
    if allocated.control is not None:
        arrays = allocated.control.policy.tensors()
        dense |= {f"{CONTROLLER}{tensor}": value for tensor, value in arrays.items()}
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        t3c_version=__version__,
        model=described.entry.model_copy(update={"normed": normed}),
        layers=(),
        profiles=(),
        seeds={"export": described.seed},
        files={},
        numerics=NumericsEntry(
            activations="float32" if described.weight_only else "int8",
            activation_zero="range",
            weight_scales="groups" if any(entry.group for entry in entries) else "per-row",
        ),
    )
    manifest = _with_profiles(manifest, traced.model.graph, tuple(entries), allocated)
    graph = traced.model.SerializeToString()
    return Draft(manifest, graph, factors, dense, described.tokenizer)


def narrowed(packed: Draft, allocated: Allocated) -> Draft:
    """Return as much of what was packed as these profiles need."""
    entries, factors, dense = part_of(packed, allocated.profiles)
    manifest = _with_profiles(packed.manifest, packed.graph().graph, entries, allocated)
    return Draft(manifest, packed.topology, factors, dense, packed.tokenizer)


def ranged(draft: Draft, samples: Inputs) -> Draft:
    """Return a draft with the activation ranges of each profile, observed as it is compressed."""
    keys = tuple(sample_keys(arrays(samples)))
    dense = dict(draft.tensors)
    for profile in draft.manifest.chain if not draft.weight_only else ():
        dense[f"{RANGES}{profile.name}"] = observe_ranges(draft, profile, samples)
    manifest = draft.manifest.model_copy(update={"calibrated_on": keys})
    return Draft(manifest, draft.topology, draft.factors, dense, draft.tokenizer)


def write(folder: Path, packed: Draft, allocated: Allocated, samples: Inputs) -> Artifact:
    """Write as much of what was packed as these profiles need, with ranges from the samples."""
    write_content(folder, ranged(narrowed(packed, allocated), samples))
    return Artifact(folder)


def _with_profiles(
    manifest: Manifest, graph: GraphProto, entries: tuple[LayerEntry, ...], allocated: Allocated
) -> Manifest:
    """Return a manifest with these profiles, and all that follows from them."""
    weight_only = manifest.numerics.activations == "float32"
    quantized = () if weight_only else _quantized_tensors(graph, entries)
    update = {
        "model": manifest.model.model_copy(update={"quantized": quantized}), "layers": entries,
        "profiles": drafted(allocated.profiles), "controller": controller_entry(allocated),
        "kernels": _kernels(entries, allocated, weight_only),
    }  # fmt: skip
    return manifest.model_copy(update=update)


def _kernels(
    entries: Sequence[LayerEntry], allocated: Allocated, weight_only: bool
) -> dict[str, KernelEntry]:
    """What every engine has to have: the forms that points can be executed in, types of weights."""
    points = [
        (e.spec, profile.points[e.spec.name]) for e in entries for profile in allocated.profiles
    ]
    forms = sorted({form for spec, point in points for form in spec.forms(point)})
    four = weight_only and any(point.bits <= 4 for _, point in points)
    kernel = KernelEntry(forms=tuple(forms), weights=("int4", "int8") if four else ("int8",))
    return dict.fromkeys(sorted(ENGINES), kernel)


def controller_entry(allocated: Allocated) -> ControllerEntry | None:
    """What the manifest says of the controller that proposed the profiles."""
    control = allocated.control
    if control is None:
        return None
    about, names = control.policy.about, [profile.name for profile in allocated.profiles]

    def stored(level: Level) -> LayerPoint:
        return LayerPoint(level.level, level.bits)

    return ControllerEntry(
        units=tuple(
            UnitEntry(name=n, points=tuple(map(stored, levels)))
            for n, levels in about.units.items()
        ),
        devices=about.devices, summarized=about.summarized, token=about.token,
        profiles={n: {u: stored(x) for u, x in control.profiles[n].items()} for n in names},
        shares={name: control.shares[name] for name in names},
    )  # fmt: skip


def float_session(artifact: Artifact, profile: Profile) -> TorchSession:
    """A profile as stored, factored, with activations left in float, in the reference engine."""
    forms = {
        name: artifact.entries[name].spec.forms(point)[0] for name, point in profile.points.items()
    }
    return TorchSession(assemble(artifact, profile, forms, ranges=None))


def observe_ranges(artifact: Artifact, profile: Profile, samples: Inputs) -> Floats:
    """Return the range (low, high) of each quantized tensor on the compressed model that leaves the
    least error of rounding; NaN where a tensor does not occur."""
    names = artifact.manifest.model.quantized
    spreads = {name: Spread() for name in names}
    aligning = _from_reduced(artifact, profile)

    def watch(name: str, value: torch.Tensor) -> None:
        if name in aligning:
            use, matrix = aligning[name]
            watch(f"{use}/aligned", value @ matrix.T)
        if name in spreads:
            spreads[name].widen(value)
            spreads[name].add(value[:COUNTED])

    session = float_session(artifact, profile)
    for batch in batches_of(samples, BATCH):
        session.observe(arrays(batch), watch)
    ranges = [spread.fitted() if spread.seen else (np.nan, np.nan) for spread in spreads.values()]
    return np.array(ranges, dtype=np.float32).reshape(len(names), 2)


def _from_reduced(artifact: Artifact, profile: Profile) -> dict[str, tuple[str, torch.Tensor]]:
    """By the reduced input of each use of a layer that can be aligned: the use, and the matrix
    (k, k) that makes the inner tensor of the aligned form of it."""
    found, specs, dense = {}, artifact.manifest.specs, artifact.dense()
    for node in artifact.graph().graph.node:
        layer = elastic_layer(node) if node.domain == ELASTIC_DOMAIN else None
        if layer is not None and Form.ALIGNED in specs[layer].forms(profile.points[layer]):
            point = profile.points[layer]
            kept = kept_columns(dense, specs[layer], point.rank)
            matrix = from_reduced(artifact.stages(layer, point), kept).astype(np.float32)
            found[f"{node.name}/stage0"] = node.name, torch.from_numpy(matrix)
    return found


@torch.no_grad()
def _float_weight(weight: ElasticWeight, traced: Traced, rank: int) -> npt.NDArray[np.float64]:
    """What the factors of a linear layer stand for at a rank before they are rounded (out, in)."""
    reduce, expand = (stage.cpu().double().numpy() for stage in weight.stored_stages())
    rows = traced.folded.get(weight.spec.name, np.ones(len(expand), np.float32))
    return np.asarray(rows[:, None] * (expand[:, :rank] @ reduce[:rank]))


def _entry(layer: ElasticWeight, allocated: Allocated, traced: Traced) -> LayerEntry:
    """A layer with what the profiles use of it."""
    name = layer.spec.name
    points = [profile.points[name] for profile in allocated.profiles]
    spec = layer.spec.per_token if traced.stateful else layer.spec
    return layer_entry(
        spec, allocated.menus[name], points, folded_norm=name in traced.folded, group=layer.group
    )


@torch.no_grad()
def _pack(entry: LayerEntry, weight: ElasticWeight, traced: Traced) -> Tensors:
    name, spec = weight.spec.name, weight.spec
    factor = torch.from_numpy(traced.folded.get(name, np.ones(spec.out_channels, np.float32)))
    views = sorted({*entry.dense_bits, *(entry.bits if spec.narrows else ())})
    dense = None
    if views:
        dense = _codes(weight.dense, weight.dense_gains, factor, views, weight.group)
    stages: dict[str, StageCodes] = {}
    if spec.narrows:
        for rank in entry.ranks:
            stages |= _correction_codes(weight, rank, factor)
    elif entry.ranks:
        stored, names = weight.stored_stages(), stage_names(spec, entry.ranks[-1])
        for index, (part, stage) in enumerate(zip(names, stored, strict=True)):
            bits = sorted({spec.stage_bits(q)[index] for q in entry.bits})
            last = factor if index == len(stored) - 1 else None
            gains, group = weight.stage_gains[index], weight.stage_groups[index]
            stages[part] = _codes(stage, gains, last, bits, group)
    return pack_layer(entry, dense, stages)


def _correction_codes(
    weight: ElasticWeight, rank: int, factor: torch.Tensor
) -> dict[str, StageCodes]:
    """The correction of one width, whose views have no gains of their own."""
    found, stages = {}, weight.corrections_at(rank)
    for part, stage in zip(stage_names(weight.spec, rank)[1:], stages, strict=True):
        last = factor[: len(stage)] if stage is stages[-1] else None
        found[part] = _codes(stage, torch.zeros(len(VIEWS), len(stage)), last, [CORRECTION_BITS])
    return found


def _codes(
    weight: torch.Tensor,
    gains: torch.Tensor,
    factor: torch.Tensor | None,
    bits: Iterable[int],
    group: int | None = None,
) -> StageCodes:
    """A stage ready to be stored; of a factor on its rows the sign goes into the codes, the size
    into the scales, so that the codes are those of training."""
    weight, gains, shares = weight.cpu(), gains.cpu(), None
    if group is not None:
        shares = group_shares(weight, group).byte().numpy()
        weight = weight / group_levels(weight, group)
    grid = row_scale(weight)
    size = torch.ones_like(grid)
    if factor is not None:
        # A scale is positive, also that of a row which is switched off.
        size = factor.abs().clamp_min(max(1e-4 * float(factor.abs().max()), 1e-8))
        sign = torch.where(factor < 0, -1.0, 1.0)
        weight = weight * sign.reshape(-1, *([1] * (weight.dim() - 1)))
    views = {q: (view_scale(weight, gains, q) * size).numpy() for q in bits}
    return StageCodes(weight.contiguous().numpy(), grid.numpy(), views, shares)


def _quantized_tensors(graph: GraphProto, entries: tuple[LayerEntry, ...]) -> tuple[str, ...]:
    """Inputs of elastic layers, what passes between the stages of factored ones, and summands."""
    named = {entry.spec.name: entry for entry in entries}
    names = quantized_inputs(graph, {name: entry.spec for name, entry in named.items()})
    names += sorted(summed_inputs(graph, names))
    for node in [node for node in graph.node if node.domain == ELASTIC_DOMAIN]:
        entry = named[elastic_layer(node)]
        factored = bool(entry.ranks) and not entry.spec.narrows
        inner = len(entry.spec.stage_shapes(entry.ranks[0])) - 1 if factored else 0
        names += [f"{node.name}/stage{index}" for index in range(inner)]
        names += [f"{node.name}/aligned"] if entry.spec.aligned else []
    return tuple(dict.fromkeys(names))
