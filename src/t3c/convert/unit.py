"""Units of layers that share one budget: a layer, an attention block's projections, or the layers
that are narrowed together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from t3c.convert.layer import LayerPlan
from t3c.spec import LayerPoint, Level


@dataclass(frozen=True)
class Unit:
    """Layers that take one level together, the same share of full rank for each, and bits."""

    name: str
    layers: tuple[LayerPlan, ...]

    @property
    def levels(self) -> tuple[float, ...]:
        """The shares of full rank that any of the layers offers, rising to 1."""
        return tuple(sorted({share for layer in self.layers for share in layer.shares}))

    def points(self) -> list[Level]:
        """Return every level of the unit at every number of bits."""
        levels, bits = enumerate(self.levels, start=1), self.layers[0].bits
        if len(self.levels) > 1 and any(layer.tied_bits for layer in self.layers):
            # The unit's own bits have to rise with the level; each layer's follow from its rank.
            bits = bits[-1:]
        return [Level(level, q, share) for (level, share), q in product(levels, bits)]

    def layer_points(self, level: Level) -> dict[str, LayerPoint]:
        """Return the point of each layer by name: the least rank that is no less than its share.

        Ranks and bits of every layer rise with the unit's level.
        """
        share = self.levels[level.level - 1]
        return {layer.spec.name: layer.point_at(share, level.bits) for layer in self.layers}


def units(layers: Iterable[LayerPlan]) -> list[Unit]:
    """Return the units of a plan, in order of their first layers."""
    members: dict[str, list[LayerPlan]] = {}
    for layer in layers:
        # A block is no layer, whatever the layers are called.
        key = f"block {layer.block}" if layer.block else f"layer {layer.spec.name}"
        key = f"width {layer.spec.unit}" if layer.spec.unit else key
        members.setdefault(key, []).append(layer)
    return [Unit(key, tuple(layers)) for key, layers in members.items()]
