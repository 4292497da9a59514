"""Tensors on their way through the worst case: what is known of them, and what they are part of.

Some functions are several nodes of a graph; taken one by one they have worse bounds, or none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto
from torch import Tensor

WIDE_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE)


class StoppedError(Exception):
    """The rules do not cover an operation; never seen by users, who are told its name."""


@dataclass(frozen=True)
class Origin:
    """A tensor by name, the node that made it if one did, and where its inputs come from.

    `disturbed` is one that is rounded, and so no exact function of others; `exact` is the value of
    a single number that is the same in both networks.
    """

    tensor: str
    node: onnx.NodeProto | None
    disturbed: bool
    of: Callable[[str], Origin]
    exact: float | None = None

    def input(self, index: int) -> Origin:
        assert self.node is not None
        return self.of(self.node.input[index])

    @property
    def operation(self) -> str:
        return "" if self.node is None else str(self.node.op_type)


@dataclass(frozen=True)
class Operand:
    """One input of an operation: its value in the original, how far it may be, and how it is known.

    `change` is the exact difference of a constant.
    """

    value: Tensor
    error: float
    change: Tensor | None = None
    origin: Origin | None = None

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

    def through(self, error: float, weight: Operand, norm: Callable[[], float]) -> float:
        """An error times the norm of a weight, that of a constant kept for the next sample."""
        if error == 0.0:
            return 0.0
        if weight.change is None:
            return norm() * error
        key = str(self.node.output[0])
        if key not in self.norms:
            self.norms[key] = norm()
        return self.norms[key] * error

    def spread(self, operand: Operand) -> float:
        """sqrt of how often an operand is repeated to fill the output."""
        return math.sqrt(max(1.0, self.made[0].numel() / max(1, operand.value.numel())))


def is_sigmoid_of(gate: Operand, x: Operand) -> bool:
    """Whether a factor is, exactly, the sigmoid of the other one, as in SiLU."""
    return _same(_behind(gate.origin, "Sigmoid"), x.origin)


def rms_norm_of(factor: Operand, x: Operand) -> float | None:
    """The epsilon of an RMS norm of `x` over its last axis, if `factor` is one over that norm."""
    total = _undisturbed(_behind(_behind(factor.origin, "Reciprocal"), "Sqrt"))
    if total is None or total.disturbed or total.operation != "Add":
        return None
    if factor.value.shape != (*x.value.shape[:-1], 1):
        return None
    sides = (total.input(0), total.input(1))
    for mean, added in (sides, sides[::-1]):
        if added.exact is not None and _is_square(_behind(mean, "ReduceMean"), x.origin):
            return added.exact
    return None


def _is_square(squares: Origin | None, x: Origin | None) -> bool:
    made = _undisturbed(squares)
    if made is None or made.disturbed or made.operation != "Pow":
        return False
    return made.input(1).exact == 2 and _same(made.input(0), x)


def _behind(origin: Origin | None, operation: str) -> Origin | None:
    """The first input of what made a tensor, if it was this operation and nothing was rounded."""
    made = _undisturbed(origin)
    if made is None or made.disturbed or made.operation != operation:
        return None
    return made.input(0)


def is_rows_of_shares(x: Operand) -> bool:
    """Whether a tensor is, exactly, a softmax over its last axis, or that with zeros for NaN."""
    origin = x.origin
    if origin is not None and origin.operation == "Where" and not origin.disturbed:
        origin = origin.input(2) if origin.input(0).operation == "IsNaN" else None
    if origin is None or origin.node is None or origin.disturbed:
        return False
    axis = next((a.i for a in origin.node.attribute if a.name == "axis"), -1)
    return origin.operation == "Softmax" and axis % x.value.dim() == x.value.dim() - 1


def _undisturbed(origin: Origin | None) -> Origin | None:
    """What made a tensor, seen through casts between floats; None if it was rounded on the way."""
    while origin is not None and origin.operation in ("Cast", "Identity"):
        if origin.disturbed or (origin.operation == "Cast" and not _between_floats(origin)):
            return None
        origin = origin.input(0)
    return origin


def _between_floats(origin: Origin) -> bool:
    assert origin.node is not None
    return any(a.name == "to" and a.i in WIDE_FLOATS for a in origin.node.attribute)


def _same(one: Origin | None, other: Origin | None) -> bool:
    """Whether two tensors are one, or casts of one."""
    found = [_undisturbed(origin) for origin in (one, other)]
    return found[0] is not None and found[1] is not None and found[0].tensor == found[1].tensor
