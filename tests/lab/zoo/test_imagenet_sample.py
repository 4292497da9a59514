from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from lab.zoo import imagenet_sample as zoo
from t3c.errors import DataError
from t3c.nn.inputs import call
from t3c.zoo import cifar10

needs_data = pytest.mark.skipif(not os.environ.get("T3C_DATA"), reason="T3C_DATA is not set")


def pixels(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(v)[:, None, None] for v in (cifar10.IMAGE.mean, cifar10.IMAGE.std))
    return (images * std + mean) * 255


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


def test_images_are_cropped_and_centred_and_carry_their_class(sample: Path) -> None:
    images, labels = zoo.imagenet_sample(part="test")
    assert images.shape == (5, 3, 224, 224)
    grey = images[:, :, 16:-16, 16:-16] + torch.tensor(zoo.MEAN)[:, None, None]
    assert (grey - labels[:, None, None, None]).abs().max() < 1


def test_halves_are_disjoint_and_follow_the_seed(sample: Path) -> None:
    tune, test = zoo.imagenet_split(seed=3)
    assert (len(tune), len(test), len({*tune, *test})) == (5, 5, 10)
    assert (tune, test) == zoo.imagenet_split(seed=3)
    assert (tune, test) != zoo.imagenet_split(seed=4)
    with pytest.raises(DataError, match="5 images to tune, 6 were asked for"):
        zoo.imagenet_sample(6, part="tune")


@pytest.mark.data
@needs_data
def test_resnet50_knows_the_sample() -> None:
    images, labels = zoo.imagenet_sample(60, part="test")
    with torch.inference_mode():
        guessed = call(zoo.resnet50(), images).argmax(1)
    assert (guessed == labels).float().mean() > 0.8


def test_imagenet_is_made_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T3C_DATA", str(tmp_path))
    (tmp_path / "imagenet-sample").mkdir()
    for index in range(4):
        image = Image.new("RGB", (256, 256), "white")  # a frame that the crop leaves out
        image.paste((50 * index, 0, 0), (16, 16, 128, 240))
        image.paste((50 * index, 0, 255), (128, 16, 240, 240))
        image.save(tmp_path / "imagenet-sample" / f"n{index:08}.jpg", quality=100, subsampling=0)
    images = pixels(zoo.imagenet_as_cifar(4))
    assert images.shape == (4, 3, 32, 32)
    inner = images[..., 1:-1, 1:-1]
    assert sorted(inner[:, 0].mean(dim=(1, 2)).tolist()) == pytest.approx([0, 50, 100, 150], abs=3)
    assert inner[:, 2, :, :14].max() < 10
    assert inner[:, 2, :, 16:].min() > 245
    with pytest.raises(DataError, match="there are 4 ImageNet images, 5 were asked for"):
        zoo.imagenet_as_cifar(5)


@pytest.mark.data
@needs_data
def test_imagenet_is_strange_to_the_network() -> None:
    with torch.inference_mode():
        sure = cifar10.resnet(20)(zoo.imagenet_as_cifar(200)).softmax(1).amax(1)
    assert sure.mean() < 0.9
