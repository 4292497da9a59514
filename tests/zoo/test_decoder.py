"""A language model whose cache is plain tensors: the same logits, in one call or in several."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from t3c.compression.decoder import Decoder
from t3c.errors import ConvertError, DataError
from t3c.nn.inputs import call

transformers = pytest.importorskip("transformers")
VOCABULARY, LAYERS = 50, 2


@cache
def language_model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=LAYERS, n_head=4,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).eval()
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


KINDS = st.sampled_from(["llama", "gpt2"])


@settings(max_examples=25)
@given(KINDS, st.integers(1, 3), st.integers(1, 9), st.integers(0, 2**16))
@torch.no_grad()
def test_without_a_past_it_is_the_model(kind: str, batch: int, length: int, seed: int) -> None:
    torch.manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (batch, length))
    model = language_model(kind)
    ours = call(Decoder(model), {"input_ids": ids})
    torch.testing.assert_close(ours, model(ids).logits, atol=1e-5, rtol=0)


@settings(max_examples=25)
@given(KINDS, st.integers(1, 3), st.lists(st.integers(1, 4), min_size=1, max_size=4))
@torch.no_grad()
def test_pieces_of_any_length_are_the_whole(kind: str, batch: int, pieces: list[int]) -> None:
    decoder = Decoder(language_model(kind))
    ids = torch.randint(0, VOCABULARY, (batch, sum(pieces)))
    states, logits = decoder.states(batch, 0), []
    for piece in ids.split(pieces, dim=1):
        given_shape = next(iter(states.values())).shape
        output, *grown = decoder(piece, **states)
        states = dict(zip(states, grown, strict=True))
        now = next(iter(states.values())).shape
        assert now[2] == given_shape[2] + piece.shape[1]
        logits.append(output)
    torch.testing.assert_close(torch.cat(logits, dim=1), decoder(ids), atol=1e-5, rtol=0)
    whole = decoder(ids, **decoder.states(batch, 0))[1:]
    for value, wanted in zip(states.values(), whole, strict=True):
        torch.testing.assert_close(value, wanted, atol=1e-5, rtol=0)


def test_states_are_named_by_layer_in_order() -> None:
    states = Decoder(language_model("llama")).states(3, 5)
    assert list(states) == ["past_0_key", "past_0_value", "past_1_key", "past_1_value"]
    assert {value.shape for value in states.values()} == {(3, 2, 5, 8)}


def test_what_it_cannot_wrap_is_refused() -> None:
    windowed = transformers.MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64, sliding_window=4,
    )  # fmt: skip
    with pytest.raises(ConvertError, match="every token sees all before it"):
        Decoder(transformers.MistralForCausalLM(windowed))
    with pytest.raises(ConvertError, match="Linear is no language model"):
        Decoder(nn.Linear(2, 2))
    decoder = Decoder(language_model("llama"))
    some = dict(list(decoder.states(1, 2).items())[:3])
    with pytest.raises(DataError, match="past_1_value, got past_0_key"):
        decoder(torch.ones(1, 1, dtype=torch.long), **some)
