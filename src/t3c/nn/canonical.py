"""Layers in a form of their own, rewritten as plain linear layers: the same function, other names.

Hugging Face's `Conv1D` is a linear layer with its weight transposed; `nn.MultiheadAttention` packs
three of them into one tensor. The rewritten modules share the tensors of the ones they replace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from t3c.nn.view import replace_

NESTED = "_t3c_nested"


@contextmanager
def canonical(model: nn.Module) -> Iterator[None]:
    """The model rewritten for the length of a `with`; afterwards it is as it was."""
    replaced = canonicalize_(model)
    try:
        yield
    finally:
        restore_(model, replaced)


def canonicalize_(model: nn.Module) -> dict[str, nn.Module]:
    """Rewrite in place; the modules that were replaced, by name."""
    modules = [(n, m) for n, m in model.named_modules(remove_duplicate=False) if n]
    found = [(n, m, rewrite(m) if _alone(m, model) else None) for n, m in modules]
    made: dict[int, nn.Module] = {}  # a module that stands in two places stays one
    replaced = {}
    for name, module, new in found:
        if new is not None:
            replaced[name] = module
            replace_(model, name, made.setdefault(id(module), new))
    for encoder in _nesting(model) if replaced else ():
        # Packed attentions alone take nested tensors; what is not padding comes out the same.
        encoder.use_nested_tensor, encoder.__dict__[NESTED] = False, True
    return replaced


def _alone(module: nn.Module, model: nn.Module) -> bool:
    """Whether no other module has a parameter of this one, and nothing watches it run."""
    if not (isinstance(module, nn.MultiheadAttention) or type(module).__name__ == "Conv1D"):
        return False
    inside = set(module.modules())
    mine = {id(p) for p in module.parameters()}
    others = (m for m in model.modules() if m not in inside)
    shared = any(id(p) in mine for m in others for p in m.parameters(recurse=False))
    watched = any(m._forward_hooks or m._forward_pre_hooks for m in inside)
    return not shared and not watched


def restore_(model: nn.Module, replaced: dict[str, nn.Module]) -> None:
    """Put modules back where they were, the outermost last."""
    for name in sorted(replaced, key=lambda name: -name.count(".")):
        replace_(model, name, replaced[name])
    for encoder in [m for m in model.modules() if m.__dict__.pop(NESTED, False)]:
        encoder.use_nested_tensor = True  # type: ignore[assignment]


def _nesting(model: nn.Module) -> list[nn.TransformerEncoder]:
    encoders = [m for m in model.modules() if isinstance(m, nn.TransformerEncoder)]
    return [encoder for encoder in encoders if encoder.use_nested_tensor]


@torch.enable_grad()
def rewrite(module: nn.Module) -> nn.Module | None:
    """The module in plain linear layers; None if it is no such module, or one with more to it.

    Parts of a tensor know whether it is trained only while gradients are on.
    """
    if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers."):
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor)
        assert isinstance(bias, Tensor)
        return _linear(weight.T, bias).train(module.training)
    packed = type(module) is nn.MultiheadAttention
    if packed and module.bias_k is None and not module.add_zero_attn:
        assert isinstance(module, nn.MultiheadAttention)
        return UnpackedAttention(module)
    return None


class UnpackedAttention(nn.Module):
    """`nn.MultiheadAttention` with a linear layer for each of its projections."""

    # What torch's transformers ask before they take a fused path.
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(self, packed: nn.MultiheadAttention) -> None:
        super().__init__()
        self.num_heads, self.batch_first = packed.num_heads, packed.batch_first
        self.embed_dim, self.kdim, self.vdim = packed.embed_dim, packed.kdim, packed.vdim
        self.head_dim, self.dropout = packed.head_dim, packed.dropout
        size = packed.embed_dim
        weights: tuple[Tensor, ...]
        if packed.in_proj_weight is not None:
            weights = torch.split(packed.in_proj_weight, size)
        else:
            weights = (packed.q_proj_weight, packed.k_proj_weight, packed.v_proj_weight)
        both = packed.in_proj_bias
        biases = (None,) * 3 if both is None else torch.split(both, size)
        self.q_proj, self.k_proj, self.v_proj = map(_linear, weights, biases)
        self.out_proj = _linear(packed.out_proj.weight, packed.out_proj.bias)
        self.train(packed.training)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None,
        average_attn_weights: bool = True, is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As `nn.MultiheadAttention.forward`; a causal mask has to be given beside `is_causal`."""
        first = self._batch_first(query)
        k_in = first if key is query else self._batch_first(key)
        v_in = first if value is query else k_in if value is key else self._batch_first(value)
        projected = (self.q_proj(first), self.k_proj(k_in), self.v_proj(v_in))
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in projected)
        mask = self._mask(key_padding_mask, attn_mask, q)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
            mixed = F.dropout(weights, dropout) @ v
            weights = weights.mean(dim=1) if average_attn_weights else weights
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if query.dim() == 2:
            return out[0], None if weights is None else weights[0]
        return (out if self.batch_first else out.transpose(0, 1)), weights

    @property
    def in_proj_weight(self) -> Tensor | None:
        """The three projections in one, as the packed attention has them."""
        weights = [self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]
        return torch.cat(weights) if len({w.shape for w in weights}) == 1 else None

    def _batch_first(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _mask(self, padding: Tensor | None, mask: Tensor | None, q: Tensor) -> Tensor | None:
        """One additive mask that broadcasts over (batch, heads, queries, keys)."""
        total: Tensor | None = None
        if mask is not None:
            total = _additive(mask, q)
            if mask.dim() == 3:
                total = total.reshape(-1, self.num_heads, *mask.shape[1:])
        if padding is not None:
            hidden = _additive(padding, q).reshape(-1, 1, 1, padding.shape[-1])
            total = hidden if total is None else total + hidden
        return total


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    out, into = weight.shape
    linear = nn.Linear(into, out, bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), bias.requires_grad)
    return linear
