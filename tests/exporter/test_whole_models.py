"""Whole models, Hugging Face's and torch's, from tiny configs: no list of classes, no download."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import t3c
from conftest import LIGHT, all_worth, quick
from t3c.convert import ElasticConfig, elasticize_, state_of
from t3c.engines import ENGINES
from t3c.exporter import ExportConfig, export
from t3c.nn.inputs import Inputs, call, select, tensors
from t3c.quant.policy import RankTiedBits
from t3c.spec import Factorization, Goal

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("briefly")


def bert() -> tuple[nn.Module, Inputs]:
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=32,
    )  # fmt: skip
    ids = torch.randint(0, 100, (60, 16))
    mask = torch.ones(60, 16, dtype=torch.long)
    mask[:, 12:] = 0
    return transformers.BertForSequenceClassification(config), {
        "input_ids": ids,
        "attention_mask": mask,
    }


def resnet() -> tuple[nn.Module, Inputs]:
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], num_labels=7
    )
    return transformers.ResNetForImageClassification(config), torch.randn(60, 3, 48, 64)


def llama() -> tuple[nn.Module, Inputs]:
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=128, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), {"input_ids": torch.randint(0, 100, (60, 16))}


def gpt2() -> tuple[nn.Module, Inputs]:
    """Linear layers in Hugging Face's Conv1D, a packed projection, the head tied to the table."""
    config = transformers.GPT2Config(
        vocab_size=100, n_positions=32, n_embd=64, n_layer=1, n_head=4, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": torch.randint(0, 100, (60, 16))}


def albert() -> tuple[nn.Module, Inputs]:
    """One layer that runs twice."""
    config = transformers.AlbertConfig(
        vocab_size=100, embedding_size=32, hidden_size=64, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=128, max_position_embeddings=32,
    )  # fmt: skip
    ids = torch.randint(0, 100, (60, 16))
    return transformers.AlbertForSequenceClassification(config), {"input_ids": ids}


def convnext() -> tuple[nn.Module, Inputs]:
    """Depthwise kernels, stored factored and executed dense."""
    config = transformers.ConvNextConfig(
        num_stages=2, hidden_sizes=[32, 64], depths=[1, 1], num_labels=7
    )
    return transformers.ConvNextForImageClassification(config), torch.randn(60, 3, 32, 64)


def sounds() -> tuple[nn.Module, Inputs]:
    """Convolutions over time."""
    model = nn.Sequential(
        nn.Conv1d(8, 64, 9, stride=4, padding=4), nn.GELU(), nn.Conv1d(64, 64, 5, padding=4,
        dilation=2), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 64, 3, groups=8, padding=1),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    return model, torch.randn(60, 8, 64)


def encoder() -> tuple[nn.Module, Inputs]:
    """torch's own transformer, with its packed attention."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    stack = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    return nn.Sequential(stack, nn.Linear(64, 16)), torch.randn(60, 8, 64)


CP = {"convolution": Factorization.CP}
TIED = {"rank_tied_bits": RankTiedBits(offsets=(1, 0, 1))}


@pytest.mark.parametrize(
    ("build", "options"),
    [(bert, {}), (resnet, CP), (llama, TIED), (gpt2, {}), (albert, {}), (convnext, {}),
     (sounds, {}), (encoder, {})],
)  # fmt: skip
def test_from_a_model_to_answers_on_every_engine(
    build: Callable[[], tuple[nn.Module, Inputs]],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What is shipped is then decided by drift and size, not by how busy the machine is.
    monkeypatch.setattr(sys.modules["t3c.exporter.export"], "prune", all_worth)
    torch.manual_seed(0)
    model, samples = build()
    model.eval()
    example, config = select(samples, slice(0, 2)), ElasticConfig(**options)
    report = elasticize_(model, example, config, calibration=[samples])
    assert report.error < 1e-4
    assert any(len(layer.ranks) > 1 for layer in report.converted)
    wanted = ExportConfig(
        goal=Goal(profiles=2, worst_drift=1.0),
        timing=quick(3),
        certificate=replace(LIGHT, delta=0.1),
    )
    exported = export(model, tmp_path / "m.t3c", [samples], wanted)
    assert [profile.name for profile in exported.profiles] == ["tiny", "max"]
    assert all(times.samples == 3 and times.p50 > 0 for times in exported.table.profiles.values())
    few = select(samples, slice(0, 3))
    with torch.no_grad():
        original = call(state_of(model).original, few).numpy()
    arrays = tuple(value.numpy() for value in tensors(few))
    outputs = [t3c.load(tmp_path / "m.t3c", engine, 1)(arrays) for engine in sorted(ENGINES)]
    for output in outputs:
        assert output.shape == original.shape
        assert np.linalg.norm(output - original) < 0.1 * np.linalg.norm(original)
