"""What keeps trained factors near a spectrum: orthogonal components, apart and in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
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


def strengths(stages: Sequence[Tensor]) -> Tensor:
    """Strength (k,) of each component: |row j of the last stage but one| * |column j of the last|.

    Of reduce and expand the norm of component j. Of Tucker-2, whose expand has unit columns until
    it is trained, the norm of slice j of the core along its output axis.
    """
    *_, inner, expand = stages
    return _norms(inner) * _norms(expand.transpose(0, 1))


def unit_norm(reduce: Tensor, expand: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unit rows (k, n), strengths (k,) and unit columns (m, k), whose product is the same."""
    return normalize(reduce, dim=1), strengths((reduce, expand)), normalize(expand, dim=0)


def _norms(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows.flatten(1), dim=1)
    return norms


def _squared_cosine(rows: Tensor) -> Tensor:
    """Mean over the pairs of rows (k, d); a row of zeros is orthogonal to all."""
    k, unit = len(rows), normalize(rows, dim=1)
    return (unit @ unit.T).triu(1).square().sum() / max(k * (k - 1) / 2, 1)
