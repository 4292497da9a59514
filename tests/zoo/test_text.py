"""Running texts: found where they are kept, tokenized whole, missed with one clear line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t3c.compression.tables import read_text
from t3c.errors import DataError
from t3c.zoo.local import data_path
from t3c.zoo.text import stories_tokens, story_tokens

transformers = pytest.importorskip("transformers")
needs_data = pytest.mark.skipif(not os.environ.get("T3C_DATA"), reason="T3C_DATA is not set")
WORDS = {"<unk>": 0, "<s>": 1, "one": 2, "two": 3}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "text").mkdir()
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


def refusal(split: str) -> str:
    with pytest.raises(DataError) as error:
        read_text(data_path(f"text/tinystories-{split}.txt"))
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def test_a_text_is_left_as_it_is(data: Path) -> None:
    text = " \n = Crème = \r\n \u2028 one \n"
    path = data / "text/tinystories-train.txt"
    path.write_bytes(text.encode())
    assert read_text(path) == text


def test_what_is_not_there_is_said(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"{data / 'text/tinystories-train.txt'} is missing" in refusal("train")
    monkeypatch.delenv("T3C_DATA")
    assert "T3C_DATA is not set" in refusal("train")


def test_what_is_no_text_is_refused(data: Path) -> None:
    path = data / "text/tinystories-valid.txt"
    path.write_text(" \n")
    assert f"{path} is empty" in refusal("valid")
    path.write_bytes(b"one \xff")
    assert "no UTF-8 text: invalid start byte at 4" in refusal("valid")


def test_tokens_are_those_of_the_text_alone() -> None:
    ids = story_tokens(tokenizer(), " one two\n\none three")
    assert ids.dtype == np.int64
    assert ids.tolist() == [2, 3, 2, 0]


def test_what_parts_stories_becomes_bos() -> None:
    text = "\none \n<|endoftext|>\n two<|endoftext|>one\n"
    assert story_tokens(tokenizer(), text).tolist() == [2, 1, 3, 1, 2]
    with pytest.raises(DataError, match="no BOS to take the place"):
        story_tokens(tokenizer(bos=None), text)
    with pytest.raises(DataError, match="no tokens"):
        story_tokens(tokenizer(), " ")


@pytest.mark.data
@needs_data
def test_stories_are_tokenized_as_their_windows_are() -> None:
    own = transformers.AutoTokenizer.from_pretrained(data_path("stories15m"), local_files_only=True)
    ids = story_tokens(own, read_text(data_path("text/tinystories-train.txt"))[:100_000])
    windows = stories_tokens("train", 20, 64)
    np.testing.assert_array_equal(ids[: 20 * 63], windows[:, 1:].flatten().numpy())
    assert (ids == own.bos_token_id).sum() > 50
