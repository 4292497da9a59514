"""GLUE's sentences: columns by name, labels by class, a bad line named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.zoo.glue import Sentences, encode, glue, read_sentences
from t3c.errors import DataError

transformers = pytest.importorskip("transformers")
needs_data = pytest.mark.skipif(not os.environ.get("T3C_DATA"), reason="T3C_DATA is not set")
QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film"]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("T3C_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    return transformers.BertTokenizerFast.from_pretrained(tmp_path)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())


def refusal(task: str, split: str) -> str:
    with pytest.raises(DataError) as error:
        glue(task, split)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


@pytest.mark.parametrize(
    ("place", "text"),
    [("sst2", 'label\tcontent\n1\ta "good film\n0\tcrème \u2028 bad\n'),
     ("sst2", 'label\tsentence\n1\ta "good film\n0\tcrème \u2028 bad'),
     ("glue/SST-2", '\ufeffsentence\tlabel\r\na "good film\t1\r\ncrème \u2028 bad\t0\r\n\r\n')],
)  # fmt: skip
def test_sst2_in_either_layout(data: Path, place: str, text: str) -> None:
    write(data / place / "dev.tsv", text)
    texts = (('a "good film',), ("crème \u2028 bad",))
    assert glue("sst2", "dev") == Sentences(texts, (1, 0), ("negative", "positive"))


@pytest.mark.parametrize("split", ["train", "dev_matched", "dev_mismatched"])
def test_mnli_has_two_sentences_and_three_classes(data: Path, split: str) -> None:
    rows = ["0\ta\tb\tneutral\tneutral", "1\tc\td\t-\tcontradiction", "2\te\t\t-\tentailment"]
    text = "\n".join(["index\tsentence1\tsentence2\tlabel1\tgold_label", *rows])
    write(data / f"glue/MNLI/{split}.tsv", text)
    found = glue("mnli", split)
    assert found.texts == (("a", "b"), ("c", "d"), ("e", ""))
    assert [found.classes[label] for label in found.labels] == [row.split("\t")[-1] for row in rows]
    assert found.labels == (1, 2, 0)


def test_qqp_has_two_questions(data: Path) -> None:
    write(data / "glue/QQP/dev.tsv", QQP + "0\t1\t2\ta ?\tb ?\t0\n1\t3\t4\tc ?\tc ?\t1\n")
    found = glue("qqp", "dev")
    assert (found.texts, found.labels) == ((("a ?", "b ?"), ("c ?", "c ?")), (0, 1))


@pytest.mark.parametrize(
    ("rows", "said"),
    [("0\t1\t2\ta\tb\t0\n0\t1\t2\ta\n", "line 3: 4 columns, the header has 6"),
     ("0\t1\t2\ta\tb\tc\t0\n", "line 2: 7 columns, the header has 6"),
     ("0\t1\t2\ta\tb\t0\n\n0\t1\t2\ta\tb\t0\n", "line 3: 1 columns, the header has 6"),
     ("0\t1\t2\ta\tb\t-\n", "line 2: is_duplicate is '-', not one of 0, 1"),
     ("0\t1\t2\ta\tb\t\n", "line 2: is_duplicate is '', not one of 0, 1"),
     ("", "has a header and no rows")],
)  # fmt: skip
def test_a_broken_line_is_named(data: Path, rows: str, said: str) -> None:
    write(data / "glue/QQP/train.tsv", QQP + rows)
    assert said in refusal("qqp", "train")


def test_what_is_not_there_is_said(data: Path) -> None:
    assert "there are sst2, mnli, qqp" in refusal("cola", "dev")
    assert "it has train, dev_matched, dev_mismatched" in refusal("mnli", "dev")
    assert "does not hold sst2/dev.tsv or glue/SST-2/dev.tsv" in refusal("sst2", "dev")
    write(data / "sst2/dev.tsv", "\n")
    assert "dev.tsv is empty" in refusal("sst2", "dev")
    write(data / "glue/SST-2/test.tsv", "index\tsentence\n0\ta film\n")
    assert "has no column label: it has index, sentence" in refusal("sst2", "test")
    write(data / "sst2/train.tsv", "label\ttext\n0\ta film\n")
    assert "has no column sentence or content" in refusal("sst2", "train")


def test_a_file_of_ones_own_has_names_or_numbers_of_classes(tmp_path: Path) -> None:
    file, texts = tmp_path / "mine.tsv", (("a film",), ("a",), ("bad",))
    for column in ("sentence", "content", "text"):
        write(file, f"id\t{column}\tlabel\n7\ta film\tgood\n8\ta\t0\n9\tbad\tbad\n")
        found = read_sentences(file, ["bad", "good"])
        assert found == Sentences(texts, (1, 0, 0), ("bad", "good"))
    write(file, "text\tlabel\na film\t5\na\t4\nbad\t5\n")
    assert read_sentences(str(file), ["5", "4"]) == Sentences(texts, (0, 1, 0), ("5", "4"))
    with pytest.raises(DataError, match=r"line 2: label is '5', not one of 1, 0$"):
        read_sentences(file, ["1", "0"])
    with pytest.raises(DataError, match=r"label is '5', not one of bad, good, 0, 1$"):
        read_sentences(file, ["bad", "good"])
    write(file, "words\tlabel\na\tbad\n")
    with pytest.raises(DataError, match="has no column sentence or content or text"):
        read_sentences(file, ["bad", "good"])


def test_one_sentence_is_padded_and_cut(tokenizer: Any) -> None:
    texts = [("a good film",), ("bad",)]
    longest = encode(tokenizer, texts)
    assert longest["input_ids"].tolist() == [[2, 5, 6, 8, 3], [2, 7, 3, 0, 0]]
    assert longest["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    assert encode(tokenizer, texts, length=4)["input_ids"].tolist() == [[2, 5, 6, 3], [2, 7, 3, 0]]
    assert encode(tokenizer, texts, length=9)["input_ids"].shape == (2, 9)


def test_two_sentences_are_told_apart_where_the_tokenizer_does(tokenizer: Any) -> None:
    encoded = encode(tokenizer, [("a good", "film")])
    assert encoded["input_ids"].tolist() == [[2, 5, 6, 3, 8, 3]]
    assert encoded["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1]]
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    plain = encode(tokenizer, [("a good", "film")])
    assert set(plain) == {"input_ids", "attention_mask"}
    assert torch.equal(plain["input_ids"], encoded["input_ids"])


def test_what_cannot_be_encoded_is_refused(tokenizer: Any) -> None:
    for texts in ([], [("a",), ("a", "b")], [("a", "b", "c")], [()]):
        with pytest.raises(DataError, match="all of one or all of two sentences"):
            encode(tokenizer, texts)
    with pytest.raises(DataError, match="over the tokenizer's 3 own tokens, got 3"):
        encode(tokenizer, [("a", "b")], length=3)
    tokenizer.pad_token = None
    with pytest.raises(DataError, match="no token to pad with"):
        encode(tokenizer, [("a",)])


@pytest.mark.data
@needs_data
@pytest.mark.parametrize(("split", "count"), [("train", 67_349), ("dev", 872), ("test", 1_821)])
def test_sst2_is_whole(split: str, count: int) -> None:
    found = glue("sst2", split)
    assert len(found.texts) == len(found.labels) == count
    assert 0.45 < sum(found.labels) / count < 0.6
    assert all(len(text) == 1 and text[0].strip() for text in found.texts)
