"""What other libraries say of their own accord does not reach a user's terminal."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from pathlib import Path

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
t3c.fit(model, [(samples[:8], torch.zeros(8).long())], t3c.TrainConfig(steps=2))
config = t3c.ExportConfig(timing=quick(2), certificate=LIGHT)
t3c.export(model, f"{sys.argv[1]}/tiny.t3c", [samples], config)
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


def test_warnings_and_levels_are_as_they_were_afterwards() -> None:
    logger, before = logging.getLogger("t3c.test"), list(warnings.filters)
    logger.setLevel(logging.INFO)
    with silenced("t3c.test"):
        assert not logger.isEnabledFor(logging.WARNING)
        assert logger.isEnabledFor(logging.ERROR)
        warnings.warn("not shown", stacklevel=1)
    assert logger.level == logging.INFO
    assert list(warnings.filters) == before
