"""The worst case: a deterministic bound on drift, sound at every input it is evaluated at.

One pass through the original in float64 carries, beside each tensor a, a bound e on ||a~ - a||.
A layer gives e_out <= ||W~|| e_in + ||(W~ - W) a||, a rounded tensor
e <= e_in + ||clip(a) - a|| + (s / 2) sqrt(numel): a clip brings no two points further apart. Nor
is a rounded tensor ever further than the far end of its grid, so that errors do not run away in
deep networks. The bound is of the graph as it is written, in exact arithmetic; an engine's own
rounding of float32 sums is not part of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx
import torch
from torch import Tensor

from t3c.artifact.manifest import ELASTIC_DOMAIN
from t3c.certify.norms import SLACK, convolution_bound, layer_bound, matrix_bound
from t3c.evidence.operands import Operand, Origin, Step, StoppedError
from t3c.evidence.program import (
    Executed,
    Grid,
    Layer,
    Program,
    Use,
    along_channels,
    apply,
    stage_outputs,
)
from t3c.evidence.rules import RULES
from t3c.spec import Factorization, Kind, LayerSpec


@dataclass(frozen=True)
class Norms:
    """Upper bounds on the norm of each stage of an executed layer.

    Between stages, channels are measured in units of their own, `units` (channels,) each: a clip
    and a grid act on single values, so they bring nothing further apart in any units, and in the
    right ones the product of the stages' norms is close to the norm of the whole.
    """

    stages: tuple[float, ...]
    units: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class WorstCase:
    """||z~ - z|| of one sample is at most `bound`; None, and `stopped`, where no rule is known.

    `layers` is the bound at the output of each use of a layer, relative to that output's norm.
    """

    bound: float | None
    size: float
    stopped: str = ""
    layers: Mapping[str, float] = field(default_factory=dict)


def norms_of(program: Program, executed: Executed) -> dict[str, Norms]:
    """The norms of all layers of a profile, a table that is also multiplied by as a matrix."""
    kinds: dict[str, set[str]] = {}
    for use in program.uses:
        kinds.setdefault(use.layer, set()).add(use.kind)
    return {
        name: _norms(layer, kinds[name]) for name, layer in executed.layers.items() if name in kinds
    }


@torch.no_grad()
def worst_cases(
    program: Program, executed: Executed, norms: Mapping[str, Norms], inputs: Sequence[Tensor]
) -> list[WorstCase]:
    """The worst case at each sample; float64 throughout."""
    assert program.dtype == torch.float64
    found = []
    constants: dict[str, float] = {}
    for index in range(len(inputs[0])):
        recursion = Recursion(program, executed, norms, constants)
        output = program(
            executed, [value[index : index + 1] for value in inputs], visit=recursion.visit
        )
        found.append(recursion.result(output))
    return found


class Recursion:
    """Bounds on every tensor of one sample, made as the original runs.

    A bound that no rule gives is infinite, with the operation that stopped it kept; a rounding, a
    norm or a softmax behind it bounds its output all the same.
    """

    def __init__(
        self,
        program: Program,
        executed: Executed,
        norms: Mapping[str, Norms],
        constants: dict[str, float],
    ) -> None:
        self.program, self.executed, self.norms = program, executed, norms
        self.constants = constants
        self.errors: dict[str, float] = {}
        self.stops: dict[str, str] = {}
        self.makers = {name: node for node in program.nodes for name in node.output}
        self.order = {id(node): index for index, node in enumerate(program.nodes)}
        self.layers: dict[str, float] = {}

    def visit(
        self, node: onnx.NodeProto, arguments: Sequence[Tensor | None], made: Sequence[Tensor]
    ) -> None:
        for name, value in zip(node.input, arguments, strict=True):
            if name in self.program.inputs and name not in self.errors and value is not None:
                self.errors[name] = self._rounded(name, value, 0.0)
        stop = str(node.op_type)
        try:
            error = self._error(node, arguments, made)
        except StoppedError as stopped:
            error, stop = math.inf, str(stopped)
        if not math.isfinite(error):
            error = math.inf
            earlier = [self.stops[name] for name in node.input if name in self.stops]
            stop = earlier[0] if earlier else stop
        for name, value in zip(node.output, made, strict=False):
            self.errors[name] = self._rounded(name, value, error)
            if self.errors[name] == math.inf:
                self.stops[name] = stop

    def result(self, output: Tensor) -> WorstCase:
        name, size = self.program.output, float(output.norm())
        if name in self.stops:
            return WorstCase(None, size, self.stops[name], self.layers)
        return WorstCase(self.errors[name], size, layers=self.layers)

    def _error(
        self, node: onnx.NodeProto, arguments: Sequence[Tensor | None], made: Sequence[Tensor]
    ) -> float:
        operands = [
            None if value is None else self._operand(name, value)
            for name, value in zip(node.input, arguments, strict=True)
        ]
        if node.domain == ELASTIC_DOMAIN:
            return self._layer(node, operands, made[0])
        if not any(o.error for o in operands if o is not None):
            return 0.0
        if node.op_type not in RULES:
            raise StoppedError(node.op_type)
        attributes = self.program.attributes[self.order[id(node)]]
        return RULES[node.op_type](Step(node, attributes, operands, made, self.constants))

    def _operand(self, name: str, value: Tensor) -> Operand:
        if name in self.executed.dense:
            change = self.executed.dense_change.get(name, torch.zeros_like(value))
            return Operand(value, float(change.norm()), change, self._origin(name))
        return Operand(value, self.errors.get(name, 0.0), None, self._origin(name))

    def _origin(self, name: str) -> Origin:
        constant = self.executed.dense.get(name)
        known = constant is not None and constant.numel() == 1
        exact = float(constant) if constant is not None and known else None
        if name in self.executed.dense_change:
            exact = None
        rounded = name in self.program.rounded
        return Origin(name, self.makers.get(name), rounded, self._origin, exact)

    def _rounded(self, name: str, value: Tensor, error: float) -> float:
        if name not in self.program.rounded or name == self.program.output:
            return error
        return _after_rounding(self.executed.grids[name], value, error)

    def _layer(
        self, node: onnx.NodeProto, operands: Sequence[Operand | None], out: Tensor
    ) -> float:
        x = operands[0]
        assert x is not None
        use = self.program.use(node)
        layer = self.executed.layers[use.layer]
        self._check_size(use, layer.spec, x.value)
        error = float(apply(use.kind, layer.spec, layer.change, x.value).norm())
        if use.kind != "embedding":
            error += self._through_stages(use, layer, x)
        elif x.error:
            raise StoppedError("an embedding of ids that are not certain")
        bias = operands[1] if len(operands) > 1 else None
        if bias is not None:
            error += bias.error * math.sqrt(out.numel() / bias.value.numel())
        self.layers[use.name] = error / max(float(out.norm()), 1e-12)
        return error

    def _check_size(self, use: Use, spec: LayerSpec, x: Tensor) -> None:
        """A convolution's norm is at the size of its spec; at a wider input it may be larger."""
        sides = x.shape[-len(spec.kernel) :]
        if use.kind == "conv" and any(a > b for a, b in zip(sides, spec.in_size, strict=True)):
            raise StoppedError(f"{use.name} at another size than its norm is of")

    def _through_stages(self, use: Use, layer: Layer, x: Operand) -> float:
        """What the input's error, and rounding between the stages, add to a layer's output."""
        norms = self.norms[use.layer]
        error = norms.stages[0] * x.error
        if len(layer.stages) == 1:
            return error
        outs = stage_outputs(use, layer, x.value, rounded=False)
        for index, grid in enumerate(layer.inner[use.name]):
            units = along_channels(use.kind, layer.spec, norms.units[index])
            error = norms.stages[index + 1] * _after_rounding(grid, outs[index], error, units)
        # Where nothing is rounded between them, the error passes through the other stages alone.
        return error * math.prod(norms.stages[len(layer.inner[use.name]) + 1 :])


def _after_rounding(grid: Grid, value: Tensor, error: float, units: Tensor | None = None) -> float:
    """How far a rounded tensor may be from `value`, before which it was within `error`.

    Codes are finite: whatever came before, it is no further than the far end of the grid.
    """
    weight = torch.ones((), dtype=torch.float64) if units is None else units
    clipped = float(((grid.clipped(value) - value) * weight).norm())
    stepped = error + clipped + grid.scale / 2 * float(weight.expand_as(value).norm())
    furthest = torch.maximum((value - grid.low).abs(), (value - grid.high).abs())
    return min(stepped, float((furthest * weight).norm()) * SLACK)


def _norms(layer: Layer, kinds: set[str]) -> Norms:
    spec = replace(layer.spec, kind=Kind.LINEAR) if "linear" in kinds else layer.spec
    if len(layer.stages) == 1:
        return Norms((layer_bound(spec, layer.stages),))
    depthwise = [spec.factorization is Factorization.CP and i == 1 for i in range(3)]
    units = tuple(_units(stage, depthwise[i]) for i, stage in enumerate(layer.stages[1:], start=1))
    ends: tuple[Tensor | None, ...] = (None, *units, None)
    stages = [
        _in_units(stage, ends[i + 1], ends[i], depthwise[i]) for i, stage in enumerate(layer.stages)
    ]
    return Norms(tuple(_stage_norm(spec, i, stage) for i, stage in enumerate(stages)), units)


def _units(stage: Tensor, depthwise: bool) -> Tensor:
    """The norm (in,) of what a stage makes of each of its inputs: the outer stages then have
    columns of norm 1, and are nearly orthonormal where the factors are."""
    by_input = stage if depthwise else stage.transpose(0, 1)
    size: Tensor = by_input.flatten(1).norm(dim=1)
    return size.clamp_min(max(1e-9 * float(size.max()), 1e-30))


def _in_units(stage: Tensor, out: Tensor | None, into: Tensor | None, depthwise: bool) -> Tensor:
    """A stage between channels that are measured in other units."""
    ones = [1] * (stage.dim() - 2)
    if out is not None:
        stage = stage * out.reshape(-1, 1, *ones)
    if into is not None:
        stage = stage / into.reshape(*((-1, 1) if depthwise else (1, -1)), *ones)
    return stage


def _stage_norm(spec: LayerSpec, index: int, stage: Tensor) -> float:
    """Of one stage by itself; a pointwise one is a matrix wherever it stands."""
    if not spec.convolution or index != spec.strided_stage():
        return matrix_bound(stage.flatten(1))
    groups = spec.stage_groups(stage.shape[0])[index]
    return convolution_bound(
        stage, spec.in_size, padding=spec.padding, dilation=spec.dilation, groups=groups
    )
