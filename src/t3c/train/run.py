"""What a run carries from step to step, and how it is kept and taken up again."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from t3c.convert import state_of
from t3c.errors import TrainError
from t3c.nn.inputs import device_of, moved, tensors
from t3c.nn.view import elastic_weights
from t3c.spec import LayerPoint, Profile, ProfileChain
from t3c.train.checkpoint import STATE, latest, load_checkpoint, save_checkpoint
from t3c.train.config import MOMENTUM, TERMS, TrainConfig
from t3c.train.policy_step import PolicyStep
from t3c.train.record import DataFingerprint, run_manifest, write_manifest
from t3c.train.sampling import draw
from t3c.train.schedules import learning_rate_share
from t3c.train.stream import Sample, forever
from t3c.train.targets import Targets, find_targets

log = logging.getLogger("t3c.train")
FINGERPRINTED = 64  # batches: enough to know the data by, and no burden


@dataclass(frozen=True)
class Keep:
    """Where a run leaves its manifest, metrics and checkpoints.

    With `resume` it goes on from the newest whole checkpoint there, if there is one, and ends with
    the weights it would have had if it had never stopped.
    """

    folder: Path
    resume: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))


class Run:
    """A model in training: its data from here on, its optimizer, its history, its controller.

    Made from the model as it starts, also to be resumed: what is aimed at is found before weights
    are restored.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        config: TrainConfig,
        keep: Keep | None,
        targets: Targets | None = None,
    ) -> None:
        self.model, self.config, self.keep = model, config, keep
        self.plans = state_of(model).plan.layers
        self.terms: dict[str, list[float]] = {term: [] for term in TERMS}
        self.validation: dict[int, Mapping[str, float]] = {}
        self.fingerprint = DataFingerprint()
        self.started = ""
        self.stream = self._watched(forever(batches, config.steps, labelled=config.reads_targets))
        path = None if keep is None else to_resume(keep, log.warning)
        self.waiting: list[Sample] = [next(self.stream)]
        first = self.waiting[0][0]
        self.batch = len(tensors(first)[0])
        targets = targets or find_targets(model, first, config.goal)
        self.profiles = targets.profiles
        self.policy = None if config.controller == "off" else PolicyStep(targets, config)
        self.trained = nn.ModuleDict({"model": model})
        if self.policy is not None:
            self.trained["controller"] = self.policy.module
        self.optimizer = self._optimizer()
        self.start = 0
        if path is not None:
            self._resume(path)

    def next(self) -> Sample:
        """The batch of the next step, where the model is."""
        inputs, target = self.waiting.pop() if self.waiting else next(self.stream)
        device = device_of(self.model)
        return moved(inputs, device), None if target is None else target.to(device)

    def profile(self, step: int) -> Profile:
        """The profile a step trains: the controller's own once it is no longer all broad draws."""
        drawn = draw(step, self.plans, self.profiles, self.config)
        if self.policy is not None and drawn in tuple(self.profiles):
            return self.policy.profile(step)
        return drawn

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        return self.config.learning_rate * learning_rate_share(step, self.config)

    def last(self) -> dict[str, float]:
        """The latest value of each term."""
        return {name: values[-1] for name, values in self.terms.items() if values}

    def save(self, step: int) -> None:
        """Write a checkpoint after `step` steps."""
        assert self.keep is not None
        state: dict[str, Any] = {
            "config": _comparable(self.config),
            "terms": self.terms,
            "validation": {str(at): dict(found) for at, found in self.validation.items()},
            "profiles": [
                {"name": p.name, "points": {n: [q.rank, q.bits] for n, q in p.points.items()}}
                for p in self.profiles
            ],
        }
        folder = self.keep.folder / "checkpoints"
        save_checkpoint(folder, step, self.trained, self.optimizer, state)

    def fingerprinted(self) -> bytes:
        """What every process of a run has to start from."""
        found = hashlib.sha256(repr((self.start, self.profiles)).encode())
        for name, value in self.trained.state_dict().items():
            found.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
        return found.digest()

    def write_manifest(self) -> None:
        """What the run was made of: versions, seeds, configuration, data."""
        assert self.keep is not None
        data = {"batch": self.batch, "first_batches": self.fingerprint.as_json()}
        seeds = {"train": self.config.seed}
        manifest = run_manifest(asdict(self.config), seeds, data)
        self.started = self.started or str(manifest["started"])
        write_manifest(self.keep.folder, manifest | {"started": self.started})

    def _resume(self, path: Path) -> None:
        now, then = _comparable(self.config), _config_of(path)
        changed = sorted(name for name in now if now[name] != then.get(name))
        if changed:
            told = ", ".join(f"{n} {then.get(n)} there, {now[n]} here" for n in changed)
            raise TrainError(f"{path} is of a run with another configuration: {told}")
        restored = load_checkpoint(path, self.trained, self.optimizer)
        self.terms = {name: list(restored.state["terms"][name]) for name in TERMS}
        self.validation = {int(at): v for at, v in restored.state["validation"].items()}
        self.profiles = ProfileChain(
            tuple(
                Profile(p["name"], {n: LayerPoint(*q) for n, q in p["points"].items()})
                for p in restored.state["profiles"]
            )
        )
        self.start = restored.step
        for _ in range(self.start):  # loaders that shuffle have to come as far as they had
            self.next()
        log.info("going on from step %d of %s", self.start, path)

    def _watched(self, stream: Iterator[Sample]) -> Iterator[Sample]:
        for index, (inputs, target) in enumerate(stream):
            if index < FINGERPRINTED and self.keep is not None:
                self.fingerprint.update((inputs,) if target is None else (inputs, target))
            yield inputs, target

    def _optimizer(self) -> torch.optim.Optimizer:
        sgd, size = self.config.optimizer == "sgd", 1.0
        own = [p for p in trainable(self.model, self.config) if p.requires_grad]
        if sgd:  # the rate is relative, so decay is to be too
            size = max(1e-12, float(nn.utils.get_total_norm([p.detach() for p in own])))
        peak, decay = self.config.learning_rate * size, self.config.weight_decay / size
        groups: list[dict[str, Any]] = [{"params": own, "peak": peak, "weight_decay": decay}]
        if self.policy is not None:
            parameters = list(self.policy.module.parameters())
            groups.append({"params": parameters, "peak": self.policy.rate, "weight_decay": 0.0})
        if sgd:
            return torch.optim.SGD(groups, lr=peak, momentum=MOMENTUM, nesterov=True)
        return torch.optim.AdamW(groups, lr=peak)


def to_resume(keep: Keep, say: Callable[[str], object]) -> Path | None:
    """Return the checkpoint to go on from; a run that is not to be resumed is left alone."""
    checkpoint = latest(keep.folder / "checkpoints", say)
    if checkpoint is not None and not keep.resume:
        raise TrainError(f"{keep.folder} holds a run already: resume it or name another")
    return checkpoint


def trainable(model: nn.Module, config: TrainConfig) -> list[nn.Parameter]:
    """What a run moves: factors and scales alone where the full view is kept."""
    if config.full == "trained":
        return list(model.parameters())
    kept = {id(weight.dense) for weight in elastic_weights(model).values()}
    own = (p for weight in elastic_weights(model).values() for p in weight.parameters())
    return [p for p in own if id(p) not in kept]


@contextmanager
def moving(model: nn.Module, config: TrainConfig) -> Iterator[None]:
    """No gradients for what a run does not move; afterwards all is as it was."""
    mine = {id(p) for p in trainable(model, config)}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in mine]
    try:
        for parameter in others:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


def _config_of(path: Path) -> dict[str, Any]:
    """The configuration in a whole checkpoint, before anything is restored from it."""
    config: dict[str, Any] = json.loads((path / STATE).read_bytes())["body"]["state"]["config"]
    return config


def _comparable(config: TrainConfig) -> dict[str, Any]:
    """Return what has to be the same for a run to go on, by path, as JSON gives it back."""
    flat: dict[str, Any] = {}
    for name, value in asdict(config).items():
        inner = value.items() if isinstance(value, dict) else ()
        flat |= {f"{name}.{key}": v for key, v in inner} or {name: value}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in flat.items()}
