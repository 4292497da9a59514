from __future__ import annotations

import pytest
import torch
from torch import nn

from t3c.convert import elasticize_, state_of
from t3c.errors import SpecError
from t3c.nn import at, dense_copy, elastic_layers, elastic_weights
from t3c.spec import LayerPoint, Profile


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 40))
    elasticize_(net, torch.randn(2, 16, 8, 8))
    return net


def profile(model: nn.Module, index: int, bits: int) -> Profile:
    plans = state_of(model).plan.layers
    return Profile("p", {p.spec.name: LayerPoint(p.ranks[index], bits) for p in plans})


def test_a_view_lasts_as_long_as_its_block(model: nn.Module) -> None:
    x = torch.randn(2, 16, 8, 8)
    full = model(x)
    with at(model, profile(model, 0, 4)):
        assert not torch.allclose(model(x), full, rtol=1e-2)
        with at(model, None):
            torch.testing.assert_close(model(x), full)
        assert not torch.allclose(model(x), full, rtol=1e-2)
    torch.testing.assert_close(model(x), full)


def test_a_view_ends_when_its_block_fails(model: nn.Module) -> None:
    def fail() -> None:
        with at(model, profile(model, 0, 4)):
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert all(weight.point is None for weight in elastic_weights(model).values())


def test_a_profile_of_another_model_is_refused(model: nn.Module) -> None:
    with (
        pytest.raises(SpecError, match="does not fit the model"),
        at(model, Profile("p", {"nowhere": LayerPoint(8, 8)})),
    ):
        pass


def test_a_dense_copy_is_the_same_function(model: nn.Module) -> None:
    x = torch.randn(2, 16, 8, 8)
    for chosen in (None, profile(model, 0, 5), profile(model, -1, 8)):
        plain = dense_copy(model, chosen)
        assert not elastic_layers(plain)
        with at(model, chosen):
            torch.testing.assert_close(plain(x), model(x), rtol=1e-4, atol=1e-5)


def test_more_rank_and_bits_are_closer(model: nn.Module) -> None:
    for layer in elastic_weights(model).values():
        full = layer.weight_at(None)
        plan = next(p for p in state_of(model).plan.layers if p.spec.name == layer.spec.name)
        by_rank = [(layer.weight_at(LayerPoint(k, 8)) - full).norm() for k in plan.ranks]
        assert by_rank == sorted(by_rank, reverse=True)
        by_bits = [
            (layer.weight_at(LayerPoint(plan.ranks[-1], q)) - full).norm() for q in range(2, 9)
        ]
        assert by_bits == sorted(by_bits, reverse=True)


def test_views_train_what_they_use(model: nn.Module) -> None:
    """A prefix view has gradients on its own ranks and none beyond them."""
    layer = elastic_weights(model)["3"]
    rank = next(p for p in state_of(model).plan.layers if p.spec.name == "3").ranks[0]
    layer.weight_at(LayerPoint(rank, 4)).square().sum().backward()
    reduce, expand = (stage.grad for stage in layer.stored_stages())
    assert reduce is not None
    assert expand is not None
    assert reduce[:rank].abs().sum() > 0
    assert expand[:, :rank].abs().sum() > 0
    assert not reduce[rank:].any()
    assert not expand[:, rank:].any()
