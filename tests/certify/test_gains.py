from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from t3c.certify.gains import Adjoints, GainConfig, gains, random_adjoints
from t3c.errors import SpecError

SAMPLES = 3


def maps(outputs: int, sizes: Sequence[int], seed: int = 0) -> list[Tensor]:
    """A Jacobian (n, outputs, size) of each layer, with spectra that fall."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for size in sizes:
        full = torch.randn(SAMPLES, outputs, size, generator=generator, dtype=torch.float64)
        u, s, v = torch.linalg.svd(full, full_matrices=False)
        found.append(u * (0.7 ** torch.arange(s.shape[1]))[None, None] @ v * size)
    return found


def found(jacobians: list[Tensor], config: GainConfig) -> tuple[Tensor, Adjoints]:
    outputs = jacobians[0].shape[1]

    def pull(probe: Tensor) -> list[Tensor]:
        return [torch.einsum("no,nos->ns", probe, j) for j in jacobians]

    def push(changes: Sequence[Tensor]) -> Tensor:
        parts = [torch.einsum("nos,ns->no", j, c) for j, c in zip(jacobians, changes, strict=True)]
        return torch.stack(parts).sum(dim=0)

    adjoints, probes = random_adjoints(pull, SAMPLES, outputs, config, torch.float64)
    return gains(pull, push, adjoints, probes, config), adjoints


def test_gains_are_exact_where_there_are_few_outputs() -> None:
    jacobians = maps(7, (5, 40))
    wanted = torch.stack([torch.linalg.matrix_norm(j, 2) for j in jacobians])
    assert torch.allclose(found(jacobians, GainConfig())[0], wanted, rtol=1e-9)


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_gains_of_many_outputs_come_from_below_and_close_in(steps: int) -> None:
    jacobians = maps(60, (30, 80, 50))
    wanted = torch.stack([torch.linalg.matrix_norm(j, 2) for j in jacobians])
    share = found(jacobians, GainConfig(probes=8, steps=steps))[0] / wanted
    assert share.max() <= 1 + 1e-9
    assert share.min() >= {0: 0.1, 1: 0.9, 2: 0.98, 4: 0.995}[steps]


def test_projections_on_the_probes_add_up_to_the_change_of_the_output() -> None:
    (jacobian,) = maps(6, (20,))
    change = torch.randn(SAMPLES, 20, dtype=torch.float64)
    _, exact = found([jacobian], GainConfig())
    wanted = torch.einsum("nos,ns->no", jacobian, change).square().sum(dim=1)
    assert torch.allclose(exact.energy(exact.along(0, change)), wanted)
    (wide,) = maps(400, (20,))
    _, signs = found([wide], GainConfig(probes=300, steps=0))
    wanted = torch.einsum("nos,ns->no", wide, change).square().sum(dim=1)
    assert torch.allclose(signs.energy(signs.along(0, change)), wanted, rtol=0.3)


def test_a_bad_configuration_is_refused() -> None:
    with pytest.raises(SpecError, match="probes"):
        GainConfig(probes=0)
