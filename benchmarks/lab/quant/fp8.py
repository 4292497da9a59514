"""FP8 as a storage format: one byte a weight and a power of two a row."""

from __future__ import annotations

import math
from enum import StrEnum

import torch
from torch import Tensor

from t3c.errors import CorruptError, DataError


class Fp8(StrEnum):
    """E4M3 has finer steps, E5M2 the wider range."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self is Fp8.E4M3 else torch.float8_e5m2

    @property
    def largest(self) -> float:
        return torch.finfo(self.dtype).max


def to_fp8(weight: Tensor, kind: Fp8) -> tuple[Tensor, Tensor]:
    """Codes uint8 (rows, ...) and the least powers of two (rows,) that keep rows in range."""
    weight = weight.detach().float()
    flat = weight.reshape(len(weight), -1)
    broken = (~torch.isfinite(flat).all(1)).nonzero().flatten().tolist()
    if broken:
        raise DataError(
            f"a weight of shape {tuple(weight.shape)} is not finite in float32 in rows {broken}"
        )
    mantissa, exponent = torch.frexp(flat.abs().amax(1))
    top_mantissa, top_exponent = math.frexp(kind.largest)
    exponent = exponent - top_exponent + (mantissa > top_mantissa)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent.clamp_min(-126))  # no subnormal scale
    codes = (flat / scale[:, None]).clamp(-kind.largest, kind.largest).to(kind.dtype)
    return codes.view(torch.uint8).reshape(weight.shape), scale


def from_fp8(codes: Tensor, scale: Tensor, kind: Fp8) -> Tensor:
    """The float32 weight (rows, ...) of `codes` uint8 and `scale` (rows,)."""
    if codes.dtype != torch.uint8 or scale.shape != codes.shape[:1]:
        raise CorruptError(
            f"{codes.dtype} codes of shape {tuple(codes.shape)} do not go with "
            f"scales of shape {tuple(scale.shape)}"
        )
    values = codes.view(kind.dtype).float()
    if not bool(torch.isfinite(values).all() and torch.isfinite(scale).all()):
        raise CorruptError(f"{kind} codes or their scales are not finite")
    weight = values * scale.reshape(-1, *([1] * (codes.dim() - 1)))
    top = torch.finfo(torch.float32).max  # a weight next to it may have been rounded up beyond it
    return weight.clamp(-top, top)
