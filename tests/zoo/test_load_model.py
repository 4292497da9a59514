"""Hugging Face models by folder, file, bundled or hub name: the right one, or one clear line."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from t3c.compression.hugging_face import bundled, load_model
from t3c.errors import DataError
from t3c.nn.inputs import call, tensors

transformers = pytest.importorskip("transformers")

# Parameters and classes, or for a language model tokens and words.
BUNDLED: dict[str, tuple[int, tuple[int, ...]]] = {
    "bert-base": (109_483_778, (2,)),
    "convnext-tiny": (28_589_128, (1000,)),
    "distilbert-base": (66_955_010, (2,)),
    "resnet-101": (44_549_160, (1000,)),
    "resnet-50": (25_557_032, (1000,)),
    "roberta-base": (124_647_170, (2,)),
    "swin-tiny": (28_288_354, (1000,)),
    "tinyllama-1.1b": (1_100_048_384, (32, 32000)),
    "vit-base": (86_567_656, (1000,)),
    "vit-large": (304_326_632, (1000,)),
}
SMALL = {
    "model_type": "bert", "architectures": ["BertForSequenceClassification"], "vocab_size": 50,
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 12, "num_labels": 3, "dtype": "float16",
}  # fmt: skip


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with a configuration and no weights."""
    folder = tmp_path / "small-1.0"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    return folder


def refusal(source: Path | str) -> str:
    with pytest.raises(DataError) as error:
        load_model(str(source))
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_models_have_their_published_size_and_run_on_meta(name: str) -> None:
    parameters, output = BUNDLED[name]
    loaded = load_model(name, meta=True, samples=3)
    assert (loaded.name, loaded.pretrained) == (name, False)
    assert sum(p.numel() for p in loaded.model.parameters()) == parameters
    assert all(value.is_meta for value in [*loaded.model.parameters(), *tensors(loaded.example)])
    assert call(loaded.model, loaded.example).shape == (3, *output)


def test_every_bundled_model_is_counted() -> None:
    assert bundled() == tuple(sorted(BUNDLED))


def test_weights_of_a_folder_are_kept(small: Path) -> None:
    random = load_model(str(small), seed=1)
    random.model.half().save_pretrained(small)  # type: ignore[operator]
    loaded = load_model(str(small), seed=2)
    assert (loaded.name, loaded.pretrained) == ("small-1.0", True)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert torch.equal(
        call(loaded.model, loaded.example), call(random.model.float(), loaded.example)
    )


@pytest.mark.parametrize("named", [True, False])
def test_random_weights_follow_the_seed_alone(small: Path, named: bool) -> None:
    config = small / "config.json"
    if not named:
        config.write_text(json.dumps({k: v for k, v in SMALL.items() if k != "architectures"}))
    state = torch.get_rng_state()
    first, again, other = (load_model(str(config), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    weights = [nn.utils.parameters_to_vector(m.model.parameters()) for m in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert weights[0].dtype == torch.float32
    ids, mask = tensors(first.example)
    assert ids.shape == mask.shape == (2, 12)
    assert not first.model.training


def test_an_image_example_is_as_the_configuration_says(tmp_path: Path) -> None:
    config = {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
        "image_size": [32, 48], "num_channels": 1,
    }  # fmt: skip
    (tmp_path / "vit.json").write_text(json.dumps(config))
    loaded = load_model(str(tmp_path / "vit.json"), samples=4)
    assert tensors(loaded.example)[0].shape == (4, 1, 32, 48)
    assert call(loaded.model, loaded.example).isfinite().all()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model_type":', "not a valid JSON"),
        ("[1, 2]", "model_type"),
        ("{}", "model_type"),
        ('{"model_type": "nonesuch"}', "nonesuch"),
        ('{"model_type": ["bert"]}', "unhashable"),
        ('{"model_type": "bert", "hidden_size": "x"}', "hidden_size"),
        ('{"model_type": "bert", "hidden_size": 30, "num_attention_heads": 7}', "30"),
        ('{"model_type": "bert", "architectures": ["Nonesuch"]}', "no architecture 'Nonesuch'"),
        ('{"model_type": "bert", "architectures": ["AutoConfig"]}', "'AutoConfig'"),
        ('{"model_type": "bert", "architectures": ["ResNetModel"]}', "model type 'bert'"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert said in refusal(path)
    assert said in refusal(tmp_path)


def test_weights_that_do_not_fit_are_refused(small: Path) -> None:
    model = load_model(str(small)).model
    weights = small / "model.safetensors"
    model.bert.save_pretrained(small)  # type: ignore[operator, union-attr]
    (small / "config.json").write_text(json.dumps(SMALL))
    assert "lack 2 tensors, 'classifier.bias'" in refusal(small)
    model.save_pretrained(small)  # type: ignore[operator]
    weights.write_bytes(weights.read_bytes()[:100])
    assert "small-1.0 is no model" in refusal(small)


def test_an_unknown_name_fails_at_once_and_lists_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    start = time.perf_counter()
    said = refusal("nobody/no-such-model")
    assert time.perf_counter() - start < 10
    assert all(word in said for word in ("nobody/no-such-model", "cannot be reached", *bundled()))


def test_offline_means_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("urllib.request.urlopen", lambda *a, **k: pytest.fail("asked"))
    assert "cannot be reached" in refusal("nobody/no-such-model")


def test_a_name_no_file_can_have_is_refused() -> None:
    assert "too long" in refusal("x" * 300)
