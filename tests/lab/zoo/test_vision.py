"""Classifiers by name: their own weights, plain logits, pictures as they were trained with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lab.subjects import SUBJECTS
from lab.zoo import imagenet_sample
from lab.zoo.imagenet import Batches, find_samples
from lab.zoo.vision import KNOWN, RAW, VISION, load_vision
from t3c.compression.pictures import Preprocessing, read_image, read_preprocessing
from t3c.errors import DataError
from t3c.zoo import local

transformers = pytest.importorskip("transformers")

IDS = ("n01440764", "n01443537", "n02012849")
ImageNet = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
BICUBIC, BILINEAR = Image.Resampling.BICUBIC, Image.Resampling.BILINEAR
CROPPED: Mapping[str, Any] = {
    "feature_extractor_type": "ConvNextFeatureExtractor", "crop_pct": 0.875, "size": 32,
    "resample": 3, **ImageNet,
}  # fmt: skip
SQUEEZED: Mapping[str, Any] = {
    "image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32},
    "resample": 2, "do_rescale": True, "rescale_factor": 1 / 255, **HALF,
}  # fmt: skip


def tiny(name: str) -> Any:
    """A network of the class that a name stands for, made small, with random weights."""
    torch.manual_seed(0)
    labels = {"id2label": dict(enumerate(IDS)), "label2id": {n: i for i, n in enumerate(IDS)}}
    kind = name.partition("-")[0]
    if kind == "resnet":
        config = transformers.ResNetConfig(
            embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", **labels
        )
    elif kind == "convnext":
        config = transformers.ConvNextConfig(
            hidden_sizes=[4, 8], depths=[1, 1], num_stages=2, **labels
        )
    elif kind == "vit":
        config = transformers.ViTConfig(
            image_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, **labels,
        )  # fmt: skip
    else:
        config = transformers.SwinConfig(
            image_size=32, embed_dim=4, depths=[1], num_heads=[2], window_size=4, **labels
        )
    return getattr(transformers, KNOWN[name].kind)(config).eval()


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("T3C_DATA", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def saved(folder: Path, model: Any, preprocessor: Mapping[str, Any] | None) -> Path:
    model.save_pretrained(folder)
    if preprocessor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return folder


def photographs(folder: Path) -> Path:
    """One wide and one tall picture of each class, in folders by WordNet id."""
    rng = np.random.default_rng(0)
    for name in IDS:
        (folder / "val" / name).mkdir(parents=True)
        for index, size in enumerate(((40, 50, 3), (61, 45, 3))):
            coarse = Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8))
            coarse.save(folder / "val" / name / f"ILSVRC2012_val_{index:08}.JPEG", quality=95)
    return folder


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(DataError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", KNOWN)
def test_logits_of_pictures_are_those_of_the_model_itself(data: Path, name: str) -> None:
    model = tiny(name)
    kind = name.partition("-")[0]
    preprocessor = CROPPED if kind in ("resnet", "convnext") else SQUEEZED
    saved(data / name, model, preprocessor)
    vision = VISION[name]()
    assert (vision.name, vision.classes) == (name, IDS)
    assert not any(module.training for module in vision.model.modules())
    samples = find_samples(photographs(data / "imagenet"), vision.classes)
    assert samples.labels == (0, 0, 1, 1, 2, 2)
    # The library's own reading of the file and of the pictures.
    own = transformers.ConvNextImageProcessorPil if preprocessor is CROPPED else None
    processor = (own or transformers.ViTImageProcessorPil).from_pretrained(data / name)
    for (images, _), start in zip(Batches(samples, vision.preprocessing, 4), (0, 4), strict=True):
        paths = samples.paths[start : start + 4]
        with torch.inference_mode():
            pictures = [Image.open(path).convert("RGB") for path in paths]
            pixels = processor(pictures, return_tensors="pt")["pixel_values"]
            torch.testing.assert_close(images, pixels, atol=2e-6, rtol=1e-5)
            assert type(vision.model(images)) is torch.Tensor
            assert torch.equal(vision.model(images), model(pixel_values=images).logits)


def test_what_the_hub_has_is_known() -> None:
    hubs = {name: known.hub for name, known in KNOWN.items()}
    assert hubs == {
        "resnet-50": "microsoft/resnet-50", "resnet-101": "microsoft/resnet-101",
        "convnext-tiny": "facebook/convnext-tiny-224", "vit-base": "google/vit-base-patch16-224",
        "vit-large": "google/vit-large-patch16-224",
        "swin-tiny": "microsoft/swin-tiny-patch4-window7-224",
    }  # fmt: skip
    assert list(VISION) == list(KNOWN)
    assert all(known.preprocessing.size == (224, 224) for known in KNOWN.values())


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("resnet-50", "resnet-101", "convnext-tiny"), {**CROPPED, "size": 224}),
        (("vit-base", "vit-large"), {**HALF, "size": 224, "do_resize": True}),
        (
            ("swin-tiny",),
            {
                **ImageNet,
                "size": 224,
                "resample": 3,
                "feature_extractor_type": "ViTFeatureExtractor",
            },
        ),
    ],
)
def test_what_the_hub_tells_of_pictures_is_known(
    tmp_path: Path, names: tuple[str, ...], told: dict[str, Any]
) -> None:
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(told))
    assert all(KNOWN[name].preprocessing == read_preprocessing(path) for name in names)


def test_without_a_folder_it_is_the_hub(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for unset in (False, True):
        if unset:
            monkeypatch.delenv("T3C_DATA")
        said = refusal(VISION["swin-tiny"])
        assert said.startswith("microsoft/swin-tiny-patch4-window7-224 is no folder")
        assert "hub cannot be reached" in said
    assert "no classifier 'resnet'" in refusal(lambda: load_vision("resnet"))


def test_a_second_name_of_a_folder_has_its_own_preprocessing(data: Path) -> None:
    saved(data / "resnet50-imagenet", tiny("resnet-50"), None)
    assert VISION["resnet-50"]().preprocessing == RAW
    assert "cannot be reached" in refusal(VISION["resnet-101"])
    saved(data / "resnet-50", tiny("resnet-50"), None)
    assert VISION["resnet-50"]().preprocessing == KNOWN["resnet-50"].preprocessing


def test_outputs_named_in_words_have_no_ids(data: Path) -> None:
    model = tiny("resnet-50")
    model.config.id2label = {0: "tench, Tinca tinca", 1: IDS[1], 2: IDS[2]}
    saved(data / "resnet-50", model, CROPPED)
    assert VISION["resnet-50"]().classes is None


def test_folders_that_hold_something_else(data: Path) -> None:
    folder = saved(data / "vit-base", tiny("resnet-50"), SQUEEZED)
    assert f"{folder} holds a ResNetForImageClassification, and vit-base is a ViT" in refusal(
        VISION["vit-base"]
    )
    saved(folder, tiny("vit-base"), {**SQUEEZED, "size": 30})
    assert f"{folder} takes images of 32, its preprocessing gives 30x30" in refusal(
        VISION["vit-base"]
    )
    (folder / "preprocessor_config.json").unlink()
    assert "its preprocessing gives 224x224" in refusal(VISION["vit-base"])
    saved(folder, tiny("vit-base"), SQUEEZED)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert f"{folder} is no model" in refusal(VISION["vit-base"])
    weights.unlink()
    assert f"{folder} holds a configuration and no weights" in refusal(VISION["vit-base"])


READ = [
    (CROPPED, Preprocessing(36, (32, 32), resample=BICUBIC)),
    ({**CROPPED, "size": {"shortest_edge": 224}, "crop_pct": 0.95}, (235, (224, 224))),
    ({**CROPPED, "size": {"shortest_edge": 384}}, ((384, 384), None)),
    ({**ImageNet, "image_processor_type": "ConvNextImageProcessor", "size": 224},
     (256, (224, 224))),
    ({**ImageNet, "size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": 224},
     (256, (224, 224))),
    (
        {**ImageNet, "size": {"height": 256, "width": 250}, "do_center_crop": True,
         "crop_size": {"height": 224, "width": 220}, "feature_extractor_type": "DeiT"},
        ((256, 250), (224, 220)),
    ),
    ({**ImageNet, "do_resize": False, "do_center_crop": True, "crop_size": 20}, (None, (20, 20))),
    ({"do_normalize": False, "size": 8}, Preprocessing((8, 8), None, (0, 0, 0), (1, 1, 1))),
    ({"do_normalize": False, "do_rescale": False, "size": 8},
     Preprocessing((8, 8), None, (0, 0, 0), (1, 1, 1), 1.0)),
    ({**HALF, "rescale_factor": 1 / 127.5, "size": 8, "resample": 0},
     Preprocessing((8, 8), None, (0.5,) * 3, (0.5,) * 3, 1 / 127.5, Image.Resampling.NEAREST)),
]  # fmt: skip


@pytest.mark.parametrize(("told", "expected"), READ)
def test_preprocessing_is_read(tmp_path: Path, told: dict[str, Any], expected: Any) -> None:
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(told))
    found = read_preprocessing(path)
    if isinstance(expected, tuple):
        assert (found.resize, found.crop) == expected
        assert (found.mean, found.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        assert found.rescale == 1 / 255
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no preprocessing"),
        ("[1]", "is no preprocessing"),
        ('{"size": 224', "is no preprocessing"),
        ('{"size": "224"}', "is no preprocessing: size"),
        ('{"size": 224, "image_mean": [0.5], "image_std": [0.5]}', "image_mean"),
        ('{"size": 224}', "there is no image_mean"),
        ('{"do_normalize": false}', "there is no size"),
        ('{"do_normalize": false, "size": {"longest_edge": 4}}', 'got {"longest_edge": 4}'),
        ('{"do_normalize": false, "size": -4}', "sides of 1 to 8192"),
        ('{"do_normalize": false, "size": {"shortest_edge": 4}}', "would differ in size"),
        ('{"do_normalize": false, "do_center_crop": true, "size": 4}', "there is no crop_size"),
        ('{"do_normalize": false, "size": 4, "crop_pct": 0}', "crop_pct must be in (0, 1], got 0"),
        ('{"do_normalize": false, "size": 4, "resample": 9}', "resample 9 is none of Pillow's"),
        (
            '{"do_normalize": false, "size": 4, "image_processor_type": "CLIPImageProcessor"}',
            "size 4 of a CLIPImageProcessor does not tell which side",
        ),
    ],
)
def test_preprocessing_that_cannot_be_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "preprocessor_config.json"
    path.write_text(text)
    said = refusal(lambda: read_preprocessing(path))
    assert said.startswith(str(path))
    assert message in said


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    assert "none.json cannot be read: No such" in refusal(
        lambda: read_preprocessing(tmp_path / "none.json")
    )


@pytest.mark.data
@pytest.mark.skipif(not os.environ.get("T3C_DATA"), reason="T3C_DATA is not set")
def test_resnet50_of_the_local_data() -> None:
    vision = VISION["resnet-50"]()
    folder = local.data_path("imagenet-sample")
    samples = find_samples(folder, vision.classes).split()[1].first(8)
    assert samples == find_samples(folder).split()[1].first(8)
    expected = imagenet_sample.read_images(samples.paths[:1])[0]
    torch.testing.assert_close(read_image(samples.paths[0], vision.preprocessing), expected)
    with torch.inference_mode():
        right = sum(
            int((vision.model(images).argmax(1) == labels).sum())
            for images, labels in Batches(samples, vision.preprocessing, 4)
        )
    assert right >= 6


def test_a_subject_has_parts_that_share_nothing(data: Path) -> None:
    model = tiny("vit-base")
    saved(data / "vit-base", model, SQUEEZED)
    photographs(data / "imagenet")
    subject = SUBJECTS["imagenet-vit-base"]()
    parts = [subject.train[0], subject.validation[0], subject.calibration, subject.test[0]]
    assert [len(part) for part in parts] == [2, 0, 1, 3]
    assert len({image.numpy().tobytes() for part in parts for image in part}) == 6
    every = find_samples(data / "imagenet", IDS)
    images, labels = next(iter(Batches(every, VISION["vit-base"]().preprocessing, 6)))
    for image, label in zip(*subject.test, strict=True):
        (place,) = [i for i, other in enumerate(images) if torch.equal(image, other)]
        assert labels[place] == label
    with torch.inference_mode():
        torch.testing.assert_close(subject.model(images), model(images).logits)
