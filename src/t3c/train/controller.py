"""Training a controller on the terrain of each device: warm start, then the curriculum of 3.3."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from t3c.control.token import RESOURCES, Array
from t3c.errors import SpecError, TrainError
from t3c.nn.masks import temperature_at
from t3c.spec import Level
from t3c.train import policy_gradient as pg
from t3c.train.policy_net import ENTROPY, OVERRUN, Controller, ControllerConfig
from t3c.train.terrain import Ground, Terrain
from t3c.train.warm_start import warm_start_

__all__ = ["Controller", "ControllerConfig", "Terrain", "train_controller", "warm_start_"]

Reward = Callable[[Mapping[str, Level]], float]
OnStep = Callable[[int, Mapping[str, float]], object]
LOOSE = 0.5  # the least share of the first stage's budgets
LEVELS = 16  # budgets of each kind that a controller is judged at
JUDGED = 16  # samples it is judged on, where it sees the input
LIFT = 10.0  # how much faster the network's say grows, which starts near nothing


@dataclass(frozen=True)
class Inputs:
    """Summaries (n, features) of samples, and their own squared drift (n, U, J) if known."""

    summaries: Tensor
    drift: Tensor | None


@dataclass(frozen=True)
class Course:
    """All that stays the same through a training."""

    controller: Controller
    grounds: tuple[Ground, ...]
    config: ControllerConfig
    noise: torch.Generator
    value: pg.Value
    reward: Reward | None = None
    inputs: Inputs | None = None
    seen: dict[tuple[int, ...], float] = field(default_factory=dict)

    def quality(self, ground: Ground, choice: Tensor, drift: Tensor | None) -> Tensor:
        """What is to be large: minus the logarithm of the drift, or the reward given (B,)."""
        if self.reward is None:
            return -ground.log_drift(choice, drift)
        units = self.controller.about.units
        found = []
        for picks in choice.argmax(dim=2).tolist():
            if tuple(picks) not in self.seen:
                points = {u: c[i] for (u, c), i in zip(units.items(), picks, strict=True)}
                self.seen[tuple(picks)] = float(self.reward(points))
            found.append(self.seen[tuple(picks)])
        return torch.tensor(found, dtype=torch.float64)


def train_controller(
    terrains: Mapping[str, Terrain],
    config: ControllerConfig | None = None,
    *,
    reward: Reward | None = None,
    on_step: OnStep | None = None,
    summaries: Array | None = None,
    sample_drift: Mapping[str, Array] | None = None,
    start: Controller | None = None,
) -> Controller:
    """A controller for these devices, never worse than the knapsack's decisions it starts from.

    `reward` replaces minus the logarithm of the drift and needs REINFORCE. `summaries`
    (n, features), with the squared drift (n, J) of samples at units of their own, are for the
    units that see the input. `start` is trained further instead of the warm start.
    """
    config = config or ControllerConfig()
    _check(terrains, config, reward, summaries)
    first = next(iter(terrains.values()))
    if start is None:
        units = {unit: [o.point for o in options] for unit, options in first.chains.items()}
        controller = Controller(units, tuple(terrains), config, summaries)
        warm_start_(controller, terrains)
    else:
        controller = copy.deepcopy(start)
    noise = torch.Generator().manual_seed(config.seed)
    grounds = tuple(Ground.of(terrain) for terrain in terrains.values())
    course = Course(controller, grounds, config, noise, pg.Value(len(grounds), noise), reward)
    refine = config.steps // 4 if config.summary_units else 0
    loose = (config.steps - refine) // 3
    report = _numbered(on_step)
    _train_(course, [(LOOSE, loose), (0.0, config.steps - refine - loose)], report)
    if config.summary_units and summaries is not None:
        inputs = _inputs(first, grounds[0], summaries, sample_drift)
        course = Course(controller, grounds, config, noise, course.value, reward, inputs)
        _train_(course, [(0.0, refine)], report)
    if config.proposals:
        _fit_proposals_(course)
    return controller


def objective(course: Course) -> float:
    """What a controller is judged by: mean log drift and overruns at a fixed set of tokens."""
    total = 0.0
    for device, ground in enumerate(course.grounds):
        limits, summary, drift = _judged(ground), None, None
        if course.inputs is not None:
            many = min(JUDGED, len(course.inputs.summaries))
            rows = torch.arange(many).repeat_interleave(len(limits))
            limits = limits.repeat(many, 1)
            summary, drift = _samples(course.inputs, rows)
        choice = course.controller.decide(limits, device, summary)
        quality = course.quality(ground, choice, drift)
        total += float((OVERRUN * ground.overrun(choice, limits) - quality).mean())
    return total / len(course.grounds)


def _train_(course: Course, stages: list[tuple[float, int]], report: OnStep) -> None:
    """Train through stages of (least budget, steps) and keep the best that was judged."""
    controller, config = course.controller, course.config
    optimizer = torch.optim.Adam(_optimized(course), lr=config.learning_rate)
    plan = [least for least, steps in stages for _ in range(steps)]
    best, kept = objective(course), copy.deepcopy(controller.state_dict())
    for step, least in enumerate(plan):
        loss, values = _loss(course, step, len(plan), least)
        if not math.isfinite(values["loss"]):
            raise TrainError(f"step {step}: the loss is not finite: {values}")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
        optimizer.step()
        report(step, values)
        if (step + 1) % max(1, len(plan) // 30) == 0:
            now = objective(course)
            if now < best:
                best, kept = now, copy.deepcopy(controller.state_dict())
    controller.load_state_dict(kept)


def _loss(course: Course, step: int, steps: int, least: float) -> tuple[Tensor, dict[str, float]]:
    """The loss of one batch of tokens on one device, and its terms."""
    config, noise, controller = course.config, course.noise, course.controller
    device = step % len(course.grounds)
    ground = course.grounds[device]
    limits = random_tokens(ground, least, config.batch, noise)
    summary = drift = None
    if course.inputs is not None:
        rows = torch.randint(len(course.inputs.summaries), (len(limits),), generator=noise)
        summary, drift = _samples(course.inputs, rows)
    logits = controller(limits, device, summary)
    if config.method == "gumbel":
        temperature = temperature_at(step, max(1, steps // 3))
        choice = pg.straight_through(logits, temperature, noise)
    else:
        choice, log_prob = pg.draw(logits, noise)
    quality, overrun = course.quality(ground, choice, drift), ground.overrun(choice, limits)
    returns = quality - OVERRUN * overrun
    loss = -returns.mean()
    if config.method == "reinforce":
        loss = pg.surrogate(log_prob, returns.detach(), course.value(limits, device))
    spread = pg.entropy(logits)
    loss = loss - ENTROPY * (1 - step / steps) * spread
    falls = torch.zeros(())
    if config.isotonic:
        room = torch.rand(limits.shape, generator=noise, dtype=limits.dtype) * (1 - limits)
        falls = pg.isotonic(logits, controller(limits + room, device, summary), ground.sizes)
        loss = loss + config.isotonic * falls
    terms = {"quality": quality.mean(), "overrun": overrun.mean(), "entropy": spread}
    terms |= {"isotonic": falls, "loss": loss}
    return loss, {name: float(term.detach()) for name, term in terms.items()}


def random_tokens(ground: Ground, least: float, count: int, noise: torch.Generator) -> Tensor:
    """Limits (count, R), each resource limited in about half of them, one of the known in all."""
    shape = (count, len(RESOURCES))
    floor = ground.least.clamp_min(least)
    limits = floor + (1 - floor) * torch.rand(shape, generator=noise, dtype=torch.float64)
    limited = torch.rand(shape, generator=noise) < 0.5
    known = ground.known.nonzero().squeeze(1)
    sure = known[torch.randint(len(known), (count,), generator=noise)]
    limited[torch.arange(count), sure] = True
    return limits.masked_fill(~(limited & ground.known), 1.0)


def _judged(ground: Ground) -> Tensor:
    """The tokens a controller is judged at: each resource alone, all alike, and mixed."""
    levels = (torch.arange(LEVELS, dtype=torch.float64) + 0.5) / LEVELS
    alike = ground.least + (1 - ground.least) * levels[:, None]
    alike = alike.masked_fill(~ground.known, 1.0)
    alone = [
        torch.where(torch.arange(len(RESOURCES)) == resource, alike, 1.0)
        for resource in ground.known.nonzero().squeeze(1).tolist()
    ]
    mixed = random_tokens(ground, 0.0, LEVELS, torch.Generator().manual_seed(0))
    return torch.cat([*alone, alike, mixed])


def _samples(inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    return inputs.summaries[rows], None if inputs.drift is None else inputs.drift[rows]


def _inputs(
    terrain: Terrain, ground: Ground, summaries: Array, sample_drift: Mapping[str, Array] | None
) -> Inputs:
    """The samples as tensors; units whose own drift is not given have that of the terrain."""
    found = torch.from_numpy(summaries.astype(float))
    if sample_drift is None:
        return Inputs(found, None)
    drift = ground.drift.repeat(len(found), 1, 1)
    places = {unit: place for place, unit in enumerate(terrain.chains)}
    for unit, own in sample_drift.items():
        width = len(terrain.chains.get(unit, ()))
        if own.shape != (len(found), width):
            wanted = (len(found), width)
            raise SpecError(f"drift of unit {unit!r} must have shape {wanted}, got {own.shape}")
        drift[:, places[unit], :width] = torch.from_numpy(own.astype(float))
    return Inputs(found, drift)


def _fit_proposals_(course: Course) -> None:
    """Draw the continuous proposals to the sizes of what is decided."""
    controller, config, noise = course.controller, course.config, course.noise
    wishes = [p for n, p in controller.named_parameters() if n.startswith("wish")]
    optimizer = torch.optim.Adam(wishes, lr=LIFT * config.learning_rate)
    for step in range(config.steps):
        device = step % len(course.grounds)
        ground = course.grounds[device]
        limits = random_tokens(ground, 0.0, config.batch, noise)
        choice = controller.decide(limits, device)
        sizes = torch.einsum("buj,puj->bup", choice, ground.sizes)
        optimizer.zero_grad(set_to_none=True)
        F.mse_loss(controller.proposals(limits, device), sizes).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _optimized(course: Course) -> list[dict[str, object]]:
    """What trains: of a controller that sees the input only what it makes of the input."""
    if course.inputs is not None:
        groups: list[dict[str, object]] = [{"params": [course.controller.summary]}]
    else:
        named = dict(course.controller.named_parameters())
        lift = named.pop("lift")
        rest = [p for n, p in named.items() if n != "summary" and not n.startswith("wish")]
        groups = [
            {"params": rest},
            {"params": [lift], "lr": LIFT * course.config.learning_rate},
        ]
    if course.config.method == "reinforce":
        groups.append({"params": list(course.value.parameters())})
    return groups


def _numbered(on_step: OnStep | None) -> OnStep:
    """`on_step` with steps numbered through all stages."""
    numbers: Iterator[int] = itertools.count()
    return lambda _, values: None if on_step is None else on_step(next(numbers), values)


def _check(
    terrains: Mapping[str, Terrain],
    config: ControllerConfig,
    reward: Reward | None,
    summaries: Array | None,
) -> None:
    if not terrains:
        raise SpecError("a controller needs the terrain of at least one device")
    if reward is not None and config.method != "reinforce":
        raise SpecError(f"a reward has no gradient: method must be reinforce, got {config.method}")
    if config.summary_units and summaries is None:
        raise SpecError("units that see the input need summaries")
