"""Training of the originals that cannot be downloaded: resumable, the weights kept in a cache.

A base recipe is YAML in `configs/base`: a network, phases, an optimizer. The weights carry the key
of the recipe that made them, so a changed one trains anew and an unchanged one never twice.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from lab.zoo.bases import NETWORKS, RECIPE, base_file, made_by, new_network
from t3c.errors import DataError, SpecError, TrainError
from t3c.files import write_atomic
from t3c.train.augment import horizontal_flip, shift
from t3c.train.checkpoint import alone, latest, load_checkpoint, save_checkpoint
from t3c.train.precision import Precision, multiplying
from t3c.train.schedules import draws, noise
from t3c.zoo.cifar10 import cifar10
from t3c.zoo.settings import read_settings

HELD = 2_000  # samples of the training part, its last, that base training does not see
EVALUATED = 500
Say = Callable[[str], object]
Watch = Callable[[str, int, int], object]


@dataclass(frozen=True)
class Phase:
    """A stretch of training: on images made `side` pixels wide, on `kept` tokens of each."""

    epochs: int
    side: int = 32
    kept: int | None = None

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise SpecError(f"a phase has at least one epoch, got {self.epochs}")
        if self.side < 8 or (self.kept is not None and self.kept < 1):
            raise SpecError(f"images of {self.side} pixels and {self.kept} tokens are too few")


@dataclass(frozen=True)
class BaseRecipe:
    """How a network is trained from nothing on CIFAR-10, less the images held back.

    The learning rate rises to its peak over the first `rise` of the steps and falls linearly to
    `final` of it, and over the last `cooldown` epochs to nothing; biases of norms take `bias_rate`
    times as much. `precision` "auto" multiplies in bfloat16 where the processor has instructions
    for it, which takes little more than half the time.
    """

    network: str
    phases: tuple[Phase, ...]
    optimizer: Literal["sgd", "adamw"] = "sgd"
    batch: int = 250
    learning_rate: float = 0.375
    momentum: float = 0.85
    weight_decay: float = 1.3e-3
    bias_rate: float = 1.0
    label_smoothing: float = 0.2
    rise: float = 0.23
    final: float = 0.07
    cooldown: int = 0
    precision: Precision = "float"
    seed: int = 3407

    def __post_init__(self) -> None:
        if self.network not in NETWORKS:
            raise SpecError(f"no network {self.network!r}: known are {', '.join(NETWORKS)}")
        if not self.phases:
            raise SpecError("there is no phase to train")
        if not 0 <= self.cooldown < self.epochs:
            raise SpecError(f"cooldown is less than all epochs, got {self.cooldown}")
        if self.batch < 1:
            raise SpecError(f"batch must be at least 1, got {self.batch}")
        for name in ("learning_rate", "bias_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise SpecError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("label_smoothing", "rise", "final"):
            if not 0 <= getattr(self, name) < 1:
                raise SpecError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if not 0 < self.momentum < 1:
            raise SpecError(f"momentum must be between 0 and 1, got {self.momentum}")
        if not 0 <= self.weight_decay < math.inf:
            raise SpecError(f"weight_decay must be at least 0, got {self.weight_decay}")

    @property
    def key(self) -> str:
        """A name for these settings and shapes; what else the code does is not in it."""
        shapes = {name: list(t.shape) for name, t in new_network(self.network).state_dict().items()}
        told = json.dumps([asdict(self), HELD, shapes], sort_keys=True)
        return f"{self.network}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"

    @property
    def epochs(self) -> int:
        return sum(phase.epochs for phase in self.phases)

    def phase(self, epoch: int) -> Phase:
        """The phase that an epoch, counted from 0, is in."""
        for phase in self.phases:
            if epoch < phase.epochs:
                return phase
            epoch -= phase.epochs
        return self.phases[-1]


@dataclass(frozen=True)
class Lesson:
    """A network about to be trained: one epoch of it, and how it then does on what is held back."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    epoch: Callable[[int], float]
    accuracy: Callable[[], float]


def load_base(path: Path) -> BaseRecipe:
    """The base recipe of a YAML file."""
    return read_settings(path, BaseRecipe)


def train_base(recipe: BaseRecipe, folder: Path, *, say: Say, watch: Watch) -> Path:
    """Train the network, or go on where it stopped; the file of its weights.

    Training is checked on the images held back; the test images are not looked at.
    """

    def begin() -> Lesson:
        _check_phases(recipe)
        images, labels = cifar10("train")
        if len(labels) < HELD + recipe.batch:
            raise DataError(f"{len(labels)} images are too few for batches of {recipe.batch}")
        kept, held = (images[:-HELD], labels[:-HELD]), (images[-HELD:], labels[-HELD:])
        torch.manual_seed(recipe.seed)
        model = NETWORKS[recipe.network](kept[0])
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = _optimizer(model, recipe)
        return Lesson(
            model, optimizer,
            lambda epoch: _epoch(model, optimizer, recipe, kept, epoch, watch),
            lambda: accuracy(model, held),
        )  # fmt: skip

    final = base_file(recipe.network, folder)
    return trained_once(final, recipe.key, recipe.epochs, begin, say)


def trained_once(final: Path, key: str, epochs: int, begin: Callable[[], Lesson], say: Say) -> Path:
    """The weights at `final` by the recipe of that key: there already, gone on with, or made."""
    if made_by(final) == key:
        say(f"{final.stem} is trained: {final}")
        return final
    lesson = begin()
    work = final.parent / key
    checkpoints = work / "checkpoints"
    with alone(work):
        found = latest(checkpoints, say)
        start = 0 if found is None else load_checkpoint(found, lesson.model, lesson.optimizer).step
        if start:
            say(f"going on after epoch {start} of {epochs}")
        for epoch in range(start, epochs):
            began = time.perf_counter()
            loss = lesson.epoch(epoch)
            say(
                f"epoch {epoch + 1} of {epochs}: loss {loss:.3f}, accuracy {lesson.accuracy():.4f} "
                f"on {HELD:,} samples held back, {time.perf_counter() - began:.0f} s"
            )
            save_checkpoint(checkpoints, epoch + 1, lesson.model, lesson.optimizer, {"loss": loss})
        tensors = {name: t.detach().contiguous() for name, t in lesson.model.state_dict().items()}
        if not all(t.isfinite().all() for t in tensors.values()):
            raise TrainError(f"{final.stem}: weights are not finite after the last step")
        write_atomic(final, save(tensors, {RECIPE: key}), TrainError)
    return final


@torch.no_grad()
def accuracy(model: nn.Module, part: tuple[Tensor, Tensor]) -> float:
    """The share of a part (images, labels) that the model gets right."""
    model.eval()
    pairs = zip(*(torch.split(values, EVALUATED) for values in part), strict=True)
    right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in pairs)
    return right / len(part[1])


@torch.no_grad()
def _check_phases(recipe: BaseRecipe) -> None:
    """Refuse images and tokens that a network does not take, before anything is trained."""
    model = new_network(recipe.network).eval()
    for phase in recipe.phases:
        if phase.kept is not None and not hasattr(model, "kept"):
            raise SpecError(f"{recipe.network} has no tokens to keep {phase.kept} of")
        try:
            model(torch.zeros(1, 3, phase.side, phase.side))
        except RuntimeError as error:
            raise SpecError(
                f"{recipe.network} does not take images of {phase.side} pixels: {error}"
            ) from error


def _optimizer(model: nn.Module, recipe: BaseRecipe) -> torch.optim.Optimizer:
    """Weights decay, biases and norms take rates of their own."""
    shifts = {id(m.bias) for m in model.modules() if isinstance(m, nn.BatchNorm2d)}
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if id(p) in shifts], "scale": recipe.bias_rate},
        {"params": [p for p in parameters if id(p) not in shifts], "scale": 1.0},
    ]
    groups = [group for group in groups if group["params"]]
    for group in groups:
        group["lr"] = recipe.learning_rate * group["scale"]  # type: ignore[operator]
        group["weight_decay"] = recipe.weight_decay / group["scale"]  # type: ignore[operator]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=recipe.momentum, nesterov=True)
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


def _epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: BaseRecipe,
    part: tuple[Tensor, Tensor],
    epoch: int,
    watch: Watch,
) -> float:
    """Go through the part once; the mean loss."""
    phase = recipe.phase(epoch)
    steps = len(part[1]) // recipe.batch
    order = draws(recipe.seed, epoch, "order").permutation(len(part[1]))
    generator = noise(recipe.seed, epoch, "augment")
    torch.manual_seed(recipe.seed + epoch)  # what the network itself draws
    if phase.kept is not None:
        model.kept = phase.kept  # type: ignore[assignment]
    model.train()
    total = 0.0
    for step in range(steps):
        chosen = torch.from_numpy(np.sort(order[step * recipe.batch : (step + 1) * recipe.batch]))
        images, labels = part[0][chosen], part[1][chosen]
        images = shift(horizontal_flip(images, generator), generator)
        if phase.side != images.shape[-1]:
            images = F.interpolate(images, size=phase.side, mode="bilinear", antialias=True)
        share = rate_share(epoch + step / steps, recipe)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * group["scale"] * share
        with multiplying(recipe.precision):
            outputs = model(images.contiguous(memory_format=torch.channels_last)).float()
        loss = F.cross_entropy(outputs, labels, label_smoothing=recipe.label_smoothing)
        if not torch.isfinite(loss):
            raise TrainError(f"epoch {epoch + 1}, step {step + 1}: the loss is not finite")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        if recipe.optimizer == "adamw":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += float(loss.detach())
        watch(f"epoch {epoch + 1} of {recipe.epochs}: loss {loss:.3f}", step + 1, steps)
    if phase.kept is not None:
        model.kept = None  # type: ignore[assignment]
    return total / steps


def rate_share(epoch: float, recipe: BaseRecipe) -> float:
    """Of the peak learning rate after so many epochs: up in a line from a fifth, down in lines."""
    falling = recipe.epochs - recipe.cooldown
    peak = recipe.rise * falling
    if epoch < peak:
        return 0.2 + 0.8 * epoch / peak
    if epoch < falling:
        return 1 + (recipe.final - 1) * (epoch - peak) / (falling - peak)
    return recipe.final * (1 - (epoch - falling) / recipe.cooldown)
