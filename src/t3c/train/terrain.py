"""What a controller learns on: the drift and the cost of every point of every chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from t3c.control.menu import Option
from t3c.control.token import RESOURCES, Array
from t3c.errors import SpecError
from t3c.spec import check_menu


@dataclass(frozen=True)
class Terrain:
    """The chains of one device, and what each point takes of what the top of all units takes.

    `shares` has an array (resources, J) for every unit; a resource nobody measured is NaN
    throughout and its limits do not count.
    """

    chains: Mapping[str, Sequence[Option]]
    shares: Mapping[str, Array]

    def __post_init__(self) -> None:
        if not self.chains or set(self.chains) != set(self.shares):
            raise SpecError("a terrain needs chains, and shares of the same units")
        for unit, options in self.chains.items():
            check_menu([option.point for option in options])
            wanted = (len(RESOURCES), len(options))
            if np.shape(self.shares[unit]) != wanted:
                got = np.shape(self.shares[unit])
                raise SpecError(f"shares of unit {unit!r} must have shape {wanted}, got {got}")
        known = ~np.isnan(np.concatenate([self.shares[unit] for unit in self.chains], axis=1))
        tops = np.sum([self.shares[unit][:, -1] for unit in self.chains], axis=0)
        for resource, here, top in zip(RESOURCES, known, tops, strict=True):
            if here.any() and not (here.all() and abs(top - 1) < 1e-3):
                raise SpecError(f"shares of {resource} are known of all points and 1 at the top")
        if not known.any():
            raise SpecError("a terrain needs the shares of at least one resource")


@dataclass(frozen=True)
class Ground:
    """A terrain as tensors of U units and J points, shorter chains filled up with zeros.

    drift (U, J) is squared, shares (R, U, J), sizes (2, U, J) the shares of the top's level and
    bits, known (R,) which resources count, least (R,) what the bottom of all units takes.
    """

    drift: Tensor
    shares: Tensor
    sizes: Tensor
    known: Tensor
    least: Tensor
    floor: float

    @classmethod
    def of(cls, terrain: Terrain) -> Ground:
        width = max(map(len, terrain.chains.values()))
        drift, shares, sizes = [], [], []
        for unit, options in terrain.chains.items():
            gap = width - len(options)
            top = options[-1].point
            drift.append([o.squared_drift for o in options] + [0.0] * gap)
            shares.append(np.pad(np.nan_to_num(terrain.shares[unit]), ((0, 0), (0, gap))))
            size = [(o.point.level / top.level, o.point.bits / top.bits) for o in options]
            sizes.append(np.array(size + [(0.0, 0.0)] * gap).T)
        drifts = torch.tensor(drift, dtype=torch.float64)
        taken = torch.from_numpy(np.stack(shares, axis=1).astype(float))
        known = ~np.isnan(next(iter(terrain.shares.values()))[:, 0])
        return cls(
            drift=drifts,
            shares=taken,
            sizes=torch.from_numpy(np.stack(sizes, axis=1)),
            known=torch.from_numpy(known),
            least=taken[:, :, 0].sum(dim=1),
            # Next to the worst drift, less than this is none: logarithms stay of one scale.
            floor=max(1e-6 * float(drifts[:, 0].sum()), 1e-30),
        )

    def cost(self, choice: Tensor) -> Tensor:
        """What a choice (B, U, J), one-hot or soft, takes of every resource: (B, R)."""
        return torch.einsum("buj,ruj->br", choice, self.shares)

    def log_drift(self, choice: Tensor, drift: Tensor | None = None) -> Tensor:
        """The logarithm of the drift of a choice (B, U, J): (B,); `drift` (B, U, J) if its own."""
        squared = (choice * (self.drift if drift is None else drift)).sum(dim=(1, 2))
        return 0.5 * (squared.clamp_min(0) + self.floor).log()

    def overrun(self, choice: Tensor, limits: Tensor) -> Tensor:
        """How far a choice (B, U, J) is above its limits (B, R), summed over known resources."""
        return ((self.cost(choice) - limits).clamp_min(0) * self.known).sum(dim=1)
