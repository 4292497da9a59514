"""Post-training quantization, helped by distillation without labels."""

from __future__ import annotations

from dataclasses import replace

from lab.baselines.baseline import Baseline, Task
from lab.baselines.finetune import finetune_
from lab.baselines.qat8 import prepare_qat, qat_graph
from t3c.evidence.int8 import bytes_on_disk, saturates


def kdptq(task: Task, *, learning_rate: float = 1e-5) -> Baseline:
    """NNCF's 8 bits, then weights and scales drawn gently to the original's outputs.

    Activations are always in 8 bits.
    """
    training = task.trained("kdptq")
    model = prepare_qat(training.model, task.samples, transformer=task.transformer)
    in_float = replace(training, precision="float")  # as qat8 is
    done = finetune_(model, in_float, learning_rate=learning_rate, watch=task.watch)
    graph = qat_graph(model, task.example)
    method = "NNCF post-training quantization, 8 bits" + (", weights 7" if saturates() else "")
    method += ", then distilled"
    return Baseline("kdptq", method, graph, bytes_on_disk(graph), done.steps, done.seconds)
