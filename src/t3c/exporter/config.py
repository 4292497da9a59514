"""What to export for, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from t3c.device.calibrate import CalibrationConfig
from t3c.errors import SpecError
from t3c.evidence.certify import CertifyConfig
from t3c.exporter.allocate import PROPOSALS, Proposals
from t3c.train.policy_net import ControllerConfig


@dataclass(frozen=True)
class ExportConfig:
    """What to export for, and how.

    `profiles` is how many to ship; fewer are where fewer are worth it. `worst_drift` is where the
    smallest profile starts: the first-order drift from the trained full view, relative to the
    output, that is still of use. `size_weight` is what bytes count for against time when layer
    points are allocated. `proposals` come from the `knapsack`, a `template`, a `greedy` walk, the
    same level for all (`uniform`), or a `controller` trained on what was measured, which the
    artifact then carries; `tie` is whether layers share a point within an attention `block` or
    wherever a `stage` repeats them; `layer_drift` caps the first-order drift of each. With
    `activations` left float only weights are compressed: for models whose time goes into reading
    them, such as decoders; "auto" leaves them so where the device's layers are faster that way.
    `budgets` are shares of the largest profile's time, rising, that the other profiles are to keep
    within; without them profiles are spread evenly over what they take. `in_place` times layer
    points in the whole network instead of alone: more of it, and closer to what they save there.
    `calibration` says how much is measured, `certificate` what is certified.
    """

    engine: str = "openvino"
    threads: int | None = None
    profiles: int = 5
    budgets: tuple[float, ...] | None = None
    worst_drift: float = 0.15
    size_weight: float = 0.5
    proposals: Proposals = "knapsack"
    tie: Literal["block", "stage"] = "block"
    layer_drift: float | None = None
    activations: Literal["int8", "float", "auto"] = "int8"
    in_place: bool = False
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    calibration: CalibrationConfig = field(default_factory=lambda: CalibrationConfig(busy=True))
    certificate: CertifyConfig = field(default_factory=CertifyConfig)
    seed: int = 3407

    def __post_init__(self) -> None:
        if not self.worst_drift > 0:
            raise SpecError(f"worst_drift must be positive, got {self.worst_drift:g}")
        if not 0 <= self.size_weight < 1:
            raise SpecError(f"size_weight must be in [0, 1), got {self.size_weight:g}")
        if self.profiles < 1:
            raise SpecError(f"profiles must be at least 1, got {self.profiles}")
        if self.budgets is not None:
            rising = sorted(set(self.budgets)) == list(self.budgets)
            if not rising or not all(0 < b < 1 for b in self.budgets):
                raise SpecError(f"budgets must rise between 0 and 1, got {self.budgets}")
            if len(self.budgets) != self.profiles - 1:
                raise SpecError(
                    f"{self.profiles} profiles have {self.profiles - 1} budgets, for all but the "
                    f"largest, got {len(self.budgets)}"
                )
        if self.proposals not in PROPOSALS:
            known = ", ".join(PROPOSALS)
            raise SpecError(f"proposals are one of {known}, got {self.proposals!r}")
        if self.proposals == "controller" and not self.controller.monotone:
            raise SpecError("a controller that is not monotone by construction is not exported")
        if self.tie not in ("block", "stage"):
            raise SpecError(f"tie is 'block' or 'stage', got {self.tie!r}")
        if self.activations not in ("int8", "float", "auto"):
            raise SpecError(f"activations are 'int8', 'float' or 'auto', got {self.activations!r}")
        if self.layer_drift is not None and not self.layer_drift > 0:
            raise SpecError(f"layer_drift must be positive, got {self.layer_drift:g}")
