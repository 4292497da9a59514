"""Width: units of channels in the order of what leaving them out costs, and what makes up for it.

Of a layer's inputs a (n,) with second moment C = E[a a^T] some are left out. The kept ones S can
stand in for them: a_D is best told from a_S by C_DS C_SS^-1, so the weight on S becomes
W_S + W_D C_DS C_SS^-1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from t3c.factor.metric import Metric
from t3c.factor.svd import svd_stages

ALIKE = 0.5  # partial correlation of two units from which on one makes up for the other
FEWEST = 0.2  # of the units: no width keeps fewer
RIDGE = 1e-3  # of the mean square of an input: with few samples, less of it fits to their noise


def unit_order(
    weight: Tensor, moment: Tensor, block: int = 1, outputs: Metric | None = None
) -> Tensor:
    """Return units (n / block,) of inputs, those first whose loss costs most.

    `weight` (m, n, ...) reads inputs of the moment (n, n); a unit is `block` inputs side by side.
    The cost is what the output changes by once all other inputs make up for the unit: of one input
    ||w||^2 / (C^-1)_jj, as optimal brain surgeon has it. The least costly go first, and costs are
    found anew when a quarter of the units has gone, until no width keeps fewer.
    """
    taps = weight.detach().double().flatten(2) if weight.dim() > 2 else weight.double()[..., None]
    if outputs is not None:
        taps = torch.einsum("po,ojt->pjt", outputs.root, taps)
    c = regular(moment)
    left = torch.arange(len(c) // block, device=c.device)
    gone: list[Tensor] = []
    fewest = int(FEWEST * len(left))
    while len(left) > max(1, fewest):
        inputs = channels(left, block)
        among = torch.linalg.inv(c[inputs][:, inputs])
        made_up = torch.einsum("ojt,jk->okt", taps, c[:, inputs] @ among)
        costs = _costs(made_up, among, block)
        going = _cheapest(costs, among, block, max(1, len(left) // 4))
        order = costs.argsort(descending=True, stable=True)
        order = order[~torch.isin(order, going)]
        gone.append(left[going.flip(0)])
        left = left[order]  # those that stay, the costliest first
    return torch.cat([left, *reversed(gone)])


def _cheapest(costs: Tensor, among: Tensor, block: int, most: int) -> Tensor:
    """Return the units of least cost, that least first, none of which makes up for another."""
    scale = among.diagonal().rsqrt()
    alike = (among * scale * scale[:, None]).abs()
    if block > 1:
        alike = nn.functional.max_pool2d(alike[None, None], block)[0, 0]
    taken: list[int] = []
    free = torch.ones(len(costs), dtype=torch.bool, device=costs.device)
    for unit in costs.argsort(stable=True).tolist():
        if len(taken) == most:
            break
        if free[unit]:
            taken.append(unit)
            free &= alike[unit] < ALIKE
    return torch.tensor(taken, device=costs.device)


def _costs(weight: Tensor, among: Tensor, block: int) -> Tensor:
    """Compute what the loss of each unit costs: tr W_u (C^-1)_uu^-1 W_u^T, over all taps."""
    count = among.shape[0] // block
    inner = among.reshape(count, block, count, block).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    parts = weight.reshape(weight.shape[0], count, block, -1)
    solved = torch.linalg.solve(inner, torch.einsum("oukt->ukot", parts).flatten(2))
    costs: Tensor = (solved * torch.einsum("oukt->ukot", parts).flatten(2)).sum(dim=(1, 2))
    return costs


def channels(units: Tensor, block: int) -> Tensor:
    """Return the channels of units, `block` side by side each."""
    return (units[:, None] * block + torch.arange(block, device=units.device)).flatten()


def regular(moment: Tensor) -> Tensor:
    """Return the moment (n, n) in float64, with a ridge that makes it well conditioned."""
    c = moment.double()
    size = (RIDGE * c.diagonal().mean()).clamp_min(1e-12)
    return c + size * torch.eye(len(c), dtype=c.dtype, device=c.device)


def compensation(weight: Tensor, moment: Tensor, kept: int) -> Tensor:
    """Return what is added to the leading `kept` columns of a weight (m, n, ...) for the others:
    each tap of a kernel for itself. (m, kept, ...) in float64."""
    c = regular(moment)
    share = torch.linalg.solve(c[:kept, :kept], c[:kept, kept:])  # (kept, left out)
    return torch.einsum("oj...,kj->ok...", weight.detach().double()[:, kept:], share)


def correction_stages(
    weight: Tensor, moment: Tensor, kept: int, rank: int, outputs: Metric | None = None
) -> tuple[Tensor, Tensor]:
    """Return reduce (rank, kept, ...) and expand (m, rank, 1..): the compensation at a width, the
    best of that rank for inputs of the moment and for what outputs are used for."""
    change = compensation(weight, moment, kept)
    root = torch.linalg.cholesky(regular(moment)[:kept, :kept])
    turned = torch.einsum("oi...,ij->oj...", change, root)
    reduce, expand = svd_stages(turned.flatten(1), rank, None, outputs)
    short = rank - len(reduce)  # the change may have no more ranks than that
    reduce = nn.functional.pad(reduce, (0, 0, 0, short)).reshape(rank, kept, -1)
    expand = nn.functional.pad(expand, (0, short))
    reduce = torch.linalg.solve_triangular(root, reduce.movedim(1, 2), upper=False, left=False)
    reduce = reduce.movedim(2, 1).reshape(rank, *change.shape[1:])
    # Each stage is rounded row by row: ranks of even size lose least.
    sizes = reduce.flatten(1).norm(dim=1).clamp_min(1e-30).sqrt()
    reduce, expand = reduce / sizes.reshape(-1, *([1] * (reduce.dim() - 1))), expand * sizes
    expand = expand.reshape(len(expand), rank, *([1] * (weight.dim() - 2)))
    return reduce.to(weight.dtype).contiguous(), expand.to(weight.dtype).contiguous()
