"""Norms that each profile has for itself, where they bring its answers nearer the original's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from t3c.artifact.graph import Traced
from t3c.artifact.manifest import NormedEntry
from t3c.artifact.norms import normed_layers, pack_norms
from t3c.certify.drift import relative_drift
from t3c.convert import state_of
from t3c.nn.inputs import Inputs, call, device_of, evaluating, select, tensors
from t3c.nn.norms import Norms, match_norms, normed, output_moments
from t3c.nn.view import at, elastic_layers, elastic_weights
from t3c.spec import ProfileChain
from t3c.train.precision import laid_out, multiplying

MATCHED, JUDGED = 64, 32  # samples, at the most: all that are matched are in memory at once
LEAST = 8  # samples of either

Watch = Callable[[str, int, int], object]


def normed_by(model: nn.Module, traced: Traced) -> tuple[NormedEntry, ...]:
    """Return the layers of an elastic model that its profiles can have their own norms for."""
    specs = {name: weight.spec for name, weight in elastic_weights(model).items()}
    return normed_layers(traced.model.graph, specs, traced.dense.keys())


@torch.no_grad()
def own_norms(
    model: nn.Module,
    entries: tuple[NormedEntry, ...],
    chain: ProfileChain,
    samples: Inputs,
    watch: Watch = lambda what, done, total: None,
) -> dict[str, Norms]:
    """Return norms by profile: of those that drift less with them, on samples of their own.

    Layers are to put out the means and spreads that they have in the original. A quarter of the
    samples judges, the rest is matched.
    """
    count = len(tensors(samples)[0])
    matched = min(MATCHED, count - count // 4)
    if count - matched < LEAST or not entries:
        return {}
    fitted = laid_out(select(samples, slice(0, matched)))
    held = laid_out(select(samples, slice(matched, matched + JUDGED)))
    original, device = state_of(model).original, device_of(model).type
    layers = {entry.layer for entry in entries}
    specs = {name: weight.spec for name, weight in elastic_weights(model).items() if name in layers}
    found: dict[str, Norms] = {}
    with multiplying("auto", device):
        wanted = output_moments(original, specs, fitted)
        answers = _numpy(call(original, held))
        for index, profile in enumerate(chain):
            watch("matching norms", index, len(chain))
            norms = match_norms(model, profile, fitted, wanted)
            with evaluating(model), at(model, profile):
                shared = relative_drift(_numpy(call(model, held)), answers).mean()
                with normed(model, norms):
                    own = relative_drift(_numpy(call(model, held)), answers).mean()
            if own < shared:
                found[profile.name] = norms
    return found


def stored_norms(
    model: nn.Module, traced: Traced, entries: tuple[NormedEntry, ...], norms: Norms
) -> npt.NDArray[np.generic]:
    """Return norms as an artifact keeps them: batch norms folded in, shifts as whole biases."""
    layers = elastic_layers(model)
    gains, biases = {}, {}
    for entry in entries:
        norm, bias = norms[entry.layer], layers[entry.layer].bias
        gain, shift = (value.cpu().double().numpy() for value in (norm.gain, norm.shift))
        factor = traced.folded.get(entry.layer, np.ones_like(gain))
        before = 0.0 if bias is None else bias.detach().cpu().double().numpy()
        change = factor * ((gain - 1) * before + shift)
        gains[entry.layer] = gain.astype(np.float32)
        biases[entry.bias] = (traced.dense[entry.bias] + change).astype(np.float32)
    return pack_norms(gains, biases, entries)


def _numpy(answers: Tensor) -> npt.NDArray[np.float32]:
    return np.asarray(answers.float().cpu().numpy())
