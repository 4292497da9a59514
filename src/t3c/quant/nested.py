"""The nested code, in numpy: what the runtime decodes.

A weight w of a row with scale s is the sign of w and the magnitude m = round(|w| / s) in 0..127.
The q-bit view keeps the sign and the top q - 1 bits of m, k = m >> (8 - q), and puts the weight in
the middle of what those bits leave open:

    q = 8:  sign * m * s_8                  q < 8:  sign * (k + 1/2) * s_q

Every view has a scale s_q of its own; s only makes the codes.

Sign and magnitude, not two's complement: truncating both sides towards zero leaves no offset that
a thousand inputs would add up, and `sign * (2k + 1)` fits an int8 kernel for every q below 8.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from t3c.spec import MAX_BITS

Codes = npt.NDArray[np.uint8]
SIGN = np.uint8(0x80)


def encode(weight: npt.NDArray[np.float32], scale: npt.NDArray[np.float32]) -> Codes:
    """Codes of `weight` (rows, ...) at one scale per row (rows,)."""
    rows = scale.reshape(-1, *([1] * (weight.ndim - 1)))
    magnitude = np.clip(np.rint(np.abs(weight) / rows), 0, 127).astype(np.uint8)
    return np.where(np.signbit(weight), magnitude | SIGN, magnitude).astype(np.uint8)


def integers(codes: Codes, bits: int) -> npt.NDArray[np.int8]:
    """The int8 weights of the `bits`-bit view, to be multiplied by `unit_scale`."""
    magnitude = (codes & 0x7F).astype(np.int16)
    if bits < MAX_BITS:
        magnitude = 2 * (magnitude >> (MAX_BITS - bits)) + 1
    return np.where(codes & SIGN, -magnitude, magnitude).astype(np.int8)


def unit_scale(view_scale: npt.NDArray[np.float32], bits: int) -> npt.NDArray[np.float32]:
    """The scale that goes with `integers`, from the view's own scale s_q."""
    return view_scale if bits == MAX_BITS else (view_scale / 2).astype(np.float32)
