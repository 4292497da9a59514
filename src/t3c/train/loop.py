"""One readable loop: every step trains one sampled profile, and now and then the full view."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from t3c.convert import state_of
from t3c.errors import TrainError
from t3c.nn.inputs import Inputs, evaluating
from t3c.nn.view import sort_
from t3c.progress import showing
from t3c.spec import ImageSpec, Profile, ProfileChain
from t3c.train.augment import Augmentation
from t3c.train.checkpoint import alone
from t3c.train.config import CHECKPOINT_EVERY, CLIP_NORM, TERMS, VALIDATIONS, TrainConfig
from t3c.train.diagnose import bad_gradient, culprit
from t3c.train.losses import Loss, loss_of
from t3c.train.policy_net import Controller
from t3c.train.processes import Processes
from t3c.train.record import Recorder
from t3c.train.run import Keep, Run, moving
from t3c.train.schedules import coefficient, learning_rate_share
from t3c.train.targets import Targets
from t3c.train.terms import NetworkTerms
from t3c.train.validate import check_validation, shown, validate


@dataclass(frozen=True)
class History:
    """Every term of the objective step by step, the validations, and the profiles aimed at."""

    terms: Mapping[str, tuple[float, ...]]
    validation: Mapping[int, Mapping[str, float]]
    profiles: ProfileChain
    controller: Controller | None = field(default=None, compare=False, repr=False)

    @property
    def steps(self) -> int:
        return len(self.terms["task"])


OnStep = Callable[[int, Mapping[str, float]], object]


def fit(
    model: nn.Module,
    batches: Iterable[Any],
    config: TrainConfig | None = None,
    *,
    loss: Loss | None = None,
    validation: Iterable[Any] | None = None,
    image: ImageSpec | None = None,
    keep: Keep | None = None,
    targets: Targets | None = None,
    on_step: OnStep | None = None,
    progress: bool = True,
) -> History:
    """Train an elastic model in place so that it is good at every profile.

    `batches` yields inputs, (inputs, target) or mappings with `labels`, and is gone through again
    as often as needed; the term `task` alone reads targets. The teacher is the original, since
    drift is measured from it; norms and dropout stay in evaluation mode. The task is the loss that
    `config` names, or a `loss(outputs, target)` of one's own; `validation` is measured at tiny, med
    and max on the way; `image` says how pictures are normalised, which augmentations need. With
    `keep` the run leaves a record and can be taken up again. `targets` are the profiles to be good
    at, as `find_targets` has them of a device; by default those of counted work. `on_step(step,
    values)` gets the terms of each step; how far it is is told on stderr unless `progress` is
    False.
    """
    config = config or TrainConfig()
    state_of(model)  # not elastic: say so before anything is written
    processes = Processes()
    task = loss or loss_of(config.loss, config.label_smoothing)
    augmentation = Augmentation(config.augmentations, image)
    folder = keep.folder if keep is not None and processes.main else None
    if validation is not None:
        check_validation(validation)  # now, not hours into the run
    with evaluating(model), moving(model, config), ExitStack() as stack:
        if folder is not None:
            stack.enter_context(alone(folder))
        show = stack.enter_context(showing(progress and processes.main))
        run = Run(model, batches, config, keep, targets)
        network = NetworkTerms(model, task, config, augmentation, processes, run.last())
        processes.check_same(run.fingerprinted())
        recorder = stack.enter_context(Recorder(folder))
        recorder.rewind(run.start)
        if folder is not None:
            run.write_manifest()
        for step in range(run.start, config.steps):
            values = advance(run, network, processes, step)
            for name, value in values.items():
                run.terms[name].append(value)
            recorder.log(step, "train", values | {"learning_rate": run.rate(step)})
            if on_step is not None:
                on_step(step, values)
            show.watch(f"training: {_shown(values)}", step + 1, config.steps)
            if config.masks and step + 1 == config.steps:
                sort_(model)  # what is validated and kept last is what is returned
            if validation is not None and _due(step, config.steps // VALIDATIONS, config):
                found = validate(
                    model, shown(run.profiles), validation, task, classes=config.of_classes
                )
                run.validation[step] = found
                recorder.log(step, "validation", found)
            if folder is not None and _due(step, CHECKPOINT_EVERY, config):
                run.save(step + 1)
        if folder is not None:
            run.write_manifest()  # again: now all its data was seen
        processes.wait()
    return History(
        {name: tuple(values) for name, values in run.terms.items()},
        run.validation,
        run.profiles,
        None if run.policy is None else run.policy.controller,
    )


def advance(run: Run, network: NetworkTerms, processes: Processes, step: int) -> dict[str, float]:
    """One step: draw a batch and a profile, compute every term, descend; the terms' values."""
    inputs, target = run.next()
    profile = run.profile(step)
    terms = network(step, inputs, target, profile)
    if run.policy is not None:
        distance = processes.mean({"distill": _value(terms.get("distill"))})
        terms |= run.policy.terms(step, profile, distance["distill"])
    return _descend(run, processes, step, terms, profile, inputs)


def _descend(
    run: Run,
    processes: Processes,
    step: int,
    terms: Mapping[str, Tensor],
    profile: Profile,
    inputs: Inputs,
) -> dict[str, float]:
    """One step down the weighted sum of the terms; their values, the same in all processes."""
    config, optimizer = run.config, run.optimizer
    weighted = [coefficient(n, step, config) * term for n, term in terms.items()]
    loss = torch.stack(weighted).sum() if weighted else torch.zeros(())
    values = processes.mean({n: _value(terms.get(n)) for n in TERMS})
    if not math.isfinite(_value(loss) + sum(values.values())):
        told = ", ".join(f"{name} {value:.3g}" for name, value in values.items() if value)
        where = culprit(run.model, profile, inputs)
        raise TrainError(f"step {step}: the loss is not finite: {where} ({told})")
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * learning_rate_share(step, config)
    optimizer.zero_grad(set_to_none=True)
    if loss.requires_grad:  # a certificate alone has no pull between its steps
        loss.backward()  # type: ignore[no-untyped-call]
    for group in optimizer.param_groups:
        processes.average_(group["params"])
        norm = nn.utils.get_total_norm([p.grad for p in group["params"] if p.grad is not None])
        if not bool(norm.isfinite()):  # before clipping, which would make all of them NaN
            name = bad_gradient(run.trained).removeprefix("model.")
            raise TrainError(f"step {step}: the gradient of {name!r} is not finite")
        nn.utils.clip_grads_with_norm_(group["params"], CLIP_NORM, norm)
    optimizer.step()
    return values


def _due(step: int, every: int, config: TrainConfig) -> bool:
    """Every so many steps, and after the last."""
    return (step + 1) % max(1, every) == 0 or step + 1 == config.steps


def _shown(values: Mapping[str, float]) -> str:
    """Return the terms that weigh something in one line."""
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items() if value)


def _value(term: Tensor | None) -> float:
    return 0.0 if term is None else float(term.detach())
