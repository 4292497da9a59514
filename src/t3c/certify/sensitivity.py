"""First-order drift of single layers: what one layer's change does to the output.

||J_l dW_l a_{l-1}|| for every point of a layer costs one application of the layer, once its inputs
and the adjoints of its outputs are known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from t3c.certify.gains import EXACT_OUTPUTS
from t3c.nn.hooks import taking
from t3c.nn.inputs import Inputs, batches_of, call, evaluating
from t3c.nn.layers import ElasticLayer
from t3c.nn.view import at, elastic_layers, elastic_weights
from t3c.nn.weight import ElasticWeight
from t3c.spec import LayerPoint

PROBES = 24


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
        total = 0.0
        for uses, norm in zip(self.uses, self.output_norms, strict=True):
            moved = [use.layer.apply_weight(use.input, change).flatten() for use in uses]
            along = [use.adjoints @ move for use, move in zip(uses, moved, strict=True)]
            if along:
                squared = torch.stack(along).sum(0).double().square().sum()
                total += self.probe_weight * float(squared) / norm**2
        return total / len(self.uses)


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
    scale, generator = 1.0, torch.Generator().manual_seed(seed)
    with evaluating(model), at(model, None), torch.enable_grad():
        for sample in batches_of(inputs, 1):
            with taking(layers) as runs:
                output = call(model, sample).flatten()
            norms.append(max(float(output.detach().double().norm()), 1e-12))
            probes, scale = _probes(output.numel(), generator)
            offsets = [run.offset for run in runs]
            rows = [
                torch.autograd.grad(
                    output, offsets, probe, retain_graph=True, materialize_grads=True
                )
                for probe in probes.to(output.device)
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


def _probes(outputs: int, generator: torch.Generator) -> tuple[Tensor, float]:
    """Unit vectors for few outputs, random signs for many."""
    if outputs <= EXACT_OUTPUTS:
        return torch.eye(outputs), 1.0
    signs = torch.randint(0, 2, (PROBES, outputs), generator=generator) * 2.0 - 1.0
    return signs, 1.0 / PROBES
