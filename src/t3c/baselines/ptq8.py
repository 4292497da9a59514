"""Post-training quantization to 8 bits by NNCF, weights and activations."""

from __future__ import annotations

from dataclasses import replace

from t3c.baselines.baseline import (
    Baseline,
    Task,
    bytes_on_disk,
    original_graph,
    quantized,
    saturates,
)


def ptq8(task: Task) -> Baseline:
    """Quantize the original as NNCF does it, calibrated on all samples."""
    model = quantized(original_graph(task), replace(task, activations="int8"))
    method = "NNCF post-training quantization, 8 bits" + (", weights 7" if saturates() else "")
    return Baseline("ptq8", method, model, bytes_on_disk(model))
