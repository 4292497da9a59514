"""The small transformer: attention as torch has it, tokens drawn in training and only there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from lab.zoo.small_vit import SelfAttention, SmallViT

TOKENS, WIDTH = 64, 16


@pytest.fixture
def model() -> SmallViT:
    torch.manual_seed(0)
    return SmallViT(width=WIDTH, depth=2, heads=2)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def seen(model: SmallViT, images: Tensor) -> Tensor:
    """The tokens (n, t, width) that the blocks are given."""
    found: list[Tensor] = []
    hook = model.blocks[0].register_forward_pre_hook(lambda _, given: found.append(given[0]))
    with torch.no_grad():
        model(images)
    hook.remove()
    return found[0]


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(1, 9), st.sampled_from([(8, 1), (8, 2), (12, 4)]))
def test_attention_is_that_of_torch(n: int, t: int, shape: tuple[int, int]) -> None:
    width, heads = shape
    torch.manual_seed(n + t)
    attention = SelfAttention(width, heads)
    x = 3 * torch.randn(n, t, width)
    query, key, value = (
        part(x).reshape(n, t, heads, width // heads).permute(0, 2, 1, 3)
        for part in (attention.query, attention.key, attention.value)
    )
    mixed = F.scaled_dot_product_attention(query, key, value)
    expected = attention.out(mixed.permute(0, 2, 1, 3).flatten(2))
    torch.testing.assert_close(attention(x), expected, atol=1e-5, rtol=1e-4)


def test_evaluation_sees_all_tokens_and_draws_nothing(model: SmallViT, images: Tensor) -> None:
    model.eval()
    whole = model(images)
    model.kept = 5
    state = torch.get_rng_state()
    assert torch.equal(model(images), whole)
    assert torch.equal(torch.get_rng_state(), state)
    assert seen(model, images).shape == (3, TOKENS, WIDTH)


def test_training_draws_as_many_of_the_tokens(model: SmallViT, images: Tensor) -> None:
    whole = seen(model.eval(), images)
    model.train().stem.eval()  # norms there see batches
    assert torch.equal(seen(model, images), whole)  # none are drawn unless it is asked for
    model.kept = 20
    torch.manual_seed(5)
    drawn = seen(model, images)
    assert drawn.shape == (3, 20, WIDTH)
    # Each is one of that image's tokens, at its own place, and none is there twice.
    places = (drawn[:, :, None] == whole[:, None]).all(-1)
    assert places.sum(2).eq(1).all()
    chosen = [set(row.tolist()) for row in places.int().argmax(2)]
    assert all(len(places) == 20 for places in chosen)
    assert chosen[0] != chosen[1]  # each image has its own
    torch.manual_seed(5)
    assert torch.equal(seen(model, images), drawn)
    torch.manual_seed(6)
    assert not torch.equal(seen(model, images), drawn)


def test_no_place_is_preferred(model: SmallViT) -> None:
    """Each token is drawn about equally often: 3,200 draws of 16 in 64."""
    model.train()
    model.kept = 16
    model.places.data = torch.arange(TOKENS).float()[None, :, None].expand(1, TOKENS, WIDTH).clone()
    for parameter in model.stem.parameters():
        parameter.data.zero_()
    torch.manual_seed(0)
    drawn = seen(model, torch.zeros(200, 3, 32, 32))[..., 0].long()
    counts = torch.bincount(drawn.flatten(), minlength=TOKENS)
    deviation = (200 * 0.25 * 0.75) ** 0.5
    assert (counts - 50).abs().max() < 4 * deviation


def test_all_tokens_in_any_order_are_the_same(model: SmallViT, images: Tensor) -> None:
    """Their places are added before, so to keep all of them is to keep none away."""
    whole = model.eval()(images)
    model.train().stem.eval()
    model.kept = TOKENS
    torch.manual_seed(0)
    assert not torch.equal(seen(model, images), seen(model.eval(), images))
    model.train().stem.eval()
    torch.testing.assert_close(model(images), whole, atol=1e-5, rtol=1e-4)


def test_a_token_is_of_a_neighbourhood(model: SmallViT, images: Tensor) -> None:
    """A changed pixel changes tokens around its own, line 2 and column 5 of 8x8."""
    other = images.clone()
    other[:, :, 9, 21] += 1
    model.eval()
    changed = (seen(model, images) != seen(model, other)).any(-1).any(0).view(8, 8)
    rows, columns = changed.nonzero().T
    assert changed[2, 5]
    assert rows.min() >= 1
    assert rows.max() <= 3
    assert columns.min() >= 4
    assert columns.max() <= 6


def test_every_parameter_matters(model: SmallViT, images: Tensor) -> None:
    F.cross_entropy(model(images), torch.tensor([0, 1, 2])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if not name.endswith("key.bias"):  # it adds the same to all of a row, which softmax undoes
            assert parameter.grad.abs().max() > 0, name
