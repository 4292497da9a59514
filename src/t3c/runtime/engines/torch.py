"""The reference: a graph interpreted operation by operation in torch.

It computes what the graph says, rounding included, with none of an engine's fusions: what the
other engines are checked against, and where ranges of inner tensors are observed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor
from torch.nn import functional as F

from t3c.errors import EngineError
from t3c.runtime.engines.protocol import Array

Attributes = dict[str, Any]


class Torch:
    """Interprets graphs in float32."""

    name = "torch"

    def __init__(self, threads: int) -> None:
        self.version = str(torch.__version__)
        self.threads = threads

    def compile(self, model: onnx.ModelProto) -> TorchSession:
        return TorchSession(model)


class TorchSession:
    """A graph and its constants."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self.constants = {
            i.name: torch.from_numpy(numpy_helper.to_array(i).copy()) for i in graph.initializer
        }
        self.inputs = [i.name for i in graph.input]
        self.outputs = [o.name for o in graph.output]
        self.nodes = []
        for node in graph.node:
            if node.op_type not in OPERATIONS:
                raise EngineError(f"the torch engine has no operation {node.op_type}")
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            self.nodes.append((node, OPERATIONS[node.op_type], attributes))
        self.last_use = {
            name: index for index, (node, _, _) in enumerate(self.nodes) for name in node.input
        }

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        return [value.numpy() for value in self.observe(inputs)]

    @torch.no_grad()
    def observe(
        self, inputs: Sequence[Array], watch: Callable[[str, Tensor], object] | None = None
    ) -> list[Tensor]:
        """Run, showing every tensor to `watch` as it is made."""
        values: dict[str, Tensor] = dict(self.constants)
        for name, array in zip(self.inputs, inputs, strict=True):
            values[name] = torch.from_numpy(array)
            if watch is not None:
                watch(name, values[name])
        for index, (node, operation, attributes) in enumerate(self.nodes):
            arguments = [values[name] if name else None for name in node.input]
            result = operation(attributes, *arguments)
            values[node.output[0]] = result
            if watch is not None:
                watch(node.output[0], result)
            for name in node.input:
                if self.last_use.get(name) == index and name not in self.outputs:
                    values.pop(name, None)
        return [values[name] for name in self.outputs]


def _conv(a: Attributes, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    pads = a.get("pads", [0, 0, 0, 0])
    half = len(pads) // 2
    if pads[:half] != pads[half:]:
        x = F.pad(
            x,
            [pads[2], pads[5], pads[1], pads[4]]
            if half == 3
            else [pads[1], pads[3], pads[0], pads[2]],
        )
        pads = [0] * len(pads)
    return F.conv2d(
        x, w, b, a.get("strides", 1), pads[:half], a.get("dilations", 1), a.get("group", 1)
    )


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
    pads = a.get("pads", [0, 0, 0, 0])
    x = F.pad(x, [pads[1], pads[3], pads[0], pads[2]], value=float("-inf"))
    return F.max_pool2d(
        x, a["kernel_shape"], a.get("strides"), 0, ceil_mode=bool(a.get("ceil_mode", 0))
    )


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


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "Add": lambda a, x, y: x + y,
    "BatchNormalization": _batch_norm,
    "Conv": _conv,
    "DequantizeLinear": _dequantize,
    "Div": lambda a, x, y: x / y,
    "Erf": lambda a, x: torch.erf(x),
    "Flatten": _flatten,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalAveragePool": lambda a, x: x.mean(dim=tuple(range(2, x.dim())), keepdim=True),
    "Identity": lambda a, x: x,
    "LayerNormalization": _layer_norm,
    "MatMul": lambda a, x, y: x @ y,
    "MaxPool": _max_pool,
    "Mul": lambda a, x, y: x * y,
    "QuantizeLinear": _quantize,
    "ReduceMean": _mean,
    "Relu": lambda a, x: x.relu(),
    "Reshape": _reshape,
    "Sigmoid": lambda a, x: x.sigmoid(),
    "Softmax": lambda a, x: x.softmax(dim=a.get("axis", -1)),
    "Sub": lambda a, x, y: x - y,
    "Tanh": lambda a, x: x.tanh(),
    "Transpose": lambda a, x: x.permute(a["perm"]),
}
