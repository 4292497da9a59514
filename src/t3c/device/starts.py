"""Cold starts: a profile in a process of its own, from the artifact on disk to its first answer."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path

import onnx

from t3c.artifact.devices import Start
from t3c.artifact.reader import Artifact
from t3c.device.execution import Execution, example_inputs
from t3c.engines import Engine, open_engine
from t3c.measure.memory import peak_live, peak_rss, reset_peak, rss
from t3c.spec import Form

SECONDS = 600


def time_start(artifact: Artifact, engine: Engine, execution: Execution, weight_bits: int) -> Start:
    """The cold start of a profile, by a child process that has imported what it needs."""
    task = {
        "artifact": str(artifact.path.resolve()),
        "engine": engine.name,
        "threads": engine.threads,
        "profile": execution.profile.name,
        "forms": {name: str(form) for name, form in execution.forms.items()},
        "grouped": [list(group) for group in execution.grouped],
        "weight_bits": weight_bits,
        "few": execution.few,
    }
    held = activation_bytes(execution.graph(artifact, weight_bits))
    command = [sys.executable, "-m", "t3c.device.starts"]
    try:
        done = subprocess.run(
            command, input=json.dumps(task), capture_output=True, text=True, timeout=SECONDS,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        reason = f"no answer within {SECONDS} seconds"
        return Start(cold_ms=None, peak_bytes=None, activation_bytes=held, reason=reason)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Start(cold_ms=None, peak_bytes=None, activation_bytes=held, reason=reason)
    cold = json.loads(done.stdout.splitlines()[-1])
    return Start(**cold, activation_bytes=held)


def activation_bytes(model: onnx.ModelProto) -> int | None:
    """The most bytes that activations hold at once at batch 1, run node by node.

    A tensor that is rounded to 8 bits counts as its codes; None where a shape is not known.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for value in copy.graph.input:
        value.type.tensor_type.shape.dim[0].dim_value = 1
    graph = onnx.shape_inference.infer_shapes(copy, data_prop=True).graph
    constants = {tensor.name for tensor in graph.initializer}
    readers: dict[str, list[str]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node.op_type)
    same: dict[str, str] = {}
    steps: list[tuple[Sequence[str], Sequence[str]]] = []
    rounded = set()
    for node in graph.node:
        inputs = [same.get(name, name) for name in node.input if name and name not in constants]
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            if inputs:  # else it is of a weight
                same[node.output[0]] = inputs[0]
                if all(kind == "QuantizeLinear" for kind in readers.get(inputs[0], ())):
                    rounded.add(inputs[0])
            else:
                constants.add(node.output[0])
            continue
        if not inputs:  # made of constants alone, such as a weight that is decompressed
            constants |= set(node.output)
            continue
        steps.append((inputs, list(node.output)))
    sizes: dict[str, int] = {}
    for value in [*graph.value_info, *graph.input, *graph.output]:
        kind = value.type.tensor_type
        dims = [d.dim_value for d in kind.shape.dim]
        if all(dims):
            width = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize
            sizes[value.name] = prod(dims) * (1 if value.name in rounded else width)
    used = {name for step in steps for part in step for name in part}
    if used - sizes.keys():
        return None
    keep = [same.get(value.name, value.name) for value in graph.output]
    return peak_live(steps, sizes, keep)


def _child() -> None:
    """Read a task, start its profile, and print what that took."""
    task = json.loads(sys.stdin.read())
    engine = open_engine(task["engine"], task["threads"])
    reset_peak()
    before, start = rss(), time.perf_counter()
    artifact = Artifact(Path(task["artifact"]))
    profile = artifact.manifest.chain[task["profile"]]
    forms = {name: Form(form) for name, form in task["forms"].items()}
    grouped = [tuple(group) for group in task["grouped"]]
    ranges = artifact.ranges(profile.name)
    execution = Execution(profile, forms, ranges, grouped, task["few"])
    graph = execution.graph(artifact, task["weight_bits"])
    engine.compile(graph).run(example_inputs(artifact))
    cold_ms = (time.perf_counter() - start) * 1e3
    peak = peak_rss()
    grown = None if peak is None or before is None else max(0, peak - before)
    sys.stdout.write(json.dumps({"cold_ms": cold_ms, "peak_bytes": grown}) + "\n")


if __name__ == "__main__":
    _child()
