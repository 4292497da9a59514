"""Convolutions: W (o, i, *kernel) by Tucker-1 or Tucker-2 over channels, every prefix usable."""

from __future__ import annotations

import tensorly as tl
import torch
from tensorly.tenalg import multi_mode_dot
from torch import Tensor

from t3c.factor.metric import Metric
from t3c.factor.svd import leading_left


def tucker1_stages(
    weight: Tensor,
    rank: int | None = None,
    metric: Metric | None = None,
    outputs: Metric | None = None,
) -> tuple[Tensor, Tensor]:
    """Stages reduce (k, i, 1..) and core (o, k, *kernel) of a kernel, k = min(i, rank).

    Prefix k is the best that reads k combinations of the input channels, in the metrics C of these
    and G of the outputs, each position for itself. The rows of `reduce` have the length that makes
    them orthonormal in C, the energy sits in the core.
    """
    white = weight.detach().double()
    if metric is not None:
        white = torch.einsum("oi...,ij->oj...", white, metric.root)
    seen = white if outputs is None else torch.einsum("po,oi...->pi...", outputs.root, white)
    directions = leading_left(seen.movedim(1, 0).flatten(1), rank or weight.shape[1])
    core = torch.einsum("oi...,ik->ok...", white, directions)
    into = directions.T if metric is None else directions.T @ metric.inverse
    reduce = into.reshape(*into.shape, *(1,) * (weight.dim() - 2))
    return reduce.to(weight.dtype).contiguous(), core.to(weight.dtype).contiguous()


def tucker2_stages(
    weight: Tensor,
    ranks: tuple[int, int] | None = None,
    metric: Metric | None = None,
    outputs: Metric | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Stages reduce (r_i, i, 1..), core (r_o, r_i, *kernel) and expand (o, r_o, 1..) of a kernel.

    A higher-order SVD, truncated to `ranks` (r_o, r_i): prefixes are near-optimal and their
    residual is monotone in both ranks. The metrics are those of input and output channels. The
    energy sits in the core, each of whose rows has a scale of its own when it is quantized; the
    columns of `expand` are orthonormal in the outputs' metric.
    """
    r_out, r_in = ranks or weight.shape[:2]
    white = weight.detach().double().cpu().numpy()
    if metric is not None:
        white = multi_mode_dot(white, [metric.root.cpu().numpy()], modes=[1])
    if outputs is not None:
        white = multi_mode_dot(white, [outputs.root.cpu().numpy()], modes=[0])
    u_out, u_in = (
        leading_left(torch.from_numpy(tl.unfold(white, mode)), rank)
        for mode, rank in ((0, r_out), (1, r_in))
    )
    core = torch.from_numpy(multi_mode_dot(white, [u_out.T.numpy(), u_in.T.numpy()], modes=[0, 1]))
    into = u_in.T if metric is None else u_in.T @ metric.inverse.cpu()
    out = u_out if outputs is None else outputs.inverse.cpu() @ u_out
    point = (1,) * (weight.dim() - 2)
    stages = (into.reshape(*into.shape, *point), core, out.reshape(*out.shape, *point))
    reduce, core, expand = (stage.to(weight).contiguous() for stage in stages)
    return reduce, core, expand
