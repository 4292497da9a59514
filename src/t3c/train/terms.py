"""What one step computes: the views of a batch, and every term of the objective on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from t3c.certify.penalty import first_order_penalty
from t3c.convert import state_of
from t3c.errors import DataError
from t3c.nn.inputs import Inputs, call, device_of, join, select, tensors
from t3c.nn.view import at, elastic_weights
from t3c.nn.weight import Relaxation
from t3c.spec import Profile
from t3c.train import objective
from t3c.train.augment import Augmentation
from t3c.train.config import CERTIFICATE_EVERY, FULL_TERMS, TrainConfig
from t3c.train.losses import Loss
from t3c.train.precision import laid_out, multiplying
from t3c.train.processes import Processes
from t3c.train.schedules import noise, relaxation


@dataclass(frozen=True)
class Batch:
    """The samples of a step: as they are with their target, and augmented ones, if any."""

    plain: Inputs
    target: Tensor | None
    augmented: Inputs | None


class NetworkTerms:
    """The terms that train the network, for one profile a step."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        config: TrainConfig,
        augmentation: Augmentation,
        processes: Processes,
        last: Mapping[str, float],
    ) -> None:
        self.model, self.original = model, state_of(model).original
        self.loss, self.config, self.processes = loss, config, processes
        self.augmentation = augmentation
        self.weights = elastic_weights(model)
        self.certificate = objective.Certificate(
            first_order_penalty, CERTIFICATE_EVERY, config.certificate.samples,
            config.certificate.tolerance, last.get("certificate", 0.0),
        )  # fmt: skip

    def __call__(
        self, step: int, inputs: Inputs, target: Tensor | None, profile: Profile
    ) -> dict[str, Tensor]:
        """Every term that weighs something, unweighted; means over the samples of all processes."""
        relaxed = relaxation(step, self.config)
        batch = self._prepare(step, inputs, target)
        makers = self._views(batch, profile, relaxed) | {
            "certificate": partial(
                self.certificate, step, self.model, self.original, profile, batch.plain, relaxed
            ),
            "tail": partial(objective.tail, self.weights, profile.points),
            "spectral": partial(objective.spectral, self.weights),
            "gap": partial(objective.gap, self.weights),
        }
        return {name: make() for name, make in makers.items() if self.config.computes(name)}

    def _views(
        self, batch: Batch, profile: Profile, relaxed: Relaxation | None
    ) -> dict[str, Callable[[], Tensor]]:
        """The terms that need outputs: of the sampled profile, and of the full view.

        One pass of the original and one of the profile serve plain and augmented samples both.
        """
        config, model = self.config, self.model
        halving = partial(multiplying, config.precision, device_of(model).type)
        if not config.computes("distill", "augment", *FULL_TERMS):
            return {}
        plain, weight = self.processes.share(laid_out(batch.plain))
        target = None if batch.target is None else batch.target[self.processes.rows]
        parts, weights = [plain], [weight]
        if batch.augmented is not None:
            extra, extra_weight = self.processes.share(laid_out(batch.augmented))
            parts, weights = [plain, extra], [weight, extra_weight]
        sizes = [len(tensors(part)[0]) for part in parts]
        match = partial(objective.distill, of_classes=config.of_classes)
        if config.teacher == "targets":
            assert target is not None
            teachers: Sequence[Tensor] = [target.float()]
        else:
            with torch.no_grad(), halving():
                teachers = torch.split(call(self.original, join(parts)).float(), sizes)
        makers: dict[str, Callable[[], Tensor]] = {}
        if config.computes("distill", "augment"):
            with at(model, profile, relaxed), halving():
                students = torch.split(call(model, join(parts)).float(), sizes)
            names = ("distill", "augment")
            for name, s, t, w in zip(names, students, teachers, weights, strict=False):
                makers[name] = lambda s=s, t=t, w=w: w * match(s, t)  # type: ignore[misc]
        if config.computes(*FULL_TERMS):
            with at(model, None), halving():
                full = call(model, plain).float()
            makers["task"] = lambda: weight * self._task(full, target)
            makers["anchor"] = lambda: weight * match(full, teachers[0])
        return makers

    def _task(self, outputs: Tensor, target: Tensor | None) -> Tensor:
        """The task's loss, which may be someone's own."""
        assert target is not None
        value = self.loss(outputs, target)
        if not isinstance(value, Tensor) or value.dim():
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise DataError(f"a loss is one number, the mean over samples, got {shape}")
        return value

    def _prepare(self, step: int, inputs: Inputs, target: Tensor | None) -> Batch:
        """Augment the second half of the batch, if asked to."""
        config, rows = self.config, len(tensors(inputs)[0])
        half = rows // 2
        if not (config.computes("augment") and half):
            return Batch(inputs, target, None)
        random = noise(config.seed, step, "augment")
        moved = self.augmentation(select(inputs, slice(rows - half, None)), random)
        kept = None if target is None else target[: rows - half]
        return Batch(select(inputs, slice(rows - half)), kept, moved)
