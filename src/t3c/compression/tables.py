"""Texts and labels from CSV, TSV and JSONL files, with errors that name the line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from t3c.errors import DataError

LABELS = ("label", "labels", "fine_label", "target", "class", "category", "sentiment", "gold_label")
TEXTS = ("text", "sentence", "content", "review", "body", "message")
PAIRS = (
    ("sentence1", "sentence2"), ("question1", "question2"), ("premise", "hypothesis"),
    ("question", "sentence"), ("query", "passage"),
)  # fmt: skip
SUFFIXES = (".csv", ".tsv", ".jsonl")


@dataclass(frozen=True)
class Table:
    """Rows of one or two texts each, and their labels as written, where there is such a column."""

    texts: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...] | None
    lines: tuple[str, ...]  # where each row stands, for errors


def read_table(path: Path) -> Table:
    """Read a table with a header: a label column by its usual names, the text is what is left."""
    rows = [(f"{path}, line {number}", row) for number, row in _rows(path)]
    if not rows:
        raise DataError(f"{path} has no rows: give a header and a row for each text")
    return _table(rows, str(path))


def table_of(rows: Sequence[Mapping[str, object]]) -> Table:
    """Return the table of a data set's rows, as Hugging Face's data sets yield them."""
    return _table([(f"the data, row {place}", row) for place, row in enumerate(rows)], "the data")


def _table(rows: Sequence[tuple[str, Mapping[str, object]]], whole: str) -> Table:
    names = list(rows[0][1])
    label = column_of(names, LABELS)
    texts = _text_columns(whole, names, label)
    found = [(line, tuple(_cell(line, row, name) for name in texts)) for line, row in rows]
    empty = next((line for line, cells in found if not all(cell.strip() for cell in cells)), "")
    if empty:
        raise DataError(f"{empty}: the text is empty")
    labels = None
    if label is not None:
        labels = tuple(_cell(line, row, label) for line, row in rows)
    lines = tuple(line for line, _ in rows)
    return Table(tuple(cells for _, cells in found), labels, lines)


def class_numbers(table: Table, classes: Sequence[str]) -> list[int]:
    """Return each row's class: labels are names of classes, or their numbers from 0."""
    assert table.labels is not None
    numbers = {name.casefold(): index for index, name in enumerate(classes)}
    if not any(name.isdecimal() for name in classes):
        numbers |= {str(index): index for index in range(len(classes))}
    found = []
    for line, label in zip(table.lines, table.labels, strict=True):
        number = numbers.get(label.strip().casefold())
        if number is None:
            known = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
            raise DataError(f"{line}: the model has no class {label!r}: it has {known}")
        found.append(number)
    return found


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    text = read_text(path)
    if path.suffix == ".jsonl":
        yield from _json_rows(path, text)
        return
    # Quotes are part of the text in the TSV files of GLUE and its like.
    lines = io.StringIO(text, newline="")
    if path.suffix == ".tsv":
        reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        reader = csv.reader(lines)
    header = next(reader, [])
    for cells in reader:
        if not cells:
            continue
        if len(cells) != len(header):
            raise DataError(
                f"{path}, line {reader.line_num}: {len(cells)} columns, "
                f"the header has {len(header)}"
            )
        yield reader.line_num, dict(zip(header, cells, strict=True))


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: not a JSON object")
        yield number, row


def column_of(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    """Return the first name that is one of those wanted, whatever its case."""
    folded = {name.strip().casefold(): name for name in names}
    return next((folded[name] for name in wanted if name in folded), None)


def _text_columns(whole: str, names: Sequence[str], label: str | None) -> tuple[str, ...]:
    rest = [name for name in names if name != label]
    for pair in PAIRS:
        columns = tuple(column_of(rest, (name,)) for name in pair)
        if None not in columns:
            return tuple(column for column in columns if column is not None)
    if len(rest) == 1:
        return (rest[0],)
    named = column_of(rest, TEXTS)
    if named is None:
        raise DataError(
            f"{whole}: which column is the text? it has {', '.join(names)}: "
            "call it text, and the one of the classes label"
        )
    return (named,)


def _cell(line: str, row: Mapping[str, object], name: str) -> str:
    value = row.get(name)
    if value is None:
        raise DataError(f"{line}: there is no {name}")
    return str(value)


def read_text(path: Path) -> str:
    """Return a file's text with its line ends as they are; refuse an empty one."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 text: {error.reason} at {error.start}") from error
    if not text.strip():
        raise DataError(f"{path} is empty")
    return text
