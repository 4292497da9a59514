"""The protocol of an engine and its sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

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


class Operations(Protocol):
    """A compiled graph of which it is known what each operation takes."""

    def run(self, inputs: Sequence[Array]) -> dict[tuple[str, ...], float]:
        """Run once: milliseconds by the names of the nodes that each operation stands for."""
        ...


@runtime_checkable
class Counting(Protocol):
    """An engine that tells what single operations take."""

    def operations(self, model: onnx.ModelProto) -> Operations: ...


def contiguous(inputs: Sequence[Array]) -> list[Array]:
    """Inputs as the engines want them."""
    return [np.ascontiguousarray(value) for value in inputs]
