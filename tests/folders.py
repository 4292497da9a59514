"""Small Hugging Face folders of random weights, each with data it reads."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from decoders import fast_tokenizer

transformers = pytest.importorskip("transformers")
WORDS = [f"w{i}" for i in range(45)]


def make_pictures(folder: Path) -> tuple[Path, Path]:
    """A small ResNet of two classes and pictures by class, which differ in brightness."""
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], layer_type="basic",
        id2label={0: "dark", 1: "light"}, label2id={"dark": 0, "light": 1},
    )  # fmt: skip
    transformers.ResNetForImageClassification(config).save_pretrained(folder / "model")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(
        folder / "model"
    )
    draw = np.random.default_rng(0)
    for name, middle in (("dark", 60), ("light", 180)):
        (folder / "data" / name).mkdir(parents=True)
        for index in range(90):
            values = draw.integers(middle - 50, middle + 50, (32, 32, 3)).astype(np.uint8)
            Image.fromarray(values).save(folder / "data" / name / f"{index}.png")
    return folder / "model", folder / "data"


def make_texts(folder: Path) -> tuple[Path, Path]:
    """A small BERT of two classes and sentences with its classes' names."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=64, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=128, max_position_embeddings=40, initializer_range=0.2,
        id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1},
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "model")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "model" / "vocab.txt").write_text("\n".join([*special, *WORDS]))
    draw = random.Random(0)
    rows = [(draw.choice(("bad", "good")), " ".join(draw.choices(WORDS, k=8))) for _ in range(180)]
    lines = ["label\ttext", *(f"{label}\t{text}" for label, text in rows)]
    (folder / "data.tsv").write_text("\n".join(lines))
    return folder / "model", folder / "data.tsv"


def make_stories(folder: Path) -> tuple[Path, Path]:
    """A small Llama and text as it runs."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=128, max_position_embeddings=64,
        initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    fast_tokenizer().save_pretrained(folder / "model")
    draw = random.Random(0)
    (folder / "data.txt").write_text(" ".join(f"w{draw.randrange(3, 100)}" for _ in range(1500)))
    return folder / "model", folder / "data.txt"
