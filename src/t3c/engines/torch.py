"""The reference: a graph interpreted operation by operation in torch.

It computes what the graph says, rounding included, with none of an engine's fusions: what the
other engines are checked against, and where ranges of inner tensors are observed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor

from t3c.engines.decode import completed, declared_inputs
from t3c.engines.protocol import Array
from t3c.engines.torch_operations import OPERATIONS
from t3c.errors import EngineError

Step = tuple[onnx.NodeProto, Callable[..., Any], dict[str, Any]]


class Torch:
    """Interprets graphs in float32."""

    name = "torch"

    def __init__(self, threads: int) -> None:
        self.version = str(torch.__version__)
        self.threads = threads

    def compile(self, model: onnx.ModelProto) -> TorchSession:
        return TorchSession(model, self.threads)


class TorchSession:
    """A graph and its constants."""

    def __init__(self, model: onnx.ModelProto, threads: int | None = None) -> None:
        self.threads = threads
        graph = model.graph
        self.constants = {
            i.name: torch.from_numpy(numpy_helper.to_array(i).copy()) for i in graph.initializer
        }
        self.inputs = declared_inputs(model)
        self.outputs = [o.name for o in graph.output]
        self.nodes: list[Step] = []
        for node in graph.node:
            if node.op_type not in OPERATIONS:
                raise EngineError(
                    f"the torch engine has no operation {node.op_type} ({node.output[0]})"
                )
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            step = (node, OPERATIONS[node.op_type], attributes)
            if all(name in self.constants for name in node.input if name):
                self.constants |= self._made(step, self.constants)  # such as a weight, unpacked
            else:
                self.nodes.append(step)
        used = {name for node, _, _ in self.nodes for name in node.input} | {*self.outputs}
        self.constants = {name: v for name, v in self.constants.items() if name in used}
        self.last_use = {
            name: index for index, (node, _, _) in enumerate(self.nodes) for name in node.input
        }

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads or before)
        try:
            return [value.numpy() for value in self.observe(inputs)]
        finally:
            torch.set_num_threads(before)

    @torch.no_grad()
    def observe(
        self, inputs: Sequence[Array], watch: Callable[[str, Tensor], object] | None = None
    ) -> list[Tensor]:
        """Run, showing every tensor to `watch` as it is made."""
        values: dict[str, Tensor] = dict(self.constants)
        for name, array in zip(self.inputs, completed(inputs, self.inputs), strict=True):
            values[name] = torch.from_numpy(np.ascontiguousarray(array))
            if watch is not None:
                watch(name, values[name])
        for index, step in enumerate(self.nodes):
            made = self._made(step, values)
            values |= made
            if watch is not None:
                for name, value in made.items():
                    watch(name, value)
            for name in step[0].input:
                if self.last_use.get(name) == index and name not in self.outputs:
                    values.pop(name, None)
        return [values[name] for name in self.outputs]

    @staticmethod
    @torch.no_grad()
    def _made(step: Step, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute a node's outputs from the values so far."""
        node, operation, attributes = step
        result = operation(attributes, *(values[name] if name else None for name in node.input))
        made = result if isinstance(result, tuple) else (result,)
        return dict(zip(node.output, made, strict=False))
