"""Ideas tried before they are built: `python benchmarks/trials.py norms|optimizers`.

On ResNet-50,
`norms`: what profiles drift with the original's means and spreads restored, and without.
`optimizers`: what they drift after a few steps of SGD and of AdamW at several rates.
Profiles are by counted work; nothing is exported. Validation images are `imagenet-val/train`'s, of
which some fit factors, some train, and others judge.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lab.figures import finish
from t3c.certify.drift import relative_drift
from t3c.compression.data import split
from t3c.compression.elastic import STATISTICS, kernels_of, make_elastic
from t3c.compression.judging import judge_of
from t3c.compression.reading import read_data
from t3c.compression.source import Source, Task, open_source
from t3c.compression.teach import WAYS, Lesson
from t3c.convert import state_of
from t3c.evidence.quality import Judge
from t3c.nn.inputs import call, evaluating, select
from t3c.nn.norms import OutputNorms, match_norms, normed, output_moments
from t3c.nn.view import at, elastic_weights
from t3c.spec import Factorization, Goal, Profile
from t3c.train import fit
from t3c.train.precision import multiplying
from t3c.train.targets import find_path
from t3c.zoo.local import data_path

JUDGED, MATCHED, BATCH = 256, 64, 32
PROFILES, SHOWN = 8, (0, 2, 4, 6)  # of so many profiles
WORST = 0.35  # first-order drift of the smallest
STEPS = 60


def main(arguments: Sequence[str]) -> int:
    """Run a trial, print its table and write it to out/trial-NAME.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trial", choices=("norms", "optimizers"))
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    bench = Bench()
    rows = bench.norms() if given.trial == "norms" else bench.optimizers(given.steps)
    return finish(Path(f"out/trial-{given.trial}.json"), [], {given.trial: rows})


class Bench:
    """ResNet-50, elastic, with the images that judge it and those that do not."""

    def __init__(self) -> None:
        folder = data_path("resnet50-imagenet")
        self.source: Source = open_source(str(folder), None)
        parts = split(read_data(self.source, str(data_path("imagenet-val") / "train")), None)
        self.train, self.judged = parts.train, parts.placement.at(slice(0, JUDGED))
        self.model = self.source.model
        batches = self.train.at(slice(0, STATISTICS)).batches(BATCH)
        inputs = [batch[0] if isinstance(batch, tuple) else batch for batch in batches]
        kernels = {n: Factorization.TUCKER1 for names in kernels_of(self.model) for n in names}
        make_elastic(self.model, select(self.train.inputs, slice(2)), inputs, kernels)
        self.targets = find_path(self.model, self.train.inputs, 0.2).targets(
            Goal(profiles=PROFILES, worst_drift=WORST, size_weight=0.2)
        )
        self.judge: Judge = judge_of(self.source, self.judged, None)
        self.wanted = self.answers(state_of(self.model).original)

    @property
    def shown(self) -> list[Profile]:
        return [list(self.targets.profiles)[index] for index in SHOWN]

    @torch.no_grad()
    def answers(self, model: nn.Module) -> np.ndarray[Any, Any]:
        """Return what a model answers to the images that judge."""
        found: list[Tensor] = []
        with multiplying("auto"):
            for start in range(0, JUDGED, BATCH):
                found.append(call(model, self.judged.at(slice(start, start + BATCH)).inputs))
        return np.asarray(torch.cat(found).float().numpy())

    def row(
        self, model: nn.Module, profile: Profile, norms: OutputNorms, how: str
    ) -> dict[str, Any]:
        """Return drift and expected loss of accuracy of a profile."""
        with evaluating(model), at(model, profile), normed(model, norms):
            answers = self.answers(model)
        losses = [self.judge.expected_losses(a, self.wanted) for a in (answers, self.wanted)]
        drift = float(relative_drift(answers, self.wanted).mean())
        lost = float((losses[0] - losses[1]).mean())
        print(f"{profile.name:6} {how:24} drift {drift:.4f} expected loss {lost:.4f}", flush=True)
        return {"profile": profile.name, "how": how, "drift": drift, "expected_loss": lost}

    def norms(self) -> list[dict[str, Any]]:
        """Return rows of each profile with norms of its own and without."""
        fitted = select(self.train.inputs, slice(-MATCHED, None))
        specs = {name: weight.spec for name, weight in elastic_weights(self.model).items()}
        wanted = output_moments(state_of(self.model).original, specs, fitted)
        rows = []
        for profile in self.shown:
            rows.append(self.row(self.model, profile, {}, "shared norms"))
            with at(self.model, profile):
                norms = match_norms(self.model, specs, fitted, wanted)
            rows.append(self.row(self.model, profile, norms, "own norms"))
        return rows

    def optimizers(self, steps: int) -> list[dict[str, Any]]:
        """Return rows of each profile after some steps of each way of training."""
        rows = [self.row(self.model, profile, {}, "untrained") for profile in self.shown]
        goal = Goal(profiles=PROFILES, worst_drift=WORST, size_weight=0.2)
        train = self.train.at(slice(STATISTICS, None))
        for way in WAYS:
            model = copy.deepcopy(self.model)
            lesson = Lesson(model, train, self.judged, Task.IMAGES, goal, self.targets, 0)
            fit(model, lesson.batches(), lesson.config(steps, way), targets=self.targets)
            rows += [self.row(model, profile, {}, f"{steps} of {way}") for profile in self.shown]
        return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
