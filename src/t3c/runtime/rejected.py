"""Which layers an engine cannot run: the tiles to name when it refuses a profile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from t3c.device.execution import Execution
from t3c.engines import Engine
from t3c.errors import EngineError
from t3c.graph.synthetic import example_input, synthetic_layer
from t3c.spec import Form, LayerPoint, LayerSpec


@dataclass(frozen=True)
class Tile:
    """A layer point as kernels see it: its form and the weights it is multiplied by."""

    spec: LayerSpec
    point: LayerPoint
    form: Form

    def __str__(self) -> str:
        executed = self.spec.executed_shapes(self.point, self.form)
        shapes = " and ".join("x".join(map(str, shape)) for shape in executed)
        rank, bits = self.point.rank, self.point.bits
        size = "width" if self.form is Form.NARROW else "rank"
        return f"{size} {rank} at {bits} bits, {self.form} {shapes}, tile {self.spec.tile}"


@dataclass(frozen=True)
class Rejected:
    """A tile that an engine refuses even alone, and what the engine says."""

    tile: Tile
    error: str

    def __str__(self) -> str:
        return f"{self.tile.spec.name}: {self.tile}: {self.error}"


def rejected_tiles(
    engine: Engine, specs: Iterable[LayerSpec], execution: Execution
) -> tuple[Rejected, ...]:
    """Return the layers of a profile that the engine refuses even alone."""
    rejected = []
    for spec in specs:
        point, form = execution.profile.points[spec.name], execution.forms[spec.name]
        try:
            engine.compile(synthetic_layer(spec, point, form)).run(
                [example_input(spec.narrowed(point.rank))]
            )
        except EngineError as error:
            rejected.append(Rejected(Tile(spec, point, form), str(error)))
    return tuple(rejected)
