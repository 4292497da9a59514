"""A small trained network and its artifact, made once; nothing here needs a download."""

from __future__ import annotations

import atexit
import copy
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import numpy as np
import pytest
import torch
from torch import nn

from small_recipe import TESTED
from t3c.artifact.devices import LayerTiming
from t3c.control.profiles import Measured, Pruned
from t3c.control.proposed import Controlled
from t3c.convert import elasticize_, state_of
from t3c.cost.proxy import FEATURES
from t3c.cost.work import layer_work
from t3c.device import calibrate as calibration
from t3c.device import measured as layer_times
from t3c.device import transfer
from t3c.device.calibrate import CalibrationConfig
from t3c.device.execution import Execution
from t3c.device.predict import work_of
from t3c.device.timed import Timed
from t3c.evidence import audit as auditing
from t3c.evidence.certify import CertifyConfig
from t3c.evidence.estimates import EstimateConfig
from t3c.evidence.original import write_original
from t3c.exporter import ExportConfig, Exported, export
from t3c.measure import latency
from t3c.progress import Show
from t3c.runtime.chooser import Chooser
from t3c.runtime.runtime import Runtime
from t3c.runtime.select import Candidate
from t3c.spec import Form, Goal, LayerPoint, LayerSpec, Profile
from t3c.train import TrainConfig, fit
from t3c.zoo import subjects
from t3c.zoo.digits import CLASSES, IMAGE, Digits, DigitsNet, load_digits, train_digits
from t3c.zoo.subjects import Subject

# They make a second device of torch's own process: test_devices.py runs them in one of theirs.
collect_ignore = ["second_device.py", "second_device_paths.py"]

if TYPE_CHECKING:
    from decoders import MadeDecoder
    from serving import Running

# A busy machine is no finding, and two runs agree.
hypothesis.settings.register_profile("t3c", deadline=None, derandomize=True)
hypothesis.settings.load_profile("t3c")

# Networks here are small: a second thread of torch waits more than it works. Commands inherit it.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing that is compiled here outlives the tests, or comes from what ran before them.
os.environ["T3C_CACHE"] = tempfile.mkdtemp(prefix="t3c-tests-")
atexit.register(shutil.rmtree, os.environ["T3C_CACHE"], ignore_errors=True)

calibration.REPEATS = 0  # a machine that runs tests is as busy as they make it


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what progress is told to watch from here on."""
    told: list[str] = []
    monkeypatch.setattr(Show, "watch", lambda show, what, done, total: told.append(what))
    return told


def quick(rounds: int, grid: int = 0) -> CalibrationConfig:
    """A calibration that measures little, on a machine that may be busy."""
    return CalibrationConfig(rounds=rounds, grid=grid, grid_rounds=2, busy=True, starts=False)


# Certificates of which epsilon is all that matters.
LIGHT = CertifyConfig(estimates=EstimateConfig(samples=2, path_samples=0))


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


def counted_profiles(
    run: calibration._Run, chain: Mapping[Timed, Execution], grid: Mapping[Timed, Execution]
) -> tuple[dict[Timed, latency.Blocks], dict[Timed, latency.Blocks]]:
    """Times of profiles on the device of `counted`: those of their layers, and 0.1 ms besides."""
    price = {"gflop": 10.0, "launch": 0.001, "mb": 0.0}
    prices = [price.get(name.rpartition(".")[2], 0.1) for name in FEATURES]

    def blocks(executions: Mapping[Timed, Execution]) -> dict[Timed, latency.Blocks]:
        return {
            key: [[float(work_of(run.artifact, execution) @ prices)] * run.config.rounds]
            for key, execution in executions.items()
        }

    return blocks(chain), blocks({**chain, **grid}) if grid else {}


def all_worth(measured: Sequence[Measured]) -> tuple[list[str], list[Pruned]]:
    """Every candidate is worth shipping, whatever was measured of it."""
    return [m.name for m in measured], []


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is measured with a few calls, where it is not what a test is about."""
    for module in (auditing, calibration, transfer):
        monkeypatch.setattr(module, "paced", lambda calls, rounds: rounds)
    monkeypatch.setattr(latency, "warm_up", lambda call, **_: call())
    monkeypatch.setattr(layer_times, "ROUNDS", 3)


# The same for a process of its own: put before what it runs.
BRIEFLY = """
from t3c.measure import latency
from t3c.device import calibrate, measured
calibrate.paced = lambda calls, rounds: rounds
latency.warm_up = lambda call, **_: call()
measured.ROUNDS = 3
"""


@pytest.fixture
def known_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports in which time follows from the work, and which ship all they may."""
    supply_times(monkeypatch)


def supply_times(patch: pytest.MonkeyPatch) -> None:
    timing = sys.modules["t3c.exporter.timing"]
    patch.setattr(timing, "time_in_place", lambda *_, **__: None)
    patch.setattr(timing, "_times_of", lambda *_: {"int8": 1.0, "float": 2.0})
    patch.setattr(timing, "time_layers", counted)
    patch.setattr(sys.modules["t3c.exporter.export"], "prune", all_worth)
    patch.setattr(calibration._Run, "measure", counted_profiles)


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
def elastic(trained: nn.Module, digits: Digits) -> nn.Module:
    """That network made elastic. Do not change it: copy it."""
    net = copy.deepcopy(trained)
    elasticize_(net, digits.train[0][:2], calibration=digits.loader(64))
    return net


@pytest.fixture(scope="session")
def small_subject(digits: Digits) -> Subject:
    """A network and pictures that take moments: every second pixel of the digits."""
    less = Digits(
        *(
            (x[:, :, ::2, ::2].contiguous(), y)
            for x, y in (digits.train, digits.calibration, digits.test)
        )
    )
    torch.manual_seed(0)
    model = DigitsNet((16, 16, 16))
    train_digits(model, less, epochs=2)
    (images, labels), (test, right) = less.train, less.test
    return Subject(
        "small", model.requires_grad_(True), (images[:64], labels[:64]),
        (images[64:96], labels[64:96]), less.calibration[0][:80], (test[:TESTED], right[:TESTED]),
        classes=CLASSES, evaluated=40,
    )  # fmt: skip


@pytest.fixture
def subject(small_subject: Subject, monkeypatch: pytest.MonkeyPatch) -> Subject:
    """The small one under the name of the real one, anew each time it is asked for."""
    anew = lambda: replace(small_subject, model=copy.deepcopy(small_subject.model))  # noqa: E731
    monkeypatch.setitem(subjects.SUBJECTS, "digits", anew)
    return small_subject


def low(model: nn.Module) -> Profile:
    """A profile of few ranks at 6 bits."""
    plans = state_of(model).plan.layers
    points = {p.spec.name: LayerPoint(p.ranks[min(1, len(p.ranks) - 1)], 6) for p in plans}
    return Profile("low", points)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, digits: Digits, trained: nn.Module) -> Made:
    """The network elasticized, trained a little and exported. Do not change it: copy it."""

    folder = tmp_path_factory.mktemp("made")
    model = copy.deepcopy(trained)
    elasticize_(model, digits.train[0][:2], calibration=digits.loader(64))
    write_original(model, folder / "original.onnx")
    fit(model, digits.loader(32), TrainConfig(steps=20))
    with pytest.MonkeyPatch.context() as patch:
        supply_times(patch)
        exported = export(
            model, folder / "small.t3c", [digits.calibration],
            ExportConfig(
                timing=quick(30, grid=9), goal=Goal(worst_drift=2.0),
                certificate=CertifyConfig(
                    estimates=EstimateConfig(samples=4), worst_case=True, monitor=True
                ),
            ),
            image=IMAGE, classes=CLASSES,
        )  # fmt: skip
    test, labels = (t.numpy() for t in digits.test)
    np.savez(folder / "test.npz", x=test[:100], y=labels[:100])
    np.savez(folder / "calibration.npz", x=digits.train[0][:64].numpy())
    np.save(folder / "one.npy", test[0])
    return Made(folder, folder / "small.t3c", model, digits, exported)


def put_candidates(runtime: Runtime, candidates: Sequence[Candidate]) -> None:
    """Let a runtime choose among other candidates than its artifact's."""
    runtime.chooser.candidates = list(candidates)


def put_controller(runtime: Runtime, controller: Controlled | None) -> None:
    """Let a runtime ask another controller than its artifact's, or none."""
    chooser = runtime.chooser
    runtime.chooser = Chooser(
        chooser.engine, chooser.candidates, controller, runtime.signals, runtime.alarm
    )


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


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> MadeDecoder:
    """A small language model with its tokenizer, exported. Do not change it: copy it."""
    from decoders import make_decoder

    return make_decoder(tmp_path_factory.mktemp("decoder") / "m.t3c")


@pytest.fixture(scope="session")
def served(made: Made) -> Iterator[Running]:
    """The small artifact over HTTP, with time for a busy machine. Leave it as it was."""
    from serving import running
    from t3c.serve.config import ServeConfig

    with running(made.artifact, ServeConfig(objective_ms=10_000, batch=4)) as found:
        yield found
