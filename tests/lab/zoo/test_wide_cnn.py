"""The wide network: a stem that whitens, convolutions that begin as nothing, images of any size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.zoo.wide_cnn import WHITENED, WideBlock, WideCnn, whiten_

WIDTHS = (26, 32, 20)


@pytest.fixture
def images() -> Tensor:
    """Images (64, 3, 12, 12) whose pixels and colours hang together, with a mean that is not 0."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(64, 3, 4, 4, generator=generator)
    smooth = F.interpolate(coarse, size=12, mode="bilinear")
    colours = torch.tensor([[1.0, 0.2, 0.1], [0.8, 0.5, 0.0], [0.6, 0.1, 0.4]])
    mixed = torch.einsum("oc,nchw->nohw", colours, smooth)
    return mixed + 0.3 + 0.05 * torch.randn(64, 3, 12, 12, generator=generator)


@pytest.fixture
def model() -> WideCnn:
    torch.manual_seed(0)
    return WideCnn(WIDTHS)


def test_the_stem_whitens(model: WideCnn, images: Tensor) -> None:
    patches = F.unfold(images, 2).transpose(1, 2).reshape(-1, WHITENED)
    moments = patches.T @ patches / len(patches)
    # There is something to whiten.
    assert torch.linalg.cond(moments) > 100
    whiten_(model, images, ridge=0)
    out = model.stem(images).permute(0, 2, 3, 1).reshape(-1, 2 * WHITENED)
    found = out[:, :WHITENED].T @ out[:, :WHITENED] / len(out)
    torch.testing.assert_close(found, torch.eye(WHITENED), atol=1e-3, rtol=0)
    # Both signs of each direction.
    torch.testing.assert_close(out[:, WHITENED:], -out[:, :WHITENED])


def test_the_ridge_holds_back_what_hardly_varies(model: WideCnn, images: Tensor) -> None:
    flat = images.mean(1, keepdim=True).expand(-1, 3, -1, -1)  # two of three colours say nothing
    whiten_(model, flat, ridge=5e-4)
    assert torch.isfinite(model.stem.weight).all()
    assert model.stem.weight.flatten(1).norm(dim=1).max() <= 5e-4**-0.5 * 1.01
    out = model.stem(flat)[:, :WHITENED].permute(0, 2, 3, 1).reshape(-1, WHITENED)
    power = out.square().mean(0)
    assert power.max() <= 1.001
    assert (power > 0.5).sum() == 4  # grey values of four pixels


def test_the_stem_stays_as_it_is(model: WideCnn, images: Tensor) -> None:
    whiten_(model, images)
    before = {name: value.clone() for name, value in model.stem.state_dict().items()}
    assert before["bias"].eq(0).all()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    model(torch.randn(4, 3, 24, 24)).square().sum().backward()
    optimizer.step()
    assert not any(p.requires_grad for p in model.stem.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.stem.state_dict().items())


@pytest.mark.parametrize(("into", "out"), [(6, 9), (9, 6), (7, 7)])
def test_a_convolution_begins_by_passing_channels_on(into: int, out: int) -> None:
    torch.manual_seed(0)
    first = WideBlock(into, out).conv1
    x = torch.randn(2, into, 5, 5)
    kept = min(into, out)
    torch.testing.assert_close(first(x)[:, :kept], x[:, :kept])
    assert not any((w == 0).all() for w in first.weight)  # the other channels are not dead


def test_a_new_block_is_two_norms_and_a_pooling() -> None:
    """Both convolutions pass everything on, so what is left can be said by hand."""
    torch.manual_seed(0)
    block = WideBlock(5, 5).train()
    x = torch.randn(8, 5, 6, 6)

    def norm(values: Tensor) -> Tensor:
        return F.batch_norm(values, None, None, training=True)

    expected = F.relu(norm(F.relu(norm(F.max_pool2d(x, 2)))))
    torch.testing.assert_close(block(x), expected, atol=1e-5, rtol=1e-4)


def test_pooling_before_or_behind_the_norm_is_the_same() -> None:
    torch.manual_seed(0)
    block = WideBlock(5, 7).eval()
    block.norm1.running_mean.normal_()  # type: ignore[union-attr]
    block.norm1.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    x = torch.randn(4, 5, 6, 6)
    inner = torch.relu(block.norm1(F.max_pool2d(block.conv1(x), 2)))
    torch.testing.assert_close(block(x), torch.relu(block.norm2(block.conv2(inner))))


def test_norms_shift_and_do_not_scale(model: WideCnn) -> None:
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 6
    assert all(n.bias.requires_grad and not n.weight.requires_grad for n in norms)
    assert all(n.weight.eq(1).all() for n in norms)


@pytest.mark.parametrize("size", [(24, 24), (25, 31), (32, 32), (40, 24)])
def test_any_size_from_24_on(model: WideCnn, size: tuple[int, int]) -> None:
    model.eval()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 3, *size, generator=generator)
    together = model(x)
    assert together.shape == (3, 10)
    assert torch.isfinite(together).all()
    assert together.std(0).min() > 0  # it depends on the image
    alone = torch.cat([model(one[None]) for one in x])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-4)


def test_every_parameter_that_is_trained_matters(model: WideCnn, images: Tensor) -> None:
    whiten_(model, images)
    loss = F.cross_entropy(model(torch.randn(4, 3, 24, 24)), torch.tensor([0, 1, 2, 3]))
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name
