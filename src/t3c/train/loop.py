"""One readable loop: every step trains the full view and one sampled profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from t3c.certify.penalty import PENALTIES
from t3c.convert import LayerPlan, state_of, units
from t3c.errors import DataError, SpecError, TrainError
from t3c.nn.inputs import Inputs, call, evaluating, split_batch
from t3c.nn.masks import temperature_at
from t3c.nn.view import at, elastic_weights, sort_
from t3c.nn.weight import Relaxation
from t3c.spec import LayerPoint, Profile
from t3c.train import objective

TERMS = ("task", "anchor", "distill", "certificate", "budget", "spectral", "gap")


@dataclass(frozen=True)
class TrainConfig:
    """How long and how hard to train, and what each term of the objective weighs.

    `task` is the labels on the full view, `anchor` holds the full view at the original, `distill`
    draws the sampled profile to it, `certificate` lowers the drift its certificate predicts,
    `budget` pulls energy into the ranks the profile pays for, `spectral` keeps factors orthogonal
    and `gap` their strengths apart; a term that weighs nothing is not computed. The task weighs
    little: the original is trained already, and what moves the full view away from it is drift at
    every profile. `masks` relaxes hard ranks to Gumbel-Top-k masks of falling temperature, and
    rounding to stochastic rounding; ranks are put in order of their strength when it is done.

    The certificate is the first-order drift of the profile or the paper's bound by spectral norms,
    `certificate_kind`. It is taken every `certificate_every` steps on the first
    `certificate_samples` of the batch, with as many times its gradient, so that its mean pull is
    that of every step; steps in between carry on the last value in the history and have no pull.
    """

    steps: int = 2000
    learning_rate: float = 1e-3
    warmup: float = 0.1
    weight_decay: float = 0.01
    task: float = 0.1
    anchor: float = 3.0
    distill: float = 1.0
    certificate: float = 0.0
    certificate_kind: Literal["first_order", "spectral"] = "first_order"
    certificate_every: int = 10
    certificate_samples: int = 4
    budget: float = 0.1
    spectral: float = 0.0
    gap: float = 0.0
    masks: bool = False
    clip_norm: float = 1.0
    seed: int = 3407

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise SpecError(f"steps must be at least 1, got {self.steps}")
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise SpecError(f"learning_rate must be positive, got {self.learning_rate:g}")
        weights = {name: getattr(self, name) for name in TERMS}
        if not all(0 <= w < math.inf for w in weights.values()) or not any(weights.values()):
            raise SpecError(f"terms weigh at least 0 and not all nothing, got {weights}")
        if not 0 <= self.warmup < 1:
            raise SpecError(f"warmup must be in [0, 1), got {self.warmup:g}")
        if self.certificate_kind not in PENALTIES:
            known = ", ".join(PENALTIES)
            raise SpecError(f"certificate_kind is one of {known}, got {self.certificate_kind!r}")
        for name in ("certificate_every", "certificate_samples"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class History:
    """Every term of the objective, step by step."""

    terms: Mapping[str, tuple[float, ...]]

    @property
    def steps(self) -> int:
        return len(self.terms["task"])


OnStep = Callable[[int, Mapping[str, float]], object]


def fit(
    model: nn.Module,
    batches: Iterable[Any],
    config: TrainConfig | None = None,
    *,
    on_step: OnStep | None = None,
) -> History:
    """Train an elastic model in place so that it is good at every profile.

    `batches` yields (inputs, target) and is gone through again as often as needed. The teacher is
    the original, since drift is measured from it; norms and dropout stay in evaluation mode.
    """
    config = config or TrainConfig()
    state = state_of(model)
    rng = np.random.default_rng(config.seed)
    torch.manual_seed(config.seed)
    generator = torch.Generator().manual_seed(config.seed)
    weights = elastic_weights(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=config.learning_rate, weight_decay=config.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _ramp(step, config))
    certificate = _certificate(config)
    history: dict[str, list[float]] = {term: [] for term in TERMS}
    with evaluating(model):
        for step, (inputs, target) in enumerate(_forever(batches, config.steps)):
            profile = sample_profile(state.plan.layers, rng)
            relaxation = _relaxation(step, config, generator)
            with torch.no_grad():
                teacher = call(state.original, inputs)
            with at(model, None):
                full = call(model, inputs)
            with at(model, profile, relaxation):
                compressed = call(model, inputs)
            makers: dict[str, Callable[[], Tensor]] = {
                "task": partial(objective.task, full, target),
                "anchor": partial(objective.distill, full, teacher),
                "distill": partial(objective.distill, compressed, teacher),
                "certificate": partial(
                    certificate, step, model, state.original, profile, inputs, relaxation
                ),
                "budget": partial(objective.budget, weights, profile.points),
                "spectral": partial(objective.spectral, weights),
                "gap": partial(objective.gap, weights),
            }
            terms = {name: makers[name]() for name in TERMS if getattr(config, name)}
            loss = torch.stack([getattr(config, n) * term for n, term in terms.items()]).sum()
            values = {n: float(terms[n].detach()) if n in terms else 0.0 for n in TERMS}
            if not math.isfinite(float(loss.detach())):
                raise TrainError(f"step {step}: the loss is not finite: {values}")
            optimizer.zero_grad(set_to_none=True)
            if loss.requires_grad:  # a certificate alone has no pull between its steps
                loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, config.clip_norm)
            optimizer.step()
            schedule.step()
            for name, value in values.items():
                history[name].append(value)
            if on_step is not None:
                on_step(step, values)
        if config.masks:
            sort_(model)
    return History({name: tuple(values) for name, values in history.items()})


def sample_profile(plans: Sequence[LayerPlan], rng: np.random.Generator) -> Profile:
    """A profile around a level of rank and a level of bits, each from Beta(0.75, 0.75) (B.2)."""

    def pick(choices: Sequence[int], level: float) -> int:
        index = level * (len(choices) - 1) + rng.uniform(-0.75, 0.75)
        return choices[int(np.clip(round(index), 0, len(choices) - 1))]

    rank_level, bit_level = rng.beta(0.75, 0.75, size=2)
    points: dict[str, LayerPoint] = {}
    for unit in units(plans):
        ranks, bits = ({getattr(p, axis) for p in unit.points()} for axis in ("rank", "bits"))
        point = LayerPoint(pick(sorted(ranks), rank_level), pick(sorted(bits), bit_level))
        points |= unit.layer_points(point)
    return Profile("sampled", points)


def _certificate(config: TrainConfig) -> objective.Certificate:
    penalty = PENALTIES[config.certificate_kind](config.seed)
    return objective.Certificate(penalty, config.certificate_every, config.certificate_samples)


def _relaxation(step: int, config: TrainConfig, noise: torch.Generator) -> Relaxation | None:
    """Masks of a temperature that falls by half in every third of the run (paper E.2)."""
    if not config.masks:
        return None
    return Relaxation(temperature_at(step, max(1, config.steps // 3)), noise)


def _ramp(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine to zero."""
    warm = max(1, round(config.warmup * config.steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, config.steps - warm)))


def _forever(batches: Iterable[Any], steps: int) -> Iterator[tuple[Inputs, Tensor]]:
    """(inputs, target) pairs, going through `batches` again until `steps` are done."""
    done = 0
    while done < steps:
        before = done
        for batch in batches:
            inputs, target = split_batch(batch)
            if target is None:
                raise DataError("training needs batches of (inputs, target)")
            yield inputs, target
            done += 1
            if done == steps:
                return
        if done == before:
            raise DataError("the training data is empty")
