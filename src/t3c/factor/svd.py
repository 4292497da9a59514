"""Matrices: W (m, n) as expand (m, K) @ reduce (K, n), every prefix usable."""

from __future__ import annotations

import torch
from torch import Tensor

from t3c.factor.metric import whitening


def svd_stages(weight: Tensor, moment: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Stages reduce (K, n) and expand (m, K), K = min(m, n), of a matrix (m, n).

    Prefix k is the best rank-k approximation in the metric C of `whitening`: it minimises
    tr (W - W_k) C (W - W_k)^T, which is E ||(W - W_k) a||^2 for inputs a with E[a a^T] = C.
    The columns of `expand` are orthonormal; the singular values sit in `reduce`, each of whose
    rows has a scale of its own when it is quantized.
    """
    root, inverse = whitening(moment, weight.shape[1])
    u, s, vt = torch.linalg.svd(weight.detach().double() @ root, full_matrices=False)
    reduce, expand = s[:, None] * vt @ inverse, u
    return reduce.to(weight.dtype), expand.to(weight.dtype)
