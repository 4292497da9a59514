"""Artifacts as users ship them, and what else they could ship: files on disk, side by side."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openvino as ov
import torch
from torch import nn

from lab.baselines import BASELINES
from lab.baselines.baseline import Task
from lab.zoo.imagenet_sample import imagenet_sample, resnet50
from t3c.artifact.reader import Artifact
from t3c.artifact.trim import trim
from t3c.compression.decoder import Decoder
from t3c.convert import elasticize_
from t3c.device.calibrate import CalibrationConfig
from t3c.engines.openvino import OpenVINO
from t3c.evidence.certify import CertifyConfig
from t3c.evidence.estimates import EstimateConfig
from t3c.evidence.int8 import bytes_on_disk
from t3c.evidence.original import write_original
from t3c.exporter import ExportConfig, export
from t3c.nn.inputs import Inputs, batches_of, select
from t3c.runtime.runtime import Runtime
from t3c.spec import Goal
from t3c.zoo.digits import DigitsNet, load_digits, train_digits
from t3c.zoo.text import stories15m, stories_tokens

Say = Callable[[str], object]
Row = dict[str, Any]
# What is compared are bytes and calls: certificates and proxies are kept short.
LIGHT = ExportConfig(
    timing=CalibrationConfig(rounds=30, grid=0, busy=True, starts=False),
    certificate=CertifyConfig(estimates=EstimateConfig(samples=2, path_samples=0)),
)


@dataclass(frozen=True)
class Subject:
    """A trained model, data for its factors, and data to export with."""

    name: str
    model: nn.Module
    statistics: Inputs
    calibration: Inputs
    config: ExportConfig = LIGHT
    axes: dict[str, dict[int, str]] = field(default_factory=dict)


def subjects() -> dict[str, Callable[[], Subject]]:
    """The digits network, stories15M and ResNet-50, made when asked for."""
    return {"digits": _digits, "stories15m": _stories15m, "resnet-50": _resnet50}


def make(subject: Subject, folder: Path) -> Artifact:
    """The artifact of a subject, with the original beside it."""
    batches = list(batches_of(subject.statistics, 16))
    elasticize_(subject.model, batches[0], calibration=batches)
    axes = subject.axes or None
    write_original(subject.model, folder / f"{subject.name}.onnx", axes=axes)
    path = folder / f"{subject.name}.t3c"
    export(subject.model, path, [subject.calibration], subject.config, axes=axes)
    return Artifact(path)


def size_rows(artifact: Artifact, original: Path, samples: Inputs, folder: Path) -> list[Row]:
    """Bytes of the artifact, of its parts, and of what people keep instead."""
    runtime = Runtime(artifact, "openvino")
    name, engine = artifact.manifest.model.name, OpenVINO(1)
    rows: list[Row] = []

    def add(what: str, size: int, note: str = "") -> None:
        rows.append({"model": name, "file": what, "bytes": size, "note": note})

    whole = artifact.content_bytes()
    add("artifact", whole, "all profiles")
    add("artifact and evidence", artifact.size_on_disk(), "with ledger, tables and card")
    for profile in artifact.manifest.chain:
        part = trim(artifact, [profile.name], folder / f"{name}-{profile.name}.t3c")
        add(f"trimmed {profile.name}", part.content_bytes())
    for kind, size, note in _others(artifact, original, samples, engine):
        add(kind, size, note)
    graphs = [
        bytes_on_disk(engine.read(runtime.graph(p).SerializeToString())) for p in runtime.chain
    ]
    add(f"{len(graphs)} int8 checkpoints", sum(graphs), "each profile as OpenVINO's own file")
    return rows


def _others(
    artifact: Artifact, original: Path, samples: Inputs, engine: OpenVINO
) -> list[tuple[str, int, str]]:
    """Files of NNCF: all in 8 bits, and weights in 4 where it does that."""
    import nncf

    logging.getLogger("nncf").setLevel(logging.ERROR)
    raw = original.read_bytes()
    found = []
    with contextlib.redirect_stdout(io.StringIO()):  # its progress bars
        if artifact.weight_only:
            int8 = nncf.compress_weights(
                read_for_nncf(raw, engine), mode=nncf.CompressWeightsMode.INT8_SYM
            )
            found.append(("nncf int8", bytes_on_disk(int8), "weights alone"))
        else:
            made = BASELINES["ptq8"](Task(raw, select(samples, slice(0, 64)), engine))
            found.append(("nncf int8", made.size_bytes, "ptq8"))
        int4 = nncf.compress_weights(
            read_for_nncf(raw, engine), mode=nncf.CompressWeightsMode.INT4_SYM, ratio=1.0,
            group_size=-1, all_layers=True,
        )  # fmt: skip
        found.append(
            ("nncf int4", bytes_on_disk(int4), "weights alone; convolutions as it has them")
        )
    return found


def read_for_nncf(raw: bytes, engine: OpenVINO) -> ov.Model:
    """A model whose products turn their weights themselves: NNCF leaves weights alone that a node
    of their own turns, and a table that is tied to them is to stay one constant."""
    model = engine.read(raw)
    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul":
            continue
        turned = node.input_value(1).get_node()
        if turned.get_type_name() != "Transpose":
            continue
        weight = turned.input_value(0)
        if weight.get_node().get_type_name() == "Constant" and len(weight.get_shape()) == 2:
            product = ov.opset13.matmul(node.input_value(0), weight, False, True)
            ov.utils.replace_node(node, product)
    model.validate_nodes_and_infer_types()
    return model


def _digits() -> Subject:
    digits = load_digits()
    torch.manual_seed(0)
    model = DigitsNet()
    train_digits(model, digits, 3, 0)
    return Subject("digits", model, digits.train[0][:128], digits.calibration[0])


def _resnet50(statistics: int = 64, calibration: int = 96) -> Subject:
    known = imagenet_sample(statistics + calibration, part="tune")[0]
    return Subject("resnet-50", resnet50(), known[:statistics], known[statistics:])


def _stories15m(statistics: int = 64, calibration: int = 96, length: int = 32) -> Subject:
    known = stories_tokens("train", statistics + calibration, length)
    config = replace(LIGHT, activations="float", goal=Goal(worst_drift=0.3))
    return Subject(
        "stories15m", Decoder(stories15m()), {"input_ids": known[:statistics]},
        {"input_ids": known[statistics:]}, config, {"input_ids": {1: "sequence"}},
    )  # fmt: skip
