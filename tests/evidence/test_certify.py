from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import t3c
from conftest import LIGHT, Made, recorded
from lab.zoo.corrupt import gaussian_noise
from t3c.artifact.reader import LEDGER, Artifact
from t3c.certify.slices import sample_keys
from t3c.errors import ArtifactError, CorruptError, DataError, SpecError
from t3c.evidence.artifact import certify_artifact
from t3c.evidence.bench import Data, bench
from t3c.evidence.certify import CertifyConfig
from t3c.evidence.estimates import EstimateConfig
from t3c.evidence.quality import Judge
from t3c.runtime.monitor import MonitorConfig, Shift
from t3c.runtime.runtime import load
from t3c.spec import Metric

QUICK = CertifyConfig(
    measures=("absolute", "kl", "flip"),
    estimates=EstimateConfig(samples=4, path_samples=1),
    worst_case=True,
    monitor=True,
    flip_cap=0.5,
)


@pytest.fixture
def images(made: Made) -> npt.NDArray[np.float32]:
    return made.digits.test[0].numpy()


def test_an_artifact_is_certified_on_data_of_ones_own(
    made: Made, copied: Path, images: npt.NDArray[np.float32], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Artifact(copied).ledger()
    assert before is not None
    assert len(before.certifications) == 1
    seen = recorded(monkeypatch)
    found = certify_artifact(
        copied, images[:300], made.folder / "original.onnx", QUICK, held_out=images[300:],
        labels=made.digits.test[1].numpy()[:300], own={"largest": _largest},
    )  # fmt: skip
    assert seen
    for entry in found.entries:
        assert entry.samples == 225
        assert entry.worst_case is not None
        assert entry.spectral is not None
        assert entry.worst_case > entry.epsilon > entry.p95 * 0.9
        assert set(entry.measures) == {"absolute", "kl", "flip", "largest"}
        assert entry.measures["flip"].epsilon > entry.measures["flip"].mean
    bounds = [entry.epsilon for entry in found.entries]
    assert bounds == sorted(bounds, reverse=True)
    assert found.held_out is not None
    assert found.held_out.coverage >= found.held_out.expected[0]
    assert {row.label for row in found.slices} == set("0123456789")
    assert sum(r.samples for r in found.slices if r.profile == found.entries[0].profile) == 225
    assert found.capped is not None
    assert found.capped.profiles[-1:] == ("max",)
    after = Artifact(copied).ledger()
    assert after is not None
    assert after.certifications == (found,)  # it takes the place of the one of the same forms
    runtime = load(copied)
    assert runtime.certificates["max"].epsilon == found.entries[-1].epsilon
    card = (copied / "README.md").read_text()
    assert "worst case" in card
    assert "| slice | profile |" in card


def _largest(outputs: npt.ArrayLike, original: npt.ArrayLike) -> npt.ArrayLike:
    return np.abs(np.asarray(outputs) - np.asarray(original)).max(axis=1)


def test_engines_have_certifications_of_their_own(
    made: Made, copied: Path, images: npt.NDArray[np.float32]
) -> None:
    other = load(copied, "onnxruntime")
    assert not other.certificates
    with pytest.raises(SpecError, match="nothing to monitor by"):
        load(copied, "onnxruntime", monitor=MonitorConfig())
    certify_artifact(
        copied, images[:120], made.folder / "original.onnx", LIGHT, engine="onnxruntime"
    )
    ledger = Artifact(copied).ledger()
    assert ledger is not None
    assert [c.engine for c in ledger.certifications] == ["openvino", "onnxruntime"]
    assert load(copied, "onnxruntime").certificates.keys() == load(copied).certificates.keys()


def test_an_original_without_names_gives_epsilon_alone(
    made: Made, copied: Path, images: npt.NDArray[np.float32], tmp_path: Path
) -> None:
    from t3c.artifact.graph import to_onnx
    from t3c.convert import state_of

    state = state_of(made.model)
    path = tmp_path / "foreign.onnx"
    path.write_bytes(to_onnx(state.original, state.example).SerializeToString())
    found = certify_artifact(copied, images[:120], path, LIGHT)
    again = certify_artifact(copied, images[:120], made.folder / "original.onnx", LIGHT)
    for mine, full in zip(found.entries, again.entries, strict=True):
        assert mine.first_order is None
        assert "write_original" in mine.unavailable
        assert mine.epsilon == pytest.approx(full.epsilon, rel=1e-3)


def test_samples_that_set_ranges_are_refused(
    made: Made, copied: Path, images: npt.NDArray[np.float32]
) -> None:
    calibration = made.digits.calibration[0].numpy()
    used = set(Artifact(copied).manifest.calibrated_on or ())
    assert len(used) == 100
    before = (copied / LEDGER).read_bytes()
    with pytest.raises(DataError, match=r"quantizer and the \w+ slices share"):
        certify_artifact(copied, calibration, made.folder / "original.onnx", LIGHT)
    with pytest.raises(DataError, match=r"test slices share \d+ samples"):
        certify_artifact(
            copied, images[:120], made.folder / "original.onnx", LIGHT, held_out=images[100:140]
        )
    assert (copied / LEDGER).read_bytes() == before
    assert used.isdisjoint(sample_keys([images]))
    runtime, data = (
        load(copied),
        Data((calibration,), Judge(Metric.AGREEMENT, 0.01), (calibration[:20],)),
    )
    with pytest.raises(DataError, match="and the test slices share"):
        bench(runtime, made.folder / "original.onnx", data, ("full",), rounds=1, checks=1)


def test_bad_samples_are_refused(made: Made, copied: Path, images: npt.NDArray[np.float32]) -> None:
    original = made.folder / "original.onnx"
    with pytest.raises(DataError, match=r"10 samples are too few for delta=0\.05"):
        certify_artifact(copied, images[:10], original, LIGHT)
    with pytest.raises(DataError, match="does not fit"):
        certify_artifact(copied, images[:60, :, :5], original, LIGHT)
    with pytest.raises(DataError, match="NaN"):
        certify_artifact(copied, np.full_like(images[:60], np.nan), original, LIGHT)
    with pytest.raises(DataError, match="labels of shape"):
        certify_artifact(copied, images[:60], original, LIGHT, labels=np.zeros(3))
    with pytest.raises(DataError, match="no such file"):
        certify_artifact(copied, images[:60], copied / "none.onnx", LIGHT)
    for wrong in ({"delta": 1.0}, {"measures": ("size",)}, {"flip_cap": 2.0}):
        with pytest.raises(SpecError):
            CertifyConfig(**wrong)  # type: ignore[arg-type]


def test_a_ledger_that_was_changed_is_refused(copied: Path) -> None:
    path = copied / LEDGER
    text = json.loads(path.read_text())
    text["certifications"][0]["entries"][0]["epsilon"] = -1
    path.write_text(json.dumps(text))
    with pytest.raises(CorruptError, match="negative"):
        Artifact(copied).ledger()
    path.write_text(path.read_text()[: path.stat().st_size // 2])
    with pytest.raises(CorruptError):
        load(copied)
    replaced = Artifact(copied)
    replaced.content = "another"
    with pytest.raises(ArtifactError, match="was replaced"):
        replaced._check_not_replaced()


def test_a_monitored_runtime_tells_of_a_shift(
    made: Made, copied: Path, images: npt.NDArray[np.float32]
) -> None:
    plain, watched = load(copied), load(copied, monitor=MonitorConfig(rate=1e-3))
    events: list[Shift] = []
    watched.on_shift = events.append
    answers = [watched.answer(images[[i]], profile="max") for i in range(60)]
    assert not events
    assert np.allclose(answers[0].output, plain(images[:1], profile="max"), atol=0.05)
    noisy = gaussian_noise(made.digits.test[0], 1.0, 0).numpy()
    for index in range(60):
        answer = watched.answer(noisy[[index]], profile="max")
        if answer.shift is not None:
            break
    assert events
    assert answer.shift is events[0]
    assert (events[0],) in [w.causes for w in answer.warnings]
    assert events[0].message in map(str, answer.warnings)
    layers = {spec.name for spec in (e.spec for e in Artifact(copied).manifest.layers)}
    assert {name for name, _ in events[0].layers} <= layers
    assert "layer" in events[0].message
    rare = load(copied, monitor=MonitorConfig(every=10))
    for index in range(20):
        rare(images[[index]], profile="max")
    assert rare.watches["max"].monitor.seen == 2


def test_public_names_are_there() -> None:
    assert t3c.certify_artifact is certify_artifact
    assert t3c.CertifyConfig is CertifyConfig
