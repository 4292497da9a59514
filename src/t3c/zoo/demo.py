"""The main job on handwritten digits: train a network, compress it, ask the artifact."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from t3c.compression.data import Data, Parts, split
from t3c.compression.door import compress
from t3c.compression.kept import work_of
from t3c.compression.stages import Stages
from t3c.errors import ArtifactError, DataError
from t3c.evidence.bench import Result
from t3c.files import writing
from t3c.progress import Show, showing
from t3c.runtime.remarks import Remark
from t3c.runtime.runtime import load
from t3c.spec import Budget, Certificate
from t3c.zoo.digits import (
    CLASSES,
    IMAGE,
    SEED,
    Digits,
    DigitsNet,
    load_digits,
    train_digits,
)  # fmt: skip

EPOCHS = 5
MINUTES = 2.8  # for compressing
DEPTH, STRIDES = 2, (1, 1, 2, 2)  # 14 layers; a pass takes milliseconds, most of it in kernels
ARTIFACT, MODEL = "digits.t3c", "model.safetensors"


@dataclass(frozen=True)
class Asked:
    """One budget and the profile that answered it."""

    budget: str
    profile: str
    prediction: str
    truth: str
    certificate: Certificate | None
    warnings: tuple[Remark, ...]


@dataclass(frozen=True)
class Demo:
    """The comparison on the test digits, and the answers to the demo's budgets."""

    result: Result
    asked: tuple[Asked, ...]
    artifact: Path


def run_demo(out: Path, *, fresh: bool = False, progress: bool = True) -> Demo:
    """Train a network, compress it, ask its artifact; goes on where an earlier run was stopped."""
    digits = load_digits()
    whole, test = whole_of(digits), Data(*digits.test)
    parts = split(whole, test)
    artifact = out / ARTIFACT
    with writing(out, ArtifactError):
        out.mkdir(parents=True, exist_ok=True)
        if fresh:
            clear(out)
    with showing(progress) as show:
        model = trained(out, digits, parts, show)
    write_picture(out / "digit.png", test)
    if not artifact.exists():
        compress(
            model, whole, artifact, test=test, example=whole.at(slice(0, 2)).inputs,
            minutes=MINUTES, seed=SEED, progress=progress,
        )  # fmt: skip
    result = Result.model_validate_json(read_kept(work_of(artifact) / "bench.json"))
    return Demo(result, ask(artifact, test), artifact)


def whole_of(digits: Digits) -> Data:
    """Return all digits but those of the test."""
    (x, y), (more, labels) = digits.train, digits.calibration
    return Data(torch.cat([x, more]), torch.cat([y, labels]))


def network() -> DigitsNet:
    """Return the demo's network as it is before training."""
    torch.manual_seed(SEED)
    return DigitsNet(depth=DEPTH, strides=STRIDES)


def trained(out: Path, digits: Digits, parts: Parts, show: Show) -> DigitsNet:
    """Return the network, trained on the digits that compressing trains on: the others stay new."""
    model, (images, labels) = network(), (parts.train.inputs, parts.train.labels)
    assert isinstance(images, torch.Tensor)
    assert labels is not None
    mine = replace(digits, train=(images, labels))

    def make(folder: Path) -> Mapping[str, Any]:
        # Channels last, and bfloat16 where the processor has it: half the time.
        learner = network()
        learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        train_digits(
            learner, mine, EPOCHS, SEED, lambda done, of, _: show.watch("training", done, of),
            precision="auto",
        )  # fmt: skip
        values = {name: value.contiguous() for name, value in learner.state_dict().items()}
        save_file(values, folder / MODEL)
        return {}

    made_from = {"model": repr(model), "epochs": EPOCHS, "seed": SEED, "data": parts.train.keys()}
    show.say(f"a residual network, {EPOCHS} epochs on {len(labels)} digits")
    stage = Stages(out, show.say).run("base", made_from, make)
    model.load_state_dict(load_file(stage.folder / MODEL))
    return model.eval()


def ask(artifact: Path, test: Data) -> tuple[Asked, ...]:
    """Ask for as little time as any profile takes, for half of them, and for little drift."""
    runtime = load(artifact)
    times = [ms for c in runtime.candidates if (ms := c.latency_ms()) is not None]
    budgets = [
        Budget(latency_ms=times[0] * 1.01),
        Budget(latency_ms=times[len(times) // 2] * 1.01),
        Budget(drift=runtime.candidates[max(0, len(runtime.candidates) - 2)].drift),
    ]
    one = test.at(slice(0, 1))
    assert one.labels is not None
    truth = CLASSES[int(one.labels[0])]
    asked = []
    for budget in budgets:
        answer = runtime.answer(one.arrays()[0], budget)
        asked.append(
            Asked(
                _describe(budget), answer.profile, CLASSES[int(answer.output.argmax())], truth,
                answer.certificate, answer.warnings,
            )
        )  # fmt: skip
    return tuple(asked)


def write_picture(path: Path, test: Data) -> None:
    """Write the first test digit as a picture for `t3c run`."""
    first = test.at(slice(0, 1)).arrays()[0][0, 0]
    pixels = (first * IMAGE.std[0] + IMAGE.mean[0]).clip(0, 1) * 255
    with writing(path, ArtifactError):
        Image.fromarray(pixels.round().astype(np.uint8)).save(path)


def clear(out: Path) -> None:
    """Remove what an earlier demo left in a folder."""
    for path in (out / ARTIFACT, work_of(out / ARTIFACT), *out.glob("base-*")):
        shutil.rmtree(path, ignore_errors=True)


def read_kept(path: Path) -> bytes:
    """Read what compressing left beside the artifact."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}: start with --fresh") from error


def _describe(budget: Budget) -> str:
    if budget.latency_ms is not None:
        return f"at most {budget.latency_ms:.3f} ms"
    return f"drift at most {budget.drift:.3f}"
