"""What keeps trained factors near a spectrum: orthogonal components, apart and in order."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import normalize


def spectral_penalty(reduce: Tensor, expand: Tensor) -> Tensor:
    """Mean squared cosine between rows of reduce (k, n), and between columns of expand (m, k).

    Between 0, both sets orthogonal, and 1; blind to the scale of each component.
    """
    return (_squared_cosine(reduce) + _squared_cosine(expand.T)) / 2


def gap_penalty(strengths: Tensor, gap: float = 0.01) -> Tensor:
    """Mean shortfall of the falls between neighbours of (k,) from `gap`, the largest being 1.

    0 if each is above the next by the gap, for which gap * (k - 1) has to be at most 1.
    """
    # Paper B.1 prints sum max(0, s_i - s_{i+1} - delta), which punishes wide gaps; its purpose is
    # "to keep gaps from collapsing", so the difference is taken the other way round.
    falls = -strengths.diff() / strengths.max().clamp_min(1e-12)
    return (gap - falls).relu().sum() / max(len(falls), 1)


def _squared_cosine(rows: Tensor) -> Tensor:
    """Mean over the pairs of rows (k, d); a row of zeros is orthogonal to all."""
    k, unit = len(rows), normalize(rows, dim=1)
    return (unit @ unit.T).triu(1).square().sum() / max(k * (k - 1) / 2, 1)
