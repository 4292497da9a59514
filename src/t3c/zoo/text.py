"""A Llama trained on TinyStories, and its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from t3c.compress.hugging_face import load_model
from t3c.errors import DataError, MissingExtraError
from t3c.zoo.corpora import corpus, corpus_tokens
from t3c.zoo.local import data_path

BOS = 1


def stories_folder() -> Path:
    """Where the Llama of TinyStories is, and its tokenizer."""
    return data_path("stories15m")


def stories15m() -> nn.Module:
    """A Llama of 15M parameters trained on TinyStories: ids (n, t) -> logits (n, t, 32000)."""
    return load_model(str(stories_folder())).model


def stories_ids(split: Literal["train", "valid"]) -> Tensor:
    """A whole text of TinyStories (tokens,)."""
    text = corpus("tinystories", split)
    return torch.from_numpy(corpus_tokens(_tokenizer(stories_folder()), text))


def stories_tokens(split: Literal["train", "valid"], windows: int, length: int) -> Tensor:
    """Windows (windows, length) of consecutive TinyStories text, each begun by BOS."""
    ids, room = stories_ids(split), length - 1
    if room < 1 or not 1 <= windows <= len(ids) // room:
        raise DataError(f"{split} has {len(ids)} tokens: no {windows} windows of BOS and {room}")
    rows = ids[: windows * room].view(windows, room)
    return torch.cat([torch.full((windows, 1), BOS), rows], dim=1)


def _tokenizer(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as missing:
        raise MissingExtraError("transformers", "train") from missing
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)
