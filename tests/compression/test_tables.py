"""Tables of texts: which column is what, labels by name or number, errors that name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from t3c.compression.tables import class_numbers, read_table
from t3c.errors import DataError


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.tsv", 'label\tcontent\n1\ta "good" film\n0\tbad\n'),
        ("a.csv", 'content,label\n"a ""good"" film",1\nbad,0\n'),
        ("a.jsonl", '{"text": "a \\"good\\" film", "label": 1}\n\n{"text": "bad", "label": 0}\n'),
        ("a.csv", 'id,review,Label\n7,"a ""good"" film",positive\n8,bad,NEGATIVE\n'),
    ],
)
def test_the_text_is_the_column_that_is_not_the_label(tmp_path: Path, name: str, text: str) -> None:
    table = read_table(written(tmp_path, name, text))
    assert table.texts == (('a "good" film',), ("bad",))
    assert class_numbers(table, ("negative", "positive")) == [1, 0]


def test_pairs_and_tables_without_labels(tmp_path: Path) -> None:
    pairs = read_table(written(tmp_path, "a.tsv", "question1\tquestion2\tlabel\na\tb\t0\n"))
    assert pairs.texts == (("a", "b"),)
    assert read_table(written(tmp_path, "b.csv", "text\nhello\n")).labels is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "text,label\na,0\nb\n", r"a.csv, line 3: 1 columns, the header has 2"),
        ("a.csv", "text,label\na,0\n ,1\n", r"a.csv, line 3: the text is empty"),
        ("a.csv", "a,b,c\n1,2,3\n", r"which column is the text\? it has a, b, c"),
        ("a.csv", "text,label\n", r"a.csv has no rows"),
        ("a.csv", "", r"a.csv is empty"),
        ("a.jsonl", '{"text": "a"}\n[1]\n', r"a.jsonl, line 2: not a JSON object"),
        ("a.jsonl", '{"text": "a"}\n{"text"\n', r"a.jsonl, line 2: not JSON"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "b"}\n', r"line 2: there is no label"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_table(written(tmp_path, name, text))
    assert "\n" not in str(caught.value)


def test_a_label_that_the_model_does_not_have(tmp_path: Path) -> None:
    table = read_table(written(tmp_path, "a.csv", "text,label\na,good\nb,ugly\n"))
    with pytest.raises(DataError, match=r"line 3: the model has no class 'ugly': it has bad, good"):
        class_numbers(table, ("bad", "good"))
    numbers = read_table(written(tmp_path, "b.csv", "text,label\na,2\n"))
    with pytest.raises(DataError, match="no class '2'"):
        class_numbers(numbers, ("bad", "good"))
