"""One-shot pruning with second-order compensation, then 8 bits."""

from __future__ import annotations

import torch

from lab.baselines.baseline import Baseline, Task, precision, quantized
from lab.baselines.compensate import zeroing
from lab.baselines.finetune import to_openvino
from lab.baselines.layers import as_matrix, embeddings, input_moments, torch_model, weight_layers
from lab.baselines.magprune import prunable
from lab.baselines.pack import Format, packed_bytes
from t3c.quant.compensate import compensate


@torch.no_grad()
def sparsegpt(task: Task, *, sparsity: float = 0.5) -> Baseline:
    """Make a share of each layer's weights zero, those left making up for it; then 8 bits.

    The file has a bit for each weight and the codes of those that are left.
    """
    model, rule = torch_model(task, "sparsegpt"), zeroing(sparsity)
    layers, moments = weight_layers(model), input_moments(model, task.samples)
    large = prunable({name: layers[name].weight for name in moments})
    names = [name for name in moments if name in large]
    formats = {f"{name}.weight": Format(8) for name in (*layers, *embeddings(model))}
    for done, name in enumerate(names):
        settled = compensate(as_matrix(layers[name]), moments.pop(name), rule)
        layers[name].weight.copy_(settled.reshape(layers[name].weight.shape))
        formats[f"{name}.weight"] = Format(8, sparse=True)
        task.watch(f"pruning {name}", done + 1, len(names))
    graph = quantized(to_openvino(model, task.example), task)
    method = f"SparseGPT, {sparsity:.0%} of each layer's weights zero, then {precision(task)}"
    return Baseline("sparsegpt", method, graph, packed_bytes(model, formats, graph))
