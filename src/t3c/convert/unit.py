"""What shares one budget: a layer alone, or the projections of an attention block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from t3c.convert.plan import LayerPlan
from t3c.spec import LayerPoint


@dataclass(frozen=True)
class Unit:
    """Layers that take one point together: a level of rank, the same share for each, and bits.

    The points of a unit are (1 + level, bits); `layer_points` says what they are to each layer.
    """

    name: str
    layers: tuple[LayerPlan, ...]

    @property
    def levels(self) -> tuple[float, ...]:
        """The shares of full rank that any of the layers offers, rising to 1."""
        return tuple(sorted({share for layer in self.layers for share in layer.shares}))

    def points(self) -> list[LayerPoint]:
        ranks = range(1, len(self.levels) + 1)
        bits = self.layers[0].bits
        tied = any(layer.tied_bits for layer in self.layers)
        if not tied or len(self.levels) == 1:
            return [LayerPoint(rank, q) for rank, q in product(ranks, bits)]
        # The unit's own bits have to rise with the level; each layer's follow from its rank.
        return [LayerPoint(rank, bits[-1]) for rank in ranks]

    def layer_points(self, point: LayerPoint) -> dict[str, LayerPoint]:
        """The point of each layer, by name: the least rank it has that is no less than its share.

        Ranks and bits of every layer rise with the unit's point.
        """
        share = self.levels[point.rank - 1]
        return {layer.spec.name: layer.point_at(share, point.bits) for layer in self.layers}


def units(layers: Iterable[LayerPlan]) -> list[Unit]:
    """The units of a plan, in order of their first layers."""
    members: dict[str, list[LayerPlan]] = {}
    for layer in layers:
        # A block is no layer, whatever the layers are called.
        key = f"block {layer.block}" if layer.block else f"layer {layer.spec.name}"
        members.setdefault(key, []).append(layer)
    return [Unit(key, tuple(layers)) for key, layers in members.items()]
