"""First-order drift of single layers: what one layer's change does to the output.

||J_l dW_l a_{l-1}|| for every point of a layer costs one application of the layer, once its inputs
and the adjoints of its outputs are known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from t3c.errors import DataError
from t3c.nn.inputs import Inputs, call, tensors
from t3c.nn.layers import ElasticLayer
from t3c.nn.view import at, elastic_layers, elastic_weights
from t3c.nn.weight import ElasticWeight
from t3c.spec import LayerPoint

EXACT_OUTPUTS = 32
PROBES = 24


@dataclass(frozen=True)
class Use:
    """One run of a layer: its input, and its output's adjoints (probes, batch, ...)."""

    layer: ElasticLayer
    input: Tensor
    adjoints: Tensor


@dataclass(frozen=True)
class LayerSensitivity:
    """One elastic weight at the calibration samples, wherever it is used.

    `probe_weight` makes the squared projections add up to the squared norm of the output change,
    exactly for unit probes and in expectation for random ones. Drift is from the full view, which
    training keeps close to the original; certificates are from the original itself.
    """

    weight: ElasticWeight
    uses: tuple[Use, ...]
    probe_weight: float
    output_norm: Tensor

    @torch.no_grad()
    def squared_drift(self, point: LayerPoint) -> float:
        """Mean over samples of (||J dW a|| / ||z||)^2 when the weight moves to `point`."""
        change = self.weight.weight_at(point) - self.weight.dense
        total = torch.zeros(())
        for use in self.uses:
            moved = use.layer.apply_weight(use.input, change).flatten(1)
            moved = moved.expand(use.adjoints.shape[1], -1)
            rows = torch.einsum("pbx,bx->pb", use.adjoints, moved)
            # A layer may see its samples in parts, such as windows: rows of one are neighbours.
            total = total + rows.reshape(len(rows), len(self.output_norm), -1).sum(-1)
        squared = self.probe_weight * total.double().square().sum(0)
        return float((squared / self.output_norm.square()).mean())


def layer_sensitivities(
    model: nn.Module, inputs: Inputs, seed: int = 0
) -> dict[str, LayerSensitivity]:
    """The sensitivity of every elastic weight, around the full view, at the given samples."""
    taken: list[tuple[ElasticLayer, Tensor, Tensor]] = []
    samples = len(tensors(inputs)[0])

    def hook(layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        assert isinstance(layer, ElasticLayer)
        if len(out) == 1:  # the same for all samples, such as positions: each has adjoints
            out = out.expand(samples, *out.shape[1:])
        if len(out) % samples:
            raise DataError(
                f"layer {layer.elastic.spec.name!r}: {len(out)} rows are not those of {samples} "
                "samples: the batch must come first"
            )
        taken.append((layer, args[0].detach(), out))
        return out

    hooks = [layer.register_forward_hook(hook) for layer in elastic_layers(model).values()]
    training = model.training
    try:
        with at(model, None), torch.enable_grad():
            output = call(model.eval(), inputs).flatten(1)
    finally:
        model.train(training)
        for handle in hooks:
            handle.remove()
    norm = output.detach().double().norm(dim=1).clamp_min(1e-12)
    probes, scale = _probes(output.shape[1], seed)
    outs = [out for _, _, out in taken]
    rows = [
        torch.autograd.grad(
            output, outs, probe.expand_as(output), retain_graph=True, materialize_grads=True
        )
        for probe in probes
    ]
    uses: dict[str, list[Use]] = {name: [] for name in elastic_weights(model)}
    for index, (layer, into, _) in enumerate(taken):
        adjoints = torch.stack([row[index].flatten(1) for row in rows])
        uses[layer.elastic.spec.name].append(Use(layer, into, adjoints))
    return {
        name: LayerSensitivity(weight, tuple(uses[name]), scale, norm)
        for name, weight in elastic_weights(model).items()
    }


def _probes(outputs: int, seed: int) -> tuple[Tensor, float]:
    """Unit vectors for few outputs, random signs for many."""
    if outputs <= EXACT_OUTPUTS:
        return torch.eye(outputs), 1.0
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (PROBES, outputs), generator=generator) * 2.0 - 1.0
    return signs, 1.0 / PROBES
