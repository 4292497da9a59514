"""Certificates that training can descend: drift of a profile, differentiable in its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from t3c.nn.inputs import Inputs, call
from t3c.nn.parametrized import WithParameters
from t3c.nn.view import elastic_layers
from t3c.spec import Profile

# Relative drift of a profile as a scalar, of a model, its original, the profile and inputs; the
# gradient reaches the model, not the original.
Penalty = Callable[[nn.Module, nn.Module, Profile, Inputs], Tensor]


def first_order_penalty(
    model: nn.Module, original: nn.Module, profile: Profile, inputs: Inputs
) -> Tensor:
    """Mean over samples of ||sum_l J_l dW_l a_{l-1}|| / ||z||, with J, a and z the original's.

    The mean of ||J dW a|| / ||z||. It is linear in the change of the parameters but for the norm:
    one forward-mode pass of the original, along a direction that has a gradient of its own.
    """
    base = {name: value.detach() for name, value in original.named_parameters()}
    there = _parameters_at(model, profile, base)
    tangent = {name: there[name] - value for name, value in base.items()}

    def run(parameters: dict[str, Tensor]) -> Tensor:
        return call(WithParameters(original, parameters), inputs)

    # Fused attention kernels have no forward mode.
    with sdpa_kernel(SDPBackend.MATH):
        output, change = jvp(run, (base,), (tangent,))  # type: ignore[misc]
    norm = output.detach().flatten(1).norm(dim=1).clamp_min(1e-12)
    drift: Tensor = (change.flatten(1).norm(dim=1) / norm).mean()
    return drift


def _parameters_at(
    model: nn.Module, profile: Profile, names: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The original's parameters as they are in the model at a profile, with their gradients."""
    layers, own = elastic_layers(model), dict(model.named_parameters(remove_duplicate=False))

    def now(name: str) -> Tensor:
        module, _, leaf = name.rpartition(".")
        if leaf != "weight" or module not in layers:
            return own[name]
        elastic = layers[module].elastic
        return elastic.weight_at(profile.points[elastic.spec.name])

    return {name: now(name) for name in names}
