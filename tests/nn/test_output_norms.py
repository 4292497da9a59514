"""Norms of one view: outputs get the moments that are wanted, layer after layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from t3c.convert import elasticize_, state_of
from t3c.nn.norms import LARGEST_GAIN, OutputMoments, match_norms, normed, output_moments
from t3c.nn.view import at, elastic_layers, elastic_weights
from t3c.spec import LayerPoint, Profile

SAMPLES = 80  # of 16 positions each: enough for spreads


@pytest.fixture(scope="module")
def network() -> tuple[nn.Module, torch.Tensor, Profile]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 64), nn.GELU(), nn.Linear(64, 10),
    ).eval()  # fmt: skip
    samples = torch.randn(SAMPLES, 3, 4, 4)
    elasticize_(model, samples[:2], calibration=[samples])
    plans = state_of(model).plan.layers
    profile = Profile("small", {p.spec.name: LayerPoint(p.ranks[0], p.bits[0]) for p in plans})
    return model, samples, profile


def test_every_layer_gets_the_moments_that_are_wanted(
    network: tuple[nn.Module, torch.Tensor, Profile],
) -> None:
    model, samples, profile = network
    specs = {name: weight.spec for name, weight in elastic_weights(model).items()}
    wanted = output_moments(state_of(model).original, specs, samples)
    with at(model, profile):
        norms = match_norms(model, specs, samples, wanted)
    assert norms.keys() == specs.keys()
    with at(model, profile), normed(model, norms):
        # Hooks run in the order in which they were added: these see what the norms made.
        found = output_moments(model, specs, samples)
    with at(model, profile):
        before = output_moments(model, specs, samples)
    for name, moments in found.items():
        torch.testing.assert_close(moments.mean, wanted[name].mean, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(before[name].mean, wanted[name].mean, atol=1e-4, rtol=1e-3)
        gain = norms[name].gain
        inside = (gain > 1 / LARGEST_GAIN) & (gain < LARGEST_GAIN)
        if moments.values < 1024:
            assert bool((gain == 1).all())
        else:
            assert bool(inside.any())
            torch.testing.assert_close(
                moments.spread[inside], wanted[name].spread[inside], atol=1e-5, rtol=1e-3
            )


def test_a_channel_that_is_silent_keeps_its_gain(
    network: tuple[nn.Module, torch.Tensor, Profile],
) -> None:
    """What it would be on other inputs is not known."""
    model, samples, profile = network
    specs = {name: weight.spec for name, weight in elastic_weights(model).items()}
    wanted = output_moments(model, specs, samples)
    spread = wanted["0"].spread.clone()
    spread[5] = 0.0
    silent = {**wanted, "0": OutputMoments(wanted["0"].mean, spread, wanted["0"].values)}
    with at(model, profile):
        norms = match_norms(model, specs, samples, silent)
    assert float(norms["0"].gain[5]) == 1.0
    assert not bool((norms["0"].gain == 1.0).all())


def test_the_model_is_as_it_was_afterwards(
    network: tuple[nn.Module, torch.Tensor, Profile],
) -> None:
    model, samples, profile = network
    specs = {name: weight.spec for name, weight in elastic_weights(model).items()}
    before = model(samples)
    with at(model, profile):
        norms = match_norms(model, specs, samples, output_moments(model, specs, samples * 2))
    with normed(model, norms):
        changed = model(samples)
    assert not torch.allclose(changed, before)
    torch.testing.assert_close(model(samples), before)
    assert not any(layer._forward_hooks for layer in elastic_layers(model).values())
