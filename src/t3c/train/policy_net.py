"""The controller while it learns: the formulas of `control.policy` on parameters that move."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from t3c.control.policy import ARRAYS, BUDGET_PATH, SUMMARY_CLIP, Policy
from t3c.control.token import RESOURCES, TOKENS, About, Array
from t3c.errors import SpecError
from t3c.spec import Level

METHODS = ("gumbel", "reinforce")
_NEVER = -1e9  # the logit of what fills up a shorter chain


KNOTS = (
    33  # of the monotone curve from a limit to the reach it allows: finer than budgets tell apart
)
ENTROPY = 0.01  # weight of what keeps choices open; it falls to nothing over the run
OVERRUN = 10.0  # weight of what a choice takes above its limits, beside its log drift


@dataclass(frozen=True)
class ControllerConfig:
    """The size of a controller, and how it is trained.

    `hidden` is its width; `steps`, `learning_rate` and `batch` (of budgets) are Adam's.
    `method` is how it learns through choices: straight-through Gumbel-softmax or REINFORCE.
    `monotone` keeps the weights of the budget path from being negative. Without it the hinge alone
    (`isotonic` is its weight, on sizes that fall as budgets grow) is to keep order, and the
    controller is not one to export.
    `token` is what it is told of a budget: every limit, or the tightest.
    `summary_units` are units that see a summary of the input as well.
    `proposals` trains continuous proposals as well.
    """

    hidden: int = 32
    steps: int = 600
    learning_rate: float = 3e-3
    batch: int = 64
    method: Literal["gumbel", "reinforce"] = "gumbel"
    isotonic: float = 0.0
    monotone: bool = True
    token: Literal["tuple", "scalar"] = "tuple"
    summary_units: tuple[str, ...] = ()
    proposals: bool = False
    seed: int = 3407

    def __post_init__(self) -> None:
        for name in ("hidden", "steps", "batch"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.learning_rate < math.inf:
            raise SpecError(f"learning_rate must be positive, got {self.learning_rate}")
        if not 0 <= self.isotonic < math.inf:
            raise SpecError(f"isotonic weighs at least 0, got {self.isotonic}")
        for name, known in (("method", METHODS), ("token", TOKENS)):
            if getattr(self, name) not in known:
                got = getattr(self, name)
                raise SpecError(f"{name} is one of {', '.join(known)}, got {got!r}")


class Controller(nn.Module):
    """Budget limits, a device and an input summary in; logits over the chain of every unit out.

    Parameters carry the names of the policy's arrays. Those of the budget path are free numbers
    whose softplus is the weight; thresholds are kept in units of reach.
    """

    def __init__(
        self,
        units: Mapping[str, Sequence[Level]],
        devices: Sequence[str],
        config: ControllerConfig | None = None,
        summaries: Array | None = None,
    ) -> None:
        super().__init__()
        self.config = config = config or ControllerConfig()
        chains = {unit: tuple(points) for unit, points in units.items()}
        self.about = About(chains, tuple(devices), config.summary_units, config.token)
        mean, std = _statistics(summaries)
        steps, hidden, resources = self.about.steps, config.hidden, len(RESOURCES)
        noise = torch.Generator().manual_seed(config.seed)

        def near(value: float, *shape: int) -> nn.Parameter:
            """Parameters around a value: for the budget path, around what makes that weight."""
            spread = torch.randn(shape, generator=noise, dtype=torch.float64) * 0.1
            return nn.Parameter(value + spread * (1 if value == 0 else abs(value)))

        self.reach = near(self.free(1 / (KNOTS - 1)), resources, KNOTS)
        self.inward = near(self.free(0.3), hidden, resources)
        self.inward_bias = near(0.0, hidden)
        self.device = near(0.0, len(devices), hidden)
        self.onward = near(self.free(1 / hidden), hidden, hidden)
        self.onward_bias = near(0.0, hidden)
        self.slope = near(self.free(4.0), steps)
        self.lift = near(self.free(1 / hidden), steps, hidden)
        self.place = near(0.5, steps)
        self.summary = nn.Parameter(
            torch.zeros(len(self.about.summary_rows), len(mean), dtype=torch.float64)
        )
        self.register_buffer("summary_mean", torch.from_numpy(mean))
        self.register_buffer("summary_std", torch.from_numpy(std))
        self.wish_slope = near(self.free(1.0), len(chains), 2)
        self.wish_lift = near(self.free(1 / hidden), len(chains), 2, hidden)
        self.wish_bias = near(0.0, len(chains), 2)
        lengths = torch.tensor([len(points) for points in chains.values()])
        grid = torch.arange(int(lengths.max()))
        self._open = grid < lengths[:, None]  # (U, J): which points there are
        self._steps = self._open[:, 1:]

    def free(self, weight: float) -> float:
        """The number that stands for a weight of the budget path."""
        if not self.config.monotone:
            return weight
        return weight + math.log(-math.expm1(-weight))  # the inverse of softplus

    def weight(self, name: str) -> Tensor:
        """The array of the policy by this name."""
        if name == "threshold":
            return self.weight("slope") * self.place
        value: Tensor = getattr(self, name)
        return F.softplus(value) if name in BUDGET_PATH and self.config.monotone else value

    def budget(self, limits: Tensor, device: int) -> tuple[Tensor, Tensor]:
        """The reach (B,) and the hidden layer (B, H) for limits (B, R)."""
        if self.config.token == "scalar":
            limits = limits.amin(dim=1, keepdim=True).expand_as(limits)
        levels = self.weight("reach").cumsum(dim=1).clamp(0, 1)
        at = limits.T * (levels.shape[1] - 1)
        below = at.long().clamp_max(levels.shape[1] - 2)
        low, high = levels.gather(1, below), levels.gather(1, below + 1)
        reach = (low + (at - below) * (high - low)).amin(dim=0)
        first = F.linear(limits, self.weight("inward"), self.inward_bias) + self.device[device]
        return reach, F.linear(first.tanh(), self.weight("onward"), self.onward_bias).tanh()

    def forward(self, limits: Tensor, device: int, summary: Tensor | None = None) -> Tensor:
        """Logits (B, U, J) for limits (B, R) and, if given, summaries (B, features)."""
        reach, hidden = self.budget(limits, device)
        scores = (reach[:, None] - self.place) * self.weight("slope")
        scores = scores + hidden @ self.weight("lift").T
        if summary is not None and self.summary.numel():
            standard = (summary - self.get_buffer("summary_mean")) / self.get_buffer("summary_std")
            standard = standard.clamp(-SUMMARY_CLIP, SUMMARY_CLIP)
            rows = torch.tensor(self.about.summary_rows)
            scores = scores.index_add(1, rows, standard @ self.summary.T)
        steps = scores.new_zeros(len(limits), *self._steps.shape)
        steps = steps.masked_scatter(self._steps.expand_as(steps), scores)
        logits = F.pad(steps.cumsum(dim=2), (1, 0))
        return logits.masked_fill(~self._open, _NEVER)

    def proposals(self, limits: Tensor, device: int) -> Tensor:
        """The shares of the top's level and bits (B, U, 2) proposed for limits (B, R)."""
        reach, hidden = self.budget(limits, device)
        lift = torch.einsum("bh,uph->bup", hidden, self.weight("wish_lift"))
        rising = reach[:, None, None] * self.weight("wish_slope") + lift
        return (rising + self.wish_bias).sigmoid()

    @torch.no_grad()
    def decide(self, limits: Tensor, device: int, summary: Tensor | None = None) -> Tensor:
        """The choice of every unit, one-hot (B, U, J): where logits peak, of equals the last."""
        logits = self(limits, device, summary)
        width = logits.shape[2]
        index = width - 1 - logits.flip(2).argmax(dim=2)
        return F.one_hot(index, width).double()

    @torch.no_grad()
    def to_policy(self) -> Policy:
        """The policy to deploy; only what is monotone by construction has one."""
        arrays = {name: self.weight(name).detach().numpy() for name in ARRAYS}
        negative = [name for name in BUDGET_PATH if (arrays[name] < 0).any()]
        if negative:
            raise SpecError(
                f"the controller cannot be exported: {', '.join(negative)} has negative weights, "
                "so nothing proves that larger budgets never find smaller points"
            )
        return Policy(self.about, **arrays)


def _statistics(summaries: Array | None) -> tuple[Array, Array]:
    """The mean and the spread of the features of summaries (n, features)."""
    if summaries is None:
        return np.zeros(0), np.ones(0)
    if summaries.ndim != 2 or not summaries.size or not np.isfinite(summaries).all():
        raise SpecError(f"summaries are finite, (n, features), got shape {summaries.shape}")
    return summaries.mean(axis=0, dtype=float), summaries.std(axis=0, dtype=float) + 1e-6
