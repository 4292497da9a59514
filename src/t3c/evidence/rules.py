"""How far an operation can carry a bounded change of its inputs: rules of the worst case.

`RULES[name](step)` bounds ||f(x~) - f(x)|| for every x~ within the known distance of x, at the
values x of one sample. Nothing here is an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from t3c.certify.norms import SLACK, convolution_bound, matrix_bound
from t3c.engines.torch_operations import OPERATIONS
from t3c.evidence.operands import (
    WIDE_FLOATS,
    Step,
    StoppedError,
    is_rows_of_shares,
    is_sigmoid_of,
    rms_norm_of,
)


def _scaled(factor: float) -> Callable[[Step], float]:
    """Rule of an elementwise or selecting operation that is Lipschitz with this constant."""
    return lambda step: factor * step.x.error


def _cast(step: Step) -> float:
    if step.attributes.get("to") not in WIDE_FLOATS:
        raise StoppedError("Cast to whole numbers, or to floats that round")
    return step.x.error


def _alone(step: Step) -> float:
    """An operation that brings nothing further apart, by parameters that are exact."""
    if any(operand.error for operand in step.given[1:]):
        raise StoppedError(f"{step.node.op_type} by parameters that are not certain")
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
    counts = [torch.bincount(part.reshape(-1).long()) for part in parts if part.numel()]
    most = max((int(count.max()) for count in counts), default=0)
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
        through = step.through(x.error, y, lambda: matrix_bound(y.moved))
        return through + float((x.value @ y.change).norm())
    if min(x.value.dim(), y.value.dim()) < 2:
        raise StoppedError("MatMul by a vector")
    copies_x, copies_y = (math.sqrt(_batches(step.made[0]) / _batches(o.value)) for o in (x, y))
    left = _matrix_norm(x.value) + x.error
    if is_rows_of_shares(x):
        left = min(left, math.sqrt(x.value.shape[-2]))  # each row has a norm up to 1
    return left * y.error * copies_y + _matrix_norm(y.value) * x.error * copies_x


def _gemm(step: Step) -> float:
    x, y = step.x, step.operand(1)
    if (y.error and y.change is None) or step.attributes.get("transA"):
        raise StoppedError("Gemm of two tensors that are not certain")
    weight, change = y.moved, torch.zeros_like(y.value) if y.change is None else y.change
    if step.attributes.get("transB"):
        weight, change = weight.T, change.T
    alpha = abs(float(step.attributes.get("alpha", 1.0)))
    through = step.through(x.error, y, lambda: matrix_bound(weight))
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

    found = step.through(x.error, kernel, norm)
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
    padded = any(step.attributes.get("pads", [])) and not step.attributes.get("count_include_pad")
    if padded or step.attributes.get("ceil_mode"):
        size = 1  # windows at the edge may hold a single element
    return math.sqrt(windows / size) * step.x.error


def _is_nan(step: Step) -> float:
    """What is at a finite distance from a number is a number."""
    if not math.isfinite(step.x.error) or bool(step.x.value.isnan().any()):
        raise StoppedError("IsNaN of what may not be a number")
    return 0.0


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


def _batches(value: Tensor) -> int:
    return math.prod(value.shape[:-2])


def _matrix_norm(value: Tensor) -> float:
    """The largest singular value of any of a batch of matrices."""
    if value.dim() < 2:
        return float(value.norm())
    return float(torch.linalg.svdvals(value).max()) * SLACK


RULES: dict[str, Callable[[Step], float]] = {
    "Abs": _scaled(1), "Add": _sum, "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm, "Cast": _cast, "Clip": _alone,
    "Concat": lambda step: math.sqrt(sum(o.error**2 for o in step.given)), "Conv": _conv,
    "Div": _div, "Elu": lambda step: max(1.0, step.attributes.get("alpha", 1.0)) * step.x.error,
    "Erf": _scaled(2 / math.sqrt(math.pi)), "Expand": _copied, "Flatten": _scaled(1),
    "Gather": _copied, "GatherElements": _copied, "GatherND": _copied, "Gelu": _scaled(1.13),
    "Gemm": _gemm, "GlobalAveragePool": _mean, "GroupNormalization": _grouped_norm,
    "HardSigmoid": lambda step: abs(step.attributes.get("alpha", 0.2)) * step.x.error,
    "HardSwish": _scaled(1.5), "Identity": _scaled(1), "InstanceNormalization": _grouped_norm,
    "IsNaN": _is_nan,
    "LayerNormalization": _layer_norm,
    "LeakyRelu": lambda step: max(1.0, abs(step.attributes.get("alpha", 0.01))) * step.x.error,
    "MatMul": _matmul, "Max": _either, "MaxPool": _max_pool, "Min": _either,
    "Mish": _scaled(1.09), "Mul": _mul, "Neg": _scaled(1), "PRelu": _prelu, "Pad": _alone,
    "Pow": _pow, "ReduceMean": _mean, "ReduceSum": _reduce_sum, "Relu": _scaled(1),
    "Reshape": _alone, "Shape": lambda step: 0.0, "Sigmoid": _scaled(0.25), "Slice": _copied,
    "Softmax": _softmax,
    "Softplus": _scaled(1), "Split": _alone, "Squeeze": _alone, "Sub": _sum,
    "Tanh": _scaled(1), "Tile": _copied, "Transpose": _scaled(1), "Unsqueeze": _alone,
    "Where": _where,
}  # fmt: skip
