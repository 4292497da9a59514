"""OpenVINO's own defaults beside ours: float operations in bfloat16 where the processor has it.

In turns, each graph with the precision hint at its default and at float32.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

from lab.width import NETWORKS
from t3c.artifact.graph import to_onnx
from t3c.certify.drift import relative_drift
from t3c.device.measured import runners
from t3c.engines import Session
from t3c.engines.openvino import OpenVINO
from t3c.evidence.int8 import ptq8
from t3c.measure.latency import interleave, paced
from t3c.nn.inputs import tensors

ROUNDS, CALIBRATED = 60, 32
HINT = "INFERENCE_PRECISION_HINT"


def settings_rows(say: Callable[[str], object]) -> list[dict[str, Any]]:
    """Return p50 and drift of the original and of plain int8 by each setting."""
    return [row for name in NETWORKS for row in _rows(name, say)]


def _rows(name: str, say: Callable[[str], object]) -> list[dict[str, Any]]:
    say(f"{name}: settings of the engine")
    model, example = NETWORKS[name]()
    raw = io.BytesIO()
    onnx.save_model(to_onnx(model, example), raw)
    ours, theirs = OpenVINO(2), OpenVINO(2)
    theirs.config = {k: v for k, v in ours.config.items() if k != HINT}
    arrays = [value.numpy() for value in tensors(example)]
    rng = np.random.default_rng(0)
    samples = [_noise(rng, array) for array in arrays]
    int8 = ptq8(ours.read(raw.getvalue()), samples, transformer=name != "ResNet-50").model
    sessions: dict[str, Session] = {}
    for how, engine in (("float32", ours), ("default", theirs)):
        sessions[f"full, {how}"] = engine.compile_read(engine.read(raw.getvalue()))
        sessions[f"ptq8, {how}"] = engine.compile_read(int8)
    one = [array[:1] for array in arrays]
    calls = runners(sessions, one)
    times = interleave(calls, paced(calls, ROUNDS))
    wanted = sessions["full, float32"].run(arrays)[0]
    return [
        {
            "network": name, "setting": key, "p50": times[key].p50, "p90": times[key].p90,
            "to_float32": times[key].p50 / times[f"{key.split(',')[0]}, float32"].p50,
            "drift": float(relative_drift(session.run(arrays)[0], wanted).mean()),
        }
        for key, session in sessions.items()
    ]  # fmt: skip


def _noise(rng: np.random.Generator, like: Any) -> Any:
    if np.issubdtype(like.dtype, np.floating):
        return rng.normal(size=(CALIBRATED, *like.shape[1:])).astype(like.dtype)
    top = max(2, int(like.max()) + 1)
    return rng.integers(1, top, (CALIBRATED, *like.shape[1:])).astype(like.dtype)
