"""Quantization-aware training to 8 bits by NNCF, on OpenVINO."""

from __future__ import annotations

import os
from dataclasses import replace
from math import prod

import openvino as ov
from torch import nn

from lab.baselines.baseline import Baseline, Task
from lab.baselines.finetune import copied, finetune_, to_openvino
from t3c.errors import TrainError
from t3c.evidence.int8 import bytes_on_disk, calibration, nncf_library, quiet, saturates
from t3c.nn.inputs import Inputs, batches_of, check_inputs


def qat8(task: Task, *, learning_rate: float = 1e-4) -> Baseline:
    """Train the original with NNCF's quantizers; its activations are always in 8 bits."""
    # In bfloat16 NNCF would take its scales in 8 bits too: its own numbers are in float.
    training = replace(task.trained("qat8"), precision="float")
    compiled = build_kernels()
    model = prepare_qat(training.model, task.samples, transformer=task.transformer)
    done = finetune_(model, training, learning_rate=learning_rate, watch=task.watch)
    graph = qat_graph(model, task.example)
    method = "NNCF quantization-aware training, 8 bits" + (", weights 7" if saturates() else "")
    if not compiled:
        method += ", its kernels not compiled"
    return Baseline("qat8", method, graph, bytes_on_disk(graph), done.steps, done.seconds)


def prepare_qat(model: nn.Module, samples: Inputs, *, transformer: bool = False) -> nn.Module:
    """A copy of `model` with NNCF's trainable quantizers, calibrated on all `samples` (n, ...).

    It is in evaluation mode and is trained so: norms keep their running statistics.
    """
    check_inputs(samples, "the calibration data")
    build_kernels()
    nncf = nncf_library()
    with quiet():
        quantized: nn.Module = nncf.quantize(
            copied(model), **calibration(list(batches_of(samples, 1)), transformer)
        )
    return quantized.eval()


def qat_graph(prepared: nn.Module, example: Inputs) -> ov.Model:
    """Convert a prepared model, with an example of its inputs (1, ...): its weights are int8, its
    activations rounded by FakeQuantize.
    """
    graph = to_openvino(prepared, example)
    for rounding in graph.get_ordered_ops():
        if rounding.get_type_name() == "FakeQuantize":
            _round_before_maximum_(rounding)
    return graph


def _round_before_maximum_(rounding: ov.Node) -> None:
    """Let a maximum be taken of what is rounded, not rounded after: it is the same number.

    OpenVINO's kernels for the CPU answer wrongly where a maximum over an image is rounded.
    """
    maximum, *ranges = (rounding.input_value(i) for i in range(5))
    node = maximum.get_node()
    per_tensor = all(prod(found.get_shape()) == 1 for found in ranges)
    if node.get_type_name() != "ReduceMax" or not per_tensor:
        return
    levels = rounding.get_attributes()["levels"]
    rounded = ov.opset13.fake_quantize(node.input_value(0), *ranges, levels)
    keep = node.get_attributes()["keep_dims"]
    after = ov.opset13.reduce_max(rounded, node.input_value(1), keep)
    for target in rounding.output(0).get_target_inputs():
        target.replace_source_output(after.output(0))


def build_kernels() -> bool:
    """Load NNCF's kernels, compiling them the first time; False if it has to do without."""
    nncf_library()
    from nncf.torch.extensions import ExtensionLoaderTimeoutException
    from nncf.torch.quantization.extensions import QuantizedFunctionsCPU as Kernels
    from nncf.torch.quantization.extensions import QuantizedFunctionsCPULoader as Loader
    from nncf.torch.quantization.reference import ReferenceQuantizedFunctions

    # Compiling takes a minute, which is how long NNCF waits unless told.
    os.environ.setdefault("NNCF_EXTENSION_LOAD_TIMEOUT", "600")
    try:
        with quiet():
            kernel = Kernels.get("Quantize_forward")
    except ExtensionLoaderTimeoutException as error:
        raise TrainError(
            "NNCF's kernels are not there after a long wait: if an earlier build was cut short, "
            f"remove {Loader.get_build_dir()}"
        ) from error
    return kernel is not ReferenceQuantizedFunctions.Quantize_forward
