"""Hugging Face language models with their key-value cache as plain tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from t3c.errors import ConvertError, DataError, MissingExtraError

FULL = "full_attention"


class Decoder(nn.Module):
    """A causal language model: ids (n, s) -> logits (n, s, vocabulary).

    Given what it remembers of p earlier tokens, `past_0_key`, `past_0_value`, `past_1_key` and so
    on (n, heads, p, head size), it reads the ids as those that follow, and returns the logits and
    then the same tensors grown to p + s.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        try:
            from transformers import PreTrainedModel
        except ImportError as missing:
            raise MissingExtraError("transformers", "train") from missing
        if not isinstance(model, PreTrainedModel) or not hasattr(model, "lm_head"):
            raise ConvertError(f"{type(model).__name__} is no language model of transformers")
        config: Any = model.config
        kinds = set(getattr(config, "layer_types", None) or (FULL,))
        window = getattr(config, "sliding_window", None)
        if config.is_encoder_decoder or kinds != {FULL} or window is not None:
            raise ConvertError(
                f"{type(model).__name__}: only decoders in which every token sees all before it"
            )
        heads = config.num_attention_heads
        self.model = model
        self.layers: int = config.num_hidden_layers
        self.heads: int = getattr(config, "num_key_value_heads", None) or heads
        self.head_size: int = getattr(config, "head_dim", None) or config.hidden_size // heads

    def states(self, batch: int, length: int) -> dict[str, Tensor]:
        """Return empty states as zeros (batch, heads, length, head size), by name and in order."""
        kind = next(self.model.parameters())
        shape = batch, self.heads, length, self.head_size
        return {name: kind.new_zeros(shape) for name in self._names()}

    def forward(self, input_ids: Tensor, **past: Tensor) -> Tensor | tuple[Tensor, ...]:
        if past and set(past) != set(self._names()):
            raise DataError(f"states are {', '.join(self._names())}, got {', '.join(past)}")
        before = past[self._names()[0]].shape[2] if past else 0
        batch, length = input_ids.shape
        positions = torch.arange(before, before + length, device=input_ids.device)
        called: dict[str, Any] = {
            "input_ids": input_ids,
            "position_ids": positions[None].expand(batch, length),
            "attention_mask": self._mask(positions, batch, length, before + length),
        }
        if not past:
            logits: Tensor = self.model(**called, use_cache=False).logits
            return logits
        out = self.model(**called, past_key_values=self._cache(past), use_cache=True)
        grown = [(layer.keys, layer.values) for layer in out.past_key_values.layers]
        return out.logits, *(value for pair in grown for value in pair)

    def _mask(self, positions: Tensor, batch: int, length: int, total: int) -> Tensor:
        """Return the mask added to scores (n, 1, s, total): the lowest number for later tokens."""
        dtype = next(self.model.parameters()).dtype
        seen = torch.arange(total, device=positions.device)[None] <= positions[:, None]
        mask = torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)
        return mask[None, None].expand(batch, 1, length, total)

    def _cache(self, past: dict[str, Tensor]) -> Any:
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        for index in range(self.layers):
            key, value = past[f"past_{index}_key"], past[f"past_{index}_value"]
            cache.update(key, value, index)
            # An update appends to a tensor without axes, which not every tracer can follow.
            cache.layers[index].keys, cache.layers[index].values = key, value
        return cache

    def _names(self) -> list[str]:
        return [f"past_{i}_{part}" for i in range(self.layers) for part in ("key", "value")]
