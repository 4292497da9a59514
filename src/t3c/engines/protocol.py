"""The protocol of an engine and its sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx

Array = npt.NDArray[Any]


class Session(Protocol):
    """A compiled graph."""

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """Outputs for inputs of any batch size, as arrays of the caller's own."""
        ...


class Engine(Protocol):
    """Compiles graphs for a number of threads."""

    name: str
    version: str
    threads: int

    def compile(self, model: onnx.ModelProto) -> Session: ...


def contiguous(inputs: Sequence[Array]) -> list[Array]:
    """Inputs as the engines want them."""
    return [np.ascontiguousarray(value) for value in inputs]
