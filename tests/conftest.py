"""A small trained network and its artifact, made once; nothing here needs a download."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from torch import nn

from t3c.artifact.devices import LayerTiming
from t3c.convert import elasticize_
from t3c.cost.work import layer_work
from t3c.evidence.certify import CertifyConfig
from t3c.evidence.estimates import EstimateConfig
from t3c.evidence.original import write_original
from t3c.exporter import ExportConfig, Exported, export
from t3c.runtime.calibrate import CalibrationConfig
from t3c.spec import Form, LayerPoint, LayerSpec
from t3c.train import TrainConfig, fit
from t3c.zoo.digits import CLASSES, IMAGE, Digits, DigitsNet, load_digits, train_digits

# A busy machine is no finding, and two runs agree.
hypothesis.settings.register_profile("t3c", deadline=None, derandomize=True)
hypothesis.settings.load_profile("t3c")


def quick(rounds: int) -> CalibrationConfig:
    """A calibration that measures little, on a machine that may be busy."""
    return CalibrationConfig(rounds=rounds, grid=6, grid_rounds=2, busy=True, starts=False)


# Certificates of which epsilon is all that matters.
LIGHT = CertifyConfig(
    estimates=EstimateConfig(samples=2, path_samples=0), worst_samples=0, monitor=False
)


def counted(
    engine: object, layers: Sequence[tuple[LayerSpec, tuple[int, ...]]], *_: object, **__: object
) -> tuple[LayerTiming, ...]:
    """Layer times of a device that is known: they follow from the work, so allocation does not
    depend on how busy the machine is."""
    timings = []
    for spec, ranks in layers:
        for rank in ranks:
            ms = {}
            for form in (Form.DENSE, *spec.forms(LayerPoint(rank, 8))):
                work = layer_work(spec, LayerPoint(rank, 8), form)
                ms[form] = work.flops / 1e8 + 0.001 * work.launches
            timings.append(LayerTiming(layer=spec.name, rank=rank, ms=ms))
    return tuple(timings)


@dataclass(frozen=True)
class Made:
    """An exported small network with everything it came from."""

    folder: Path
    artifact: Path
    model: nn.Module
    digits: Digits
    exported: Exported


@pytest.fixture(scope="session")
def digits() -> Digits:
    return load_digits()


@pytest.fixture(scope="session")
def trained(digits: Digits) -> nn.Module:
    """A narrow digits network after two epochs."""
    torch.manual_seed(0)
    model = DigitsNet((16, 32, 64))
    train_digits(model, digits, epochs=2)
    return model.requires_grad_(True)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, digits: Digits, trained: nn.Module) -> Made:
    """The network elasticized, trained a little and exported. Do not change it: copy it."""
    import copy

    folder = tmp_path_factory.mktemp("made")
    model = copy.deepcopy(trained)
    elasticize_(model, digits.train[0][:2], calibration=digits.loader(64))
    write_original(model, folder / "original.onnx")
    fit(model, digits.loader(32), TrainConfig(steps=20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["t3c.exporter.export"], "time_layers", counted)
        exported = export(
            model, folder / "small.t3c", [digits.calibration],
            ExportConfig(
                calibration=quick(30), worst_drift=2.0,
                certificate=CertifyConfig(estimates=EstimateConfig(samples=4), worst_samples=1),
            ),
            image=IMAGE, classes=CLASSES,
        )  # fmt: skip
    test, labels = (t.numpy() for t in digits.test)
    np.savez(folder / "test.npz", x=test[:100], y=labels[:100])
    np.savez(folder / "calibration.npz", x=digits.train[0][:64].numpy())
    np.save(folder / "one.npy", test[0])
    return Made(folder, folder / "small.t3c", model, digits, exported)


@pytest.fixture
def copied(made: Made, tmp_path: Path) -> Path:
    """A copy of the artifact that a test may break."""
    return Path(shutil.copytree(made.artifact, tmp_path / "copy.t3c"))


@pytest.fixture
def flip() -> Callable[[Path, int], None]:
    """Change one bit of a file."""

    def apply(path: Path, at: int) -> None:
        raw = bytearray(path.read_bytes())
        raw[at] ^= 0x10
        path.write_bytes(bytes(raw))

    return apply
