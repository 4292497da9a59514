"""Export with float activations: only weights are compressed, and everything else holds as ever."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import t3c
from conftest import quick, supply_times
from t3c.artifact.manifest import RANGES
from t3c.artifact.reader import Artifact
from t3c.convert import elasticize_, state_of
from t3c.errors import EngineError, SpecError
from t3c.evidence.certify import CertifyConfig
from t3c.evidence.estimates import EstimateConfig
from t3c.exporter import ExportConfig, Exported, export
from t3c.graph.int4 import products
from t3c.graph.tensorrt import write_tensorrt
from t3c.spec import Goal

CONFIG = ExportConfig(
    activations="float", goal=Goal(profiles=3, worst_drift=1.0), timing=quick(3),
    certificate=CertifyConfig(
        delta=0.1, estimates=EstimateConfig(samples=4), worst_case=True
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Exported]:
    torch.manual_seed(0)
    wide = [nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10)]
    model, x = nn.Sequential(*wide), torch.randn(240, 64)
    elasticize_(model, x[:2], calibration=[x[:64]])
    with pytest.MonkeyPatch.context() as patch:
        supply_times(patch)
        path = tmp_path_factory.mktemp("weights") / "w.t3c"
        return model, export(model, path, [x], CONFIG)


def test_nothing_but_weights_is_of_few_bits(
    exported: tuple[nn.Module, Exported], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("t3c.graph.assemble.cache_bytes", lambda: 0)  # nothing is cached
    artifact = Artifact(exported[1].path)
    assert artifact.weight_only
    assert not artifact.manifest.model.quantized
    assert not any(name.startswith(RANGES) for name in artifact.dense())
    runtime = t3c.load(exported[1].path)
    bits = set()
    for profile in runtime.chain:
        graph = runtime.graph(profile)
        assert not [n for n in graph.graph.node if n.op_type == "QuantizeLinear"]
        bits |= {product.bits for product in products(graph.graph)}
    assert bits == {4, 8}
    assert artifact.manifest.kernels["openvino"].weights == ("int4", "int8")


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_engines_are_torch(exported: tuple[nn.Module, Exported], engine: str) -> None:
    rows = [row for row in exported[1].parity if row.engine == engine]
    assert len(rows) == len(exported[1].profiles)
    # Without rounding between layers, nothing is left to differ by but the order of sums.
    assert all(row.ok and row.rounded < 1e-3 for row in rows)


def test_certificates_hold_for_what_runs(exported: tuple[nn.Module, Exported]) -> None:
    model, found = exported
    original = state_of(model).original
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    wanted = original(x).detach().numpy()
    runtime = t3c.load(found.path)
    for certificate in found.ledger.entries:
        drift = np.linalg.norm(runtime(x.numpy(), profile=certificate.profile) - wanted, axis=1)
        drift = drift / np.linalg.norm(wanted, axis=1)
        assert drift.mean() == pytest.approx(certificate.mean, rel=0.5, abs=1e-3)
        if certificate.mean < 0.1:  # further out it is no straight line
            assert certificate.first_order == pytest.approx(certificate.mean, rel=0.5)
        assert certificate.worst_case is not None
        assert certificate.worst_case >= certificate.mean
        assert (drift <= certificate.epsilon).mean() > 0.75


def test_a_part_of_it_answers_the_same(
    exported: tuple[nn.Module, Exported], tmp_path: Path
) -> None:
    whole = t3c.load(exported[1].path)
    part = t3c.load(t3c.trim(whole.artifact, ["tiny"], tmp_path / "t.t3c").path)
    x = np.ones((2, 64), np.float32)
    np.testing.assert_array_equal(part(x), whole(x, profile="tiny"))
    assert part.artifact.weight_only


def test_it_is_not_for_tensorrt(exported: tuple[nn.Module, Exported], tmp_path: Path) -> None:
    artifact = Artifact(exported[1].path)
    with pytest.raises(EngineError, match="its activations are float"):
        write_tensorrt(artifact, artifact.manifest.chain["max"], tmp_path / "max.onnx")
    assert not list(tmp_path.iterdir())


def test_activations_are_one_or_the_other() -> None:
    with pytest.raises(SpecError, match="activations are 'int8', 'float' or 'auto'"):
        replace(CONFIG, activations="int4")
