"""Text models with their tokenizers: what one makes the other takes, and the wrong kind is told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.zoo import language
from lab.zoo.language import load_decoder, load_encoder
from t3c.compression.decoder import Decoder
from t3c.errors import DataError
from t3c.nn.inputs import call
from t3c.zoo.local import data_path

transformers = pytest.importorskip("transformers")
needs_data = pytest.mark.skipif(not os.environ.get("T3C_DATA"), reason="T3C_DATA is not set")
SMALL = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 40,
}  # fmt: skip
TEXTS = [("a good film", "bad"), ("bad", "a")]


def config(kind: str, **more: Any) -> Any:
    if kind == "distilbert":
        return transformers.DistilBertConfig(
            vocab_size=50, dim=16, hidden_dim=32, n_layers=1, n_heads=2,
            max_position_embeddings=40, **more,
        )  # fmt: skip
    named = {"bert": "BertConfig", "roberta": "RobertaConfig", "llama": "LlamaConfig"}[kind]
    return getattr(transformers, named)(**SMALL, **more)


def save(folder: Path, name: str, kind: str, **more: Any) -> Any:
    """A random model of class `name`, written with its weights."""
    torch.manual_seed(3)
    model = getattr(transformers, name)(config(kind, **more)).eval()
    model.save_pretrained(folder)
    return model


def words(folder: Path, kind: str) -> None:
    """The files of a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    if kind != "roberta":
        lines = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film"]
        (folder / "vocab.txt").write_text("\n".join(lines))
        return
    vocabulary = {w: i for i, w in enumerate(["<s>", "<pad>", "</s>", "<unk>", "a", "bad"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>", bos_token="<s>"
    ).save_pretrained(folder)


def refusal(load: Any, *args: Any, **more: Any) -> str:
    with pytest.raises(DataError) as error:
        load(*map(str, args), **more)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


CLASSIFIERS = {
    "bert": "BertForSequenceClassification",
    "roberta": "RobertaForSequenceClassification",
    "distilbert": "DistilBertForSequenceClassification",
}


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_a_classifier_is_as_it_was_and_takes_what_its_tokenizer_makes(
    tmp_path: Path, kind: str
) -> None:
    saved = save(tmp_path, CLASSIFIERS[kind], kind, num_labels=3)
    words(tmp_path, kind)
    loaded = load_encoder(str(tmp_path), classes=3)
    assert (loaded.name, loaded.pretrained) == (tmp_path.name, True)
    assert loaded.tokenizer is not None
    columns = [list(column) for column in zip(*TEXTS, strict=True)]
    wanted = {"padding": "max_length", "max_length": 8, "return_tensors": "pt"}
    inputs = dict(loaded.tokenizer(*columns, **wanted))
    assert ("token_type_ids" in inputs) == (kind == "bert")
    assert torch.equal(call(loaded.model, inputs), call(saved, inputs))
    assert call(loaded.model, loaded.example).shape == (2, 3)
    assert not loaded.model.training


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_a_configuration_alone_is_random_and_has_no_tokenizer(tmp_path: Path, kind: str) -> None:
    config(kind, num_labels=4, architectures=[CLASSIFIERS[kind]]).save_pretrained(tmp_path)
    for source in (tmp_path, tmp_path / "config.json"):
        loaded = load_encoder(str(source))
        assert (loaded.tokenizer, loaded.pretrained) == (None, False)
        assert call(loaded.model, loaded.example).shape == (2, 4)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("bert", "BertForMaskedLM"), ("bert", "BertModel"),
     ("bert", "BertForSequenceClassification"), ("roberta", "RobertaForMaskedLM"),
     ("roberta", "RobertaModel"), ("distilbert", "DistilBertForMaskedLM"),
     ("distilbert", "DistilBertForSequenceClassification")],
)  # fmt: skip
def test_another_number_of_classes_is_a_new_head(tmp_path: Path, kind: str, name: str) -> None:
    saved = save(tmp_path, name, kind, dtype="float16")
    state = torch.get_rng_state()
    loaded = load_encoder(str(tmp_path), classes=5)
    again = load_encoder(str(tmp_path), classes=5)
    assert torch.equal(state, torch.get_rng_state())
    logits = call(loaded.model, loaded.example)
    assert (logits.shape, logits.dtype) == ((2, 5), torch.float32)
    assert torch.equal(logits, call(again.model, again.example))
    mine: Any = loaded.model
    features, wanted = (
        call(model.base_model, loaded.example) for model in (mine, saved.float())
    )  # an output that has no logits is known by its first tensor
    torch.testing.assert_close(features, wanted, atol=1e-5, rtol=0)
    assert not mine.training


def test_a_decoder_is_wrapped(tmp_path: Path) -> None:
    saved = save(tmp_path, "LlamaForCausalLM", "llama")
    loaded = load_decoder(str(tmp_path))
    assert isinstance(loaded.model, Decoder)
    assert (loaded.tokenizer, loaded.pretrained) == (None, True)
    logits = call(loaded.model, loaded.example)
    torch.testing.assert_close(logits, call(saved, loaded.example), atol=1e-5, rtol=0)
    assert not loaded.model.training


def test_the_wrong_kind_is_told_before_its_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = language.load_model

    def shapes_only(name: str, *, meta: bool = False) -> Any:
        return load(name, meta=meta) if meta else pytest.fail("loaded")

    monkeypatch.setattr(language, "load_model", shapes_only)
    assert "is a LlamaForCausalLM, a decoder" in refusal(load_encoder, "tinyllama-1.1b")
    assert "BertForSequenceClassification, which does not continue" in refusal(
        load_decoder, "bert-base"
    )
    for kind in (load_encoder, load_decoder):
        assert "resnet-50 is a ResNetForImageClassification, which does not read text" in refusal(
            kind, "resnet-50"
        )
    assert "classes must be at least 2, got 1" in refusal(load_encoder, "bert-base", classes=1)
    save(tmp_path, "RobertaForMaskedLM", "roberta")
    assert "is a RobertaForMaskedLM, which does not classify" in refusal(load_encoder, tmp_path)
    assert "is a RobertaForMaskedLM, which does not continue" in refusal(load_decoder, tmp_path)
    config("bert", is_decoder=True, architectures=["BertLMHeadModel"]).save_pretrained(tmp_path)
    assert "is a BertLMHeadModel, a decoder" in refusal(load_encoder, tmp_path)
    assert f"{tmp_path}: BertLMHeadModel is no language model" in refusal(load_decoder, tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "no bundled name" in refusal(load_encoder, "nobody/no-such-model")


def test_the_hub_is_asked_only_for_a_tokenizer_that_is_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, CLASSIFIERS["bert"], "bert")
    load, read = language.load_model, transformers.AutoTokenizer.from_pretrained
    monkeypatch.setattr(language, "load_model", lambda name, **more: load(str(tmp_path), **more))
    asked = []

    def found(name: str, *, local_files_only: bool, trust_remote_code: bool) -> Any:
        asked.append((name, local_files_only))
        if len(asked) == 2:
            words(tmp_path, "bert")  # until now the library makes one of special tokens alone
        return read(tmp_path, local_files_only=True)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", found)
    for _ in range(2):
        assert len(load_encoder("somebody/small").tokenizer) == 9  # type: ignore[arg-type]
    assert asked == [("somebody/small", local) for local in (True, False, True)]


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    save(tmp_path, CLASSIFIERS["bert"], "bert")
    (tmp_path / "tokenizer.json").write_text("{")
    assert "its tokenizer cannot be loaded" in refusal(load_encoder, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "spiece.model").write_text("of another kind")
    assert "it knows special tokens alone" in refusal(load_encoder, tmp_path)


@pytest.mark.data
@needs_data
def test_stories15m_comes_with_its_tokenizer() -> None:
    loaded = load_decoder(str(data_path("stories15m")))
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("Once upon a time")["input_ids"]
    assert call(loaded.model, loaded.example).shape == (2, 32, 32000)
