"""The terms of the training objective (paper 3.4, B.2)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from t3c.cost.work import layer_work
from t3c.nn.layers import ElasticLayer
from t3c.spec import Form, LayerPoint


def task(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of the full view; classes on the last axis."""
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def distill(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student), plus the relative drift ||z' - z|| / ||z||, both a mean over samples.

    KL alone is blind to shifts of the logits that softmax does not see. The drift is not squared:
    views that are close already, the full one above all, keep being pulled closer.
    """
    log_p, log_q = (F.log_softmax(z.flatten(0, -2), dim=-1) for z in (teacher, student))
    kl = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    change, size = (z.flatten(1).norm(dim=1) for z in (student - teacher, teacher))
    drift: Tensor = (change / size.clamp_min(1e-12)).mean()
    return kl + drift


def budget(layers: Mapping[str, ElasticLayer], points: Mapping[str, LayerPoint]) -> Tensor:
    """The share of each layer's energy that its point does not pay for, weighted by its FLOPs.

    A hard rank has no gradient; the spectrum has. The term pulls energy into the leading ranks,
    most where a layer is expensive, so that a tight budget cuts less.
    """
    full = {
        name: layer_work(layer.spec, LayerPoint(layer.spec.full_rank, 8), Form.DENSE).flops
        for name, layer in layers.items()
    }
    total = torch.zeros(())
    for name, layer in layers.items():
        if len(layer.stages) == 1 or layer.spec.stored_dense(points[name]):
            continue
        kept, _ = layer.spec.channel_ranks(points[name].rank)
        before, last = layer.stages[-2].flatten(1), layer.stages[-1].flatten(1)
        energy = before.square().sum(1) * last.square().sum(0)
        total = total + full[name] * energy[kept:].sum() / energy.sum()
    return total / sum(full.values())
