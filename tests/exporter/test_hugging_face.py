"""Models as Hugging Face hands them over, from tiny configs: no list of classes, no download."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import t3c
from t3c.convert import elasticize_, state_of
from t3c.exporter import ExportConfig, export
from t3c.nn.inputs import Inputs, call, select, tensors
from t3c.runtime.engines import ENGINES

transformers = pytest.importorskip("transformers")


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


@pytest.mark.parametrize("build", [bert, resnet, llama])
def test_from_a_model_to_answers_on_every_engine(
    build: Callable[[], tuple[nn.Module, Inputs]], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, samples = build()
    model.eval()
    report = elasticize_(model, select(samples, slice(0, 2)), calibration=[samples])
    assert report.error < 1e-4
    assert any(len(layer.ranks) > 1 for layer in report.converted)
    config = ExportConfig(rounds=3, worst_drift=1.0, delta=0.1)
    exported = export(model, tmp_path / "m.t3c", [samples], config)
    assert len(exported.profiles) >= 2
    few = select(samples, slice(0, 3))
    with torch.no_grad():
        original = call(state_of(model).original, few).numpy()
    arrays = tuple(value.numpy() for value in tensors(few))
    outputs = [t3c.load(tmp_path / "m.t3c", engine)(arrays) for engine in sorted(ENGINES)]
    for output in outputs:
        assert output.shape == original.shape
        assert np.linalg.norm(output - original) < 0.1 * np.linalg.norm(original)
