"""How a training run goes: one value for all of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

from t3c.certify.penalty import PENALTIES
from t3c.errors import SpecError
from t3c.train.precision import Precision

# Terms of the network, and of the controller where one is trained.
NETWORK_TERMS = (
    "task", "anchor", "distill", "augment", "certificate", "tail", "spectral", "gap",
)  # fmt: skip
FULL_TERMS = ("task", "anchor")  # of the full view
CONTROLLER_TERMS = ("drift", "budget", "isotonic", "entropy")
TERMS = (*NETWORK_TERMS, *CONTROLLER_TERMS)


@dataclass(frozen=True)
class TrainConfig:
    """How long and how hard to train, what each term of the objective weighs, what is drawn when.

    Terms: `task` is the loss on the full view, `anchor` holds the full view at the original,
    `distill` draws the sampled profile to it, `augment` does so on augmented inputs, half of each
    batch, `certificate` lowers the drift its certificate predicts beyond `tolerance`, `tail` pulls
    energy into the ranks the profile pays for, `spectral` keeps factors orthogonal and `gap` their
    strengths apart; the controller's are `drift`, `budget` (cost over the budget), `isotonic` and
    `entropy`. A term that weighs nothing is not computed. The task weighs little: the original is
    trained already, and what moves the full view away from it is drift at every profile. `distill`
    and `augment` ramp up over the first `ramp` of the run (paper B.2), `certificate` over the first
    `anneal` (E.2). The certificate is taken every `certificate_every` steps, on
    `certificate_samples`, with as many times its gradient.

    With `full="kept"` all that the full view runs on, dense weights, biases, norms, stays as it is:
    the full view is the original, `task` and `anchor` have nothing to move and are not computed,
    and factors and scales alone are trained. "trained" moves everything, as the paper does; the
    full view then runs every `full_every` steps.

    Draws: profiles come from Beta(0.75, 0.75) levels and, over the first `anneal` of the run, more
    and more, up to all but a share `broad`, from `profiles` targets no further than `worst_drift`
    that weigh bytes by `size_weight` against work (`curriculum="profiles"`; "beta" stays with the
    levels, "falling" starts at full rank); `elastic` holds bits or ranks at their top. `masks`
    relaxes ranks to Gumbel-Top-k masks and rounding to stochastic rounding.

    `precision` "auto" multiplies in bfloat16 where the processor has instructions for it.
    `reference_batch` scales the learning rate by batch / reference_batch (256 in the paper).
    """

    steps: int = 2000
    learning_rate: float = 1e-3
    reference_batch: int | None = None
    warmup: float = 0.1
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    seed: int = 3407
    loss: str = "classification"
    label_smoothing: float = 0.0
    outputs: Literal["classes", "values"] = "classes"
    softening: float = 1.0
    task: float = 0.1
    anchor: float = 3.0
    distill: float = 1.0
    augment: float = 0.25
    certificate: float = 0.0
    tail: float = 0.1
    spectral: float = 0.0
    gap: float = 0.0
    ramp: float = 0.15
    full: Literal["kept", "trained"] = "kept"
    full_every: int = 1
    certificate_kind: Literal["first_order", "spectral"] = "first_order"
    certificate_every: int = 10
    certificate_samples: int = 4
    tolerance: float = 0.0
    augmentations: tuple[str, ...] = ()
    mixing: Literal["none", "mixup", "cutmix", "both"] = "none"
    curriculum: Literal["profiles", "beta", "falling"] = "profiles"
    elastic: Literal["both", "ranks", "bits"] = "both"
    anneal: float = 1 / 3
    broad: float = 0.25
    profiles: int = 5
    worst_drift: float = 0.5
    size_weight: float = 0.5
    masks: bool = False
    precision: Precision = "float"
    controller: Literal["off", "gumbel", "reinforce"] = "off"
    token: Literal["tuple", "scalar"] = "tuple"
    monotone: bool = True
    drift: float = 1.0
    budget: float = 10.0
    isotonic: float = 0.0
    entropy: float = 0.01
    validate_every: int | None = None
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_weights()
        for name in ("learning_rate", "clip_norm", "softening", "worst_drift"):
            if not 0 < getattr(self, name) < math.inf:
                raise SpecError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("warmup", "label_smoothing", "size_weight"):
            if not 0 <= getattr(self, name) < 1:
                raise SpecError(f"{name} must be in [0, 1), got {getattr(self, name):g}")
        for name in ("ramp", "anneal", "broad"):
            if not 0 <= getattr(self, name) <= 1:
                raise SpecError(f"{name} must be in [0, 1], got {getattr(self, name):g}")
        for name in ("weight_decay", "tolerance"):
            if not 0 <= getattr(self, name) < math.inf:
                raise SpecError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.controller == "reinforce" and not (self.distill and self.curriculum == "profiles"):
            raise SpecError(
                "reinforce learns from distill at profiles that the controller drew: "
                'give distill a weight, and curriculum="profiles"'
            )
        self._check_counts()

    def _check_weights(self) -> None:
        weights = {name: getattr(self, name) for name in TERMS}
        known = all(0 <= weight < math.inf for weight in weights.values())
        if not known or not self.computes(*NETWORK_TERMS):
            raise SpecError(f"terms weigh at least 0 and not all nothing, got {weights}")

    def _check_counts(self) -> None:
        counts = ("steps", "certificate_every", "certificate_samples", "full_every", "profiles")
        optional = ("reference_batch", "validate_every", "checkpoint_every")
        given = [name for name in optional if getattr(self, name) is not None]
        for name in (*counts, *given):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise SpecError(f"{name} must be at least 1, got {value}")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise SpecError(f"seed must be at least 0, got {self.seed}")

    def _check_choices(self) -> None:
        assert set(PENALTIES) == {"first_order", "spectral"}
        for name, hint in get_type_hints(TrainConfig).items():
            choices = get_args(hint)
            named = choices and all(isinstance(choice, str) for choice in choices)
            if named and getattr(self, name) not in choices:
                known = ", ".join(choices)
                raise SpecError(f"{name} is one of {known}, got {getattr(self, name)!r}")
        if isinstance(self.augmentations, str):
            raise SpecError(f"augmentations is a list of names, got {self.augmentations!r}")
        object.__setattr__(self, "augmentations", tuple(self.augmentations))

    def computes(self, *terms: str) -> bool:
        """Whether any of the terms weighs something and has something to move."""
        return any(getattr(self, term) and term not in self.idle for term in terms)

    @property
    def idle(self) -> tuple[str, ...]:
        """Terms that have nothing to move, or no augmented samples to be taken on."""
        full = FULL_TERMS if self.full == "kept" else ()
        return full if self.augmentations else (*full, "augment")

    @property
    def validation_steps(self) -> int:
        """Every how many steps the model is validated; ten times a run unless told."""
        return self.validate_every or max(1, self.steps // 10)

    @property
    def checkpoint_steps(self) -> int:
        """Every how many steps a checkpoint is written; twenty times a run unless told."""
        return self.checkpoint_every or max(1, self.steps // 20)

    def learning_rate_for(self, batch: int) -> float:
        """The peak learning rate at a global batch, by the linear rule if asked for (paper E.2)."""
        if self.reference_batch is None:
            return self.learning_rate
        return self.learning_rate * batch / self.reference_batch
