"""Originals that base.py trained, as `t3c compress` takes them: `originals.py:cifar10_vit`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lab.zoo.bases import base_network


def cifar10_vit() -> tuple[nn.Module, Tensor]:
    """Return the small vision transformer and an example of its input."""
    return base_network("cifar10-vit").eval(), torch.zeros(2, 3, 32, 32)
