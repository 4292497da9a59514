"""The main job end to end, on handwritten digits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from t3c.convert import elasticize_
from t3c.evidence.bench import Data, Result, bench
from t3c.evidence.original import write_original
from t3c.evidence.quality import MAX_DROP, Judge
from t3c.exporter import export
from t3c.runtime.remarks import Remark
from t3c.runtime.runtime import load
from t3c.spec import Budget, Certificate, Metric
from t3c.train import TrainConfig, fit
from t3c.zoo.digits import (
    CLASSES,
    EPOCHS,
    IMAGE,
    SEED,
    Digits,
    DigitsNet,
    load_digits,
    train_digits,
)  # fmt: skip

STEPS = 200


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
    """The demo's comparison, and the answers to its budgets."""

    result: Result
    asked: tuple[Asked, ...]
    folder: Path


Watch = Callable[[str, int, int], object]


def run_demo(out: Path, say: Callable[[str], object], watch: Watch) -> Demo:
    """Train, elasticize, train once, export, measure, ask: each step says what it does."""
    digits = load_digits()
    say(f"training a residual network on {len(digits.train[0])} digits, {EPOCHS} epochs")
    torch.manual_seed(SEED)
    model = DigitsNet()
    train_digits(model, digits, EPOCHS, SEED, lambda s, n, _: watch("training", s, n))
    write_files(out, digits)
    say("making it elastic, with factors that suit its own activations")
    report = elasticize_(model, digits.train[0][:2], calibration=digits.loader(64))
    p = report.params
    say(
        f"{p.rank_elastic:,} parameters rank-elastic, {p.bit_elastic:,} elastic in bits only, "
        f"{p.untouched:,} untouched"
    )
    write_original(model, out / "original.onnx")
    say(f"training once for every profile, {STEPS} steps")
    config = TrainConfig(steps=STEPS, seed=SEED)
    fit(model, digits.shifted(32, SEED), config)
    say("exporting: calibrating this machine, allocating, packing, certifying")
    artifact = out / "digits.t3c"
    export(model, artifact, [digits.calibration], image=IMAGE, classes=CLASSES)
    say("comparing with the original and with NNCF's int8, on data no step has seen yet")
    runtime = load(artifact)
    arrays = _data(digits)
    result = bench(runtime, out / "original.onnx", arrays, say=say)
    latencies = [ms for c in runtime.candidates if (ms := c.latency_ms()) is not None]
    middle = len(runtime.candidates) // 2
    budgets = [
        Budget(latency_ms=latencies[0] * 1.01),
        Budget(latency_ms=latencies[middle] * 1.01),
        Budget(drift=runtime.candidates[max(0, len(runtime.candidates) - 2)].drift),
    ]
    asked = []
    for budget in budgets:
        answer = runtime.answer(arrays.test[0][:1], budget)
        asked.append(
            Asked(
                _describe(budget), answer.profile, CLASSES[int(answer.output.argmax())],
                CLASSES[int(digits.test[1][0])],
                answer.certificate, answer.warnings,
            )
        )  # fmt: skip
    return Demo(result, tuple(asked), out)


def write_files(out: Path, digits: Digits) -> None:
    """Write data and a picture for `t3c bench`, `t3c certify` and `t3c run`."""
    data = _data(digits)
    np.savez_compressed(out / "test.npz", x=data.test[0], y=digits.test[1].numpy())
    np.savez_compressed(out / "calibration.npz", x=data.calibration[0])
    pixels = (data.test[0][0, 0] * IMAGE.std[0] + IMAGE.mean[0]).clip(0, 1) * 255
    Image.fromarray(pixels.round().astype(np.uint8)).save(out / "digit.png")


def _data(digits: Digits) -> Data:
    test, labels = (t.numpy() for t in digits.test)
    judge = Judge(Metric.ACCURACY, MAX_DROP[Metric.ACCURACY], labels)
    return Data((test,), judge, (digits.train[0][:300].numpy(),))


def _describe(budget: Budget) -> str:
    if budget.latency_ms is not None:
        return f"at most {budget.latency_ms:.3f} ms"
    return f"drift at most {budget.drift:.3f}"
