"""A few hundred unlabelled samples: block-wise reconstruction beside end-to-end distillation."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

from torch import nn

from t3c.convert import elasticize_, state_of
from t3c.spec import ProfileChain
from t3c.train import BlockConfig, TrainConfig, fit, reconstruct
from t3c.train.losses import loss_of
from t3c.train.targets import find_targets
from t3c.zoo.subjects import SUBJECTS, Labelled
from t3c.zoo.views import outputs, tested

Say = Callable[[str], object]


def few_rows(
    subject: str, samples: int, steps: int, block_steps: int, test: int, say: Say
) -> list[dict[str, Any]]:
    """Drift and accuracy of each profile untrained, distilled end to end, and block by block."""
    found = SUBJECTS[subject]()
    elasticize_(found.model, found.example, calibration=found.statistics[: samples // 64])
    part = (found.test[0][:test], found.test[1][:test])
    config = TrainConfig(steps=steps)
    profiles = find_targets(found.model, found.train[0][:samples], config.goal).profiles
    original = outputs(state_of(found.model).original, None, part)
    rows: list[dict[str, Any]] = []

    def note(method: str, model: nn.Module, seconds: float) -> None:
        rows.extend(_row(method, model, profiles, part, original, seconds))

    def trained(method: str, train: Callable[[nn.Module], object]) -> nn.Module:
        say(f"{subject}: {method} on {samples} samples")
        model, started = copy.deepcopy(found.model), time.perf_counter()
        train(model)
        note(method, model, time.perf_counter() - started)
        return model

    note("untrained", found.model, 0.0)
    batches = found.batches(32, 3407, samples)
    trained("end to end", lambda model: fit(model, batches, config))
    blocks = BlockConfig(steps=block_steps)
    trained("blocks", lambda model: reconstruct(model, batches, blocks, profiles=list(profiles)))
    return [{"model": subject, "samples": samples, "tested": test} | row for row in rows]


def _row(
    method: str,
    model: nn.Module,
    profiles: ProfileChain,
    part: Labelled,
    original: Any,
    seconds: float,
) -> list[dict[str, Any]]:
    found = []
    for profile in profiles:
        view = tested(outputs(model, profile, part), original, part[1], loss_of("classification"))
        found.append(
            {
                "method": method, "profile": profile.name, "accuracy": view.accuracy,
                "drift": view.drift, "seconds": seconds,
            }
        )  # fmt: skip
    return found
