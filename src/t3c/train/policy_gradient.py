"""Gradients of choices that are discrete: straight-through Gumbel-softmax, and REINFORCE."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from t3c.control.token import RESOURCES


def straight_through(logits: Tensor, temperature: float, noise: torch.Generator) -> Tensor:
    """A one-hot draw over logits (..., J) whose gradient is that of the soft one (paper B.4)."""
    noisy = logits + _gumbel(logits, noise)
    soft = (noisy / temperature).softmax(dim=-1)
    hard = F.one_hot(noisy.argmax(dim=-1), logits.shape[-1]).to(soft.dtype)
    return hard + soft - soft.detach()


def draw(logits: Tensor, noise: torch.Generator) -> tuple[Tensor, Tensor]:
    """A one-hot draw over logits (B, U, J), and the logarithm of its probability (B,)."""
    index = (logits + _gumbel(logits, noise)).argmax(dim=-1, keepdim=True)
    chosen = logits.log_softmax(dim=-1).gather(-1, index)
    choice = F.one_hot(index.squeeze(-1), logits.shape[-1]).to(logits.dtype)
    return choice, chosen.sum(dim=(1, 2))


def entropy(logits: Tensor) -> Tensor:
    """The mean entropy of the choices behind logits (B, U, J)."""
    logs = logits.log_softmax(dim=-1)
    return -(logs.exp() * logs).sum(dim=-1).mean()


def isotonic(low: Tensor, high: Tensor, sizes: Tensor) -> Tensor:
    """How much of the expected sizes (2, U, J) the larger budgets lose, paper B.4's hinge.

    `low` and `high` are the logits (B, U, J) of pairs of budgets, the second nowhere smaller.
    """
    expected = [
        torch.einsum("buj,puj->bpu", logits.softmax(dim=-1), sizes) for logits in (low, high)
    ]
    return (expected[0] - expected[1]).clamp_min(0).sum(dim=(1, 2)).mean()


def surrogate(log_prob: Tensor, returns: Tensor, value: Tensor) -> Tensor:
    """What to minimise for REINFORCE with a learned baseline, all (B,)."""
    advantage = returns - value.detach()
    if len(advantage) > 1:
        # Of one scale, so that the size of steps does not depend on that of the returns.
        advantage = advantage / advantage.square().mean().sqrt().clamp_min(1e-6)
    return -(advantage * log_prob).mean() + F.mse_loss(value, returns)


class Value(nn.Module):
    """The return to expect of limits (B, R) on a device: (B,)."""

    def __init__(self, devices: int, noise: torch.Generator, hidden: int = 16) -> None:
        super().__init__()
        inputs = len(RESOURCES) + devices
        weights = torch.randn(hidden, inputs, generator=noise, dtype=torch.float64)
        self.inward = nn.Parameter(weights / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(hidden, dtype=torch.float64))
        self.outward = nn.Parameter(torch.zeros(hidden + 1, dtype=torch.float64))
        self.devices = devices

    def forward(self, limits: Tensor, device: int) -> Tensor:
        where = F.one_hot(torch.tensor(device), self.devices).expand(len(limits), -1)
        inputs = torch.cat([limits, where.to(limits.dtype)], dim=1)
        hidden = F.linear(inputs, self.inward, self.bias).tanh()
        return hidden @ self.outward[:-1] + self.outward[-1]


def _gumbel(like: Tensor, noise: torch.Generator) -> Tensor:
    return -torch.empty_like(like).exponential_(generator=noise).log()
