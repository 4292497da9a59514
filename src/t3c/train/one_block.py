"""One block in training: its configuration, its steps, and whether what it learned is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from t3c.convert import state_of
from t3c.errors import SpecError, TrainError
from t3c.nn.inputs import Inputs, tensors
from t3c.nn.view import at
from t3c.nn.weight import ElasticWeight
from t3c.quant.straight_through import VIEWS
from t3c.spec import MAX_BITS, Profile
from t3c.train.calls import Call, answer, record
from t3c.train.config import CLIP_NORM

# Share of steps on inputs that the network compressed to the step's profile gives the block, which
# is what the block will see; the rest are on the original's, where its own error is seen alone.
MIX = 0.5


@dataclass(frozen=True)
class BlockConfig:
    """How long and how hard each block is trained.

    The target is what the original's block answers to the same inputs: asked to undo what blocks
    before it lost, blocks helped the lowest profiles a little and cost those in the middle much.
    """

    steps: int = 200
    learning_rate: float = 1e-3
    batch: int = 32
    seed: int = 3407

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.learning_rate < math.inf:
            raise SpecError(f"learning_rate must be positive, got {self.learning_rate:g}")


@dataclass(frozen=True)
class BlockRow:
    """A block's relative squared error on held-out samples; None where it was not trained."""

    block: str
    before: float | None
    after: float | None
    kept: bool
    reason: str


Exam = tuple[Profile, float, Call]


class Block:
    """One block in training; `runs` is how often it is called in a run of the model."""

    def __init__(
        self,
        model: nn.Module,
        name: str,
        runs: int,
        parameters: list[nn.Parameter],
        config: BlockConfig,
    ) -> None:
        self.model, self.original = model, state_of(model).original
        self.name, self.runs, self.config = name, runs, config
        self.block = model.get_submodule(name)
        self.parameters = parameters
        self.saved = [parameter.detach().clone() for parameter in parameters]
        self.tops = {id(weight.dense_gains) for weight in weights_of(self.block)}

    def train(
        self,
        chunks: list[Inputs],
        exams: list[Exam],
        draw: Callable[[], Profile],
        rng: np.random.Generator,
    ) -> BlockRow:
        """Train the block and compare it with what it was; what got worse is taken back."""
        before = self._examine(exams)
        if not math.isfinite(before):
            raise TrainError(f"block {self.name!r}: the error is not finite before it is trained")
        rate = self.config.learning_rate
        optimizer = torch.optim.AdamW(self.parameters, lr=rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.config.steps)
        for step, loss in enumerate(self._losses(chunks, draw, rng)):
            value = float(loss.detach())
            if not math.isfinite(value):
                self.restore()
                raise TrainError(f"block {self.name!r}, step {step}: the loss is not finite")
            self._step(loss, optimizer)
            schedule.step()
        after = self._examine(exams)
        if after <= before:
            return BlockRow(self.name, before, after, True, "no worse on held-out samples")
        self.restore()
        return BlockRow(self.name, before, after, False, "rolled back: worse on held-out samples")

    def _losses(
        self, chunks: list[Inputs], draw: Callable[[], Profile], rng: np.random.Generator
    ) -> Iterator[Tensor]:
        """The error of each step's batch, on the original's inputs or on compressed ones."""
        known = [record(self.original, self.name, chunk, self.runs) for chunk in chunks]
        order: list[int] = []
        for _ in range(self.config.steps):
            order = order or rng.permutation(len(chunks)).tolist()
            index, run = order.pop(), int(rng.integers(self.runs))
            compressed, profile = rng.random() < MIX, draw()
            given = self._compressed(chunks[index], profile) if compressed else known[index]
            yield self._error(given[run], profile)

    def exams(self, chunks: list[Inputs], profiles: list[Profile]) -> list[Exam]:
        """The block on the original's inputs and on compressed ones, each with its weight."""
        exams = []
        for chunk in chunks:
            known = record(self.original, self.name, chunk, self.runs)
            size = len(tensors(chunk)[0])
            for profile in profiles:
                exams += [(profile, size * (1 - MIX), given) for given in known]
                exams += [
                    (profile, size * MIX, given) for given in self._compressed(chunk, profile)
                ]
        return exams

    @torch.no_grad()
    def _examine(self, exams: list[Exam]) -> float:
        errors = [weight * float(self._error(given, p)) for p, weight, given in exams]
        return sum(errors) / sum(weight for _, weight, _ in exams)

    @torch.no_grad()
    def _compressed(self, chunk: Inputs, profile: Profile) -> list[Call]:
        """What the model at the profile gives the block; the original's block answers."""
        with at(self.model, profile):
            calls = record(self.model, self.name, chunk, self.runs)
        block = self.original.get_submodule(self.name)
        return [Call(given.args, given.kwargs, answer(block, given)) for given in calls]

    def _error(self, given: Call, profile: Profile) -> Tensor:
        with at(self.model, profile):
            return _relative(answer(self.block, given), given.output)

    def _step(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        top = VIEWS.index(MAX_BITS)
        with torch.no_grad():
            for parameter, saved in zip(self.parameters, self.saved, strict=True):
                if id(parameter) in self.tops:
                    parameter[top] = saved[top]

    @torch.no_grad()
    def restore(self) -> None:
        """Give the block the weights it came with."""
        for parameter, saved in zip(self.parameters, self.saved, strict=True):
            parameter.copy_(saved)


def weights_of(module: nn.Module) -> list[ElasticWeight]:
    """The elastic weights that a module uses."""
    return [m for m in module.modules() if isinstance(m, ElasticWeight)]


def _relative(answer: Tensor, target: Tensor) -> Tensor:
    """||answer - target||^2 / ||target||^2, a mean over samples."""
    change, size = (v.reshape(len(v), -1).square().sum(dim=1) for v in (answer - target, target))
    # A sample to which the original answers next to nothing would outweigh all others.
    floor = max(1e-3 * float(size.mean()), 1e-12)
    mean: Tensor = (change / size.clamp_min(floor)).mean()
    return mean
