"""Which layers an engine cannot run: what to say when it refuses a profile."""

from __future__ import annotations

from collections.abc import Iterable

from t3c.device.execution import Execution
from t3c.engines import Engine
from t3c.errors import EngineError
from t3c.graph.assemble import example_input, synthetic_layer
from t3c.spec import Form, LayerPoint, LayerSpec


def rejected_tiles(engine: Engine, specs: Iterable[LayerSpec], execution: Execution) -> list[str]:
    """The layers of a profile that the engine refuses even alone, with the tiles it was given."""
    found = []
    for spec in specs:
        point, form = execution.profile.points[spec.name], execution.forms[spec.name]
        try:
            engine.compile(synthetic_layer(spec, point, form)).run([example_input(spec)])
        except EngineError as error:
            found.append(f"{spec.name}: {tile(spec, point, form)}: {error}")
    return found


def tile(spec: LayerSpec, point: LayerPoint, form: Form) -> str:
    """A layer point as kernels see it: its form and the weights it is multiplied by."""
    shapes = " and ".join("x".join(map(str, shape)) for shape in spec.executed_shapes(point, form))
    return f"rank {point.rank} at {point.bits} bits, {form} {shapes}, tile {spec.tile}"
