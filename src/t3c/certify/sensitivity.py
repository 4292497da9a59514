"""First-order drift of single layers: what one layer's change does to the output.

||J_l dW_l a_{l-1}|| for every point of a layer costs one application of the layer, once its inputs
and the adjoints of its outputs are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from t3c.errors import DataError
from t3c.nn.inputs import Inputs, call, tensors
from t3c.nn.layers import ElasticLayer
from t3c.nn.view import at, elastic_layers
from t3c.spec import LayerPoint

EXACT_OUTPUTS = 32
PROBES = 24


@dataclass(frozen=True)
class LayerSensitivity:
    """One layer at the calibration samples: its input, its output's adjoints (probes, batch, ...).

    `probe_weight` makes the squared projections add up to the squared norm of the output change,
    exactly for unit probes and in expectation for random ones. Drift is from the full view, which
    training keeps close to the original; certificates are from the original itself.
    """

    layer: ElasticLayer
    input: Tensor
    adjoints: Tensor
    probe_weight: float
    output_norm: Tensor

    @torch.no_grad()
    def squared_drift(self, point: LayerPoint) -> float:
        """Mean over samples of (||J dW a|| / ||z||)^2 when the layer moves to `point`."""
        change = self.layer.weight_at(point) - self.layer.weight_at(None)
        moved = _apply(self.layer, self.input, change)
        rows = torch.einsum("pbx,bx->pb", self.adjoints, moved.flatten(1))
        # A layer may see its samples in parts, such as windows: rows of a sample are neighbours.
        projections = rows.reshape(len(rows), len(self.output_norm), -1).sum(-1)
        squared = self.probe_weight * projections.double().square().sum(0)
        return float((squared / self.output_norm.square()).mean())


def layer_sensitivities(
    model: nn.Module, inputs: Inputs, seed: int = 0
) -> dict[str, LayerSensitivity]:
    """The sensitivity of every elastic layer, around the full view, at the given samples."""
    layers = elastic_layers(model)
    taken: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str, layer: ElasticLayer) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            if name in taken:
                raise DataError(f"layer {name!r} runs twice in one forward pass")
            if len(out) % len(tensors(inputs)[0]):
                raise DataError(
                    f"layer {name!r}: {len(out)} rows are not those of {len(tensors(inputs)[0])} "
                    "samples: the batch must come first"
                )
            taken[name] = (args[0].detach(), out)

        return layer.register_forward_hook(hook)

    hooks = [watch(name, layer) for name, layer in layers.items()]
    training = model.training
    try:
        with at(model, None), torch.enable_grad():
            output = call(model.eval(), inputs).flatten(1)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    norm = output.detach().double().norm(dim=1).clamp_min(1e-12)
    probes, weight = _probes(output.shape[1], seed)
    outs = [taken[name][1] for name in layers]
    rows = [
        torch.autograd.grad(
            output, outs, probe.expand_as(output), retain_graph=True, materialize_grads=True
        )
        for probe in probes
    ]
    return {
        name: LayerSensitivity(
            layer,
            taken[name][0],
            torch.stack([row[index].flatten(1) for row in rows]),
            weight,
            norm,
        )
        for index, (name, layer) in enumerate(layers.items())
    }


def _probes(outputs: int, seed: int) -> tuple[Tensor, float]:
    """Unit vectors for few outputs, random signs for many."""
    if outputs <= EXACT_OUTPUTS:
        return torch.eye(outputs), 1.0
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (PROBES, outputs), generator=generator) * 2.0 - 1.0
    return signs, 1.0 / PROBES


def _apply(layer: ElasticLayer, x: Tensor, weight: Tensor) -> Tensor:
    """The layer's linear map with another weight and no bias."""
    s = layer.spec
    if weight.dim() == 2:
        return nn.functional.linear(x, weight)
    return nn.functional.conv2d(x, weight, None, s.stride, s.padding, s.dilation, s.groups)
