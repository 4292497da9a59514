"""Nested codes chosen with second-order compensation, for all views of one file.

Rounding a weight to its nearest code leaves an error that others could make up for. Columns are
settled one by one, each error being taken back by the columns still free (`compensate`), and view
by view: that of the fewest bits first, every next one within the cells that the view before chose.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from t3c.errors import DataError, SpecError
from t3c.quant.compensate import Settle, compensate
from t3c.quant.straight_through import group_levels
from t3c.spec import MAX_BITS, MIN_BITS


@torch.no_grad()
def settled(
    weight: Tensor,
    code_scale: Tensor,
    scales: Mapping[int, Tensor],
    moment: Tensor,
    *,
    group: int | None = None,
    ridge: float = 0.01,
) -> Tensor:
    """A weight (m, n) whose nearest codes are the settled ones, for inputs with E[a a^T] (n, n).

    `code_scale` (m,) makes the codes, `scales` (m,) are those of the views that are settled, by
    bits, 8 among them. With a `group`, so many columns have a grid of their own. The largest
    weight of each grid stays, and with it the scale of the codes.
    """
    views = sorted(scales)
    if not views or views[-1] != MAX_BITS or views[0] < MIN_BITS:
        raise SpecError(f"views are of {MIN_BITS} to {MAX_BITS} bits and end there, got {views}")
    if weight.dim() != 2 or moment.shape != (weight.shape[1],) * 2:
        shapes = tuple(weight.shape), tuple(moment.shape)
        raise DataError(f"a weight of shape {shapes[0]} has a moment of shape {shapes[1]}")
    order = moment.diagonal().argsort(descending=True, stable=True)
    here, around = weight[:, order], moment[order][:, order]
    size = weight.abs().reshape(len(weight), -1, group or weight.shape[1])
    # Those of a group of zeros are free: whatever they become, its grid is the finest.
    largest = ((size >= size.amax(dim=2, keepdim=True)) & (size > 0)).flatten(1)[:, order]
    level = torch.ones_like(weight) if group is None else group_levels(weight, group)[:, order]
    cells = Cells.whole(here)
    for bits in views:
        chosen = Chosen(cells, largest, scales[bits][:, None] * level, bits)
        compensate(
            here[None], around[None], lambda *_, chosen=chosen: chosen.next_block(), ridge=ridge
        )
        cells = chosen.cells
    made = torch.copysign(cells.low * code_scale[:, None] * level, cells.sign)
    # Rows next to nothing have a wider scale than their own: they stay as they are.
    own = here.abs().amax(dim=1, keepdim=True) > 126.5 * code_scale[:, None]
    made = torch.where(own, made.to(weight.dtype), here)
    return torch.empty_like(weight).index_copy_(1, order, made)


class Cells:
    """What is still open of each code (m, n): its sign, and magnitudes from `low` on, `bits` of
    which are known; a sign of 0 is open too."""

    def __init__(self, sign: Tensor, low: Tensor, bits: int) -> None:
        self.sign, self.low, self.bits = sign, low, bits

    @classmethod
    def whole(cls, weight: Tensor) -> Cells:
        """Nothing is chosen yet: one cell for all magnitudes."""
        return cls(torch.zeros_like(weight), torch.zeros_like(weight), 1)


class Chosen:
    """The codes of one view as its columns are settled, block after block."""

    def __init__(self, before: Cells, largest: Tensor, scale: Tensor, bits: int) -> None:
        self.before, self.largest, self.scale, self.bits = before, largest, scale.double(), bits
        self.cells = Cells(before.sign.clone(), before.low.clone(), bits)
        self.column = 0

    def next_block(self) -> Settle:
        start = self.column
        return lambda index, values: self._settle(start + index, values)

    def _settle(self, column: int, values: Tensor) -> Tensor:
        """The value (1, m) of this view that is nearest to one wanted, of those still open."""
        self.column = column + 1
        step = 2 ** (MAX_BITS - self.bits)
        width = 2 ** (MAX_BITS - self.before.bits) // step  # cells of this view in one before it
        wanted = values[0]
        sign = self.before.sign[:, column].double()
        sign = torch.where(sign == 0, torch.copysign(torch.ones_like(wanted), wanted), sign)
        scale = self.scale[:, column]
        size = sign * wanted / scale
        first = self.before.low[:, column].double() / step
        level = size.round() if self.bits == MAX_BITS else size.floor()
        level = torch.minimum(level.maximum(first), first + width - 1)
        # Codes end where the largest weight of a row is, which keeps its own.
        level = torch.where(self.largest[:, column], first + width - 1, level)
        self.cells.sign[:, column], self.cells.low[:, column] = sign.float(), (level * step).float()
        shift = 0.5 if self.bits < MAX_BITS else 0.0
        return (sign * (level + shift) * scale)[None]
