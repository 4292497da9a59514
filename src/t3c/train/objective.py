"""The terms of the training objective (paper 3.4, B.2)."""

from __future__ import annotations

from collections.abc import Mapping

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


def distill(student: Tensor, teacher: Tensor, *, of_classes: bool = True) -> Tensor:
    """KL(teacher || student), plus the relative drift ||z' - z|| / ||z||, both a mean over samples.

    KL alone is blind to shifts of the logits that softmax does not see. The drift is not squared:
    views that are close already, the full one above all, keep being pulled closer. Outputs that
    are not logits `of_classes` have the drift alone.
    """
    change, size = (z.flatten(1).norm(dim=1) for z in (student - teacher, teacher))
    drift: Tensor = (change / size.clamp_min(1e-12)).mean()
    if not of_classes:
        return drift
    log_p, log_q = (F.log_softmax(z.flatten(0, -2), dim=-1) for z in (teacher, student))
    return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean") + drift


class Certificate:
    """A drift penalty on the first `samples` of every `every`-th batch.

    Drift up to `tolerance` costs nothing: max(0, drift - tolerance) (paper eq. loss). On the steps
    in between the value is the last one, without a gradient; where it is taken the gradient counts
    `every` times. So the mean gradient does not depend on `every`; what clips or normalizes single
    steps still damps a rare, large gradient more than a steady one.
    """

    def __init__(
        self, penalty: Penalty, every: int, samples: int, tolerance: float = 0.0, last: float = 0.0
    ) -> None:
        self.penalty, self.samples, self.tolerance = penalty, samples, tolerance
        self.every = every
        self._last = torch.tensor(last)

    def __call__(
        self,
        step: int,
        model: nn.Module,
        original: nn.Module,
        profile: Profile,
        inputs: Inputs,
        relaxation: Relaxation | None = None,
    ) -> Tensor:
        if step % self.every:
            return self._last
        few = select(inputs, slice(self.samples))
        with at(model, profile, relaxation):
            drift = self.penalty(model, original, profile, few)
        value = (drift - self.tolerance).clamp_min(0)
        self._last = value.detach()
        return self._last + self.every * (value - self._last)


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
        if weight.spec.narrows or weight.spec.stored_dense(points[name]):
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
