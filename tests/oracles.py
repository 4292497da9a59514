"""Slow and plain ways to what the library computes otherwise."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from t3c.certify.drift import Array
from t3c.nn.inputs import Inputs, call
from t3c.nn.parametrized import WithParameters
from t3c.nn.view import dense_copy
from t3c.spec import Profile


def first_order_drift(
    model: nn.Module, original: nn.Module, profile: Profile, inputs: Inputs
) -> Array:
    """First-order drift of each sample (n,), relative to the norm of the original's output.

    The direction is the difference of all parameters, weights, biases and norms, between the
    profile and the original; activation rounding is not part of it.
    """
    base = dict(original.named_parameters())
    there = dict(dense_copy(model, profile).named_parameters())
    tangent = {name: (there[name] - value).detach() for name, value in base.items()}

    def run(parameters: dict[str, Tensor]) -> Tensor:
        return call(WithParameters(original, parameters), inputs)

    # Fused attention kernels have no forward mode.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        output, change = jvp(run, (base,), (tangent,))  # type: ignore[misc]
    norm = output.flatten(1).double().norm(dim=1).clamp_min(1e-12)
    return np.asarray((change.flatten(1).double().norm(dim=1) / norm).numpy())
