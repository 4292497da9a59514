"""How faithful a model stays as its ranks and bits fall, before any training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.zoo.imagenet_sample import imagenet_sample, resnet50
from lab.zoo.minilm import minilm, sst2_sentences
from t3c.convert import ConversionPlan, ElasticConfig, elasticize_, state_of
from t3c.cost.work import profile_work
from t3c.nn.inputs import Inputs, batches_of, call, tensors
from t3c.nn.view import dense_copy
from t3c.spec import Cost, LayerPoint, Profile
from t3c.zoo.text import stories15m, stories_tokens

SHARES = (1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
BITS = (3, 4, 5, 6, 8)
CONFIG = ElasticConfig(rank_fractions=SHARES, bits=BITS, store_ratio=1.0, metric="inputs")
Say = Callable[[str], object]


@dataclass(frozen=True)
class Subject:
    """A trained model, data for its statistics, and a measure of how faithful a view is."""

    name: str
    measure: str
    samples: int
    model: nn.Module
    calibration: Sequence[Inputs]
    evaluate: Callable[[nn.Module], float]


def subjects(say: Say) -> Iterator[Subject]:
    """ResNet-50, MiniLM-L6 and stories15M, on data the statistics have not seen."""
    for make in (_minilm, _stories15m, _resnet50):
        say(f"loading {make.__name__.lstrip('_')}")
        yield make()


def curve(subject: Subject, metric: str, say: Say) -> list[dict[str, Any]]:
    """Fidelity at each share of rank in 8 bits, and for the plain metric at full rank in fewer."""
    model = copy.deepcopy(subject.model)
    data = None if metric == "plain" else subject.calibration
    example = subject.calibration[0]
    elasticize_(model, _few(example), CONFIG, calibration=data)
    plan = state_of(model).plan
    whole = work(plan, uniform(plan, 1.0, 8))
    points = [(share, 8) for share in (*SHARES, 1.0)]
    if metric == "plain":
        points += [(1.0, bits) for bits in BITS[:-1]]
    rows = []
    for share, bits in points:
        profile = uniform(plan, share, bits)
        cost = work(plan, profile)
        value = subject.evaluate(dense_copy(model, profile))
        say(f"{subject.name} {metric} rank {share:.3f} bits {bits}: {value:.4f}")
        rows.append(
            {
                "model": subject.name, "metric": metric, "rank_share": share, "bits": bits,
                "flops": cost.flops / whole.flops, "bytes": cost.size_bytes / whole.size_bytes,
                "measure": subject.measure, "value": value, "samples": subject.samples,
            }
        )  # fmt: skip
    return rows


def uniform(plan: ConversionPlan, share: float, bits: int) -> Profile:
    """Every layer at one share of its rank; layers that would not get smaller stay dense."""
    points: dict[str, LayerPoint] = {p.spec.name: p.point_at(share, bits) for p in plan.layers}
    return Profile(f"{share:g}", points)


def work(plan: ConversionPlan, profile: Profile) -> Cost:
    """What a profile's layers cost, each factored where it is stored so and can run so."""
    specs = {p.spec.name: p.spec for p in plan.layers}
    forms = {name: specs[name].forms(point)[0] for name, point in profile.points.items()}
    return profile_work(specs, profile, forms)


def _few(inputs: Inputs) -> Inputs:
    return next(batches_of(inputs, 2))


@torch.no_grad()
def outputs(model: nn.Module, inputs: Inputs, size: int = 50) -> Tensor:
    """The model's outputs, in batches."""
    return torch.cat([call(model, batch) for batch in batches_of(inputs, size)])


def _resnet50(calibration: int = 200, samples: int = 200) -> Subject:
    model = resnet50()
    images, _ = imagenet_sample(calibration, part="tune")
    test, _ = imagenet_sample(samples, part="test")
    wanted = outputs(model, test).argmax(-1)

    def agreement(view: nn.Module) -> float:
        return float((outputs(view, test).argmax(-1) == wanted).float().mean())

    batches = list(batches_of(images, 25))
    return Subject("resnet-50", "top-1 agreement", samples, model, batches, agreement)


def _minilm(calibration: int = 250, samples: int = 500) -> Subject:
    model = minilm()
    known, _ = sst2_sentences("train", calibration, 48)
    test, _ = sst2_sentences("test", samples, 48)
    targets = _pooled(model, known)
    wanted = (_pooled(model, test) @ targets.T).argmax(-1)

    def agreement(view: nn.Module) -> float:
        """Which of the known sentences is nearest, all of them seen by the view."""
        nearest = (_pooled(view, test) @ _pooled(view, known).T).argmax(-1)
        return float((nearest == wanted).float().mean())

    batches = list(batches_of(known, 50))
    name = f"agreement on the nearest of {calibration} sentences"
    return Subject("minilm-l6", name, samples, model, batches, agreement)


def _pooled(model: nn.Module, sentences: Inputs) -> Tensor:
    """Unit sentence vectors: the mean over tokens."""
    mask = tensors(sentences)[1][..., None]
    features = outputs(model, sentences)
    return F.normalize((features * mask).sum(1) / mask.sum(1), dim=-1)


def _stories15m(calibration: int = 64, windows: int = 32, length: int = 256) -> Subject:
    model = stories15m()
    known = stories_tokens("train", calibration, length)
    test = stories_tokens("valid", windows, length)

    def perplexity(view: nn.Module) -> float:
        logits = outputs(view, test, 8)[:, :-1]
        return float(F.cross_entropy(logits.flatten(0, 1), test[:, 1:].flatten()).exp())

    count = windows * (length - 1)
    batches = list(batches_of(known, 8))
    return Subject("stories15m", "perplexity", count, model, batches, perplexity)
