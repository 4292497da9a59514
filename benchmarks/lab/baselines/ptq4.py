"""Post-training quantization of weights to 4 bits, with second-order compensation."""

from __future__ import annotations

import torch
from torch import Tensor

from lab.baselines.baseline import Baseline, Task, precision, quantized
from lab.baselines.compensate import clipped_scale, group_rounding, rounding
from lab.baselines.finetune import to_openvino
from lab.baselines.layers import as_matrix, embeddings, input_moments, torch_model, weight_layers
from lab.baselines.pack import Format, packed_bytes
from t3c.errors import SpecError
from t3c.quant.compensate import compensate

LARGEST = 128  # inputs that share a scale: kernels for 4 bits take groups of 32 to 128


@torch.no_grad()
def ptq4(task: Task, *, ends: bool = False, group: int | None = None) -> Baseline:
    """Round weights to 4 bits, each output channel with its best clipping; the rest to 8 bits.

    The first and the last layer that run have 8 bits, unless their `ends` too are to have 4. With a
    `group` as many inputs share a scale, where it divides them; by default a transformer has the
    largest groups of up to 128 inputs, others one scale a channel. What runs holds the 4-bit
    weights in 8 bits, rounded again by a few hundredths of a 4-bit step.
    """
    if group is not None and group < 0:
        raise SpecError(f"group must be at least 0, got {group}")
    model = torch_model(task, "ptq4")
    layers, moments = weight_layers(model), input_moments(model, task.samples)
    names = list(moments)
    formats = {f"{name}.weight": Format(8) for name in (*layers, *embeddings(model))}
    for done, name in enumerate(names):
        if ends or name not in (names[0], names[-1]):
            matrix = as_matrix(layers[name])
            size = group_of(matrix.shape[-1]) if group is None and task.transformer else group
            settled, form = _rounded(matrix, moments.pop(name), size or 0)
            layers[name].weight.copy_(settled.reshape(layers[name].weight.shape))
            formats[f"{name}.weight"] = form
        task.watch(f"rounding {name}", done + 1, len(names))
    graph = quantized(to_openvino(model, task.example), task)
    method = f"weights in 4 bits with second-order compensation, run in {precision(task)}"
    if group or (group is None and task.transformer):
        method += f", a scale for {group or f'up to {LARGEST}'} inputs"
    if not ends:
        method += ", first and last layer 8"
    return Baseline("ptq4", method, graph, packed_bytes(model, formats, graph))


def group_of(inputs: int) -> int:
    """Return the largest number of up to 128 inputs that divides them into whole groups."""
    return next(size for size in range(LARGEST, 0, -1) if inputs % size == 0)


def _rounded(weight: Tensor, moment: Tensor, group: int) -> tuple[Tensor, Format]:
    """A weight (g, m, n) on a grid of 4 bits, and how it is packed."""
    form = Format(4)
    if not group or weight.shape[-1] % group:
        scale = clipped_scale(weight, form.top)
        settled = compensate(weight, moment, rounding(scale, form.top), sort=True)
        return settled, Format(4, scale=scale.flatten())
    scales: list[Tensor] = []
    settled = compensate(weight, moment, group_rounding(form.top, scales), block=group)
    together = torch.stack(scales, dim=-1)  # (g, m, groups)
    return settled, Format(4, scale=together.flatten().float(), groups=len(scales))
