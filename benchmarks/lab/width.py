"""Width of feed-forward layers, untrained: what leaving neurons out drifts, and what undoes it.

The neurons of MiniLM-L6's feed-forward layers are ordered by what leaving them out costs, and the
least of them left out, layer after layer on the compressed model's own inputs. Four ways to make
up for them: nothing, the second matrix's bias alone, its weights exactly (a copy a width), and a
correction of low rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lab.zoo.minilm import MiniLMEmbedding, sst2_sentences
from t3c.certify.drift import relative_drift
from t3c.nn.hooks import hooked, read_by

FITTED, JUDGED, BATCH = 300, 1000, 50  # sentences
RIDGE = 1e-3  # of the mean square of a neuron
SHARES = (0.75, 0.6)
RANKS = (16, 32, 64)
Sentences = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Inputs:
    """Mean (n,) and covariance (n, n) of what the second matrix of a layer reads."""

    mean: Tensor
    covariance: Tensor


def width_rows() -> Iterator[dict[str, Any]]:
    """Yield the drift of the pooled embedding for each share of neurons and each way."""
    model = MiniLMEmbedding().eval()
    inputs, _ = sst2_sentences("train", count=FITTED + JUDGED)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    fitted = ids[:FITTED], mask[:FITTED]
    judged = ids[FITTED:], mask[FITTED:]
    wanted = _answers(model, judged)
    orders = [_order(_inputs(model, index, fitted), model, index) for index in _layers(model)]
    ways: list[tuple[str, int | None]] = [("nothing", None), ("bias", 0), ("exact", -1)]
    ways += [(f"rank {rank}", rank) for rank in RANKS]
    for share in SHARES:
        for name, rank in ways:
            narrow = copy.deepcopy(model)
            for index in _layers(narrow):
                _narrow_(narrow, index, orders[index], share, rank, fitted)
            drift = float(relative_drift(_answers(narrow, judged), wanted).mean())
            yield {"share": share, "made up for by": name, "drift": drift, "samples": JUDGED}


def _layers(model: nn.Module) -> range:
    stack: Any = model.get_submodule("encoder.encoder.layer")
    return range(len(stack))


def _second(model: nn.Module, index: int) -> nn.Linear:
    dense = model.get_submodule(f"encoder.encoder.layer.{index}.output.dense")
    assert isinstance(dense, nn.Linear)
    return dense


@torch.no_grad()
def _answers(model: nn.Module, sentences: Sentences) -> np.ndarray[Any, Any]:
    ids, mask = sentences
    parts = [model(ids[i : i + BATCH], mask[i : i + BATCH]) for i in range(0, len(ids), BATCH)]
    return np.asarray(torch.cat(parts).numpy())


def _inputs(model: nn.Module, index: int, sentences: Sentences) -> Inputs:
    """Return the moments of what a layer's second matrix reads, padding left out."""
    ids, mask = sentences
    read: list[Tensor] = []

    def watch(_: nn.Module, args: Any, kwargs: Any) -> None:
        rows = mask[BATCH * len(read) : BATCH * (len(read) + 1)].bool()
        read.append(read_by(args, kwargs).detach()[rows].double())

    with hooked([(_second(model, index), watch)], before=True):
        _answers(model, (ids, mask))
    whole = torch.cat(read)
    return Inputs(whole.mean(0), torch.cov(whole.T, correction=0))


def _regular(covariance: Tensor) -> Tensor:
    size = RIDGE * covariance.diagonal().mean()
    return covariance + size * torch.eye(len(covariance), dtype=covariance.dtype)


def _order(inputs: Inputs, model: nn.Module, index: int) -> Tensor:
    """Return neurons, those first whose loss costs most once the others make up for it."""
    stiffness = torch.linalg.inv(_regular(inputs.covariance)).diagonal()
    weight = _second(model, index).weight.detach().double()
    order: Tensor = (weight.square().sum(0) / stiffness).argsort(descending=True)
    return order


@torch.no_grad()
def _narrow_(
    model: nn.Module, index: int, order: Tensor, share: float, rank: int | None, fitted: Sentences
) -> None:
    """Leave neurons out of a layer; `rank` is of the correction, -1 the exact one, None none."""
    dense = _second(model, index)
    count = round(share * len(order))
    kept, left = order[:count], order[count:]
    if rank is not None:
        inputs = _inputs(model, index, fitted)
        weight = dense.weight.double()
        among = _regular(inputs.covariance)[kept][:, kept]
        change = weight[:, left] @ torch.linalg.solve(
            among, inputs.covariance[kept][:, left]
        ).T  # fmt: skip
        if rank >= 0:  # the best of that rank for these inputs
            root = torch.linalg.cholesky(among)
            u, sizes, v = torch.linalg.svd(change @ root, full_matrices=False)
            near = (u[:, :rank] * sizes[:rank]) @ v[:rank]
            change = torch.linalg.solve_triangular(root, near, upper=False, left=False)
        shift = weight[:, left] @ inputs.mean[left] - change @ inputs.mean[kept]
        dense.bias.add_(shift.float())
        dense.weight[:, kept] += change.float()
    dense.weight[:, left] = 0
