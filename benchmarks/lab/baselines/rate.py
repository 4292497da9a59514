"""The learning rate of baselines that train: each tries a few, as `t3c.compress` does."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from lab.baselines import BASELINES
from lab.baselines.baseline import Baseline, Task
from t3c.certify.drift import relative_drift
from t3c.errors import TrainError
from t3c.evidence.drifts import arrays
from t3c.nn.inputs import Inputs, batches_of, call, evaluating, select

RATES = (1e-5, 3e-5, 1e-4, 3e-4)
PROBE = 0.2  # of the minutes go into trying them, as in t3c.compress
HELD = 32  # samples of the training part, its first, that rates are judged on


def at_best_rate(name: str, task: Task) -> Baseline:
    """Make a baseline at the rate that leaves the least drift after a short run of each.

    Its seconds and steps are those of the trials too.
    """
    training = task.trained(name)
    held = select(training.inputs, slice(0, HELD))
    rest = replace(training, inputs=select(training.inputs, slice(HELD, None)))
    brief = replace(rest, minutes=PROBE * training.minutes / len(RATES))
    whole = replace(rest, minutes=(1 - PROBE) * training.minutes)
    spent, drifts = [], dict.fromkeys(RATES, math.inf)
    for rate in RATES:
        try:
            trial = BASELINES[name](replace(task, training=brief), learning_rate=rate)
        except TrainError:  # it diverged
            continue
        spent.append((trial.steps, trial.seconds))
        drifts[rate] = drift_of(trial, task, held)
    taken = min(drifts, key=drifts.__getitem__)
    made = BASELINES[name](replace(task, training=whole), learning_rate=taken)
    return replace(
        made, method=f"{made.method}, learning rate {taken:g} of {len(RATES)} tried",
        steps=made.steps + sum(steps for steps, _ in spent),
        seconds=made.seconds + sum(seconds for _, seconds in spent),
    )  # fmt: skip


@torch.no_grad()
def drift_of(made: Baseline, task: Task, held: Inputs) -> float:
    """Return how far a baseline's answers are from the original's: a mean, infinite for NaN."""
    original, session = task.trained(made.name).model, task.engine.compile_read(made.model)
    found = []
    with evaluating(original):
        for one in batches_of(held, 1):
            wanted = call(original, one).numpy()
            found.append(float(relative_drift(session.run(arrays(one))[0], wanted).mean()))
    return float(np.nan_to_num(np.mean(found), nan=math.inf))
