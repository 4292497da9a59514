"""The metric a factorization is best in: plain, or that of the layer's own inputs."""

from __future__ import annotations

import torch
from torch import Tensor


def whitening(moment: Tensor | None, size: int, ridge: float = 1.0) -> tuple[Tensor, Tensor]:
    """C^{1/2} and C^{-1/2}, each (size, size) in float64, of a second moment with a ridge.

    C is the moment E[a a^T] plus `ridge` times its mean eigenvalue on the diagonal. The ridge keeps
    directions the data never used, and a large one serves the network's output better than the
    layer's own: what a layer's output is used for is not in the moment. Without a moment both are
    the identity, which is the plain metric.
    """
    if moment is None:
        eye = torch.eye(size, dtype=torch.float64)
        return eye, eye
    c = moment.double()
    mean = c.diagonal().mean().clamp_min(1e-12)
    values, vectors = torch.linalg.eigh(c + ridge * mean * torch.eye(size, dtype=torch.float64))
    values = values.clamp_min(ridge * float(mean))
    root = values.sqrt()
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
