"""How good answers are, sample by sample: what profiles are placed by and what the ledger says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from t3c.artifact.devices import forms_key
from t3c.artifact.ledger import QualityEntry
from t3c.certify.slices import digest, sample_keys
from t3c.errors import DataError
from t3c.evidence.served import Run, answers, chunks, run_of
from t3c.runtime.runtime import Runtime
from t3c.spec import Metric

Array = npt.NDArray[np.float64]
Outputs = npt.NDArray[Any]
BATCH = 32  # samples that the original is asked together
Watch = Callable[[str, int, int], object]


# Accuracy as a share of samples; changed answers or neighbours beyond those that plain int8
# changes; the perplexity's growth.
MAX_DROP = {
    Metric.ACCURACY: 0.005, Metric.AGREEMENT: 0.01, Metric.PERPLEXITY: 0.02,
    Metric.NEIGHBOURS: 0.01,
}  # fmt: skip


@dataclass(frozen=True)
class Judge:
    """Scores answers by one metric; `labels` (n,) or token ids (n, t) where it needs them."""

    metric: Metric
    max_drop: float
    targets: npt.NDArray[np.int64] | None = None

    def losses(self, answers: Outputs, original: Outputs) -> Array:
        """Return the loss of each sample (n,): 1 for a wrong or changed answer, or nats a token."""
        if self.metric is Metric.ACCURACY:
            assert self.targets is not None
            return np.asarray(answers.argmax(axis=-1) != self.targets, np.float64)
        if self.metric is Metric.AGREEMENT:
            changed = answers.argmax(axis=-1) != original.argmax(axis=-1)
            return np.asarray(changed.reshape(len(changed), -1).mean(axis=1), np.float64)
        if self.metric is Metric.NEIGHBOURS:
            return np.asarray(nearest(answers) != nearest(original), np.float64)
        assert self.targets is not None
        return token_losses(answers, self.targets)

    def expected_losses(self, answers: Outputs, original: Outputs) -> Array:
        """Return losses that tell candidates apart with fewer samples than `losses` do.

        A label is one draw from what the input leaves open, and that chance is most of the
        variance of a paired accuracy. Here an answer's loss is one minus the probability the
        original gives it, its temperature fitted to the labels: the same mean where that is
        calibrated, and several times less variance.
        """
        if self.metric is not Metric.ACCURACY:
            return self.losses(answers, original)
        assert self.targets is not None
        chances = calibrated(original, self.targets)
        mine = np.take_along_axis(chances, answers.argmax(axis=-1)[:, None], axis=1)[:, 0]
        return np.asarray(1.0 - mine, np.float64)

    @property
    def beyond_int8(self) -> bool:
        """Return whether a drop counts from what plain int8 loses, not from the original."""
        return self.metric in (Metric.AGREEMENT, Metric.NEIGHBOURS)

    @property
    def limit(self) -> float:
        """Return what the mean loss may rise by."""
        return math.log1p(self.max_drop) if self.metric is Metric.PERPLEXITY else self.max_drop

    def value(self, losses: Array) -> float:
        """Return the figure people know: a share of samples, or a perplexity."""
        mean = float(losses.mean())
        return math.exp(mean) if self.metric is Metric.PERPLEXITY else 1.0 - mean

    def drop(self, more: float) -> float:
        """Return what a higher mean loss is called: a share of samples, or growth of perplexity."""
        return math.expm1(more) if self.metric is Metric.PERPLEXITY else more

    def at(self, part: slice) -> Judge:
        """Return the judge of some of the samples."""
        targets = None if self.targets is None else self.targets[part]
        return Judge(self.metric, self.max_drop, targets)


@dataclass(frozen=True)
class Scorer:
    """Samples with what the original answers to them: scores whatever else answers them."""

    judge: Judge
    inputs: tuple[Outputs, ...]
    original: Outputs | None
    run: Run

    @classmethod
    def of(cls, judge: Judge, inputs: Sequence[Outputs], run: Run) -> Scorer:
        """Return the scorer of samples (n, ...), the original's answers being those of `run`."""
        whole = judge.metric is not Metric.PERPLEXITY  # a language model's are too large to hold
        return cls(judge, tuple(inputs), answers(run, inputs, BATCH) if whole else None, run)

    def __len__(self) -> int:
        return len(self.inputs[0])

    def original_losses(self, *, expected: bool = True) -> Array:
        """Return the loss of each sample (n,) for what the original answers."""
        if self.original is None:
            return self.losses(self.run)
        score = self.judge.expected_losses if expected else self.judge.losses
        return score(self.original, self.original)

    def losses(self, run: Run, *, expected: bool = False) -> Array:
        """Return the loss of each sample (n,) for what `run` answers, one sample at a time."""
        if self.original is not None:
            score = self.judge.expected_losses if expected else self.judge.losses
            return score(answers(run, self.inputs), self.original)
        assert self.judge.targets is not None
        rows = [
            token_losses(run(one), self.judge.targets[place : place + 1])
            for place, one in enumerate(chunks(self.inputs, 1))
        ]
        return np.concatenate(rows)


def measure_quality(
    runtime: Runtime, scorer: Scorer, watch: Watch = lambda what, done, total: None
) -> tuple[QualityEntry, ...]:
    """Return how good every profile is on the scorer's samples, by their labels themselves."""
    original = scorer.original_losses(expected=False)
    value, data = scorer.judge.value, digest(sample_keys(scorer.inputs))
    found = []
    for index, profile in enumerate(runtime.chain):
        watch("measuring quality", index, len(runtime.chain))
        losses = scorer.losses(run_of(runtime.session(profile.name)))
        low, high = paired_interval(losses, original)
        found.append(
            QualityEntry(
                profile=profile.name, engine=runtime.engine.name,
                engine_version=runtime.device.engine_version,
                forms=forms_key(runtime.forms[profile.name], runtime.device.weight_bits),
                metric=scorer.judge.metric, value=value(losses), original=value(original),
                drop=scorer.judge.drop(float((losses - original).mean())),
                ci95=(scorer.judge.drop(low), scorer.judge.drop(high)),
                samples=len(scorer), data=data,
            )
        )  # fmt: skip
    return tuple(found)


def nearest(vectors: Outputs) -> npt.NDArray[np.int64]:
    """Return the index of each vector's nearest other one, by cosine, of vectors (n, ...)."""
    flat = np.asarray(vectors, np.float64).reshape(len(vectors), -1)
    if len(flat) < 2:
        raise DataError("nearest neighbours need at least two samples")
    units = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12)
    alike = units @ units.T
    np.fill_diagonal(alike, -np.inf)
    return np.asarray(alike.argmax(axis=1))


def token_losses(logits: Outputs, ids: npt.NDArray[np.int64]) -> Array:
    """Return the mean negative log likelihood of each text's tokens (n,), but the first's."""
    losses = np.empty(len(ids))
    for row, (score, tokens) in enumerate(zip(logits, ids, strict=True)):
        wide = np.asarray(score[:-1], np.float64)
        wide = wide - wide.max(axis=1, keepdims=True)
        chosen = wide[np.arange(len(tokens) - 1), tokens[1:]]
        losses[row] = float((np.log(np.exp(wide).sum(axis=1)) - chosen).mean())
    return losses


def calibrated(logits: Outputs, labels: npt.NDArray[np.int64]) -> Array:
    """Return softmax (n, classes) at the temperature under which the labels are likeliest."""
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(axis=1, keepdims=True)

    def chances(temperature: float) -> Array:
        scaled = np.exp(wide / temperature)
        return np.asarray(scaled / scaled.sum(axis=1, keepdims=True))

    def surprise(temperature: float) -> float:
        right = np.take_along_axis(chances(temperature), labels[:, None], axis=1)
        return float(-np.log(np.maximum(right, 1e-12)).mean())

    temperatures = np.geomspace(0.1, 10, 81)
    return chances(min(temperatures, key=surprise))


def paired_interval(losses: Array, reference: Array, errors: float = 1.96) -> tuple[float, float]:
    """Return the interval of how much higher the mean loss is on the same samples.

    One pseudo-sample is won and one is lost, so that where none differ the interval is not empty.
    """
    more = losses - reference
    size = float(np.abs(more).max()) or float(np.abs(reference).max()) or 1.0
    padded = np.concatenate([more, [size, -size]])
    error = errors * float(padded.std()) / math.sqrt(len(padded))
    middle = float(padded.mean())
    return middle - error, middle + error
