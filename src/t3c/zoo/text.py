"""A Llama trained on TinyStories, and its text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from t3c.compression.hugging_face import load_model
from t3c.compression.tables import read_text
from t3c.errors import DataError, MissingExtraError
from t3c.zoo.local import data_path

BOS = 1
SEPARATOR = "<|endoftext|>"


def stories_folder() -> Path:
    """Where the Llama of TinyStories is, and its tokenizer."""
    return data_path("stories15m")


def stories15m() -> nn.Module:
    """A Llama of 15M parameters trained on TinyStories: ids (n, t) -> logits (n, t, 32000)."""
    return load_model(str(stories_folder())).model


def stories_ids(split: Literal["train", "valid"]) -> Tensor:
    """Return a whole text of TinyStories (tokens,)."""
    text = read_text(data_path(f"text/tinystories-{split}.txt"))
    return torch.from_numpy(story_tokens(_tokenizer(stories_folder()), text))


def story_tokens(tokenizer: Any, text: str) -> npt.NDArray[np.int64]:
    """Return ids (tokens,) of a text, without the special tokens a tokenizer adds around it.

    Where `<|endoftext|>` parts it, BOS and a space are read instead of it and of the space around
    it, as the models of TinyStories were trained.
    """
    if SEPARATOR in text:
        if not tokenizer.bos_token:
            raise DataError(f"the tokenizer has no BOS to take the place of {SEPARATOR}")
        bos = f"{tokenizer.bos_token} "
        text = re.sub(rf"\s*{re.escape(SEPARATOR)}\s*", lambda _: bos, text.strip())
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise DataError("the text has no tokens")
    return np.asarray(ids, dtype=np.int64)


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
