"""The terms of the training objective (paper 3.4, B.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from t3c.certify.penalty import Penalty
from t3c.cost.work import layer_work
from t3c.factor.compose import compose, prefix
from t3c.factor.ranks import RANK_AXES, strengths
from t3c.factor.regularize import gap_penalty, spectral_penalty
from t3c.nn.inputs import Inputs, select
from t3c.nn.view import at
from t3c.nn.weight import ElasticWeight, Relaxation
from t3c.spec import Form, LayerPoint, Profile


def distill(
    student: Tensor, teacher: Tensor, outputs: str = "classes", softening: float = 1.0
) -> Tensor:
    """KL(teacher || student), plus the relative drift ||z' - z|| / ||z||, both a mean over samples.

    KL alone is blind to shifts of the logits that softmax does not see. The drift is not squared:
    views that are close already, the full one above all, keep being pulled closer. Outputs that
    are "values", no logits of classes, have the drift alone.
    """
    change, size = (z.flatten(1).norm(dim=1) for z in (student - teacher, teacher))
    drift: Tensor = (change / size.clamp_min(1e-12)).mean()
    if outputs == "values":
        return drift
    scaled = (z.flatten(0, -2) / softening for z in (teacher, student))
    log_p, log_q = (F.log_softmax(z, dim=-1) for z in scaled)
    kl = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    return softening**2 * kl + drift


class Rarely:
    """A term taken every `every` steps, with as many times its gradient; else its last value.

    The value is always the plain term, without a gradient on the steps in between. So the mean
    gradient does not depend on `every`; what clips or normalizes single steps still damps a rare,
    large gradient more than a steady one.
    """

    def __init__(self, every: int, last: float = 0.0) -> None:
        self.every = every
        self._last = torch.tensor(last)

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def __call__(self, step: int, make: Callable[[], Tensor]) -> Tensor:
        if not self.due(step):
            return self._last
        value = make()
        self._last = value.detach()
        return self._last + self.every * (value - self._last)


class Certificate:
    """A drift penalty on the first `samples` of every `every`-th batch.

    Drift up to `tolerance` costs nothing: max(0, drift - tolerance) (paper eq. loss).
    """

    def __init__(
        self, penalty: Penalty, every: int, samples: int, tolerance: float = 0.0, last: float = 0.0
    ) -> None:
        self.penalty, self.samples, self.tolerance = penalty, samples, tolerance
        self._rarely = Rarely(every, last)

    def __call__(
        self,
        step: int,
        model: nn.Module,
        original: nn.Module,
        profile: Profile,
        inputs: Inputs,
        relaxation: Relaxation | None = None,
    ) -> Tensor:
        def over() -> Tensor:
            few = select(inputs, slice(self.samples))
            with at(model, profile, relaxation):
                drift = self.penalty(model, original, profile, few)
            return (drift - self.tolerance).clamp_min(0)

        return self._rarely(step, over)


def tail(weights: Mapping[str, ElasticWeight], points: Mapping[str, LayerPoint]) -> Tensor:
    """The share of each weight's energy that its ranks leave out, weighted by its FLOPs.

    A hard rank has no gradient; what it leaves out has. The term pulls the leading ranks to the
    weight they stand for, most where a layer is expensive, so that a tight budget cuts less.
    """
    full = {
        name: layer_work(w.spec, LayerPoint(w.spec.full_rank, 8), Form.DENSE).flops
        for name, w in weights.items()
    }
    total = torch.zeros(())
    for name, weight in weights.items():
        if weight.spec.stored_dense(points[name]):
            continue
        kept = prefix(weight.stored_stages(), weight.spec.stage_shapes(points[name].rank))
        dense = weight.dense.detach()  # the full view is not to be made easy to factor
        lost = (compose(kept) - dense).square().sum()
        total = total + full[name] * lost / dense.square().sum().clamp_min(1e-12)
    return total / max(1, sum(full.values()))


def spectral(weights: Mapping[str, ElasticWeight]) -> Tensor:
    """How far the outer factors of all weights are from orthogonal directions (paper B.1)."""
    terms = [
        spectral_penalty(stages[0].flatten(1), stages[-1].flatten(1))
        for stages in (weight.stored_stages() for weight in weights.values())
        if stages
    ]
    return torch.stack(terms).mean() if terms else torch.zeros(())


def gap(weights: Mapping[str, ElasticWeight]) -> Tensor:
    """How far neighbouring strengths of all weights are from falling by a gap (paper B.1)."""
    terms = []
    for weight in weights.values():
        for axes in RANK_AXES[weight.spec.factorization]:
            strong = strengths(weight.stored_stages(), axes)
            terms.append(gap_penalty(strong, 0.1 / len(strong)))
    return torch.stack(terms).mean() if terms else torch.zeros(())
