"""A wide convolutional network for CIFAR-10, made to be trained in minutes on a CPU.

Blocks of two 3x3 convolutions behind a stem that whitens 2x2 patches (Jordan, arXiv 2404.00498).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTHS = (64, 256, 1024)
PATCH = 2
WHITENED = 3 * PATCH * PATCH  # directions of a patch's colours


class WideBlock(nn.Module):
    """Two 3x3 convolutions, the first halving the side: (n, into, h, w) -> (n, out, h/2, w/2).

    In training it pools before the norm, which costs less. Afterwards behind it, where engines can
    fold the norm into the convolution: what only rises may change places with a maximum.
    """

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _convolution(into, out), _norm(out)
        self.conv2, self.norm2 = _convolution(out, out), _norm(out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        if self.training:
            x = torch.relu(self.norm1(F.max_pool2d(x, 2)))
        else:
            x = F.max_pool2d(torch.relu(self.norm1(x)), 2)
        return torch.relu(self.norm2(self.conv2(x)))


class WideCnn(nn.Module):
    """Images (n, 3, h, w), 16 pixels wide at least -> logits (n, 10)."""

    def __init__(self, widths: tuple[int, int, int] = WIDTHS, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 2 * WHITENED, PATCH)
        into = (2 * WHITENED, *widths[:2])
        self.blocks = nn.Sequential(*(WideBlock(i, o) for i, o in zip(into, widths, strict=True)))
        self.head = nn.Linear(widths[-1], classes, bias=False)
        self.scale = 1 / 9  # of logits: it keeps the first steps small

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(torch.relu(self.stem(images)))
        # Not amax: OpenVINO's CPU plugin answers wrongly where a rounding follows a ReduceMax.
        strongest = F.max_pool2d(features, features.shape[2:]).flatten(1)
        logits: Tensor = self.head(strongest) * self.scale
        return logits


@torch.no_grad()
def whiten_(model: WideCnn, images: Tensor, ridge: float = 5e-4) -> None:
    """Set the stem to the directions of the images' (n, 3, h, w) patches, each of unit variance.

    Every direction is there with both signs, so that nothing is lost in the ReLU; the stem is not
    trained after that.
    """
    patches = images.unfold(2, PATCH, 1).unfold(3, PATCH, 1)
    flat = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, WHITENED)
    values, vectors = torch.linalg.eigh(flat.T @ flat / len(flat))
    directions = (vectors / (values + ridge).sqrt()).T.reshape(-1, 3, PATCH, PATCH)
    assert model.stem.bias is not None
    model.stem.weight.copy_(torch.cat([directions, -directions]))
    model.stem.bias.zero_()
    model.stem.requires_grad_(False)


def _convolution(into: int, out: int) -> nn.Conv2d:
    """A 3x3 convolution that passes its first channels on unchanged to begin with."""
    layer = nn.Conv2d(into, out, 3, padding=1, bias=False)
    kept = min(into, out)
    nn.init.dirac_(layer.weight[:kept])
    return layer


def _norm(channels: int) -> nn.BatchNorm2d:
    """A norm that shifts but does not scale: the next layer does."""
    norm = nn.BatchNorm2d(channels, momentum=0.4)
    norm.weight.requires_grad_(False)
    return norm
