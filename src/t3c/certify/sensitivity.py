"""First-order drift of single layers: what one layer's change does to the output.

||J_l dW_l a_{l-1}|| for every point of a layer costs one application of the layer, once its inputs
and the adjoints of its outputs are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from t3c.certify.gains import EXACT_OUTPUTS
from t3c.nn.hooks import taking
from t3c.nn.inputs import Inputs, batches_of, call, evaluating, tensors
from t3c.nn.layers import ElasticLayer
from t3c.nn.view import at, elastic_layers, elastic_weights
from t3c.nn.weight import ElasticWeight
from t3c.spec import LayerPoint

PROBES, LEAST_PROBES = 96, 12  # of all samples together; of each


@dataclass(frozen=True)
class Use:
    """One run of a layer on one sample: its input, and its output's adjoints (probes, ...)."""

    layer: ElasticLayer
    input: Tensor
    adjoints: Tensor


@dataclass(frozen=True)
class LayerSensitivity:
    """One elastic weight at the calibration samples, wherever it is used.

    `uses` are those of each sample. `probe_weight` makes the squared projections add up to the
    squared norm of the output change, exactly for unit probes and in expectation for random ones.
    Drift is from the full view, which training keeps close to the original; certificates are from
    the original itself.
    """

    weight: ElasticWeight
    uses: tuple[tuple[Use, ...], ...]
    probe_weight: float
    output_norms: tuple[float, ...]

    @torch.no_grad()
    def squared_drift(self, point: LayerPoint) -> float:
        """Mean over samples of (||J dW a|| / ||z||)^2 when the weight moves to `point`."""
        change = self.weight.weight_at(point) - self.weight.dense
        along: list[Tensor | float] = [0.0] * len(self.uses)
        for layer, places, inputs in self.batches:
            moved = layer.apply_weight(inputs, change).flatten().chunk(len(places))
            for (sample, use), move in zip(places, moved, strict=True):
                along[sample] = along[sample] + self.uses[sample][use].adjoints @ move
        total = 0.0
        for sum_, norm in zip(along, self.output_norms, strict=True):
            if isinstance(sum_, Tensor):
                squared = float(sum_.double().square().sum())
                total += self.probe_weight * squared / norm**2
        return total / len(self.uses)

    @cached_property
    def batches(self) -> list[tuple[ElasticLayer, list[tuple[int, int]], Tensor]]:
        """Inputs of one shape and one layer together, with the sample and the use each is of."""
        alike: dict[tuple[int, torch.Size], list[tuple[int, int]]] = {}
        for sample, uses in enumerate(self.uses):
            for index, use in enumerate(uses):
                alike.setdefault((id(use.layer), use.input.shape), []).append((sample, index))
        found = []
        for places in alike.values():
            first = self.uses[places[0][0]][places[0][1]]
            inputs = torch.cat([self.uses[sample][use].input for sample, use in places])
            found.append((first.layer, places, inputs))
        return found


class PointDrifts:
    """Squared drift of layer points, by layer and point, each found once.

    Between a layer's fewest and most bits it is reckoned: a bit less doubles the step of a grid,
    and with it adds four times as much of what rounding drifts.
    """

    def __init__(
        self, sensitivities: Mapping[str, LayerSensitivity], bits: Mapping[str, Sequence[int]]
    ) -> None:
        self.sensitivities, self.bits = sensitivities, bits
        self.known: dict[tuple[str, LayerPoint], float] = {}

    def __call__(self, name: str, point: LayerPoint) -> float:
        fewest, most = self.bits[name][0], self.bits[name][-1]
        if point.bits in (fewest, most):
            return self._found(name, point)
        low, high = (self._found(name, LayerPoint(point.rank, b)) for b in (fewest, most))
        rounding = max(low - high, 0.0) / (4.0 ** (most - fewest) - 1)
        return high + rounding * (4.0 ** (most - point.bits) - 1)

    def _found(self, name: str, point: LayerPoint) -> float:
        if (name, point) not in self.known:
            self.known[name, point] = self.sensitivities[name].squared_drift(point)
        return self.known[name, point]


def layer_sensitivities(
    model: nn.Module, inputs: Inputs, seed: int = 1
) -> dict[str, LayerSensitivity]:
    """The sensitivity of every elastic weight, around the full view, at the given samples.

    One sample at a time: whatever a model does with its batch, all that runs is that sample's.
    Each has probes of its own, and none is one that factors were made to suit: these drift less
    along those.
    """
    weights, layers = elastic_weights(model), elastic_layers(model)
    uses: dict[str, list[tuple[Use, ...]]] = {name: [] for name in weights}
    norms: list[float] = []
    samples = len(tensors(inputs)[0])
    scale, generator = 1.0, torch.Generator().manual_seed(seed)
    with evaluating(model), at(model, None), torch.enable_grad():
        for sample in batches_of(inputs, 1):
            with taking(layers) as runs:
                output = call(model, sample).flatten()
            norms.append(max(float(output.detach().double().norm()), 1e-12))
            count = max(LEAST_PROBES, -(-PROBES // samples))
            probes, scale = _probes(output.numel(), count, generator)
            offsets = [run.offset for run in runs]
            rows = [
                torch.autograd.grad(
                    output, offsets, probe, retain_graph=True, materialize_grads=True
                )
                for probe in probes
            ]
            mine: dict[str, list[Use]] = {name: [] for name in weights}
            for index, run in enumerate(runs):
                layer = layers[run.name]
                adjoints = torch.stack([row[index].flatten() for row in rows])
                mine[layer.elastic.spec.name].append(Use(layer, run.kept, adjoints))
            for name in weights:
                uses[name].append(tuple(mine[name]))
    return {
        name: LayerSensitivity(weight, tuple(uses[name]), scale, tuple(norms))
        for name, weight in weights.items()
    }


def _probes(outputs: int, count: int, generator: torch.Generator) -> tuple[Tensor, float]:
    """Unit vectors for few outputs, `count` random signs for many."""
    if outputs <= EXACT_OUTPUTS:
        return torch.eye(outputs), 1.0
    signs = torch.randint(0, 2, (count, outputs), generator=generator) * 2.0 - 1.0
    return signs, 1.0 / count
