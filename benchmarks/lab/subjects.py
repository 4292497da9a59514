"""Add the laboratory's own networks to the subjects that a recipe can name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from lab.zoo.bases import base_network
from lab.zoo.imagenet import Batches, Samples, find_samples, imagenet_folder
from lab.zoo.imagenet_sample import imagenet_sample, resnet50
from lab.zoo.minilm import PADDING, sst2_ids
from lab.zoo.vision import VISION, load_vision
from t3c.compression.pictures import Preprocessing
from t3c.compression.source import Classifier
from t3c.zoo import cifar10 as cifar
from t3c.zoo.subjects import EVALUATED, SUBJECTS, Labelled, Subject

__all__ = ["SUBJECTS", "Labelled", "Subject"]


def own_cifar10(name: str) -> Subject:
    """A network of ours for CIFAR-10: 45,000 images to train, 3,000 to validate, 2,000 spare.

    The spare ones, which calibrate, are held back from its own training too.
    """
    images, labels = cifar.cifar10("train")
    train, validation = (
        (images[part], labels[part]) for part in (slice(45_000), slice(45_000, 48_000))
    )
    return Subject(
        name, base_network(name), train, validation, images[48_000:], cifar.cifar10("test"),
        cifar.IMAGE, cifar.CLASSES,
    )  # fmt: skip


def minilm(length: int = 128) -> Subject:
    """MiniLM-L6 fine-tuned on SST-2, sentences filled up to 128 tokens.

    Trained on all but the last 2,000 phrases, which validate; calibrated with the 872 sentences of
    the development part, which are whole ones, as those of the test part are.
    """
    ids, labels = sst2_ids("train", length)
    train, held = ((ids[part], labels[part]) for part in (slice(-2_000), slice(-2_000, None)))
    return Subject(
        "minilm", base_network("minilm"), train, held, sst2_ids("dev", length)[0],
        sst2_ids("test", length), classes=("negative", "positive"), padding=PADDING,
        vocabulary=30_522,
    )  # fmt: skip


def resnet50_on_sample() -> Subject:
    """ResNet-50 and 1,000 images of ImageNet: 500 to test, and 500 for all else.

    Of these 340 train, 20 validate and 140 calibrate, unlabelled but for the validation.
    """
    images, labels = imagenet_sample(part="tune")
    test = imagenet_sample(part="test")
    train, validation = ((images[part], labels[part]) for part in (slice(340), slice(340, 360)))
    return Subject(
        "resnet50",
        Classifier(resnet50()).eval(),
        train,
        validation,
        images[360:],
        test,
        evaluated=25,
    )


def imagenet(name: str, tune: int = 1000, test: int = 2000) -> Subject:
    """Return a classifier of the hub or of T3C_DATA on an ImageNet folder (T3C_DATA/imagenet or
    T3C_IMAGENET): `tune` images, of which 7 in 10 train, and `test` others.

    A folder with fewer than both is halved. Images of the folder that it was trained on say little
    about its accuracy, whatever part they are in.
    """
    found = load_vision(name)
    samples = find_samples(imagenet_folder(), found.classes)
    mine, rest = samples.split(min(tune, len(samples) // 2))
    rest = rest.first(min(test, len(rest)))
    images, labels = _read(mine, found.preprocessing)
    last, held = round(0.7 * len(labels)), round(0.75 * len(labels))
    train, validation = ((images[part], labels[part]) for part in (slice(last), slice(last, held)))
    return Subject(
        f"imagenet-{name}", found.model, train, validation, images[held:],
        _read(rest, found.preprocessing), found.preprocessing.image, evaluated=25,
    )  # fmt: skip


def _read(samples: Samples, how: Preprocessing) -> Labelled:
    """Return all images and labels of some samples."""
    parts = list(Batches(samples, how, EVALUATED))
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


OWN: dict[str, Callable[[], Subject]] = {
    "cifar10-cnn": lambda: own_cifar10("cifar10-cnn"),
    "cifar10-vit": lambda: own_cifar10("cifar10-vit"),
    "resnet50": resnet50_on_sample,
    "minilm": minilm,
    **{f"imagenet-{name}": partial(imagenet, name) for name in VISION},
}
SUBJECTS.update(OWN)
