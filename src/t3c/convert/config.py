"""What may become elastic, and what it is offered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from t3c.errors import SpecError
from t3c.nn.units import UnitGroup
from t3c.quant.policy import RankTiedBits
from t3c.spec import MAX_BITS, MIN_BITS, Factorization


class Role(StrEnum):
    """What a layer is for, as far as its structure tells."""

    PROJECTION = "projection"  # of an attention block: queries, keys, values, output
    LINEAR = "linear"
    CONVOLUTION = "convolution"
    DEPTHWISE = "depthwise"  # any convolution in groups
    EMBEDDING = "embedding"


# What kernels wider than a point may be factored by.
KERNELS = (Factorization.TUCKER1, Factorization.TUCKER2, Factorization.CP)


@dataclass(frozen=True)
class ElasticConfig:
    """What may become elastic, and which ranks and bits a layer is offered.

    `include` and `exclude` are patterns of layer names such as `*.attention.*`; every one has to
    match a layer. `store_ratio` caps factored ranks: the factored copy of a layer takes at most
    this share of its dense weights, so that an artifact with both stays under 1.4 times its
    largest profile; `rank_caps` caps them by role, as a share of full rank (paper E.2).
    `widths` are the units that layers are narrowed by instead of being factored, as `order_units_`
    returns them.
    `convolution` is how kernels wider than a point are factored, `kernels` those of some layers by
    name. `rank_tied_bits` ties bits to the
    rank, None offers them freely.
    `metric` says what factors are made to suit where there is calibration data: a layer's `inputs`,
    or `both` these and what the network's output does with the layer's. `balance` is how much of
    the strength of an SVD's ranks goes from its first factor to its second: with some, what passes
    between them is more even, which rounding it to 8 bits asks for; with 0 the second is, which is
    best where activations stay float; None takes what is best in 8 bits by the calibration data,
    and 0 without any.
    `spectral` keeps plain factors orthonormal in training.
    """

    bits: tuple[int, ...] = (4, 5, 6, 8)
    rank_fractions: tuple[float, ...] = (1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8)
    tile: int = 8
    store_ratio: float = 0.4
    min_weights: int = 512
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    rank_caps: Mapping[str, float] = field(default_factory=dict)
    convolution: Factorization = Factorization.TUCKER2
    kernels: Mapping[str, Factorization] = field(default_factory=dict)
    widths: tuple[UnitGroup, ...] = ()
    rank_tied_bits: RankTiedBits | None = None
    metric: Literal["inputs", "both"] = "both"
    balance: float | None = None
    spectral: bool = False

    def __post_init__(self) -> None:
        if not self.bits or sorted(set(self.bits)) != list(self.bits) or self.bits[-1] != MAX_BITS:
            raise SpecError(f"bits must rise and end with {MAX_BITS}, got {self.bits}")
        if self.bits[0] < MIN_BITS:
            raise SpecError(f"bits must be at least {MIN_BITS}, got {self.bits}")
        rising = sorted(set(self.rank_fractions)) == list(self.rank_fractions)
        if not rising or not all(0 < f < 1 for f in self.rank_fractions):
            raise SpecError(f"rank_fractions must rise between 0 and 1, got {self.rank_fractions}")
        counts = (self.tile, self.min_weights, *self.bits)
        if not all(isinstance(count, int) for count in counts) or self.min_weights < 0:
            raise SpecError(f"bits, tile and min_weights are whole and not negative, got {counts}")
        if self.tile < 1:
            raise SpecError(f"tile must be at least 1, got {self.tile}")
        if not 0 < self.store_ratio <= 1:
            raise SpecError(f"store_ratio must be in (0, 1], got {self.store_ratio:g}")
        for kernel in (self.convolution, *self.kernels.values()):
            if kernel not in KERNELS:
                raise SpecError(f"convolution must be one of {', '.join(KERNELS)}, got {kernel}")
        object.__setattr__(self, "convolution", Factorization(self.convolution))
        kernels = {name: Factorization(kernel) for name, kernel in self.kernels.items()}
        object.__setattr__(self, "kernels", MappingProxyType(kernels))
        if self.metric not in ("inputs", "both"):
            raise SpecError(f"metric is 'inputs' or 'both', got {self.metric!r}")
        balance = self.balance
        if balance is not None and (not 0 <= balance <= 1 or (balance and self.spectral)):
            raise SpecError(
                f"balance must be in [0, 1], and 0 with spectral factors, got {balance:g}"
            )
        self._check_names()

    def _check_names(self) -> None:
        roles = {str(role) for role in Role}
        for role, cap in self.rank_caps.items():
            number = isinstance(cap, int | float)
            if str(role) not in roles or not number or not 0 < cap <= 1:
                raise SpecError(
                    f"rank_caps are shares of full rank by role ({', '.join(sorted(roles))}), "
                    f"got {role}={cap}"
                )
        caps = {Role(role): cap for role, cap in self.rank_caps.items()}
        object.__setattr__(self, "rank_caps", MappingProxyType(caps))
        for name in ("include", "exclude"):
            given = getattr(self, name)
            if isinstance(given, str) or not all(isinstance(p, str) for p in given):
                raise SpecError(f"{name} is a tuple of patterns, got {given!r}")
