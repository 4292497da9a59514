"""Running texts: found where they are kept, tokenized whole, missed with one clear line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t3c.errors import DataError
from t3c.zoo.corpora import corpus, corpus_tokens
from t3c.zoo.local import data_path
from t3c.zoo.text import stories_tokens

transformers = pytest.importorskip("transformers")
needs_data = pytest.mark.skipif(not os.environ.get("T3C_DATA"), reason="T3C_DATA is not set")
WORDS = {"<unk>": 0, "<s>": 1, "one": 2, "two": 3, "end": 4}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for folder in ("text", "wikitext-2", "wikitext-103"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("T3C_DATA", str(tmp_path))
    return tmp_path


def tokenizer(bos: str | None = "<s>") -> Any:
    """One id a word, and BOS around whatever is asked for with special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    backend = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token=bos, model_max_length=2
    )


def refusal(name: str, split: str) -> str:
    with pytest.raises(DataError) as error:
        corpus(name, split)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "split", "place"),
    [("wikitext-2", "test", "text/wikitext2-test.txt"),
     ("wikitext-2", "train", "wikitext-2/wiki.train.tokens"),
     ("wikitext-103", "train", "wikitext-103/wiki.train.raw"),
     ("wikitext-103", "valid", "wikitext-103/wiki.valid.tokens"),
     ("tinystories", "train", "text/tinystories-train.txt")],
)  # fmt: skip
def test_a_text_is_found_and_left_as_it_is(data: Path, name: str, split: str, place: str) -> None:
    text = " \n = Crème = \r\n \u2028 one \n"
    (data / place).write_bytes(text.encode())
    assert corpus(name, split) == text


def test_words_as_written_come_before_rare_ones_left_out(data: Path) -> None:
    (data / "wikitext-103/wiki.test.tokens").write_text("<unk>")
    (data / "wikitext-103/wiki.test.raw").write_text("rare")
    assert corpus("wikitext-103", "test") == "rare"


def test_what_is_not_there_is_said(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "wikitext-2, wikitext-103, tinystories" in refusal("c4", "train")
    assert "has no split 'test': it has train, valid" in refusal("tinystories", "test")
    said = refusal("wikitext-103", "valid")
    assert str(data) in said
    assert "wikitext-103/wiki.valid.raw or wikitext-103/wiki.valid.tokens" in said
    monkeypatch.delenv("T3C_DATA")
    assert "T3C_DATA is not set" in refusal("wikitext-2", "test")


def test_what_is_no_text_is_refused(data: Path) -> None:
    path = data / "text/tinystories-valid.txt"
    path.write_text(" \n")
    assert f"{path} is empty" in refusal("tinystories", "valid")
    path.write_bytes(b"one \xff")
    assert "no UTF-8 text: invalid start byte at 4" in refusal("tinystories", "valid")


def test_tokens_are_those_of_the_text_alone() -> None:
    ids = corpus_tokens(tokenizer(), " one two\n\none three")
    assert ids.dtype == np.int64
    assert ids.tolist() == [2, 3, 2, 0]


def test_what_parts_stories_becomes_bos_or_what_is_asked_for() -> None:
    text = "\none \n<|endoftext|>\n two<|endoftext|>one\n"
    assert corpus_tokens(tokenizer(), text).tolist() == [2, 1, 3, 1, 2]
    assert corpus_tokens(tokenizer(), text, between=" end ").tolist() == [2, 4, 3, 4, 2]
    assert corpus_tokens(tokenizer(bos=None), text, between=" ").tolist() == [2, 3, 2]
    with pytest.raises(DataError, match="no BOS to take the place"):
        corpus_tokens(tokenizer(bos=None), text)
    with pytest.raises(DataError, match="no tokens"):
        corpus_tokens(tokenizer(), " ")


@pytest.mark.data
@needs_data
def test_stories_are_tokenized_as_their_windows_are() -> None:
    own = transformers.AutoTokenizer.from_pretrained(data_path("stories15m"), local_files_only=True)
    ids = corpus_tokens(own, corpus("tinystories", "train")[:100_000])
    windows = stories_tokens("train", 20, 64)
    np.testing.assert_array_equal(ids[: 20 * 63], windows[:, 1:].flatten().numpy())
    assert (ids == own.bos_token_id).sum() > 50
