"""ONNX operations in torch: `OPERATIONS[name](attributes, *inputs)`."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor
from torch.nn import functional as F

from t3c.errors import EngineError

Attributes = dict[str, Any]


def _conv(a: Attributes, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    x = _padded(a, x, 0.0)
    conv: Callable[..., Tensor] = F.conv1d if x.dim() == 3 else F.conv2d
    return conv(x, w, b, a.get("strides", 1), 0, a.get("dilations", 1), a.get("group", 1))


def _padded(a: Attributes, x: Tensor, value: float) -> Tensor:
    """Padding of the trailing axes as convolutions and pools name it: all starts, then all ends."""
    pads = a.get("pads", [])
    if not any(pads):
        return x
    half = len(pads) // 2
    sides = [side for axis in reversed(range(half)) for side in (pads[axis], pads[axis + half])]
    return F.pad(x, sides, value=value)


def _gemm(a: Attributes, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    x = x.T if a.get("transA") else x
    product: Tensor = a.get("alpha", 1.0) * (x @ (w.T if a.get("transB") else w))
    return product if b is None else product + a.get("beta", 1.0) * b


def _quantize(a: Attributes, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    limits = torch.iinfo(zero.dtype)
    return (torch.round(x / scale) + zero).clamp(limits.min, limits.max).to(zero.dtype)


def _dequantize(a: Attributes, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    value = x.float() if zero is None else x.float() - zero.float()
    if scale.dim() == 1:
        axis = a.get("axis", 1) % x.dim()
        scale = scale.reshape([-1 if index == axis else 1 for index in range(x.dim())])
    return value * scale


def _mean(a: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
    dims = tuple(range(x.dim())) if axes is None else tuple(axes.tolist())
    return x.mean(dim=dims, keepdim=bool(a.get("keepdims", 1)))


def _reshape(a: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    sizes = shape.tolist()
    if not a.get("allowzero"):
        sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    return x.reshape(sizes)


def _max_pool(a: Attributes, x: Tensor) -> Tensor:
    ceil = bool(a.get("ceil_mode", 0))
    x = _padded(a, x, float("-inf"))
    return F.max_pool2d(x, a["kernel_shape"], a.get("strides"), ceil_mode=ceil)


def _layer_norm(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    shape = x.shape[a.get("axis", -1) % x.dim() :]
    return F.layer_norm(x, shape, weight, bias, a.get("epsilon", 1e-5))


def _batch_norm(
    a: Attributes, x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor
) -> Tensor:
    return F.batch_norm(x, mean, var, w, b, training=False, eps=a.get("epsilon", 1e-5))


def _flatten(a: Attributes, x: Tensor) -> Tensor:
    axis = a.get("axis", 1)
    return x.reshape(int(torch.tensor(x.shape[:axis]).prod()), -1)


def _gelu(a: Attributes, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=a.get("approximate", b"none").decode())


def _gather(a: Attributes, x: Tensor, index: Tensor) -> Tensor:
    axis = a.get("axis", 0) % x.dim()
    index = torch.where(index < 0, index + x.shape[axis], index)
    flat = x.index_select(axis, index.reshape(-1))
    return flat.reshape(x.shape[:axis] + index.shape + x.shape[axis + 1 :])


def _gather_nd(a: Attributes, x: Tensor, index: Tensor) -> Tensor:
    batch = a.get("batch_dims", 0)
    if batch:
        rows = zip(x, index, strict=True)
        return torch.stack([_gather_nd({"batch_dims": batch - 1}, r, i) for r, i in rows])
    return x[tuple(index.unbind(-1))]


def _slice(
    a: Attributes, x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:  # fmt: skip
    where = axes.tolist() if axes is not None else range(len(starts))
    strides = steps.tolist() if steps is not None else [1] * len(starts)
    for axis, start, end, step in zip(where, starts.tolist(), ends.tolist(), strides, strict=True):
        picked = list(range(x.shape[axis]))[start:end:step]
        if step < 0 and end < -x.shape[axis]:
            picked = list(range(x.shape[axis]))[start::step]
        x = x.index_select(axis, torch.tensor(picked, dtype=torch.long))
    return x


def _expand(a: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    wide = torch.broadcast_shapes(x.shape, shape.tolist())  # type: ignore[no-untyped-call]
    return x.expand(wide)


def _squeeze(a: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(axes.tolist()))


def _unsqueeze(a: Attributes, x: Tensor, axes: Tensor) -> Tensor:
    for axis in sorted(axis % (x.dim() + axes.numel()) for axis in axes.tolist()):
        x = x.unsqueeze(axis)
    return x


def _cast(a: Attributes, x: Tensor) -> Tensor:
    name = helper.tensor_dtype_to_np_dtype(a["to"]).name
    dtype: torch.dtype = getattr(torch, name)
    return x.to(dtype)


def _constant(a: Attributes) -> Tensor:
    array = numpy_helper.to_array(a["value"])
    if a["value"].data_type == TensorProto.UINT4:  # torch has none: a byte for each
        array = array.astype("uint8")
    return torch.from_numpy(array.copy())


def _shape(a: Attributes, x: Tensor) -> Tensor:
    return torch.tensor(x.shape[a.get("start", 0) : a.get("end")], dtype=torch.long)


def _cumsum(a: Attributes, x: Tensor, axis: Tensor) -> Tensor:
    if a.get("exclusive") or a.get("reverse"):
        raise EngineError("the torch engine has no exclusive or reversed CumSum")
    return x.cumsum(int(axis))


def _range(a: Attributes, start: Tensor, limit: Tensor, step: Tensor) -> Tensor:
    return torch.arange(start.item(), limit.item(), step.item(), dtype=start.dtype)


def _sum(a: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
    dims = tuple(range(x.dim())) if axes is None else tuple(axes.tolist())
    return x.sum(dim=dims, keepdim=bool(a.get("keepdims", 1)))


def _clip(
    a: Attributes, x: Tensor, low: Tensor | None = None, high: Tensor | None = None
) -> Tensor:
    return x.clamp(low, high)


def _filled(a: Attributes, shape: Tensor) -> Tensor:
    value = a.get("value")
    if value is None:
        return torch.zeros(shape.tolist())
    filler = torch.from_numpy(numpy_helper.to_array(value).copy())
    return filler.expand(shape.tolist()).clone()


def _div(a: Attributes, x: Tensor, y: Tensor) -> Tensor:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def _average_pool(a: Attributes, x: Tensor) -> Tensor:
    ceil, count = bool(a.get("ceil_mode", 0)), bool(a.get("count_include_pad", 0))
    pads = a.get("pads", [0] * 4)
    if pads[:2] != pads[2:]:
        raise EngineError("the torch engine has no AveragePool with uneven padding")
    return F.avg_pool2d(x, a["kernel_shape"], a.get("strides"), pads[:2], ceil, count)


def _group_norm(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, a["num_groups"], weight, bias, a.get("epsilon", 1e-5))


def _instance_norm(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, weight=weight, bias=bias, eps=a.get("epsilon", 1e-5))


def _split(a: Attributes, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    axis = a.get("axis", 0)
    if sizes is not None:
        return x.split(sizes.tolist(), dim=axis)  # type: ignore[no-untyped-call, no-any-return]
    return x.chunk(a["num_outputs"], dim=axis)


def _hard_sigmoid(a: Attributes, x: Tensor) -> Tensor:
    line: Tensor = a.get("alpha", 0.2) * x + a.get("beta", 0.5)
    return line.clamp(0, 1)


def _argmax(a: Attributes, x: Tensor) -> Tensor:
    return x.argmax(a.get("axis", 0), keepdim=bool(a.get("keepdims", 1)))


def _gather_elements(a: Attributes, x: Tensor, index: Tensor) -> Tensor:
    axis = a.get("axis", 0)
    return x.gather(axis, torch.where(index < 0, index + x.shape[axis], index))


def _pad(a: Attributes, x: Tensor, pads: Tensor, value: Tensor | None = None) -> Tensor:
    if a.get("mode", b"constant") != b"constant":
        raise EngineError(f"Pad in mode {a['mode']!r}")
    before, after = pads.tolist()[: x.dim()], pads.tolist()[x.dim() :]
    sides = [side for pair in zip(before[::-1], after[::-1], strict=True) for side in pair]
    return F.pad(x, sides, value=0.0 if value is None else float(value))


def _trilu(a: Attributes, x: Tensor, k: Tensor | None = None) -> Tensor:
    diagonal = 0 if k is None else int(k)
    return x.triu(diagonal) if a.get("upper", 1) else x.tril(diagonal)


def _scatter_nd(a: Attributes, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    if a.get("reduction", b"none") != b"none":
        raise EngineError(f"ScatterND with reduction {a['reduction']!r}")
    out = x.clone()
    out[tuple(index.unbind(-1))] = updates
    return out


OPERATIONS: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    "Abs": lambda a, x: x.abs(),
    "Add": lambda a, x, y: x + y,
    "And": lambda a, x, y: x & y,
    "ArgMax": _argmax,
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": lambda a, *xs: torch.cat(xs, dim=a["axis"]),
    "Constant": _constant,
    "ConstantOfShape": _filled,
    "Conv": _conv,
    "Cos": lambda a, x: x.cos(),
    "CumSum": _cumsum,
    "DequantizeLinear": _dequantize,
    "Div": _div,
    "Elu": lambda a, x: F.elu(x, a.get("alpha", 1.0)),
    "Equal": lambda a, x, y: x == y,
    "Erf": lambda a, x: torch.erf(x),
    "Exp": lambda a, x: x.exp(),
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalAveragePool": lambda a, x: x.mean(dim=tuple(range(2, x.dim())), keepdim=True),
    "Greater": lambda a, x, y: x > y,
    "GreaterOrEqual": lambda a, x, y: x >= y,
    "GroupNormalization": _group_norm,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": lambda a, x: F.hardswish(x),
    "Identity": lambda a, x: x,
    "InstanceNormalization": _instance_norm,
    "IsNaN": lambda a, x: x.isnan(),
    "LayerNormalization": _layer_norm,
    "LeakyRelu": lambda a, x: F.leaky_relu(x, a.get("alpha", 0.01)),
    "Less": lambda a, x, y: x < y,
    "LessOrEqual": lambda a, x, y: x <= y,
    "Log": lambda a, x: x.log(),
    "MatMul": lambda a, x, y: x @ y,
    "Max": lambda a, *xs: reduce(torch.maximum, xs),
    "MaxPool": _max_pool,
    "Min": lambda a, *xs: reduce(torch.minimum, xs),
    "Mish": lambda a, x: F.mish(x),
    "Mul": lambda a, x, y: x * y,
    "Neg": lambda a, x: -x,
    "Not": lambda a, x: ~x,
    "Or": lambda a, x, y: x | y,
    "PRelu": lambda a, x, slope: torch.where(x < 0, slope * x, x),
    "Pad": _pad,
    "Pow": lambda a, x, y: x**y,
    "QuantizeLinear": _quantize,
    "Range": _range,
    "Reciprocal": lambda a, x: x.reciprocal(),
    "ReduceMean": _mean,
    "ReduceSum": _sum,
    "Relu": lambda a, x: x.relu(),
    "Reshape": _reshape,
    "ScatterND": _scatter_nd,
    "Shape": _shape,
    "Sigmoid": lambda a, x: x.sigmoid(),
    "Sin": lambda a, x: x.sin(),
    "Slice": _slice,
    "Softmax": lambda a, x: x.softmax(dim=a.get("axis", -1)),
    "Softplus": lambda a, x: F.softplus(x),
    "Split": _split,
    "Tile": lambda a, x, repeats: x.repeat(repeats.tolist()),
    "Sqrt": lambda a, x: x.sqrt(),
    "Squeeze": _squeeze,
    "Sub": lambda a, x, y: x - y,
    "Tanh": lambda a, x: x.tanh(),
    "Transpose": lambda a, x: x.permute(a["perm"]),
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
    "Where": lambda a, c, x, y: torch.where(c, x, y),
}
