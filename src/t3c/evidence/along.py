"""Derivatives of a network on the way from the original to a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from t3c.certify.gains import Adjoints, GainConfig, gains, random_adjoints
from t3c.evidence.program import Executed, Program, Use, rows


def first_order(program: Program, executed: Executed, inputs: Sequence[Tensor]) -> Tensor:
    """The first-order change of the output (n, outputs), by one forward-mode pass.

    J sum_l dW_l a_{l-1}, with biases and norms that were trained, and what activation rounding
    adds at the original's activations.
    """
    share = torch.zeros((), dtype=program.dtype)
    with torch.no_grad(), forward_ad.dual_level():
        output = program(executed, inputs, _dual(share, torch.ones_like(share)))
        return rows(_tangent(output), len(inputs[0]))


@torch.no_grad()
def batched(program: Program, executed: Executed, inputs: Sequence[Tensor]) -> bool:
    """Whether every layer's output has the samples on its first axis, or serves all of them."""

    def sizes(count: int) -> list[int]:
        found: list[int] = []

        def keep(use: Use, x: Tensor, out: Tensor) -> Tensor:
            found.append(out.shape[0])
            return out

        program(executed, [value[:count] for value in inputs], tap=keep)
        return found

    if len(inputs[0]) < 2:
        return False
    pairs = zip(sizes(1), sizes(2), strict=True)
    return all(two == 2 * one or one == two == 1 for one, two in pairs)


@dataclass(frozen=True)
class Linearized:
    """A network at some samples: inputs and outputs of its layers, adjoints and gains.

    `gains` (uses, n) are of the map from a use's output to the network's.
    """

    uses: list[Use]
    into: list[Tensor]
    output: Tensor
    adjoints: Adjoints
    gains: Tensor


def linearize(
    program: Program,
    executed: Executed,
    inputs: Sequence[Tensor],
    share: float,
    config: GainConfig,
) -> Linearized:
    """The network at a share of the way, linearized behind each use of a layer."""
    samples = len(inputs[0])
    uses: list[Use] = []
    into: list[Tensor] = []
    outs: list[Tensor] = []

    def keep(use: Use, x: Tensor, out: Tensor) -> Tensor:
        uses.append(use)
        into.append(x.detach())
        if out.shape[0] == 1 != samples:
            out = out.expand(samples, *out.shape[1:]).clone()  # each sample has its own adjoint
        out = out if out.requires_grad else out.detach().requires_grad_()
        outs.append(out)
        return out

    with torch.enable_grad():
        output = rows(program(executed, inputs, share, tap=keep), samples)

    def pull(probe: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(output, outs, probe, retain_graph=True, materialize_grads=True)
        return [rows(part, samples) for part in found]

    shapes = [out.shape for out in outs]

    def push(changes: Sequence[Tensor]) -> Tensor:
        pending = iter(zip(changes, shapes, strict=True))

        def nudge(use: Use, x: Tensor, out: Tensor) -> Tensor:
            change, shape = next(pending)
            still = torch.zeros(shape, dtype=out.dtype)
            return out + _dual(still, change.reshape(shape))

        with torch.no_grad(), forward_ad.dual_level():
            return rows(_tangent(program(executed, inputs, share, tap=nudge)), samples)

    adjoints, probes = random_adjoints(pull, samples, output.shape[1], config, program.dtype)
    found = gains(pull, push, adjoints, probes, config)
    return Linearized(uses, into, output.detach(), adjoints, found)


def _dual(value: Tensor, tangent: Tensor) -> Tensor:
    made: Tensor = forward_ad.make_dual(value, tangent)  # type: ignore[no-untyped-call]
    return made


def _tangent(value: Tensor) -> Tensor:
    """The derivative that a dual number carries; none is zero."""
    found: Tensor | None = forward_ad.unpack_dual(value).tangent  # type: ignore[no-untyped-call]
    return torch.zeros_like(value) if found is None else found
