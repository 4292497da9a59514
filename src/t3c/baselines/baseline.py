"""What a baseline is, and how its size is counted."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import openvino as ov

from t3c.runtime.engines import Session


@dataclass(frozen=True)
class Baseline:
    """A model made by a method, compiled on the engine it is compared on."""

    name: str
    method: str
    session: Session
    size_bytes: int


def bytes_on_disk(model: ov.Model) -> int:
    """What the model takes in OpenVINO's own format: weights and topology."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.xml"
        ov.save_model(model, path, compress_to_fp16=False)
        return sum(file.stat().st_size for file in Path(folder).iterdir())
