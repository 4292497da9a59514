"""What other libraries say of their own accord does not reach a user's terminal."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from t3c.silence import silenced

CODE = """
import sys
import torch
from torch import nn
from conftest import BRIEFLY, LIGHT, quick
import openvino
import t3c
from t3c.evidence.int8 import ptq8

exec(BRIEFLY)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
samples = torch.randn(48, 32)
t3c.elasticize_(model, samples[:2], calibration=[samples])
t3c.write_original(model, f"{sys.argv[1]}/original.onnx")
t3c.fit(model, [samples[:8]], t3c.TrainConfig(steps=2), progress=False)
t3c.reconstruct(model, [samples[:8]], t3c.BlockConfig(steps=2), progress=False)
config = t3c.ExportConfig(timing=quick(2), certificate=LIGHT)
t3c.export(model, f"{sys.argv[1]}/tiny.t3c", [samples], config, progress=False)
ptq8(openvino.Core().read_model(f"{sys.argv[1]}/original.onnx"), samples.numpy())
t3c.load(f"{sys.argv[1]}/tiny.t3c")(samples[:1].numpy())
"""


def run(*command: object) -> str:
    """Return what a process of its own says on stderr."""
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_model_is_made_and_served_without_a_word(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); {CODE}"
    assert run("-c", code, tmp_path) == ""


def test_a_model_of_transformers_is_converted_without_a_word() -> None:
    command = ("-m", "t3c.cli", "convert", "--model", "bert-base", "--plan", "--json")
    assert run(*command) == ""


LOADED = """
import sys
from transformers import BertConfig, BertForSequenceClassification
from transformers.utils import logging

from t3c.compression.hugging_face import load_model

config = BertConfig(
    vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
BertForSequenceClassification(config).save_pretrained(sys.argv[1])
sys.stderr.flush()
print("saved", file=sys.stderr)
assert load_model(sys.argv[1]).pretrained
assert logging.is_progress_bar_enabled()
"""


def test_weights_of_transformers_are_loaded_without_a_bar(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert run("-c", LOADED, tmp_path / "bert").rpartition("saved\n")[2] == ""


def test_warnings_and_levels_are_as_they_were_afterwards() -> None:
    logger, before = logging.getLogger("t3c.test"), list(warnings.filters)
    logger.setLevel(logging.INFO)
    with silenced("t3c.test"):
        assert not logger.isEnabledFor(logging.WARNING)
        assert logger.isEnabledFor(logging.ERROR)
        warnings.warn("not shown", stacklevel=1)
    assert logger.level == logging.INFO
    assert list(warnings.filters) == before
