"""Post-training quantization of weights to 4 bits, with second-order compensation."""

from __future__ import annotations

import torch

from t3c.baselines.baseline import Baseline, Task, precision, quantized
from t3c.baselines.compensate import clipped_scale, compensate, rounding
from t3c.baselines.finetune import to_openvino
from t3c.baselines.layers import as_matrix, embeddings, input_moments, torch_model, weight_layers
from t3c.baselines.pack import Format, packed_bytes


@torch.no_grad()
def ptq4(task: Task, *, ends: bool = False) -> Baseline:
    """Round weights to 4 bits, each output channel with its best clipping; the rest to 8 bits.

    The first and the last layer that run have 8 bits, unless their `ends` too are to have 4. What
    runs holds the 4-bit weights in 8 bits, rounded again by a few hundredths of a 4-bit step.
    """
    model = torch_model(task, "ptq4")
    layers, moments = weight_layers(model), input_moments(model, task.samples)
    names = list(moments)
    formats = {f"{name}.weight": Format(8) for name in (*layers, *embeddings(model))}
    for done, name in enumerate(names):
        if ends or name not in (names[0], names[-1]):
            weight, form = as_matrix(layers[name]), Format(4)
            scale = clipped_scale(weight, form.top)
            rule = rounding(scale, form.top)
            settled = compensate(weight, moments.pop(name), rule, sort=True)
            layers[name].weight.copy_(settled.reshape(layers[name].weight.shape))
            formats[f"{name}.weight"] = Format(4, scale=scale.flatten())
        task.watch(f"rounding {name}", done + 1, len(names))
    graph = quantized(to_openvino(model, task.samples[:1]), task)
    method = f"weights in 4 bits with second-order compensation, run in {precision(task)}"
    if not ends:
        method += ", first and last layer 8"
    return Baseline("ptq4", method, graph, packed_bytes(model, formats, graph))
