"""Post-training quantization, helped by distillation on the samples it is calibrated on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from t3c.baselines.baseline import Baseline, Task, bytes_on_disk, saturates
from t3c.baselines.finetune import finetune_
from t3c.baselines.qat8 import prepare_qat, qat_graph


def kdptq(task: Task, *, learning_rate: float = 1e-5) -> Baseline:
    """NNCF's 8 bits, then weights and scales drawn to the original's outputs on the samples.

    There is no training set: neither its images nor labels are used. The rate is small, as
    samples are few. Activations are always in 8 bits.
    """
    training = task.trained("kdptq")
    images = torch.from_numpy(np.ascontiguousarray(task.samples))
    none = torch.zeros(len(images), dtype=torch.long)
    model = prepare_qat(training.model, task.samples, transformer=task.transformer)
    unlabelled = replace(training, images=images, targets=none, labels=0.0)
    done = finetune_(model, unlabelled, learning_rate=learning_rate, watch=task.watch)
    graph = qat_graph(model, task.samples[:1])
    method = f"NNCF post-training quantization, 8 bits, distilled on {len(images)} samples"
    method += ", weights 7" if saturates() else ""
    return Baseline("kdptq", method, graph, bytes_on_disk(graph), done.steps, done.seconds)
