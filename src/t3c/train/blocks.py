"""Block-wise reconstruction: what a few hundred unlabelled samples are enough for."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from t3c.convert import LayerPlan, state_of, units
from t3c.errors import DataError, SpecError, TrainError
from t3c.nn.inputs import Inputs, batches_of, call, evaluating, gather, select, tensors
from t3c.nn.layers import ElasticLayer
from t3c.nn.view import at
from t3c.nn.weight import ElasticWeight
from t3c.quant.straight_through import VIEWS
from t3c.spec import MAX_BITS, LayerPoint, Profile
from t3c.train.sampling import sample_profile

LARGEST = 1 / 3  # of all elastic layers: what one block may hold, if it can be divided
HELD_OUT = 0.1  # of the samples

OnStep = Callable[[str, int, float], object]
Watch = Callable[[str, int, int], object]


@dataclass(frozen=True)
class BlockConfig:
    """How long and how hard each block is trained.

    `mix` is the share of steps on inputs that the network compressed to the step's profile gives
    the block, the rest are on the original's. The target is what the original's block answers to
    the same inputs: asked to undo what blocks before it lost, blocks helped the lowest profiles a
    little and cost those in the middle much.
    """

    steps: int = 200
    learning_rate: float = 1e-3
    batch: int = 32
    profiles_per_step: int = 1
    mix: float = 0.5
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    seed: int = 3407

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "profiles_per_step"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise SpecError(f"{name} must be positive, got {getattr(self, name):g}")
        if not 0 <= self.mix <= 1:
            raise SpecError(f"mix must be in [0, 1], got {self.mix:g}")
        if not 0 <= self.weight_decay < math.inf:
            raise SpecError(f"weight_decay must be at least 0, got {self.weight_decay:g}")


@dataclass(frozen=True)
class BlockRow:
    """A block's relative squared error on held-out samples; None where it was not trained."""

    block: str
    before: float | None
    after: float | None
    kept: bool
    reason: str


@dataclass(frozen=True)
class BlockReport:
    """What became of every block, in order of execution."""

    rows: tuple[BlockRow, ...]


def find_blocks(model: nn.Module) -> list[str]:
    """The names of what to reconstruct one after the other, in order of execution.

    A block is a member of a list or sequence in which its class repeats, at the outermost such
    level that has no member with more than a third of all elastic layers, unless there is no
    further level of members with several; elastic layers in no such block stand for themselves.
    What is never called, or does not answer with a tensor, is no block, but its parts may be.
    """
    ran = _runs(model)
    limit = LARGEST * _size(model)
    seen: set[int] = set()  # a module may stand under several names

    def walk(name: str, module: nn.Module) -> Iterator[str]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if isinstance(module, ElasticLayer):
            yield name
            return
        members = _members(module)
        if any(_size(member) > limit and _divisible(member) for member in members):
            members = []
        for leaf, child in module.named_children():
            path = f"{name}.{leaf}" if name else leaf
            if path in ran and any(child is member for member in members):
                seen.update(map(id, child.modules()))
                yield path
            else:
                yield from walk(path, child)

    order = {name: index for index, name in enumerate(ran)}
    return sorted(walk("", model), key=lambda name: order.get(name, len(order)))


def reconstruct(
    model: nn.Module,
    batches: Iterable[Any],
    config: BlockConfig | None = None,
    *,
    profiles: Sequence[Profile] = (),
    on_step: OnStep | None = None,
    watch: Watch | None = None,
) -> BlockReport:
    """Train an elastic model in place, block after block, to answer as the original's blocks do.

    `batches` yields inputs or (inputs, target); targets are not used. Each step is at one of
    `profiles`, or at a sampled one. Only factors and gains are trained. Biases, norms, dense
    weights and their 8-bit gains serve the full view too and stay as they are: trained as well,
    with the full view as an anchor in every fourth step, they brought the low profiles of a small
    network (DigitsNet) hardly closer and took its full view 4% away.

    A block that got worse on a held-out tenth of the samples has its weights back; a weight that
    several blocks share stays as it is. `on_step(block, step, loss)` is told of each step,
    `watch(what, done, total)` of each block.
    """
    config = config or BlockConfig()
    plans = state_of(model).plan.layers
    rng = np.random.default_rng(config.seed)
    training, held = _split(gather(batches), config, rng)

    def draw() -> Profile:
        if not profiles:
            return sample_profile(plans, rng)
        return profiles[int(rng.integers(len(profiles)))]

    judges = list(profiles) or _spread(plans)
    names, runs, rows = find_blocks(model), _runs(model), []
    trainable = {name: _trainable(model, name, names) for name in names}
    with evaluating(model):
        for index, name in enumerate(names):
            if watch is not None:
                watch(f"block {name}", index, len(names))
            parameters, reason = trainable[name]
            if name not in runs:
                reason = "it does not run on the example"
            if reason:
                rows.append(BlockRow(name, None, None, False, reason))
                continue
            block = _Block(model, name, runs[name], parameters, config)
            try:
                rows.append(block.train(training, block.exams(held, judges), draw, rng, on_step))
            except _UnevenError as uneven:
                block.restore()
                rows.append(BlockRow(name, None, None, False, str(uneven)))
    return BlockReport(tuple(rows))


@dataclass(frozen=True)
class _Call:
    """What a block is given, and the answer that is wanted."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor


_Exam = tuple[Profile, float, _Call]


class _Block:
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
        self.tops = {id(weight.dense_gains) for weight in _weights(self.block)}

    def train(
        self,
        chunks: list[Inputs],
        exams: list[_Exam],
        draw: Callable[[], Profile],
        rng: np.random.Generator,
        on_step: OnStep | None,
    ) -> BlockRow:
        """Train the block and compare it with what it was; what got worse is taken back."""
        before = self._examine(exams)
        if not math.isfinite(before):
            raise TrainError(f"block {self.name!r}: the error is not finite before it is trained")
        optimizer = torch.optim.AdamW(
            self.parameters, lr=self.config.learning_rate, weight_decay=self.config.weight_decay
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.config.steps)
        for step, loss in enumerate(self._losses(chunks, draw, rng)):
            value = float(loss.detach())
            if not math.isfinite(value):
                self.restore()
                raise TrainError(f"block {self.name!r}, step {step}: the loss is not finite")
            self._step(loss, optimizer)
            schedule.step()
            if on_step is not None:
                on_step(self.name, step, value)
        after = self._examine(exams)
        if after <= before:
            return BlockRow(self.name, before, after, True, "no worse on held-out samples")
        self.restore()
        return BlockRow(self.name, before, after, False, "rolled back: worse on held-out samples")

    def _losses(
        self, chunks: list[Inputs], draw: Callable[[], Profile], rng: np.random.Generator
    ) -> Iterator[Tensor]:
        """The error of each step's batch, on the original's inputs or on compressed ones."""
        known = [_record(self.original, self.name, chunk, self.runs) for chunk in chunks]
        order: list[int] = []
        for _ in range(self.config.steps):
            order = order or rng.permutation(len(chunks)).tolist()
            index, run = order.pop(), int(rng.integers(self.runs))
            compressed = rng.random() < self.config.mix
            errors = []
            for profile in [draw() for _ in range(self.config.profiles_per_step)]:
                given = known[index][run]
                if compressed:
                    given = self._compressed(chunks[index], profile)[run]
                errors.append(self._error(given, profile))
            yield torch.stack(errors).mean()

    def exams(self, chunks: list[Inputs], profiles: list[Profile]) -> list[_Exam]:
        """The block on the original's inputs and on compressed ones, each with its weight."""
        exams = []
        for chunk in chunks:
            known = _record(self.original, self.name, chunk, self.runs)
            size, mix = len(tensors(chunk)[0]), self.config.mix
            for profile in profiles:
                exams += [(profile, size * (1 - mix), given) for given in known]
                mine = self._compressed(chunk, profile) if mix else []
                exams += [(profile, size * mix, given) for given in mine]
        return exams

    @torch.no_grad()
    def _examine(self, exams: list[_Exam]) -> float:
        errors = [weight * float(self._error(given, p)) for p, weight, given in exams]
        return sum(errors) / sum(weight for _, weight, _ in exams)

    @torch.no_grad()
    def _compressed(self, chunk: Inputs, profile: Profile) -> list[_Call]:
        """What the model at the profile gives the block; the original's block answers."""
        with at(self.model, profile):
            calls = _record(self.model, self.name, chunk, self.runs)
        block = self.original.get_submodule(self.name)
        return [_Call(given.args, given.kwargs, _answer(block, given)) for given in calls]

    def _error(self, given: _Call, profile: Profile) -> Tensor:
        with at(self.model, profile):
            return _relative(_answer(self.block, given), given.output)

    def _step(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm)
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


def _split(
    samples: Inputs, config: BlockConfig, rng: np.random.Generator
) -> tuple[list[Inputs], list[Inputs]]:
    """Shuffled samples in batches: those to train on, and those held out."""
    count = tensors(samples)[0].shape[0]
    if count < 2:
        raise DataError("reconstruction needs at least 2 samples: one is held out")
    shuffled = select(samples, torch.from_numpy(rng.permutation(count)))
    held = max(1, round(HELD_OUT * count))
    parts = (select(shuffled, slice(held, None)), select(shuffled, slice(held)))
    training, rest = (list(batches_of(part, config.batch)) for part in parts)
    return training, rest


def _spread(plans: Sequence[LayerPlan]) -> list[Profile]:
    """Few profiles that reach every rank and every bits: no view is made worse unnoticed."""
    options = []
    for unit in units(plans):
        points = unit.points()
        options.append((unit, sorted({p.rank for p in points}), sorted({p.bits for p in points})))
    profiles = []
    for index in range(max(max(len(ranks), len(bits)) for _, ranks, bits in options)):
        chosen: dict[str, LayerPoint] = {}
        for unit, ranks, bits in options:
            point = LayerPoint(ranks[index % len(ranks)], bits[index % len(bits)])
            chosen |= unit.layer_points(point)
        profiles.append(Profile(f"judge {index}", chosen))
    return profiles


def _trainable(model: nn.Module, name: str, names: Sequence[str]) -> tuple[list[nn.Parameter], str]:
    """The parameters that the block's compressed views alone have; or why there are none."""
    mine = _weights(model.get_submodule(name))
    shared = {
        id(weight): other
        for other in names
        if other != name
        for weight in _weights(model.get_submodule(other))
    }
    parameters = [
        parameter
        for weight in mine
        if id(weight) not in shared
        for parameter in weight.parameters()
        if parameter.requires_grad and parameter is not weight.dense
    ]
    if parameters:
        return parameters, ""
    others = sorted({shared[id(weight)] for weight in mine if id(weight) in shared})
    if others:
        return [], f"its weights are also those of {', '.join(others)}"
    return [], "its weights are frozen"


def _weights(module: nn.Module) -> list[ElasticWeight]:
    return [m for m in module.modules() if isinstance(m, ElasticWeight)]


def _size(module: nn.Module) -> int:
    """How many elastic layers a module holds."""
    return sum(isinstance(m, ElasticLayer) for m in module.modules())


def _members(module: nn.Module) -> list[nn.Module]:
    """Members of a list or sequence that hold elastic layers and are of a class that repeats."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    counts = Counter(type(child) for child in module)
    return [
        child
        for child in module
        if not isinstance(child, ElasticLayer)
        and _size(child)
        and (counts[type(child)] > 1 or len(module) == 1)
    ]


def _divisible(module: nn.Module) -> bool:
    """Whether there is a further level of repeated members, of more than a layer each."""
    return any(_size(member) > 1 for inner in module.modules() for member in _members(inner))


@torch.no_grad()
def _runs(model: nn.Module) -> dict[str, int]:
    """How often each module that answers with a tensor runs on the example, in order."""
    runs: Counter[str] = Counter()
    odd: set[str] = set()

    def watch(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            runs[name] += 1
            if _tensor(output) is None:
                odd.add(name)

        return hook

    handles = [m.register_forward_hook(watch(name)) for name, m in model.named_modules()]
    try:
        with evaluating(model), at(model, None):
            call(model, _copied(state_of(model).example))
    finally:
        for handle in handles:
            handle.remove()
    return {name: count for name, count in runs.items() if name not in odd}


class _ReachedError(Exception):
    """The block has run: the rest of the model need not."""


class _UnevenError(Exception):
    """The block runs now more often, now less."""


@torch.no_grad()
def _record(model: nn.Module, name: str, inputs: Inputs, runs: int) -> list[_Call]:
    """What the block is given and answers in a run of the model that ends with it."""
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    calls: list[_Call] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.append((_copied(args), _copied(kwargs)))  # a block may work on its input in place

    def after(_: nn.Module, __: Any, output: Any) -> None:
        answer = _tensor(output)
        assert answer is not None
        calls.append(_Call(*given[-1], answer.clone()))
        if len(calls) == runs:
            raise _ReachedError

    block = model.get_submodule(name)
    start = block.register_forward_pre_hook(before, with_kwargs=True)
    end = block.register_forward_hook(after)
    try:
        call(model, _copied(inputs))
    except _ReachedError:
        return calls
    finally:
        start.remove()
        end.remove()
    raise _UnevenError(f"it runs {runs} times on the example, {len(calls)} on other samples")


def _answer(block: nn.Module, given: _Call) -> Tensor:
    answer = _tensor(block(*_copied(given.args), **_copied(given.kwargs)))
    assert answer is not None
    return answer


def _relative(answer: Tensor, target: Tensor) -> Tensor:
    """||answer - target||^2 / ||target||^2, a mean over samples."""
    change, size = (v.reshape(len(v), -1).square().sum(dim=1) for v in (answer - target, target))
    # A sample to which the original answers next to nothing would outweigh all others.
    floor = max(1e-3 * float(size.mean()), 1e-12)
    mean: Tensor = (change / size.clamp_min(floor)).mean()
    return mean


def _tensor(output: Any) -> Tensor | None:
    """The tensor a block answers with, or that its tuple begins with; None if there is none."""
    if isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) and output.is_floating_point() else None


def _copied(value: Any) -> Any:
    """A copy of inputs that a block may change, caches included; of a view only what it shows."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):
        return type(value)(_copied(item) for item in value)
    if type(value) is dict:
        return {name: _copied(item) for name, item in value.items()}
    return copy.deepcopy(value)
