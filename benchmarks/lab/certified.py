"""Networks to certify: trained, elastic, with samples that nothing else has seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lab.uniform import uniform_artifact
from lab.zoo.imagenet_sample import imagenet_sample, resnet50
from lab.zoo.minilm import MiniLMEmbedding, sst2_sentences
from t3c.convert import ElasticConfig
from t3c.evidence.drifts import arrays
from t3c.evidence.original import Original, beside, to_original
from t3c.evidence.served import Samples
from t3c.nn.inputs import Inputs, batches_of, select
from t3c.runtime.runtime import Runtime
from t3c.zoo.cifar10 import cifar10, resnet
from t3c.zoo.digits import DigitsNet, load_digits, train_digits
from t3c.zoo.text import stories15m, stories_tokens

BITS = (3, 4, 5, 6, 8)
ELASTIC = ElasticConfig(rank_fractions=(1 / 2, 5 / 8, 3 / 4, 7 / 8), bits=BITS, store_ratio=1.0)
# Shares of rank and bits of five profiles, as far down as a network untrained for them can go.
WIDE = ((1 / 2, 5), (5 / 8, 6), (3 / 4, 6), (7 / 8, 8), (1.0, 8))
NARROW = ((3 / 4, 4), (3 / 4, 5), (1.0, 5), (1.0, 6), (1.0, 8))


@dataclass(frozen=True)
class Subject:
    """A model, data for its factors and its ranges, and a pool of samples nothing else has seen.

    `studied` is how many of the pool the correlation is taken over, `bounded` how many the worst
    case is evaluated at.
    """

    name: str
    model: nn.Module
    statistics: Sequence[Inputs]
    calibration: Inputs
    pool: Inputs
    points: Sequence[tuple[float, int]]
    studied: int = 32
    bounded: int = 16


@dataclass(frozen=True)
class Made:
    """An artifact with the original it was made from, ready to be certified."""

    subject: Subject
    runtime: Runtime
    original: Original
    pool: Samples

    @property
    def names(self) -> list[str]:
        return [profile.name for profile in self.runtime.chain]


def subjects() -> dict[str, Callable[[], Subject]]:
    """The digits network, ResNet-56, MiniLM-L6, stories15M and ResNet-50, made when asked for."""
    return {
        "digits": _digits, "resnet-56": _resnet56, "minilm-l6": _minilm,
        "stories15m": _stories15m, "resnet-50": _resnet50,
    }  # fmt: skip


def make(subject: Subject, path: Path) -> Made:
    """An artifact of profiles at even points; forms are those of a device that was not timed."""
    artifact = uniform_artifact(
        path, subject.model, subject.statistics, subject.calibration, subject.points, ELASTIC
    )
    original = beside(artifact, to_original(subject.model))
    return Made(subject, Runtime(artifact, "openvino"), original, arrays(subject.pool))


def _digits() -> Subject:
    digits = load_digits()
    torch.manual_seed(0)
    model = DigitsNet()
    train_digits(model, digits, 3, 0)
    pool = torch.cat([digits.calibration[0], digits.test[0]])
    batches = [inputs for inputs, _ in digits.loader(64)]
    return Subject("digits", model, batches, digits.train[0][:64], pool, WIDE, studied=64)


def _resnet56(statistics: int = 512, ranges: int = 64, pool: int = 1500) -> Subject:
    known = cifar10("train", statistics + ranges)[0]
    batches = list(batches_of(known[:statistics], 128))
    images = cifar10("test", pool)[0]
    return Subject("resnet-56", resnet(56), batches, known[statistics:], images, WIDE)


def _resnet50(statistics: int = 32, ranges: int = 16) -> Subject:
    known = imagenet_sample(statistics + ranges, part="tune")[0]
    rest = torch.cat(
        [imagenet_sample(part="tune")[0][statistics + ranges :], imagenet_sample(part="test")[0]]
    )
    batches = list(batches_of(known[:statistics], 16))
    return Subject(
        "resnet-50", resnet50(), batches, known[statistics:], rest, WIDE, studied=16, bounded=4
    )


def _minilm(statistics: int = 128, ranges: int = 64, length: int = 48) -> Subject:
    known = sst2_sentences("train", statistics + ranges, length)[0]
    parts = [select(known, slice(0, statistics)), select(known, slice(statistics, None))]
    pool = sst2_sentences("test", 1200, length)[0]
    batches = list(batches_of(parts[0], 32))
    return Subject("minilm-l6", MiniLMEmbedding(), batches, parts[1], pool, NARROW)


def _stories15m(statistics: int = 64, ranges: int = 32, length: int = 32) -> Subject:
    known = stories_tokens("train", statistics + ranges, length)
    pool = {"input_ids": stories_tokens("valid", 920, length)}
    batches = [{"input_ids": part} for part in torch.split(known[:statistics], 16)]
    model = stories15m()
    return Subject(
        "stories15m", model, batches, {"input_ids": known[statistics:]}, pool, NARROW, studied=16,
        bounded=8,
    )  # fmt: skip
