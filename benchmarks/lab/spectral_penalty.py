"""The paper's certificate as a penalty of training: measured beside the one that is shipped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from t3c.nn.hooks import taking
from t3c.nn.inputs import Inputs, batches_of, call
from t3c.nn.layers import ElasticLayer, patches
from t3c.nn.view import elastic_layers, elastic_weights
from t3c.spec import Kind, Profile

KEPT = 0.9  # of the statistics at hand when those of other samples come in
COLD_STEPS, WARM_STEPS = 8, 2  # of power iteration: from a random vector, from the last one


class SpectralPenalty:
    """sum_l L_l ||dW_l||_2 alpha_l / mean ||z|| over the elastic weights (paper eq. avg-bound).

    L_l and alpha_l are running averages at the original, constants to the gradient: see `Reach`.
    dW_l is the weight as a matrix (out, rest). A convolution multiplies it by patches of its input,
    so alpha_l is the norm of all patches, at most sqrt(kernel positions) times that of the input:
    an upper estimate of what the kernel's change does, without the norm of the real operator.
    ||dW_l||_2 comes from below, by power iteration from the vector kept for that weight and rank:
    the residuals of two ranks have hardly a direction in common. Biases and norms are left out.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = torch.Generator().manual_seed(seed)  # no draw is taken from anyone else
        self._reach: Reach | None = None
        self._vectors: dict[tuple[str, int], Tensor] = {}

    def __call__(
        self, model: nn.Module, original: nn.Module, profile: Profile, inputs: Inputs
    ) -> Tensor:
        seen = observe_reach(model, original, inputs, self._random)
        self._reach = reach = seen if self._reach is None else self._reach.toward(seen, 1 - KEPT)
        norms = []
        for name, weight in elastic_weights(model).items():
            before = original.get_submodule(name).weight
            assert isinstance(before, Tensor)
            change = weight.weight_at(profile.points[name]) - before.detach()
            norms.append(self._norm((name, profile.points[name].rank), change.flatten(1)))
        bound: Tensor = (reach.factors * torch.stack(norms)).sum()
        return bound

    def _norm(self, key: tuple[str, int], change: Tensor) -> Tensor:
        """The spectral norm of a change (out, rest), as u^T change v with constant u and v."""
        steps, right = WARM_STEPS, self._vectors.get(key)
        if right is None:
            steps = COLD_STEPS
            right = torch.randn(change.shape[1], generator=self._random).to(change)
        left, right = _top_vectors(change.detach(), right, steps)
        if right.any():  # a change of nothing says nothing of the next
            self._vectors[key] = right
        norm: Tensor = left @ change @ right
        return norm


@dataclass(frozen=True)
class Reach:
    """What the original makes of a change in each elastic weight, in order; means over samples.

    `gains` (L,) are squared Frobenius norms of the Jacobians from the layer's output to the
    model's, in expectation over random signs; `sizes` (L,) squared norms of what the rows of the
    weight are multiplied by. Both are sums where several layers, or several runs, share a weight.
    """

    gains: Tensor
    sizes: Tensor
    output: Tensor

    @property
    def factors(self) -> Tensor:
        """L_l alpha_l / mean ||z|| of each weight (L,)."""
        return self.gains.sqrt() * self.sizes.sqrt() / self.output.clamp_min(1e-12)

    def toward(self, other: Reach, share: float) -> Reach:
        pairs = zip(*((r.gains, r.sizes, r.output) for r in (self, other)), strict=True)
        return Reach(*(torch.lerp(mine, new, share) for mine, new in pairs))


def observe_reach(
    model: nn.Module, original: nn.Module, inputs: Inputs, random: Generator
) -> Reach:
    """The reach of every elastic weight of `model`, by one backward pass of `original` a sample.

    One sample at a time: whatever a model does with its batch, all that runs is that sample's.
    """
    index = {name: i for i, name in enumerate(elastic_weights(model))}
    layers = elastic_layers(model)
    gains, sizes, output = torch.zeros(len(index)), torch.zeros(len(index)), torch.zeros(())
    samples = list(batches_of(inputs, 1))
    modules = {name: original.get_submodule(name) for name in layers}

    def squared_size(name: str, x: Tensor) -> Tensor:
        return _squared_size(layers[name], x)

    for sample in samples:
        with torch.enable_grad(), taking(modules, squared_size) as runs:
            result = call(original, sample)
        output += result.detach().norm()
        if not runs:
            continue
        signs = torch.randint(0, 2, result.shape, generator=random).to(result) * 2 - 1
        offsets = [run.offset for run in runs]
        adjoints = torch.autograd.grad(result, offsets, signs, materialize_grads=True)
        for run, adjoint in zip(runs, adjoints, strict=True):
            weight = index[layers[run.name].elastic.spec.name]
            gains[weight] += adjoint.square().sum()
            sizes[weight] += run.kept
    return Reach(gains / len(samples), sizes / len(samples), output / len(samples))


@torch.no_grad()
def _squared_size(layer: ElasticLayer, x: Tensor) -> Tensor:
    """The squared norm of what a layer multiplies its weight by; ids stand for unit vectors."""
    if layer.kind is Kind.EMBEDDING:
        return torch.tensor(float(x.numel()))
    return patches(layer.elastic.spec, x).square().sum()


@torch.no_grad()
def _top_vectors(matrix: Tensor, right: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Unit vectors u (m,), v (n,) near the leading singular pair of a matrix (m, n)."""
    left = F.normalize(matrix @ right, dim=0)
    for _ in range(steps):
        right = F.normalize(matrix.T @ left, dim=0)
        left = F.normalize(matrix @ right, dim=0)
    return left, right
