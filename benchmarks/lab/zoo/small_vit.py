"""A small vision transformer for CIFAR-10, with a convolutional stem.

Convolutions with norms make the patches (Xiao et al., arXiv 2106.14881): patches that are one
linear map need many more epochs than a CPU has time for.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIDE, STRIDE = 32, 4
WIDTH, DEPTH, HEADS, HIDDEN = 512, 2, 8, 8  # few large products: small ones are all overhead


class SelfAttention(nn.Module):
    """Tokens (n, t, width) -> (n, t, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        shape = (n, t, self.heads, width // self.heads)
        query, key, value = (
            part(x).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        likeness = query @ key.transpose(2, 3) * (width // self.heads) ** -0.5
        mixed = likeness.softmax(-1) @ value
        answer: Tensor = self.out(mixed.transpose(1, 2).reshape(n, t, width))
        return answer


class TransformerBlock(nn.Module):
    """Attention and two linear layers, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.between = nn.LayerNorm(width)
        self.widen = nn.Linear(width, HIDDEN * width)
        self.narrow = nn.Linear(HIDDEN * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        added: Tensor = self.narrow(F.gelu(self.widen(self.between(x))))
        return x + added


class SmallViT(nn.Module):
    """Images (n, 3, 32, 32) -> logits (n, 10); 64 tokens, their mean is classified.

    In training `kept` of the tokens, drawn for each image, are all that the blocks see: it costs
    that much less, and the rest is not missed much.
    """

    kept: int | None = None

    def __init__(
        self, width: int = WIDTH, depth: int = DEPTH, heads: int = HEADS, classes: int = 10
    ) -> None:
        super().__init__()
        narrow = width // 8
        self.stem = nn.Sequential(
            nn.Conv2d(3, narrow, 3, 2, 1), nn.BatchNorm2d(narrow), nn.ReLU(inplace=True),
            nn.Conv2d(narrow, narrow, 3, 1, 1), nn.BatchNorm2d(narrow), nn.ReLU(inplace=True),
            nn.Conv2d(narrow, width, 3, 2, 1),
        )  # fmt: skip
        self.places = nn.Parameter(torch.randn(1, (SIDE // STRIDE) ** 2, width) * 0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.stem(images).flatten(2).transpose(1, 2) + self.places
        if self.training and self.kept is not None:
            drawn = torch.rand(tokens.shape[:2]).argsort(1)[:, : self.kept]
            tokens = tokens.gather(1, drawn[..., None].expand(-1, -1, tokens.shape[2]))
        logits: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return logits
