"""What is estimated of drift from a few samples: gains, residuals, activations, first order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from t3c.artifact.ledger import LayerTerm
from t3c.certify.drift import Array
from t3c.certify.gains import GainConfig
from t3c.certify.norms import residual_norm
from t3c.errors import SpecError
from t3c.evidence.along import Linearized, batched, first_order, linearize
from t3c.evidence.program import Executed, Program, Use, apply, inner_rounding, rows
from t3c.measure.shift import Activations
from t3c.spec import Kind, LayerSpec

MEMORY = 2 * 2**30  # bytes that adjoints may take
QUANTILE = 0.99
GAINS = GainConfig()
PATH, PATH_GAINS = (0.5, 1.0), GainConfig(probes=4, steps=1)  # shares of the way to a profile


@dataclass(frozen=True)
class EstimateConfig:
    """How much the estimates may take.

    `samples` are those gains and first order are averaged over; on `path_samples` of them gains are
    taken again on the way to a profile.
    """

    samples: int = 16
    path_samples: int = 2

    def __post_init__(self) -> None:
        if self.samples < 1 or self.path_samples < 0:
            raise SpecError(f"estimates need samples, got {self.samples}")


@dataclass
class LayerStatistics:
    """One layer along the samples: gains and input norms (samples,), and its activations."""

    gains: list[float]
    sizes: list[float]
    activations: Activations


@dataclass(frozen=True)
class Estimate:
    """One profile: the figures, and the terms of each layer.

    `first_order` and `spectral_of` are of each sample, relative to its output.
    """

    first_order: Array
    spectral: float
    spectral_of: Array
    layers: Mapping[str, LayerTerm]


Tick = Callable[[str, int, int], object]


def residuals_of(program: Program, executed: Executed) -> dict[str, float]:
    """||W~ - W||_2 of every layer, at its real input size; of a table that heads use, as theirs."""
    matrices = {use.layer for use in program.uses if use.kind == "linear"}
    return {
        name: residual_norm(
            replace(x.spec, kind=Kind.LINEAR) if name in matrices else x.spec, x.change
        )
        for name, x in executed.layers.items()
    }


def estimate(
    program: Program,
    profiles: Mapping[str, Executed],
    inputs: Sequence[Tensor],
    config: EstimateConfig | None = None,
    tick: Tick = lambda what, done, total: None,
) -> dict[str, Estimate]:
    """The estimates of every profile at the given samples."""
    config = config or EstimateConfig()
    inputs = [value[: config.samples] for value in inputs]
    gathered = {name: _Gathered(program.specs) for name in profiles}
    any_profile = next(iter(profiles.values()))
    at_once = None if batched(program, any_profile, inputs) else 1
    parts = _parts(program, inputs, GAINS, at_once)
    for index, part in enumerate(parts):
        tick("gains at the original", index, len(parts))
        at = linearize(program, any_profile, part, 0.0, GAINS)
        for name, executed in profiles.items():
            gathered[name].add(program, executed, part, at)
    for count, (name, executed) in enumerate(profiles.items()):
        few = [value[: config.path_samples] for value in inputs]
        path = _parts(program, few, PATH_GAINS, at_once) if config.path_samples else []
        for part in path:
            for share in PATH:
                tick(f"gains on the way to {name}", count, len(profiles))
                gathered[name].widen(linearize(program, executed, part, share, PATH_GAINS))
        tick(f"residuals of {name}", count, len(profiles))
        gathered[name].residuals = residuals_of(program, executed)
    return {name: found.estimate() for name, found in gathered.items()}


class _Gathered:
    """What accumulates of one profile. Embeddings read ids, whose size is no activation."""

    def __init__(self, specs: Mapping[str, LayerSpec]) -> None:
        self.layers = {name: LayerStatistics([], [], Activations()) for name in specs}
        self.wider_gain = dict.fromkeys(specs, 0.0)
        self.wider_rms = dict.fromkeys(specs, 0.0)
        self.energies: dict[str, list[float]] = {name: [] for name in specs}
        self.first_order: list[float] = []
        self.norms: list[float] = []
        self.residuals: dict[str, float] = {}

    def add(
        self, program: Program, executed: Executed, inputs: Sequence[Tensor], at: Linearized
    ) -> None:
        """Samples at the original."""
        norms = at.output.double().norm(dim=1).clamp_min(1e-12)
        change = first_order(program, executed, inputs).double().norm(dim=1)
        self.norms += norms.tolist()
        self.first_order += (change / norms).tolist()
        along = _projections(executed, at)
        for name, layer in self.layers.items():
            gain, size = _at_layer(name, at)
            layer.gains += gain.tolist()
            layer.sizes += size.tolist()
            self.energies[name] += (at.adjoints.energy(along[name]) / norms.square()).tolist()
        for use, into in zip(at.uses, at.into, strict=True):
            if use.kind != "embedding":
                self.layers[use.layer].activations.add(into.numpy())

    def widen(self, at: Linearized) -> None:
        """Samples on the way: gains and activations there may be larger."""
        for name in self.layers:
            gain, size = _at_layer(name, at)
            self.wider_gain[name] = max(self.wider_gain[name], float(gain.max()))
            rms = float(size.square().mean().sqrt())
            self.wider_rms[name] = max(self.wider_rms[name], rms)

    def estimate(self) -> Estimate:
        norms = np.array(self.norms)
        scale = float(np.sqrt(np.mean(norms**2)))
        terms, pointwise = {}, np.zeros(len(norms))
        for name, layer in self.layers.items():
            sizes, residual = np.array(layer.sizes), self.residuals[name]
            gain = max(max(layer.gains), self.wider_gain[name])
            rms = max(float(np.sqrt(np.mean(sizes**2))), self.wider_rms[name])
            pointwise += np.array(layer.gains) * residual * sizes / norms
            terms[name] = LayerTerm(
                layer=name,
                gain=gain,
                residual=residual,
                rms=rms,
                largest=float(sizes.max()),
                p99=layer.activations.quantile(QUANTILE) if layer.activations.count else 0.0,
                spectral=gain * residual * rms / scale,
                first_order=float(np.sqrt(np.mean(self.energies[name]))),
            )
        spectral = sum(term.spectral for term in terms.values())
        return Estimate(np.array(self.first_order), spectral, pointwise, terms)


def _at_layer(name: str, at: Linearized) -> tuple[Tensor, Tensor]:
    """Gains and input norms (n,) of a layer, over all its uses.

    A weight used several times changes several outputs: their gains and inputs add in squares.
    """
    mine = [index for index, use in enumerate(at.uses) if use.layer == name]
    samples = len(at.output)
    if not mine:
        return torch.zeros(samples), torch.zeros(samples)
    gain = torch.stack([at.gains[index] for index in mine]).square().sum(dim=0).sqrt()
    sizes = [_size(at.uses[index], at.into[index], samples) for index in mine]
    return gain, torch.stack(sizes).square().sum(dim=0).sqrt()


def _size(use: Use, into: Tensor, samples: int) -> Tensor:
    """The norm of a use's input (n,); of ids, which pick rows, the root of how many there are."""
    flat = rows(into, samples)
    if use.kind == "embedding":
        return torch.full((samples,), float(flat.shape[1])).sqrt()
    sizes: Tensor = flat.double().norm(dim=1)
    return sizes


def _projections(executed: Executed, at: Linearized) -> dict[str, Tensor]:
    """What each layer's change at the original's activations gives along the probes (p, n)."""
    samples = len(at.output)
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        for index, (use, into) in enumerate(zip(at.uses, at.into, strict=True)):
            layer = executed.layers[use.layer]
            change = apply(use.kind, layer.spec, layer.change, into)
            change = rows(change + inner_rounding(use, layer, into), samples)
            along = at.adjoints.along(index, change)
            found[use.layer] = found[use.layer] + along if use.layer in found else along
    return found | {
        name: torch.zeros(len(at.adjoints.of[0]), samples)
        for name in executed.layers
        if name not in found
    }


def _parts(
    program: Program, inputs: Sequence[Tensor], config: GainConfig, at_once: int | None
) -> list[list[Tensor]]:
    """The samples in parts whose adjoints fit into memory."""
    # Sizes of a model with states are those of one token, whatever its texts are long.
    tokens = 1 if inputs[0].is_floating_point() else inputs[0][0].numel()
    outputs = sum(
        s.out_channels * max(s.out_positions, tokens) * s.runs for s in program.specs.values()
    )
    each = 3 * max(config.probes, config.exact) * outputs * 4  # bytes, with those at work
    size = at_once or max(1, min(len(inputs[0]), MEMORY // each))
    return [
        [value[start : start + size] for value in inputs]
        for start in range(0, len(inputs[0]), size)
    ]
