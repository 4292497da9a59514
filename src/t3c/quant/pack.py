"""Bit planes: codes packed so that the q-bit view is the first q planes, byte for byte."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from t3c.errors import CorruptError
from t3c.quant.nested import Codes
from t3c.spec import MAX_BITS


def plane_bytes(count: int) -> int:
    """Bytes of one bit plane of `count` codes."""
    return -(-count // 8)


def pack_planes(codes: Codes) -> npt.NDArray[np.uint8]:
    """Planes (8, ceil(n/8)) of flat codes (n,), the sign first, then from the highest bit down."""
    shifts = np.arange(MAX_BITS - 1, -1, -1, dtype=np.uint8)[:, None]
    return np.packbits((codes[None, :] >> shifts) & 1, axis=1)


def unpack_planes(planes: npt.NDArray[np.uint8], count: int) -> Codes:
    """Codes (count,) from the first q planes (q, ceil(count/8)); the bits not given are zero."""
    if planes.ndim != 2 or planes.shape[1] != plane_bytes(count) or planes.shape[0] > MAX_BITS:
        raise CorruptError(f"{count} codes do not fit bit planes of shape {planes.shape}")
    bits = np.unpackbits(planes, axis=1, count=count)
    codes = np.zeros(count, dtype=np.uint8)
    for index, plane in enumerate(bits):
        codes |= plane << np.uint8(MAX_BITS - 1 - index)
    return codes
