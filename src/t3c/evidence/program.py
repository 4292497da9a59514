"""A network on the way from the original to a profile, as one differentiable function.

At `share` 0 it is the original, at 1 the profile as it is deployed, activation rounding included:
weights are W + share dW, and a rounded tensor is x + share (Q(x) - x). The change of the output is
then the integral of its derivative along `share`; the derivative at 0 is the first-order drift.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor
from torch.nn import functional as F

from t3c.artifact.manifest import ELASTIC_DOMAIN, elastic_kind, elastic_layer
from t3c.artifact.reader import Artifact
from t3c.device.execution import Execution
from t3c.engines.decode import empty_states
from t3c.engines.torch_operations import OPERATIONS
from t3c.evidence.original import Original
from t3c.factor.compose import compose
from t3c.graph.aligning import execution
from t3c.graph.assemble import rounded_tensors
from t3c.quant.grid import activation_grid
from t3c.spec import MAX_BITS, LayerSpec


@dataclass(frozen=True)
class Grid:
    """The 8-bit grid of a rounded tensor."""

    scale: float
    low: float
    high: float

    def rounded(self, x: Tensor) -> Tensor:
        return (torch.round(x / self.scale) * self.scale).clamp(self.low, self.high)

    def clipped(self, x: Tensor) -> Tensor:
        return x.clamp(self.low, self.high)


@dataclass(frozen=True)
class Layer:
    """A layer of the original and as it is executed: stages, and grids of what is between them.

    Each use of the layer has its own grids, `inner` by the name of the use.
    """

    spec: LayerSpec
    weight: Tensor
    stages: tuple[Tensor, ...]
    inner: Mapping[str, tuple[Grid, ...]]

    @cached_property
    def change(self) -> Tensor:
        """What the executed weight is more than the original's."""
        return compose(self.stages).reshape(self.weight.shape) - self.weight


@dataclass(frozen=True)
class Use:
    """One use of a layer in the graph."""

    name: str
    layer: str
    kind: str


@dataclass(frozen=True)
class Executed:
    """A profile beside the original, tensor by tensor; `dense_change` of those that differ."""

    layers: Mapping[str, Layer]
    dense: Mapping[str, Tensor]
    dense_change: Mapping[str, Tensor]
    grids: Mapping[str, Grid]


Visit = Callable[[onnx.NodeProto, Sequence[Tensor | None], Sequence[Tensor]], object]
Tap = Callable[[Use, Tensor, Tensor], Tensor]  # what goes into a use and comes out; what goes on


class Program:
    """The topology of an artifact, interpreted in torch between the original and a profile."""

    def __init__(self, artifact: Artifact, dtype: torch.dtype = torch.float32) -> None:
        graph = artifact.graph().graph
        self.specs = artifact.manifest.specs
        self.dtype = dtype
        self.inputs = [entry.name for entry in artifact.manifest.model.inputs]
        self.states = artifact.manifest.model.states
        self.output = graph.output[0].name
        self.nodes = list(graph.node)
        made = {name for node in graph.node for name in node.output} | set(self.inputs)
        rounded = frozenset(rounded_tensors(artifact, graph)) & made  # no constants
        self.rounded = frozenset() if artifact.weight_only else rounded
        self.integers = {
            i.name: torch.from_numpy(numpy_helper.to_array(i).copy()) for i in graph.initializer
        }
        self.attributes = [
            {a.name: helper.get_attribute_value(a) for a in node.attribute} for node in self.nodes
        ]
        self.last_use = {
            name: index for index, node in enumerate(self.nodes) for name in node.input
        }

    @property
    def uses(self) -> list[Use]:
        return [self.use(node) for node in self.nodes if node.domain == ELASTIC_DOMAIN]

    def use(self, node: onnx.NodeProto) -> Use:
        layer = elastic_layer(node)
        return Use(node.name, layer, elastic_kind(node, self.specs[layer]))

    def __call__(
        self,
        executed: Executed,
        inputs: Sequence[Tensor],
        share: Tensor | float = 0.0,
        *,
        tap: Tap = lambda use, into, out: out,
        visit: Visit | None = None,
    ) -> Tensor:
        """The output (n, ...) at a share of the way; `tap` may change what layers put out."""
        moved = not isinstance(share, float) or share != 0.0
        answer = torch.empty(0)
        values: dict[str, Tensor] = dict(self.integers)
        values |= executed.dense
        for name, change in executed.dense_change.items() if moved else ():
            values[name] = values[name] + share * change
        grids = {name: executed.grids[name] for name in self.rounded} if moved else {}
        for name, given in zip(self.inputs, inputs, strict=True):
            values[name] = _partly_rounded(self._float(given), grids.get(name), share)
        for state in self.states:
            (empty,) = empty_states([state], len(inputs[0]))
            values[state.input] = self._float(torch.from_numpy(empty))
        at = {
            name: layer.weight + share * layer.change if moved else layer.weight
            for name, layer in executed.layers.items()
        }
        for index, node in enumerate(self.nodes):
            arguments = [values[name] if name else None for name in node.input]
            if node.domain == ELASTIC_DOMAIN:
                result: Tensor | tuple[Tensor, ...] = self._layer(
                    node, executed, arguments, at, share if moved else 0.0, tap
                )
            else:
                result = OPERATIONS[node.op_type](self.attributes[index], *arguments)
            parts = result if isinstance(result, tuple) else (result,)
            made = [self._float(value) for value in parts]
            if visit is not None:
                visit(node, arguments, made)
            for name, value in zip(node.output, made, strict=False):
                # Whatever reads a rounded tensor reads it rounded, but the user.
                values[name] = _partly_rounded(value, grids.get(name), share)
                if name == self.output:
                    answer = value
            for name in node.input:
                if self.last_use.get(name) == index:
                    values.pop(name, None)
        return answer

    def _layer(
        self,
        node: onnx.NodeProto,
        executed: Executed,
        arguments: Sequence[Tensor | None],
        at: Mapping[str, Tensor],
        share: Tensor | float,
        tap: Tap,
    ) -> Tensor:
        use = self.use(node)
        layer, x = executed.layers[use.layer], arguments[0]
        bias = arguments[1] if len(arguments) > 1 else None
        assert x is not None
        out = apply(use.kind, layer.spec, at[use.layer], x)
        if not isinstance(share, float) or share:
            out = out + share * inner_rounding(use, layer, x)
        if bias is not None:
            out = out + along_channels(use.kind, layer.spec, bias)
        return tap(use, x, out)

    def _float(self, value: Tensor) -> Tensor:
        return value.to(self.dtype) if value.is_floating_point() else value


def executed(
    artifact: Artifact,
    original: Original,
    deployed: Execution,
    weight_bits: int,
    dtype: torch.dtype,
) -> Executed:
    """A profile as a device executes it, beside the original, in one precision."""

    def real(array: Any) -> Tensor:
        return torch.from_numpy(np.asarray(array, dtype=np.float64)).to(dtype)

    grids = {name: _grid(*limits) for name, limits in deployed.ranges.items()}
    uses: dict[str, list[str]] = {name: [] for name in deployed.profile.points}
    for node in artifact.graph().graph.node:
        if node.domain == ELASTIC_DOMAIN:
            uses[elastic_layer(node)].append(node.name)
    layers, mine = {}, artifact.dense(deployed.profile.name)
    for name in deployed.profile.points:
        stored = artifact.weights(deployed.profile, name)
        spec = artifact.entries[name].spec
        bits = MAX_BITS if artifact.weight_only else weight_bits
        run = execution(mine, spec, stored, deployed.forms[name], bits)
        ends = () if artifact.weight_only else run.inner
        inner = {use: tuple(grids[f"{use}/{end}"] for end in ends) for use in uses[name]}
        stages, weight = tuple(real(weight) for weight in run.weights), real(original.weights[name])
        if spec.narrows:
            stages = (_as_wide(stages[0], weight),)
        layers[name] = Layer(spec, weight, stages, inner)
    dense = {name: real(value) for name, value in original.dense.items()}
    change = {name: _difference(real(mine[name]), value) for name, value in dense.items()}
    moved = {name: value for name, value in change.items() if bool(value.any())}
    return Executed(layers, dense, moved, grids)


def _as_wide(weight: Tensor, original: Tensor) -> Tensor:
    """A narrowed weight as wide as the original: zeros for inputs that are left out.

    Nothing reads the outputs that are left out, so that they may as well be the original's.
    """
    wide = original.clone()
    wide[: len(weight)] = 0.0
    wide[: len(weight), : weight.shape[1]] = weight
    return wide


def unchanged(artifact: Artifact, original: Original, dtype: torch.dtype) -> Executed:
    """The original beside itself."""
    layers = {}
    for name, weight in original.weights.items():
        dense = torch.from_numpy(weight).to(dtype)
        layers[name] = Layer(artifact.entries[name].spec, dense, (dense,), {})
    rest = {
        name: torch.from_numpy(value.copy()).to(dtype) for name, value in original.dense.items()
    }
    return Executed(layers, rest, {}, {})


def apply(kind: str, spec: LayerSpec, weight: Tensor, x: Tensor) -> Tensor:
    """One use of a dense weight, without a bias."""
    if kind == "embedding":
        return F.embedding(x, weight)
    if kind == "linear":
        return F.linear(x, weight)
    conv = F.conv1d if len(spec.kernel) == 1 else F.conv2d
    return conv(x, weight, None, spec.stride, spec.padding, spec.dilation, spec.groups)


def stage_outputs(use: Use, layer: Layer, x: Tensor, *, rounded: bool) -> list[Tensor]:
    """What each executed stage puts out, with what is between them rounded or not."""
    spec, outs, kind = layer.spec, [], use.kind
    if len(layer.stages) == 1 or kind == "embedding":
        return [apply(kind, spec, layer.stages[0], x)]
    groups = spec.stage_groups(layer.stages[0].shape[0])
    for index, stage in enumerate(layer.stages):
        if kind == "linear":
            x = F.linear(x, stage)
        else:
            conv: Callable[..., Tensor] = F.conv1d if len(spec.kernel) == 1 else F.conv2d
            plain = index != spec.strided_stage()
            geometry = (1, 0, 1) if plain else (spec.stride, spec.padding, spec.dilation)
            x = conv(x, stage, None, *geometry, groups[index])
        outs.append(x)
        if rounded and index < len(layer.inner[use.name]):
            x = layer.inner[use.name][index].rounded(x)
    return outs


def inner_rounding(use: Use, layer: Layer, x: Tensor) -> Tensor:
    """What rounding between the stages adds to the output of a layer."""
    if len(layer.stages) == 1 or use.kind == "embedding":
        return torch.zeros((), dtype=layer.weight.dtype)
    with torch.no_grad():
        still = x.detach()
        outs = [stage_outputs(use, layer, still, rounded=flag)[-1] for flag in (True, False)]
        return outs[0] - outs[1]


def along_channels(kind: str, spec: LayerSpec, bias: Tensor) -> Tensor:
    """A bias (out,) in the shape in which it is added to a layer's output."""
    return bias.reshape(-1, *([1] * len(spec.kernel))) if kind == "conv" else bias


def _partly_rounded(x: Tensor, grid: Grid | None, share: Tensor | float) -> Tensor:
    if grid is None:
        return x
    still = x.detach()
    return x + share * (grid.rounded(still) - still).detach()


def _difference(mine: Tensor, other: Tensor) -> Tensor:
    """mine - other, where infinities that are equal differ by nothing."""
    return torch.where(mine == other, torch.zeros_like(other), mine - other)


def _grid(low: float, high: float) -> Grid:
    scale, zero = activation_grid(low, high)
    step, start, limits = float(scale), int(zero), np.iinfo(zero.dtype)
    return Grid(step, step * (limits.min - start), step * (limits.max - start))


def rows(value: Tensor, samples: int) -> Tensor:
    """A tensor as one row a sample (n, rest); one that all samples share is repeated."""
    if value.shape[0] == 1 != samples:
        value = value.expand(samples, *value.shape[1:])
    return value.reshape(samples, math.prod(value.shape) // samples)
