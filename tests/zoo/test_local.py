"""The local data folder: read as its README says, missed with one clear line."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from t3c.errors import DataError
from t3c.nn.inputs import call
from t3c.zoo import local, text

needs_data = pytest.mark.skipif(not os.environ.get("T3C_DATA"), reason="T3C_DATA is not set")


def test_a_missing_folder_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("T3C_DATA", raising=False)
    with pytest.raises(DataError, match="T3C_DATA is not set"):
        local.data_root()
    monkeypatch.setenv("T3C_DATA", str(tmp_path / "none"))
    with pytest.raises(DataError, match="is no folder"):
        local.data_path("resnet50-imagenet")
    monkeypatch.setenv("T3C_DATA", str(tmp_path))
    with pytest.raises(DataError, match="does not hold text/tinystories-valid"):
        text.stories_tokens("valid", 1, 8)


@pytest.mark.data
@needs_data
@pytest.mark.parametrize("split", ["train", "valid"])
def test_stories15m_predicts_stories(split: str) -> None:
    tokens = text.stories_tokens(split, 6, 128)  # type: ignore[arg-type]
    assert tokens.shape == (6, 128)
    assert (tokens[:, 0] == text.BOS).all()
    with torch.inference_mode():
        logits = call(text.stories15m(), {"input_ids": tokens})
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert 2 < math.exp(loss) < 8
    with pytest.raises(DataError, match="no 1000000 windows"):
        text.stories_tokens(split, 10**6, 128)  # type: ignore[arg-type]
