"""Hugging Face text models with their tokenizers: encoders that classify, and decoders."""

from __future__ import annotations

import inspect
import textwrap
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from t3c.compression.decoder import Decoder
from t3c.compression.hugging_face import Loaded, bundled, load_model
from t3c.errors import ConvertError, DataError
from t3c.nn.inputs import Inputs

FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip


@dataclass(frozen=True)
class TextModel:
    """A model in evaluation mode, its tokenizer where there is one, an example of its inputs."""

    name: str
    model: nn.Module
    tokenizer: Any | None
    example: Inputs
    pretrained: bool


def load_encoder(name_or_path: str, *, classes: int | None = None) -> TextModel:
    """A folder's, a bundled or a hub model that classifies texts: ids (n, t) -> logits (n, c).

    With `classes`, a model of another number of them, or one that does not classify, is given a
    new head of random weights.
    """
    if classes is not None and classes < 2:
        raise DataError(f"classes must be at least 2, got {classes}")
    shape = _text_shape(name_or_path)
    kind = type(shape.model).__name__
    if _is_decoder(shape.model):
        raise DataError(f"{name_or_path} is a {kind}, a decoder: use load_decoder")
    if classes is None and not _classifies(shape.model):
        raise DataError(f"{name_or_path} is a {kind}, which does not classify: give it classes")
    loaded = load_model(name_or_path)
    model: Any = loaded.model
    if classes is not None and (not _classifies(model) or model.config.num_labels != classes):
        model = _with_head(name_or_path, model, classes)
    tokenizer = _tokenizer(name_or_path, model)
    return TextModel(loaded.name, model, tokenizer, loaded.example, loaded.pretrained)


def load_decoder(name_or_path: str) -> TextModel:
    """A folder's, a bundled or a hub model that continues texts, as a `Decoder`."""
    shape = _text_shape(name_or_path)
    if not _is_decoder(shape.model):
        kind = type(shape.model).__name__
        raise DataError(f"{name_or_path} is a {kind}, which does not continue texts")
    try:
        Decoder(shape.model)
    except ConvertError as refusal:
        raise DataError(f"{name_or_path}: {refusal}") from refusal
    loaded = load_model(name_or_path)
    assert isinstance(loaded.example, dict)
    example = {"input_ids": loaded.example["input_ids"]}
    tokenizer = _tokenizer(name_or_path, loaded.model)
    decoder = Decoder(loaded.model).eval()
    return TextModel(loaded.name, decoder, tokenizer, example, loaded.pretrained)


def _text_shape(name_or_path: str) -> Loaded:
    """The model without its weights, which are not worth loading to be refused."""
    shape = load_model(name_or_path, meta=True)
    assert isinstance(shape.example, dict)
    if "input_ids" not in shape.example:
        kind = type(shape.model).__name__
        raise DataError(f"{name_or_path} is a {kind}, which does not read text")
    return shape


def _is_decoder(model: Any) -> bool:
    # RoBERTa's masked words come of an `lm_head` too, so that its presence says nothing.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return type(model).__name__ in NAMES.values() or getattr(model.config, "is_decoder", False)


def _classifies(model: nn.Module) -> bool:
    from transformers.models.auto import modeling_auto

    names = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    return type(model).__name__ in names.values()


def _with_head(name: str, model: Any, classes: int, seed: int = 0) -> Any:
    """The same encoder under a new head; what pools its tokens is part of a head."""
    from transformers import AutoModelForSequenceClassification

    kind: Any = AutoModelForSequenceClassification
    config = deepcopy(model.config)
    config.num_labels, config.dtype = classes, torch.float32
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            fresh = kind.from_config(config)
    except ValueError as error:
        raise DataError(f"transformers has no classifier of {config.model_type!r}") from error
    odd = fresh.base_model.load_state_dict(model.base_model.state_dict(), strict=False)
    names = [*odd.missing_keys, *odd.unexpected_keys]
    if wrong := sorted(n for n in names if not n.startswith("pooler.")):
        raise DataError(f"{name}: {wrong[0]!r} is not in both it and a classifier of its type")
    return fresh.eval()


def _tokenizer(name: str, model: Any) -> Any | None:
    """The tokenizer of a folder or of the hub, or None; it gives only what the model takes."""
    from transformers import AutoTokenizer

    folder = (Path(name) / "config.json").is_file()
    if folder and not any((Path(name) / file).is_file() for file in FILES):
        return None
    if not folder and (Path(name).is_file() or name in bundled()):
        return None
    refusal: Exception | None = None
    for local in (True,) if folder else (True, False):  # the hub only for what is not cached
        try:
            found: Any = AutoTokenizer.from_pretrained(
                name, local_files_only=local, trust_remote_code=False
            )
        except (AttributeError, ImportError, KeyError, OSError, TypeError, ValueError) as error:
            refusal = error
            continue
        # Where it finds no words the library makes a tokenizer of special tokens alone.
        if len(found) > len(found.all_special_tokens):
            takes = inspect.signature(model.forward).parameters
            found.model_input_names = [n for n in found.model_input_names if n in takes]
            return found
        refusal = DataError("it knows special tokens alone") if folder else None
    if refusal is None:
        return None
    cause = textwrap.shorten(str(refusal) or type(refusal).__name__, 200, placeholder=" ...")
    raise DataError(f"{name}: its tokenizer cannot be loaded: {cause}") from refusal
