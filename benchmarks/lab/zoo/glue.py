"""Sentences to classify: of GLUE, SST-2, MNLI and QQP, and of files of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from t3c.compression.tables import read_text
from t3c.errors import DataError
from t3c.zoo.local import data_root

SENTENCE, LABEL = ("sentence", "content", "text"), "label"  # columns of a file of one's own
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True)
class Sentences:
    """Texts of one or two sentences each, their labels and the names of the classes."""

    texts: tuple[tuple[str, ...], ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """How a task's files are laid out: the names its columns may have, and its labels in them."""

    folders: tuple[str, ...]
    splits: tuple[str, ...]
    texts: tuple[tuple[str, ...], ...]
    label: str
    marks: tuple[str, ...]
    classes: tuple[str, ...]


ENTAILMENT = ("entailment", "neutral", "contradiction")
TASKS = {
    "sst2": Task(
        ("sst2", "glue/SST-2"), ("train", "dev", "test"), (("sentence", "content"),),
        "label", ("0", "1"), ("negative", "positive"),
    ),
    "mnli": Task(
        ("glue/MNLI",), ("train", "dev_matched", "dev_mismatched"),
        (("sentence1",), ("sentence2",)), "gold_label", ENTAILMENT, ENTAILMENT,
    ),
    "qqp": Task(
        ("glue/QQP",), ("train", "dev"), (("question1",), ("question2",)),
        "is_duplicate", ("0", "1"), ("not_duplicate", "duplicate"),
    ),
}  # fmt: skip


def glue(task: str, split: str) -> Sentences:
    """One split of a task, from T3C's or GLUE's own files in the local data."""
    known = TASKS.get(task)
    if known is None:
        raise DataError(f"there is no task {task!r}: there are {', '.join(TASKS)}")
    if split not in known.splits:
        raise DataError(f"{task} has no split {split!r}: it has {', '.join(known.splits)}")
    path = first_file([f"{folder}/{split}.tsv" for folder in known.folders])
    texts, marks = _columns(path, known.texts, known.label, known.marks)
    return Sentences(texts, tuple(map(known.marks.index, marks)), known.classes)


def read_sentences(path: str | Path, classes: Sequence[str]) -> Sentences:
    """A TSV of one's own: a header, a column sentence, content or text, and a column label.

    Labels are names of the classes, or their numbers from 0 where no name is a number itself.

    >>> read_sentences("reviews.tsv", ["bad", "good"])  # doctest: +SKIP
    """
    names = tuple(classes)
    numbers = () if any(map(str.isdecimal, names)) else tuple(map(str, range(len(names))))
    known = (*names, *numbers)
    texts, marks = _columns(Path(path), (SENTENCE,), LABEL, known)
    return Sentences(texts, tuple(known.index(mark) % len(names) for mark in marks), names)


def encode(
    tokenizer: Any, texts: Sequence[Sequence[str]], length: int | None = None
) -> dict[str, Tensor]:
    """Ids and mask (n, t), and which sentence a token is of where the tokenizer tells them apart.

    t is `length`, longer texts being cut, or that of the longest text.
    """
    sizes = {len(text) for text in texts}
    if sizes not in ({1}, {2}):
        raise DataError(f"texts are all of one or all of two sentences, got {sorted(sizes)}")
    if tokenizer.pad_token is None:
        raise DataError("the tokenizer has no token to pad with")
    own = tokenizer.num_special_tokens_to_add(pair=sizes == {2})
    if length is not None and length <= own:
        raise DataError(f"length must be over the tokenizer's {own} own tokens, got {length}")
    encoded = tokenizer(
        *(list(column) for column in zip(*texts, strict=True)),
        padding="longest" if length is None else "max_length",
        truncation=length is not None, max_length=length, return_tensors="pt",
    )  # fmt: skip
    return {name: encoded[name] for name in INPUTS if name in encoded}


def _columns(
    path: Path, texts: tuple[tuple[str, ...], ...], label: str, marks: tuple[str, ...]
) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Texts and label of every row; quotes are part of the text in these files."""
    rows = list(_rows(path, texts, label, marks))
    if not rows:
        raise DataError(f"{path} has a header and no rows")
    found, labels = zip(*rows, strict=True)
    return found, labels


def _rows(
    path: Path, texts: tuple[tuple[str, ...], ...], label: str, marks: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    header, *lines = (line.removesuffix("\r") for line in read_text(path).split("\n"))
    names = header.split("\t")
    columns = [_column(names, options, path) for options in texts]
    mark = _column(names, (label,), path)
    while lines and not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=2):
        cells = line.split("\t")
        if len(cells) != len(names):
            raise DataError(
                f"{path}, line {number}: {len(cells)} columns, the header has {len(names)}"
            )
        if cells[mark] not in marks:
            wanted = ", ".join(marks)
            raise DataError(
                f"{path}, line {number}: {label} is {cells[mark]!r}, not one of {wanted}"
            )
        yield tuple(cells[column] for column in columns), cells[mark]


def _column(names: list[str], options: tuple[str, ...], path: Path) -> int:
    for option in options:
        if option in names:
            return names.index(option)
    raise DataError(f"{path} has no column {' or '.join(options)}: it has {', '.join(names)}")


def first_file(names: list[str]) -> Path:
    """Return the first of these files that the local data holds."""
    root = data_root()
    for name in names:
        if (root / name).is_file():
            return root / name
    raise DataError(f"T3C_DATA, {root}, does not hold {' or '.join(names)}")
