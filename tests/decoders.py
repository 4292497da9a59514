"""A small language model and a tokenizer for it, neither of which knows any language."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from conftest import LIGHT, quick, supply_times
from t3c.compression.decoder import Decoder
from t3c.convert import elasticize_, state_of
from t3c.errors import DataError
from t3c.exporter import ExportConfig, export
from t3c.nn.inputs import select
from t3c.spec import Goal

VOCABULARY = 100
UNKNOWN, BOS, STOP = "<unk>", "<s>", "</s>"  # 0, 1 and 2; then the words w3 to w99


@dataclass(frozen=True)
class MadeDecoder:
    """An exported decoder, and what it was made of."""

    path: Path
    original: nn.Module


def words(length: int | None = None) -> Any:
    """A tokenizer of words, as the library has it; of texts of a length if one is given."""
    tokenizers = pytest.importorskip("tokenizers")
    names = [UNKNOWN, BOS, STOP, *(f"w{i}" for i in range(3, VOCABULARY))]
    model = tokenizers.models.WordLevel({n: i for i, n in enumerate(names)}, unk_token=UNKNOWN)
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([BOS, STOP])
    if length is not None:
        made.enable_padding(length=length, pad_id=7)
        made.enable_truncation(length)
    return made


def fast_tokenizer() -> Any:
    """The same as Hugging Face has it."""
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words(), bos_token=BOS, eos_token=STOP, unk_token=UNKNOWN
    )


def make_decoder(path: Path) -> MadeDecoder:
    """A decoder of one layer with its states, exported in two profiles."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=128, max_position_embeddings=64,
        initializer_range=0.2,
    )  # fmt: skip
    model = Decoder(transformers.LlamaForCausalLM(config)).eval()
    samples = {"input_ids": torch.randint(0, VOCABULARY, (60, 8))}
    elasticize_(model, select(samples, slice(0, 2)), calibration=[samples])
    wanted = ExportConfig(
        goal=Goal(profiles=2, worst_drift=1.0),
        timing=quick(3),
        certificate=replace(LIGHT, delta=0.1),
    )
    with pytest.MonkeyPatch.context() as patch:
        supply_times(patch)
        exporter = sys.modules["t3c.exporter.export"]
        # The original would be traced once more, which takes long.
        patch.setattr(exporter, "to_original", _refuse)
        export(
            model, path, [samples], wanted, axes={"input_ids": {1: "sequence"}},
            tokenizer=fast_tokenizer(),
        )  # fmt: skip
    return MadeDecoder(path, state_of(model).original)


def _refuse(*_: object, **__: object) -> onnx.ModelProto:
    raise DataError("not asked for")
