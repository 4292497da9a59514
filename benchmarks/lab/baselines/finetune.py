"""The training that baselines share: the same data, the same minutes, one loop."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lab.baselines.baseline import Watch
from t3c.artifact.graph import BATCH_AXIS, example_states
from t3c.errors import SpecError, TrainError
from t3c.evidence.int8 import quiet
from t3c.nn.inputs import Inputs, call, evaluating, select, tensors
from t3c.train.config import TrainConfig
from t3c.train.objective import distill
from t3c.train.precision import Precision, multiplying
from t3c.train.schedules import draws, learning_rate_share

TIMED = 6  # steps that the number of steps is planned by, the first of which is not counted

Layer = nn.Linear | nn.Conv1d | nn.Conv2d


@dataclass(frozen=True)
class Training:
    """The original in torch, which is not changed, and what every trained method is given alike.

    `minutes` are turned into steps by timing a few; `steps` pins them. The loss is the distance
    to the original's outputs.
    """

    model: nn.Module
    inputs: Inputs
    minutes: float
    steps: int | None = None
    batch: int = 64
    precision: Precision = "float"
    seed: int = 3407

    def __post_init__(self) -> None:
        if not 0 < self.minutes < math.inf:
            raise SpecError(f"minutes must be positive, got {self.minutes:g}")
        for name in ("steps", "batch"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise SpecError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not len(self):
            raise SpecError("there is no sample to train on")

    def __len__(self) -> int:
        return len(tensors(self.inputs)[0])

    def batches(self) -> Iterator[Inputs]:
        """Yield shuffled batches without end, the same for every method."""
        size, step = min(self.batch, len(self)), 0
        while True:
            order = draws(self.seed, step, "order").permutation(len(self))
            for start in range(0, len(order) - size + 1, size):
                chosen = torch.from_numpy(np.sort(order[start : start + size]))
                yield select(self.inputs, chosen)
                step += 1


@dataclass(frozen=True)
class Finetuned:
    """How a fine-tuning went; the seconds are those of planning it too."""

    steps: int
    seconds: float
    losses: tuple[float, ...]


def finetune_(
    model: nn.Module,
    training: Training,
    *,
    learning_rate: float,
    before_step: Callable[[float], object] = lambda share: None,
    weight_decay: float = 0.0,
    faster: Callable[[int], Mapping[nn.Parameter, float]] = lambda steps: {},
    watch: Watch = lambda what, done, total: None,
) -> Finetuned:
    """Train `model` in place towards the original: AdamW, a warm-up over a tenth, then a cosine.

    Norms keep their running statistics. `before_step` is told the share of the run that is done;
    with share 0 it is called more than once where steps are timed first. `faster` says which
    parameters take how many times the learning rate in a run of so many steps.
    """
    started, losses = time.perf_counter(), list[float]()
    model.eval()
    with evaluating(training.model):
        steps = training.steps or _planned(model, training, before_step, started)
        optimizer = adamw(model, learning_rate, weight_decay, faster(steps))
        pace = TrainConfig(steps=steps, warmup=0.1)  # the schedule of our own training
        for step, inputs in zip(range(steps), training.batches(), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * group["times"] * learning_rate_share(step, pace)
            before_step(step / steps)
            try:
                losses.append(descend(optimizer, _loss(model, training, inputs)))
            except TrainError as error:
                raise TrainError(f"step {step + 1}: {error}") from error
            watch(f"step {step + 1}: loss {losses[-1]:.3f}", step + 1, steps)
    return Finetuned(steps, time.perf_counter() - started, tuple(losses))


def adamw(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float = 0.0,
    faster: Mapping[nn.Parameter, float] | None = None,
) -> torch.optim.Optimizer:
    """All that is not frozen, trained alike but for what takes so many times the learning rate."""
    times = faster or {}
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in parameters if p not in times], "times": 1.0}]
    groups += [{"params": [p], "times": times[p]} for p in parameters if p in times]
    for group in groups:
        group["lr"] = learning_rate * group["times"]  # type: ignore[operator]
    return torch.optim.AdamW(groups, weight_decay=weight_decay)


def descend(optimizer: torch.optim.Optimizer, loss: Tensor, clip_norm: float = 1.0) -> float:
    """One step against the clipped gradient of a loss (), whose value is returned."""
    value = float(loss.detach())
    if not math.isfinite(value):
        raise TrainError(f"the loss is not finite: {value}")
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(parameters, clip_norm)
    optimizer.step()
    return value


def _loss(model: nn.Module, training: Training, inputs: Inputs) -> Tensor:
    with multiplying(training.precision):
        with torch.no_grad():
            wanted = call(training.model, inputs).float()
        outputs = call(model, inputs).float()
    return distill(outputs, wanted)


def _planned(
    model: nn.Module, training: Training, before_step: Callable[[float], object], started: float
) -> int:
    """How many steps fit in what is left of the minutes.

    The steps that are timed have a learning rate of 0: schedules begin after them, with the model
    as it was.
    """
    idle, marks = adamw(model, 0.0), list[float]()
    for _, inputs in zip(range(TIMED), training.batches(), strict=False):
        before_step(0.0)
        descend(idle, _loss(model, training, inputs))
        marks.append(time.perf_counter())
    each = float(np.median(np.diff(marks)))
    return max(1, int((60 * training.minutes - (marks[-1] - started)) / each))


def copied(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode, all of whose parameters may be trained."""
    return copy.deepcopy(model).eval().requires_grad_(True)


def looked_up(model: nn.Module) -> frozenset[int]:
    """Weights, by identity, that a table of vectors holds: a layer that is tied to one is its head.

    Methods leave these in 8 bits, as is usual: what is rounded there is every word's own vector.
    """
    return frozenset(id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding))


def weighted(model: nn.Module) -> dict[str, tuple[Layer, ...]]:
    """The linear layers and convolutions by name; those that share one weight are together.

    Those that share one with a table are not among them.
    """
    found: dict[int, tuple[str, list[Layer]]] = {}
    tables = looked_up(model)
    for name, module in model.named_modules():
        if isinstance(module, Layer) and id(module.weight) not in tables:
            found.setdefault(id(module.weight), (name, []))[1].append(module)
    return {name: tuple(layers) for name, layers in found.values()}


def reparametrize_(layers: tuple[Layer, ...], made: nn.Module) -> None:
    """Let `made` compute the weight that the layers run with from the one they hold."""
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", made)


@torch.no_grad()
def settle_(layers: Mapping[str, tuple[Layer, ...]]) -> None:
    """Let every layer hold, as an ordinary weight, what was computed for it."""
    for sharing in layers.values():
        computed = sharing[0].weight.clone()
        for layer in sharing:
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        sharing[0].weight.copy_(computed)


def to_openvino(model: nn.Module, example: Inputs) -> ov.Model:
    """Convert a torch model, with an example of its inputs (1, ...), to what OpenVINO reads.

    One that carries states takes and gives them as its ONNX does; how long texts are is free.
    """
    names = list(example) if isinstance(example, Mapping) else None
    values = [value.contiguous() for value in tensors(example)]
    free = [{0: BATCH_AXIS, 1: "sequence"}]
    states, remembering = example_states(model, values, free)
    called = _Called(model.eval(), names, list(states))
    with quiet(), torch.no_grad():  # tracing warns of every number that is read
        if not states:
            shapes = [ov.PartialShape([-1, *value.shape[1:]]) for value in values]
            return ov.convert_model(called, example_input=tuple(values), input=shapes)
        found = ov.convert_model(called, example_input=(*values, *states.values()))
    named = {"input_ids": values[0]} | states
    for port, (name, value), over in zip(
        found.inputs, named.items(), free + remembering, strict=True
    ):
        sizes = [-1 if axis in over else size for axis, size in enumerate(value.shape)]
        port.get_tensor().set_names({name})
        port.get_node().set_partial_shape(ov.PartialShape(sizes))
    found.validate_nodes_and_infer_types()
    return found


class _Called(nn.Module):
    """A model called with its inputs and then its states, all in order."""

    def __init__(self, model: nn.Module, names: list[str] | None, states: list[str]) -> None:
        super().__init__()
        self.model, self.names, self.states = model, names, states

    def forward(self, *given: Tensor) -> Any:
        count = len(given) - len(self.states)
        values, past = given[:count], dict(zip(self.states, given[count:], strict=True))
        if past:  # all that it answers: its states are among them
            return self.model(*values, **past)
        if self.names is None:
            return call(self.model, values)
        return call(self.model, dict(zip(self.names, values, strict=True)))
