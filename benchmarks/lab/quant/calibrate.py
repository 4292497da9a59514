"""Clipping, bias and scales from calibration data."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from t3c.errors import DataError, SpecError


@torch.no_grad()
def choose_percentile(
    weight: Tensor,
    inputs: Tensor,
    quantize: Callable[[Tensor, float], Tensor],
    candidates: tuple[float, ...] = (100.0, 99.99, 99.9, 99.5, 99.0),
) -> float:
    """The percentile whose quantized outputs are nearest in KL; of equals, the largest.

    `weight` is (out, in), `inputs` (samples, in); a convolution's are unfolded.
    """
    if not candidates:
        raise SpecError("no percentiles to choose from")
    if weight.dim() != 2 or inputs.dim() != 2 or not len(inputs):
        raise DataError(
            f"expected a weight (out, in) and inputs (samples, in), "
            f"got {tuple(weight.shape)} and {tuple(inputs.shape)}"
        )
    inputs, target = inputs.double(), F.log_softmax(inputs.double() @ weight.double().T, dim=1)

    def divergence(percentile: float) -> float:
        outputs = inputs @ quantize(weight, percentile).double().T
        found = F.kl_div(
            F.log_softmax(outputs, dim=1), target, reduction="batchmean", log_target=True
        )
        if not bool(torch.isfinite(found)):
            raise DataError(f"the outputs at percentile {percentile:g} are not finite")
        return float(found)

    return min(sorted(candidates, reverse=True), key=divergence)


def bias_correction(change: Tensor, mean_input: Tensor, groups: int = 1) -> Tensor:
    """E[(W - Q(W)) a] (out,), to be added to the bias.

    `change` is W - Q(W) (out, in / groups, *kernel), `mean_input` (in,) or (groups, in / groups).
    Where a convolution pads, borders see less than the mean input: there it is approximate.
    """
    out, inner = change.shape[:2]
    if groups < 1 or out % groups or mean_input.shape not in ((groups * inner,), (groups, inner)):
        raise DataError(
            f"a change of shape {tuple(change.shape)} does not go with {groups} groups and "
            f"mean inputs of shape {tuple(mean_input.shape)}"
        )
    taps = change.reshape(groups, out // groups, inner, -1).sum(-1)
    return (taps @ mean_input.reshape(groups, inner, 1)).flatten()
