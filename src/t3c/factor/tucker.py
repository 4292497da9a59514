"""Convolutions: W (o, i, h, w) by Tucker-2 over its channels, every prefix usable."""

from __future__ import annotations

import tensorly as tl
import torch
from tensorly.tenalg import multi_mode_dot
from torch import Tensor

from t3c.factor.metric import whitening


def tucker2_stages(weight: Tensor, moment: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Stages reduce (i, i, 1, 1), core (o, i, h, w) and expand (o, o, 1, 1) of a kernel.

    A higher-order SVD: prefixes are near-optimal and their residual is monotone in both ranks.
    `moment` (i, i) is the second moment of the input channels. The energy sits in the core, each
    of whose rows has a scale of its own when it is quantized; the columns of `expand` are
    orthonormal.
    """
    root, inverse = whitening(moment, weight.shape[1])
    white = multi_mode_dot(weight.detach().double().numpy(), [root.numpy()], modes=[1])
    u_out, u_in = _basis(tl.unfold(white, 0)), _basis(tl.unfold(white, 1))
    core = torch.from_numpy(multi_mode_dot(white, [u_out.T.numpy(), u_in.T.numpy()], modes=[0, 1]))
    reduce, expand = (u_in.T @ inverse)[..., None, None], u_out[..., None, None]
    dtype = weight.dtype
    return reduce.to(dtype), core.to(dtype).contiguous(), expand.to(dtype)


def _basis(unfolded: tl.ndarray) -> Tensor:
    """All left singular vectors (m, m) of a matrix (m, n), by its Gram matrix, largest first."""
    matrix = torch.from_numpy(unfolded)
    vectors: Tensor = torch.linalg.eigh(matrix @ matrix.T).eigenvectors
    return vectors.flip(1)
