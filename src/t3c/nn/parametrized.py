"""A module run with other parameters than its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


class WithParameters(nn.Module):
    """Calls `module` with some of its parameters given; the others are its own."""

    def __init__(self, module: nn.Module, given: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.module, self.given = module, dict(given)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.module, self.given, args, kwargs)
