"""Post-layer gains: how much of a change behind a layer the output can show, ||J_l||_2.

A power iteration is a lower bound of a norm, and a norm at one point says nothing of other points:
gains make estimates, never bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from t3c.errors import SpecError

EXACT_OUTPUTS = 32

Pull = Callable[[Tensor], Sequence[Tensor]]  # u (n, outputs) -> J_l^T u (n, size) of each layer
Push = Callable[[Sequence[Tensor]], Tensor]  # v_l (n, size) of each layer -> sum_l J_l v_l


@dataclass(frozen=True)
class GainConfig:
    """Power iteration in a space of `probes` output directions that all layers share.

    Each of the `steps` is one backward and one forward pass a probe, for all layers at once. With
    no more than `exact` outputs every direction is a probe and the gain is exact.
    """

    probes: int = 8
    steps: int = 2
    exact: int = EXACT_OUTPUTS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.probes < 1 or self.steps < 0 or self.exact < 0:
            raise SpecError(f"gains need probes, and no negative steps: {self}")


@dataclass(frozen=True)
class Adjoints:
    """J_l^T of some output directions: (probes, n, size) of each layer.

    `weight` makes squared projections on them add up to a squared norm, exactly for the unit
    vectors and in expectation for random signs. They are kept until the gains are known.
    """

    of: Sequence[Tensor]
    weight: float

    def along(self, layer: int, change: Tensor) -> Tensor:
        """What a change r (n, size) of a layer's output gives along the probes (probes, n)."""
        return torch.einsum("pns,ns->pn", self.of[layer], change)

    def energy(self, along: Tensor) -> Tensor:
        """||J r||^2 of each sample (n,), from what r gives along the probes."""
        return self.weight * along.double().square().sum(dim=0)


def random_adjoints(
    pull: Pull, samples: int, outputs: int, config: GainConfig, dtype: torch.dtype = torch.float32
) -> tuple[Adjoints, Tensor]:
    """Adjoints of the probes, and the probes (probes, n, outputs): units, or random signs."""
    if outputs <= config.exact:
        probes = torch.eye(outputs, dtype=dtype)[:, None].expand(-1, samples, -1)
        return Adjoints(_pulled(pull, probes), 1.0), probes
    generator = torch.Generator().manual_seed(config.seed)
    count = min(config.probes, outputs)
    shape = (count, samples, outputs)
    signs = torch.randint(0, 2, shape, generator=generator).to(dtype) * 2 - 1
    return Adjoints(_pulled(pull, signs), 1 / count), signs


def gains(pull: Pull, push: Push, adjoints: Adjoints, probes: Tensor, config: GainConfig) -> Tensor:
    """||J_l||_2 of each layer and sample (layers, n); from below where there are many outputs.

    The iteration is on sum_l J_l J_l^T / c_l, with c_l such that each layer counts the same: one
    space of directions then serves them all, and each layer's gain is its norm within that space.
    """
    outputs = probes.shape[2]
    if outputs <= config.exact:
        return _norms(adjoints.of)
    current: Sequence[Tensor] = adjoints.of
    for _ in range(config.steps):
        scales = [part.double().square().sum(dim=(0, 2)).clamp_min(1e-60) for part in current]
        rows = [
            push(
                [
                    part[i] / s.to(part.dtype)[:, None]
                    for part, s in zip(current, scales, strict=True)
                ]
            )
            for i in range(len(probes))
        ]
        current = _pulled(pull, _orthonormal(torch.stack(rows)))
    if config.steps == 0:
        current = _pulled(pull, _orthonormal(probes))
    return _norms(current)


def _pulled(pull: Pull, probes: Tensor) -> list[Tensor]:
    """The adjoints of each probe, stacked layer by layer: (probes, n, size)."""
    return [torch.stack(parts) for parts in zip(*(pull(probe) for probe in probes), strict=True)]


def _norms(adjoints: Sequence[Tensor]) -> Tensor:
    found = []
    for part in adjoints:
        gram = torch.einsum("pns,qns->npq", part, part).double()
        found.append(torch.linalg.eigvalsh(gram)[:, -1].clamp_min(0).sqrt())
    return torch.stack(found)


def _orthonormal(probes: Tensor) -> Tensor:
    """The same span sample by sample, with orthonormal probes (probes, n, outputs)."""
    basis: Tensor = torch.linalg.qr(probes.permute(1, 2, 0)).Q
    return basis.permute(2, 0, 1).contiguous()
