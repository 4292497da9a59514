"""A profile as a device executes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from t3c.artifact.devices import Device, DeviceTable, Group, choose_forms
from t3c.artifact.ledger import Ledger
from t3c.artifact.reader import Artifact
from t3c.engines.decode import empty_states
from t3c.engines.protocol import Array
from t3c.errors import CorruptError
from t3c.graph.assemble import assemble
from t3c.graph.builder import Ranges
from t3c.spec import Form, Profile


@dataclass(frozen=True)
class Execution:
    """A profile with the forms, ranges and groups a device executes it with.

    `few` says whether kernels of at most 4 bits run; None where the device did not time them.
    """

    profile: Profile
    forms: Mapping[str, Form]
    ranges: Ranges
    grouped: Sequence[Group] = ()
    few: bool | None = None

    def graph(self, artifact: Artifact, weight_bits: int) -> onnx.ModelProto:
        """Return the graph an engine compiles."""
        return assemble(
            artifact, self.profile, self.forms, self.ranges, weight_bits, self.grouped,
            few=self.few,
        )  # fmt: skip


def execution_of(artifact: Artifact, table: DeviceTable, profile: Profile) -> Execution:
    """Return a profile of the artifact as the table has it executed."""
    specs = artifact.manifest.specs
    forms = table.forms.get(profile.name) or choose_forms(table.layers, specs, profile.points)
    if not possible(artifact, profile, forms):
        raise CorruptError(
            f"the table of {table.device.title} runs profile {profile.name!r} in forms its layers "
            "do not have: calibrate again"
        )
    grouped = table.grouped(profile.points, forms)
    return Execution(profile, forms, artifact.ranges(profile.name), grouped, table.few)


def possible(artifact: Artifact, profile: Profile, forms: Mapping[str, Form]) -> bool:
    """Return whether each layer of a profile, and no other, has a form it can run in."""
    has = {n: artifact.manifest.specs[n].forms(point) for n, point in profile.points.items()}
    return forms.keys() == has.keys() and all(form in has[n] for n, form in forms.items())


def certified_forms(ledger: Ledger | None, device: Device) -> dict[str, dict[str, Form]]:
    """Return each profile's forms by its latest certificate for this engine and its weights."""
    forms: dict[str, dict[str, Form]] = {}
    for certification in reversed(ledger.on(device.engine)) if ledger else ():
        if certification.weight_bits == device.weight_bits:
            forms |= certification.forms
    return forms


def example_inputs(artifact: Artifact, seed: int = 0) -> list[Array]:
    """Return inputs of the right shapes at batch 1: noise, and ones where they are whole numbers.

    Free axes are as long as in the example the model was exported with. A model with states reads
    one token, and remembers as many as the example has.
    """
    rng, model = np.random.default_rng(seed), artifact.manifest.model
    inputs, remembered = [], 0
    for entry in model.inputs:
        shape = list(entry.example or [n if isinstance(n, int) else 1 for n in entry.shape])
        if model.states:
            remembered = max(remembered, *shape[1:])
            shape = [n if isinstance(n, int) else 1 for n in entry.shape]
        noise = rng.normal(size=shape) if entry.dtype.startswith("float") else np.ones(shape)
        inputs.append(noise.astype(entry.dtype))
    return [*inputs, *empty_states(model.states, 1, remembered)]
