"""Weights in 8 bits by NNCF, activations left in float: not of the paper, but what one would use
where int8 kernels are slow."""

from __future__ import annotations

from dataclasses import replace

from t3c.baselines.baseline import Baseline, Task, bytes_on_disk, original_graph, quantized


def ptq8w(task: Task) -> Baseline:
    """Compress the original's weights, whatever others do with activations."""
    model = quantized(original_graph(task), replace(task, activations="float"))
    return Baseline("ptq8w", "NNCF weight compression, 8 bits", model, bytes_on_disk(model))
