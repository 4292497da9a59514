"""What to export for, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from t3c.device.calibrate import CalibrationConfig
from t3c.errors import SpecError
from t3c.evidence.certify import CertifyConfig
from t3c.spec import Goal
from t3c.train.policy_net import ControllerConfig


@dataclass(frozen=True)
class ExportConfig:
    """What to export for, and how.

    `engine` and `threads` are what profiles are timed and checked on; all cores without `threads`.
    `goal` is the profiles to ship. Drift is measured from the trained full view here.
    `budgets` are shares of the largest profile's time, rising, that the other profiles are to keep
    within; without them profiles are spread evenly over what they take.
    `controller` is how to train one on what was measured; it then allocates the profiles instead
    of the knapsack, and the artifact carries it.
    `activations` left float compress weights alone: for models whose time goes into reading them,
    such as decoders; "auto" leaves them so where the device's layers are faster that way.
    `timing` is how much is measured, `certificate` what is certified.
    `seed` decides which calibration samples go into which part.
    """

    engine: str = "openvino"
    threads: int | None = None
    goal: Goal = field(default_factory=Goal)
    budgets: tuple[float, ...] | None = None
    activations: Literal["int8", "float", "auto"] = "int8"
    controller: ControllerConfig | None = None
    timing: CalibrationConfig = field(default_factory=lambda: CalibrationConfig(busy=True))
    certificate: CertifyConfig = field(default_factory=CertifyConfig)
    seed: int = 3407

    def __post_init__(self) -> None:
        if self.budgets is not None:
            rising = sorted(set(self.budgets)) == list(self.budgets)
            if not rising or not all(0 < b < 1 for b in self.budgets):
                raise SpecError(f"budgets must rise between 0 and 1, got {self.budgets}")
            others = self.goal.profiles - 1
            if len(self.budgets) != others:
                raise SpecError(
                    f"{self.goal.profiles} profiles have {others} budgets, for all but the "
                    f"largest, got {len(self.budgets)}"
                )
        if self.controller is not None and not self.controller.monotone:
            raise SpecError("a controller that is not monotone by construction is not exported")
        if self.activations not in ("int8", "float", "auto"):
            raise SpecError(f"activations are 'int8', 'float' or 'auto', got {self.activations!r}")
