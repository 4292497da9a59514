"""Views of an elastic model on the test part: what each answers, trained and not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from t3c.certify.drift import relative_drift
from t3c.control.options import Shares
from t3c.convert import state_of
from t3c.engines.protocol import Array
from t3c.nn.inputs import call, evaluating
from t3c.nn.view import at
from t3c.spec import Profile, ProfileChain
from t3c.train import TrainConfig
from t3c.train.losses import Loss, loss_of
from t3c.train.targets import counted_shares
from t3c.zoo.subjects import Labelled, Subject, in_batches

Z95 = 1.959963984540054
Watch = Callable[[str, int, int], object]


@dataclass(frozen=True)
class View:
    """How a view did on the test part: loss and drift, and which samples it got right."""

    loss: float
    drift: float
    right: Array | None

    @property
    def accuracy(self) -> float | None:
        return None if self.right is None else float(self.right.mean())


@dataclass(frozen=True)
class Paired:
    """A difference of two shares on the same samples, and its 95% interval."""

    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class ViewRow:
    """A view beside itself untrained, and beside full and the next larger view.

    Accuracies are None where outputs are no classes; `flops` and `bytes` are counted, as shares of
    the all-dense 8-bit network.
    """

    name: str
    accuracy: float | None
    untrained: float | None
    loss: float
    untrained_loss: float
    drift: float
    untrained_drift: float
    flops: float
    bytes: float
    to_full: Paired | None
    to_next: Paired | None


def view_rows(
    model: nn.Module,
    untrained: nn.Module,
    profiles: ProfileChain,
    subject: Subject,
    config: TrainConfig,
    watch: Watch,
) -> list[ViewRow]:
    """Test every profile, smallest first, and full: trained, untrained, paired differences."""
    loss = loss_of(config.loss)
    shares = counted_shares(state_of(model).plan.layers)
    views: list[Profile | None] = [*profiles, None]
    seen: list[list[View]] = [[] for _ in range(2 * len(views))]
    parts = subject.in_batches(subject.test)
    for index, part in enumerate(parts):
        watch("testing", index + 1, len(parts))
        originals = outputs(state_of(model).original, None, part)
        wanted = [(m, profile) for m in (model, untrained) for profile in views]
        for found, (m, profile) in zip(seen, wanted, strict=True):
            found.append(tested(outputs(m, profile, part), originals, part[1], loss))
    sizes = [len(target) for _, target in parts]
    whole = [together(found, sizes) for found in seen]
    trained, before = whole[: len(views)], whole[len(views) :]
    rows = []
    for profile, mine, old, above in zip(views, trained, before, [*trained[1:], None], strict=True):
        flops, size = _taken(profile, shares)
        rows.append(
            ViewRow(
                "full" if profile is None else profile.name, mine.accuracy, old.accuracy, mine.loss,
                old.loss, mine.drift, old.drift, flops, size, paired(mine, trained[-1]),
                None if above is None else paired(mine, above),
            )
        )  # fmt: skip
    return rows


@torch.no_grad()
def outputs(model: nn.Module, profile: Profile | None, part: Labelled) -> Tensor:
    """Return what a view answers; weights are quantized as stored, activations are in float."""
    with evaluating(model), at(model, profile):
        return torch.cat([call(model, inputs) for inputs, _ in in_batches(part)])


def tested(answers: Tensor, originals: Tensor, target: Tensor, loss: Loss) -> View:
    """Return how answers did against the labels and against the original's."""
    drift = float(relative_drift(answers, originals).mean())
    classes = target.dim() == 1 and answers.dim() == 2 and not target.is_floating_point()
    right = (answers.argmax(-1) == target).numpy() if classes else None
    return View(float(loss(answers, target)), drift, right)


def together(views: Sequence[View], sizes: Sequence[int]) -> View:
    """Return the view of all samples, from what it was on parts of these sizes."""
    loss, drift = (
        float(np.average([getattr(v, name) for v in views], weights=sizes))
        for name in ("loss", "drift")
    )
    right = [v.right for v in views if v.right is not None]
    return View(loss, drift, np.concatenate(right) if right else None)


def paired(mine: View, other: View) -> Paired | None:
    """Return the difference of two accuracies on the same samples, and its 95% interval."""
    if mine.right is None or other.right is None:
        return None
    return paired_difference(mine.right, other.right)


def paired_difference(mine: Array, other: Array) -> Paired:
    """Return how much more of the same samples (n,) is right, as a share, and its 95% interval.

    The interval is that of Bonett and Price, of one more sample won and one more lost: where none
    differ it does not claim that none ever will.
    """
    won, lost = (int((a & ~b).sum()) for a, b in ((mine, other), (other, mine)))
    n = len(mine) + 2
    centre, changed = (won - lost) / n, (won + lost + 2) / n
    error = Z95 * math.sqrt((changed - centre**2) / n)
    return Paired((won - lost) / len(mine), centre - error, centre + error)


def _taken(profile: Profile | None, shares: Shares) -> tuple[float, float]:
    """Return the counted work and bytes of a profile; all of both for full."""
    if profile is None:
        return 1.0, 1.0
    taken = [shares(name, point) for name, point in profile.points.items()]
    return sum(t[0] for t in taken), sum(t[1] for t in taken)
