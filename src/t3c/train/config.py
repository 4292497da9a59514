"""How a training run goes: one value for all of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from t3c.errors import SpecError
from t3c.spec import Goal
from t3c.train.policy_net import ENTROPY, OVERRUN
from t3c.train.precision import Precision

FULL_TERMS = ("task", "anchor")  # of the full view
NETWORK_TERMS = (
    *FULL_TERMS, "distill", "augment", "certificate", "tail", "spectral", "gap",
)  # fmt: skip
# What the controller's terms weigh beside each other, as at export; its parameters are its own, so
# the network's terms do not compete with them.
CONTROLLER_WEIGHTS = {"drift": 1.0, "budget": OVERRUN, "entropy": ENTROPY}
TERMS = (*NETWORK_TERMS, *CONTROLLER_WEIGHTS)

CLIP_NORM = 1.0  # of the gradient: the usual value for AdamW, the paper names none
MOMENTUM = 0.9  # of SGD
RAMP = 0.15  # share of the run over which `distill` and `augment` rise (paper B.2: 10 to 20%)
ANNEAL = 1 / 3  # share of the run over which draws narrow and the certificate rises (paper E.2)
BROAD = 0.25  # share of draws that stays broad: a device may ask for profiles not trained at
CERTIFICATE_EVERY = 10  # steps; its gradient weighs as many times more then
VALIDATIONS = 10  # in a run
CHECKPOINT_EVERY = 100  # steps: no more are lost, and short runs are not slowed by writing


@dataclass(frozen=True)
class Objective:
    """What each term of the network's loss weighs; a term of weight 0 is not computed.

    `task` is the loss on the full view. It weighs little: the original is trained already, and what
    moves the full view away from it is drift at every profile. 1 in the paper's recipes.
    `anchor` is the distance of the full view from the original.
    `distill` is the distance of the sampled profile from the original, on the batch as it is.
    `augment` is the same on augmented inputs, half of each batch.
    `certificate` is the drift that the certificate predicts for the sampled profile.
    `tail` is the energy of weights that the ranks of the profile leave out.
    `spectral` keeps factors orthogonal, `gap` keeps their strengths apart (paper B.1).

    `task` and `anchor` are computed with `full="trained"` alone, `augment` with augmentations.
    """

    task: float = 0.1
    anchor: float = 3.0
    distill: float = 1.0
    augment: float = 0.25
    certificate: float = 0.0
    tail: float = 0.1
    spectral: float = 0.0
    gap: float = 0.0

    def __post_init__(self) -> None:
        for name, weight in self.weights.items():
            if not 0 <= weight < math.inf:
                raise SpecError(f"{name} must be at least 0, got {weight}")

    @property
    def weights(self) -> dict[str, float]:
        """Return the weights by the names of their terms."""
        return {
            "task": self.task, "anchor": self.anchor, "distill": self.distill,
            "augment": self.augment, "certificate": self.certificate, "tail": self.tail,
            "spectral": self.spectral, "gap": self.gap,
        }  # fmt: skip


@dataclass(frozen=True)
class CertificateTerm:
    """How the term `certificate` is computed.

    `samples` is how many samples of a batch it is taken on; drift up to `tolerance` costs nothing
    (paper E.2).
    """

    samples: int = 4
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        _check_count("samples", self.samples)
        if not 0 <= self.tolerance < math.inf:
            raise SpecError(f"tolerance must be at least 0, got {self.tolerance}")


@dataclass(frozen=True)
class TrainConfig:
    """How long and how hard to train, and on what.

    `steps`, `learning_rate` (its peak), `warmup` (a share of the steps) and `weight_decay` are the
    `optimizer`'s. The rate of "sgd" is relative: times the norm of all trained weights. Gradients
    are clipped to norm 1, so that without momentum a step moves at most that share of them. It
    barely changes weights with small gradients, where "adamw" moves all of them alike. `seed`
    decides every draw.
    `loss` names the task's loss, `label_smoothing` is of its labels.
    `objective` weighs the terms, `certificate` is how that term is computed.
    `full` is "kept" where all that the full view runs on (dense weights, biases, norms) stays the
    original's and factors and scales alone are trained, or "trained", as in the paper.
    `teacher` is what profiles are to match: the outputs of the "original", computed in every step,
    or the "targets" of the batches, which are these outputs: samples come back unchanged.
    `augmentations` are names, in order.
    `curriculum` is which profiles are drawn: "profiles" goes from Beta(0.75, 0.75) levels to those
    of the goal, and keeps a share of the draws broad; "aimed" draws those of the goal alone, for
    short runs; "beta" stays with the levels; "falling" starts those at full rank.
    `goal` is the profiles aimed at.
    `masks` relaxes ranks to Gumbel-Top-k masks and rounding to stochastic rounding.
    `precision` "auto" multiplies in bfloat16 where the processor has instructions for it.
    `controller` trains one beside the network, which draws the profiles.
    """

    steps: int = 2000
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-3
    warmup: float = 0.1
    weight_decay: float = 0.01
    seed: int = 3407
    loss: str = "classification"
    label_smoothing: float = 0.0
    objective: Objective = field(default_factory=Objective)
    certificate: CertificateTerm = field(default_factory=CertificateTerm)
    full: Literal["kept", "trained"] = "kept"
    teacher: Literal["original", "targets"] = "original"
    augmentations: tuple[str, ...] = ()
    curriculum: Literal["profiles", "aimed", "beta", "falling"] = "profiles"
    goal: Goal = field(default_factory=Goal)
    masks: bool = False
    precision: Precision = "float"
    controller: Literal["off", "gumbel", "reinforce"] = "off"

    def __post_init__(self) -> None:
        _check_choices(self)
        if isinstance(self.augmentations, str):
            raise SpecError(f"augmentations is a list of names, got {self.augmentations!r}")
        object.__setattr__(self, "augmentations", tuple(self.augmentations))
        if not self.computes(*NETWORK_TERMS):
            raise SpecError(f"the objective has no term that is computed: {self.objective}")
        if self.teacher == "targets" and self.computes("task", "augment"):
            raise SpecError(
                'teacher="targets" leaves no labels for the term `task` and none for augmented '
                'samples: take full="kept" and no augmentations'
            )
        if not 0 < self.learning_rate < math.inf:
            raise SpecError(f"learning_rate must be positive, got {self.learning_rate}")
        for name in ("warmup", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise SpecError(f"{name} must be in [0, 1), got {getattr(self, name):g}")
        if not 0 <= self.weight_decay < math.inf:
            raise SpecError(f"weight_decay must be at least 0, got {self.weight_decay}")
        _check_count("steps", self.steps)
        if not isinstance(self.seed, int) or self.seed < 0:
            raise SpecError(f"seed must be at least 0, got {self.seed}")
        if self.optimizer == "sgd" and self.controller != "off":
            raise SpecError(
                'optimizer="sgd" cannot train a controller: use optimizer="adamw" or '
                'controller="off"'
            )
        drawn = self.curriculum in ("profiles", "aimed")
        if self.controller == "reinforce" and not (self.objective.distill and drawn):
            raise SpecError(
                "reinforce learns from distill at profiles that the controller drew: "
                'give distill a weight, and curriculum="profiles"'
            )

    def computes(self, *terms: str) -> bool:
        """Return whether any of the terms weighs something and has something to move."""
        return any(self.objective.weights[term] and term not in self.idle for term in terms)

    @property
    def idle(self) -> tuple[str, ...]:
        """Return terms that have nothing to move, or no augmented samples to be taken on."""
        full = FULL_TERMS if self.full == "kept" else ()
        augmented = bool(self.augmentations)
        return full if augmented else (*full, "augment")

    @property
    def reads_targets(self) -> bool:
        """Return whether batches need targets: labels for the task, or the original's outputs."""
        return self.teacher == "targets" or self.computes("task")

    @property
    def of_classes(self) -> bool:
        """Return whether outputs are logits of classes; else they are values, as in regression."""
        return self.loss != "regression"


def _check_choices(config: Any) -> None:
    """Raise SpecError for a field that is not one of the words of its type."""
    for name, hint in get_type_hints(type(config)).items():
        choices = get_args(hint)
        named = choices and all(isinstance(choice, str) for choice in choices)
        if named and getattr(config, name) not in choices:
            known = ", ".join(choices)
            raise SpecError(f"{name} is one of {known}, got {getattr(config, name)!r}")


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise SpecError(f"{name} must be at least 1, got {value}")
