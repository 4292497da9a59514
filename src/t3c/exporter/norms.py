"""Norms that each profile has for itself, where they lower its drift."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from t3c.artifact.graph import Traced
from t3c.artifact.manifest import NormedEntry
from t3c.artifact.norms import normed_layers, pack_norms
from t3c.certify.drift import relative_drift
from t3c.convert import state_of
from t3c.nn.inputs import Inputs, batches_of, call, device_of, evaluating, select, tensors
from t3c.nn.norms import OutputNorms, match_norms, normed, output_moments
from t3c.nn.view import dense_copy, elastic_layers, elastic_weights
from t3c.spec import ProfileChain
from t3c.train.precision import laid_out, multiplying

MATCHED, JUDGED = 64, 32  # samples, at the most
LEAST = 8  # samples that judge: with fewer, profiles have no norms of their own
MATCHED_BYTES = 2 << 30  # of a layer's output: all samples that are matched are in memory at once
JUDGED_TOGETHER = 16

Watch = Callable[[str, int, int], object]


def normed_by(model: nn.Module, traced: Traced) -> tuple[NormedEntry, ...]:
    """Return the layers of an elastic model that its profiles can have their own norms for."""
    specs = {name: weight.spec for name, weight in elastic_weights(model).items()}
    return normed_layers(traced.model.graph, specs, traced.dense)


@torch.no_grad()
def own_norms(
    model: nn.Module,
    entries: tuple[NormedEntry, ...],
    chain: ProfileChain,
    samples: Inputs,
    watch: Watch = lambda what, done, total: None,
) -> dict[str, OutputNorms]:
    """Return norms for the profiles whose drift on held-out samples falls with them.

    They give each layer's output the mean and spread it has in the original, on up to 64 of the
    samples; up to 32 others, at least a quarter, decide.
    """
    count = len(tensors(samples)[0])
    matched = min(MATCHED, count - count // 4, _affordable(model))
    if min(count - matched, matched) < LEAST or not entries:
        return {}
    fitted = laid_out(select(samples, slice(0, matched)))
    held = laid_out(select(samples, slice(matched, matched + JUDGED)))
    original, device = state_of(model).original, device_of(model).type
    layers = {entry.layer for entry in entries}
    specs = {name: weight.spec for name, weight in elastic_weights(model).items() if name in layers}
    found: dict[str, OutputNorms] = {}
    with multiplying("auto", device):
        wanted = output_moments(original, specs, fitted)
        answers = _answers(original, held)
        for index, profile in enumerate(chain):
            watch("matching norms", index, len(chain))
            view = dense_copy(model, profile)  # its weights are put together once
            norms = match_norms(view, specs, fitted, wanted)
            with evaluating(view):
                shared = relative_drift(_answers(view, held), answers).mean()
                with normed(view, norms):
                    own = relative_drift(_answers(view, held), answers).mean()
            if own < shared:
                found[profile.name] = norms
    return found


def stored_norms(
    model: nn.Module, traced: Traced, entries: tuple[NormedEntry, ...], norms: OutputNorms
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


def _answers(model: nn.Module, samples: Inputs) -> npt.NDArray[np.float32]:
    parts = [call(model, batch).float().cpu() for batch in batches_of(samples, JUDGED_TOGETHER)]
    return np.asarray(torch.cat(parts).numpy())


def _affordable(model: nn.Module) -> int:
    """Return how many samples' outputs of the widest layer fit into memory."""
    specs = [weight.spec for weight in elastic_weights(model).values()]
    return MATCHED_BYTES // (4 * max(spec.out_channels * spec.out_positions for spec in specs))
