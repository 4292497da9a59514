"""How far an operation can carry a bounded change of its inputs: rules of the worst case.

`RULES[name](step)` bounds ||f(x~) - f(x)|| for every x~ within the known distance of x, at the
values x of one sample. Nothing here is an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from torch import Tensor

from t3c.certify.norms import SLACK, convolution_bound, matrix_bound
from t3c.runtime.engines.torch_operations import OPERATIONS


class StoppedError(Exception):
    """The rules do not cover an operation; never seen by users, who are told its name."""


@dataclass(frozen=True)
class Operand:
    """One input of an operation: its value in the original, how far it may be, and how it is known.

    `change` is the exact difference of a constant, `maker` the operations that made the tensor.
    """

    value: Tensor
    error: float
    change: Tensor | None = None
    maker: Maker | None = None

    @property
    def largest(self) -> float:
        """No element of the changed tensor is larger."""
        if self.change is not None:
            return float((self.value + self.change).abs().max())
        return float(self.value.abs().max()) + self.error

    @property
    def moved(self) -> Tensor:
        """A constant as it is in the changed network."""
        return self.value if self.change is None else self.value + self.change


@dataclass(frozen=True)
class Maker:
    """The node behind a tensor, and those behind its inputs."""

    node: onnx.NodeProto
    behind: Callable[[str], Maker | None]

    def input(self, index: int) -> Maker | None:
        return self.behind(self.node.input[index])


@dataclass(frozen=True)
class Step:
    """One operation at one sample; `norms` keeps those of constants for the next sample."""

    node: onnx.NodeProto
    attributes: dict[str, Any]
    operands: Sequence[Operand | None]
    made: Sequence[Tensor]
    norms: dict[str, float]

    @property
    def x(self) -> Operand:
        return self.operand(0)

    def operand(self, index: int) -> Operand:
        found = self.operands[index]
        assert found is not None
        return found

    @property
    def given(self) -> list[Operand]:
        return [operand for operand in self.operands if operand is not None]

    def through(self, error: float, norm: Callable[[], float]) -> float:
        """An error times the norm of this node's constant, which is found when first needed."""
        if error == 0.0:
            return 0.0
        key = str(self.node.output[0])
        if key not in self.norms:
            self.norms[key] = norm()
        return self.norms[key] * error

    def spread(self, operand: Operand) -> float:
        """sqrt of how often an operand is repeated to fill the output."""
        return math.sqrt(max(1.0, self.made[0].numel() / max(1, operand.value.numel())))


def _scaled(factor: float) -> Callable[[Step], float]:
    """Rule of an elementwise or selecting operation that is Lipschitz with this constant."""
    return lambda step: factor * step.x.error


def _cast(step: Step) -> float:
    if not step.made[0].is_floating_point():
        raise StoppedError("Cast to whole numbers")
    return step.x.error


def _sum(step: Step) -> float:
    return sum(operand.error * step.spread(operand) for operand in step.given)


def _either(step: Step) -> float:
    """Each output is one of the inputs, or the larger or smaller of them."""
    return math.sqrt(sum((o.error * step.spread(o)) ** 2 for o in step.given))


def _where(step: Step) -> float:
    if step.x.error:
        raise StoppedError("Where by a condition that is not certain")
    return _either(step)


def _copied(step: Step) -> float:
    """A selection by exact indices, in which an element may stand several times."""
    if any(operand.error for operand in step.given[1:]):
        raise StoppedError(f"{step.node.op_type} by indices that are not certain")
    numbers = torch.arange(step.x.value.numel(), dtype=torch.float64).reshape(step.x.value.shape)
    rest = [None if o is None else o.value for o in step.operands[1:]]
    chosen = OPERATIONS[step.node.op_type](step.attributes, numbers, *rest)
    parts = chosen if isinstance(chosen, tuple) else (chosen,)
    most = max(int(torch.bincount(part.reshape(-1).long()).max()) for part in parts)
    return math.sqrt(most) * step.x.error


def _mul(step: Step) -> float:
    x, y = step.x, step.operand(1)
    for one, other in ((x, y), (y, x)):
        if is_sigmoid_of(other, one):
            return 1.1 * one.error  # SiLU
        found = rms_norm_of(other, one)
        if found is not None:
            return normalized(one.value.flatten(0, -2), one.error, found)
    if x.change is not None:
        x, y = y, x
    if y.change is not None:
        return y.largest * x.error * step.spread(x) + float((x.value * y.change).norm())
    first = y.largest * x.error * step.spread(x)
    return first + float(x.value.abs().max()) * y.error * step.spread(y)


def _div(step: Step) -> float:
    x, y = step.x, step.operand(1)
    nearest = float(y.value.abs().min()) - y.error
    if nearest <= 0:
        raise StoppedError("Div by what may be zero")
    ratio = float((x.value / y.value).abs().max())
    return (x.error * step.spread(x) + ratio * y.error * step.spread(y)) / nearest


def _pow(step: Step) -> float:
    power = step.operand(1)
    if power.error or power.value.numel() != 1 or float(power.value) != 2:
        raise StoppedError("Pow other than a square")
    return (2 * float(step.x.value.abs().max()) + step.x.error) * step.x.error


def _matmul(step: Step) -> float:
    x, y = step.x, step.operand(1)
    if y.change is not None and y.value.dim() == 2:
        through = step.through(x.error, lambda: matrix_bound(y.moved))
        return through + float((x.value @ y.change).norm())
    if min(x.value.dim(), y.value.dim()) < 2:
        raise StoppedError("MatMul by a vector")
    copies_x, copies_y = (math.sqrt(_batches(step.made[0]) / _batches(o.value)) for o in (x, y))
    left = _matrix_norm(x.value) + x.error
    if x.maker is not None and x.maker.node.op_type == "Softmax":
        left = min(left, math.sqrt(x.value.shape[-2]))  # rows of shares have norms up to 1
    return left * y.error * copies_y + _matrix_norm(y.value) * x.error * copies_x


def _gemm(step: Step) -> float:
    x, y = step.x, step.operand(1)
    if (y.error and y.change is None) or step.attributes.get("transA"):
        raise StoppedError("Gemm of two tensors that are not certain")
    weight, change = y.moved, torch.zeros_like(y.value) if y.change is None else y.change
    if step.attributes.get("transB"):
        weight, change = weight.T, change.T
    alpha = abs(float(step.attributes.get("alpha", 1.0)))
    through = step.through(x.error, lambda: matrix_bound(weight))
    found = alpha * (through + float((x.value @ change).norm()))
    if len(step.operands) > 2 and step.operands[2] is not None:
        bias = step.operand(2)
        found += abs(float(step.attributes.get("beta", 1.0))) * bias.error * step.spread(bias)
    return found


def _conv(step: Step) -> float:
    x, kernel = step.x, step.operand(1)
    if kernel.error and kernel.change is None:
        raise StoppedError("Conv by weights that are not certain")
    axes = kernel.value.dim() - 2
    pads = list(step.attributes.get("pads", [0] * 2 * axes))

    def norm() -> float:
        return convolution_bound(
            kernel.moved,
            tuple(x.value.shape[-axes:]),
            padding=[max(pads[i], pads[i + axes]) for i in range(axes)],
            dilation=list(step.attributes.get("dilations", [1] * axes)),
            groups=step.attributes.get("group", 1),
        )

    found = step.through(x.error, norm)
    if kernel.change is not None and kernel.error:
        moved = OPERATIONS["Conv"](step.attributes, x.value, kernel.change)
        assert isinstance(moved, Tensor)
        found += float(moved.norm())
    if len(step.operands) > 2 and step.operands[2] is not None:
        positions = step.made[0].numel() / step.made[0].shape[1]
        found += step.operand(2).error * math.sqrt(positions)
    return found


def _mean(step: Step) -> float:
    shrunk = step.made[0].numel() / step.x.value.numel()
    return step.x.error * math.sqrt(shrunk)


def _reduce_sum(step: Step) -> float:
    return step.x.error * math.sqrt(step.x.value.numel() / step.made[0].numel())


def _overlap(step: Step) -> tuple[int, int]:
    """Into how many windows an element falls at most, and how many elements a window has."""
    kernel = step.attributes["kernel_shape"]
    strides = step.attributes.get("strides", [1] * len(kernel))
    dilations = step.attributes.get("dilations", [1] * len(kernel))
    if any(d > 1 for d in dilations):
        return math.prod(kernel), math.prod(kernel)
    counts = [math.ceil(k / s) for k, s in zip(kernel, strides, strict=True)]
    return math.prod(counts), math.prod(kernel)


def _max_pool(step: Step) -> float:
    return math.sqrt(_overlap(step)[0]) * step.x.error


def _average_pool(step: Step) -> float:
    windows, size = _overlap(step)
    if not step.attributes.get("count_include_pad", 0):
        size = 1 if any(step.attributes.get("pads", [])) else size
    return math.sqrt(windows / size) * step.x.error


def _softmax(step: Step) -> float:
    """Its Jacobian diag(p) - p p^T has norm at most 1/2, and shares differ by at most sqrt(2)."""
    rows = step.x.value.numel() / step.x.value.shape[step.attributes.get("axis", -1)]
    return min(0.5 * step.x.error, math.sqrt(2 * rows))


def normalized(rows: Tensor, error: float, epsilon: float) -> float:
    """How far x / sqrt(mean(x^2) + epsilon), row by row (k, d), moves; no input is too far.

    With c = sqrt(d epsilon) as one more element this is sqrt(d) X / |X|, and
    |X~/|X~| - X/|X|| <= 2 |X~ - X| / (|X~| + |X|). No row moves by more than 2 sqrt(d).
    """
    count, width = rows.shape
    floor = math.sqrt(width * epsilon)
    size = (rows.square().sum(dim=1) + width * epsilon).sqrt()
    moved = (size - error).clamp_min(floor)
    steepest = float((2 * math.sqrt(width) / (size + moved)).max())
    return min(steepest * error, 2 * math.sqrt(width * count)) * SLACK


def _layer_norm(step: Step) -> float:
    axis = step.attributes.get("axis", -1) % step.x.value.dim()
    return _group_norm(step, step.x.value.flatten(axis).flatten(0, axis - 1), lambda v: v)


def _grouped_norm(step: Step) -> float:
    x = step.x.value
    groups = step.attributes.get("num_groups", x.shape[1])
    channel = [1, -1, *([1] * (x.dim() - 2))]
    return _group_norm(step, x.reshape(groups, -1), lambda v: v.reshape(channel))


def _group_norm(step: Step, flat: Tensor, shaped: Callable[[Tensor], Tensor]) -> float:
    """A norm over the rows of `flat`, then a gain and a bias."""
    epsilon = float(step.attributes.get("epsilon", 1e-5))
    centred = flat - flat.mean(dim=1, keepdim=True)
    unit = centred / (centred.square().mean(dim=1, keepdim=True) + epsilon).sqrt()
    gain = step.operand(1)
    found = normalized(centred, step.x.error, epsilon) * gain.largest
    if gain.change is not None and gain.error:
        found += float((unit.reshape(step.x.value.shape) * shaped(gain.change)).norm())
    elif gain.error:
        raise StoppedError(f"{step.node.op_type} with a gain that is not certain")
    if len(step.operands) > 2 and step.operands[2] is not None:
        found += step.operand(2).error * step.spread(step.operand(2))
    return found


def _batch_norm(step: Step) -> float:
    """Frozen, it is a gain and a bias for each channel."""
    if any(o.error and o.change is None for o in step.given[1:]):
        raise StoppedError("BatchNormalization with statistics that are not certain")
    epsilon = step.attributes.get("epsilon", 1e-5)

    def affine(gain: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> list[Tensor]:
        factor = gain / (variance + epsilon).sqrt()
        channel = [-1, *([1] * (step.x.value.dim() - 2))]
        return [factor.reshape(channel), (bias - mean * factor).reshape(channel)]

    before = affine(*(o.value for o in step.given[1:5]))
    after = affine(*(o.moved for o in step.given[1:5]))
    shift = (after[0] - before[0]) * step.x.value + (after[1] - before[1])
    return float(after[0].abs().max()) * step.x.error + float(shift.norm())


def _prelu(step: Step) -> float:
    slope = step.operand(1)
    found = max(1.0, slope.largest) * step.x.error
    return found + float(step.x.value.clamp_max(0).abs().max()) * slope.error * step.spread(slope)


def is_sigmoid_of(gate: Operand, x: Operand) -> bool:
    """Whether a factor is the sigmoid of the other one, as in SiLU."""
    maker = _through_casts(gate.maker)
    if maker is None or maker.node.op_type != "Sigmoid":
        return False
    return x.maker is not None and _same(_through_casts(maker.input(0)), _through_casts(x.maker))


def rms_norm_of(factor: Operand, x: Operand) -> float | None:
    """The epsilon of an RMS norm of `x` over its last axis, if `factor` is one over that norm.

    The epsilon is read off the values: mean(x^2) + epsilon = 1 / factor^2 at every position.
    """
    maker = _through_casts(factor.maker)
    chain = ["Reciprocal", "Sqrt", "Add", "ReduceMean", "Pow"]
    for wanted in chain:
        if maker is None or maker.node.op_type != wanted:
            return None
        maker = _through_casts(maker.input(0) or maker.input(len(maker.node.input) - 1))
    if x.maker is None or not _same(maker, _through_casts(x.maker)):
        return None
    if factor.value.shape != (*x.value.shape[:-1], 1):
        return None
    gaps = factor.value.pow(-2) - x.value.square().mean(dim=-1, keepdim=True)
    low, high = float(gaps.min()), float(gaps.max())
    return max(0.0, low) if high - low <= 1e-6 * high else None


def _through_casts(maker: Maker | None) -> Maker | None:
    while maker is not None and maker.node.op_type in ("Cast", "Identity"):
        maker = maker.input(0)
    return maker


def _same(one: Maker | None, other: Maker | None) -> bool:
    return one is not None and other is not None and one.node is other.node


def _batches(value: Tensor) -> int:
    return math.prod(value.shape[:-2])


def _matrix_norm(value: Tensor) -> float:
    """The largest singular value of any of a batch of matrices."""
    if value.dim() < 2:
        return float(value.norm())
    return float(torch.linalg.svdvals(value).max()) * SLACK


RULES: dict[str, Callable[[Step], float]] = {
    "Abs": _scaled(1), "Add": _sum, "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm, "Cast": _cast, "Clip": _scaled(1),
    "Concat": lambda step: math.sqrt(sum(o.error**2 for o in step.given)), "Conv": _conv,
    "Div": _div, "Elu": lambda step: max(1.0, step.attributes.get("alpha", 1.0)) * step.x.error,
    "Erf": _scaled(2 / math.sqrt(math.pi)), "Expand": _copied, "Flatten": _scaled(1),
    "Gather": _copied, "GatherElements": _copied, "GatherND": _copied, "Gelu": _scaled(1.13),
    "Gemm": _gemm, "GlobalAveragePool": _mean, "GroupNormalization": _grouped_norm,
    "HardSigmoid": lambda step: abs(step.attributes.get("alpha", 0.2)) * step.x.error,
    "HardSwish": _scaled(1.5), "Identity": _scaled(1), "InstanceNormalization": _grouped_norm,
    "LayerNormalization": _layer_norm,
    "LeakyRelu": lambda step: max(1.0, abs(step.attributes.get("alpha", 0.01))) * step.x.error,
    "MatMul": _matmul, "Max": _either, "MaxPool": _max_pool, "Min": _either,
    "Mish": _scaled(1.09), "Mul": _mul, "Neg": _scaled(1), "PRelu": _prelu, "Pad": _scaled(1),
    "Pow": _pow, "ReduceMean": _mean, "ReduceSum": _reduce_sum, "Relu": _scaled(1),
    "Reshape": _scaled(1), "Sigmoid": _scaled(0.25), "Slice": _copied, "Softmax": _softmax,
    "Softplus": _scaled(1), "Split": _scaled(1), "Squeeze": _scaled(1), "Sub": _sum,
    "Tanh": _scaled(1), "Tile": _copied, "Transpose": _scaled(1), "Unsqueeze": _scaled(1),
    "Where": _where,
}  # fmt: skip
