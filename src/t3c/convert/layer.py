"""One weight to convert: its geometry, and the points it is offered."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from t3c.convert.config import Role
from t3c.quant.policy import RankTiedBits
from t3c.spec import LayerPoint, LayerSpec


@dataclass(frozen=True)
class LayerPlan:
    """One weight to convert: its geometry, the ranks (full rank last) and bits it may take.

    `shares` are the ranks as shares of full rank, `modules` all layers that run the weight, `block`
    the attention block whose budget it shares. `reason` says why a layer is elastic in bits alone.
    """

    spec: LayerSpec
    ranks: tuple[int, ...]
    bits: tuple[int, ...]
    shares: tuple[float, ...]
    modules: tuple[str, ...]
    role: Role
    block: str = ""
    tied_bits: RankTiedBits | None = None
    reason: str = ""

    @property
    def cap(self) -> int:
        """The largest rank stored factored; full rank where none is."""
        return self.ranks[-2] if len(self.ranks) > 1 else self.ranks[-1]

    @property
    def rank_elastic(self) -> bool:
        return len(self.ranks) > 1

    @property
    def weights(self) -> int:
        return prod(self.spec.dense_shape)

    def point_at(self, share: float, bits: int) -> LayerPoint:
        """The least rank that is no less than `share` of full rank, at `bits` if they are free."""
        rank = next(k for k, mine in zip(self.ranks, self.shares, strict=True) if mine >= share)
        if self.tied_bits is None or not self.rank_elastic:
            return LayerPoint(rank, bits)
        tied = self.tied_bits.allowed(rank, self.bits)
        return LayerPoint(rank, self.bits[-1] if rank == self.ranks[-1] else tied)

    def __str__(self) -> str:
        also = f", shared by {', '.join(self.modules[1:])}" if len(self.modules) > 1 else ""
        if not self.rank_elastic:
            return f"{self.spec.name}: bits only ({self.reason}){also}"
        if self.spec.narrows:
            widths = ", ".join(map(str, self.ranks))
            return f"{self.spec.name}: {self.spec.factorization}, widths {widths}{also}"
        block = f", in block {self.block}" if self.block else ""
        ranks = ", ".join(map(str, self.ranks))
        return f"{self.spec.name}: {self.spec.factorization}, ranks {ranks}{block}{also}"
