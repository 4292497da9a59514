"""What shares one budget: a layer, the projections of an attention block, or a stage of these."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from t3c.convert.plan import LayerPlan
from t3c.errors import SpecError
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


def units(layers: Iterable[LayerPlan], tie: Literal["block", "stage"] = "block") -> list[Unit]:
    """The units of a plan, in order of their first layers.

    A stage ties the units that repeat: of one geometry, with names that differ in numbers alone.
    """
    if tie not in ("block", "stage"):
        raise SpecError(f"tie is 'block' or 'stage', got {tie!r}")
    members: dict[str, list[LayerPlan]] = {}
    for layer in layers:
        # A block is no layer, whatever the layers are called.
        key = f"block {layer.block}" if layer.block else f"layer {layer.spec.name}"
        members.setdefault(key, []).append(layer)
    found = [Unit(key, tuple(layers)) for key, layers in members.items()]
    return _stages(found) if tie == "stage" else found


def _stages(found: Iterable[Unit]) -> list[Unit]:
    """Units that repeat as one, called by the first and the last of them."""
    stages: dict[Hashable, list[Unit]] = {}
    for unit in found:
        stages.setdefault(tuple(map(_likeness, unit.layers)), []).append(unit)
    tied = []
    for same in stages.values():
        first, last = (unit.name.partition(" ")[2] for unit in (same[0], same[-1]))
        name = f"stage {first} to {last}" if len(same) > 1 else same[0].name
        tied.append(Unit(name, tuple(layer for unit in same for layer in unit.layers)))
    return tied


def _likeness(layer: LayerPlan) -> Hashable:
    """What layers of one stage have alike: all but the numbers in their names."""
    name = re.sub(r"\d+", "#", layer.spec.name)
    offered = (layer.ranks, layer.shares, layer.bits, layer.tied_bits)
    return replace(layer.spec, name=name), layer.role, bool(layer.block), offered
