"""Data of a path for a model: folders of images, tables of texts, running text, arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from t3c.compression.data import MOST_BYTES, Data, Rows, gathered
from t3c.compression.pictures import (
    PICTURES,
    Preprocessing,
    listed,
    pictures_of,
    prepared,
    read_image,
)
from t3c.compression.source import Source, Task
from t3c.compression.tables import (
    LABELS,
    SUFFIXES,
    Table,
    class_numbers,
    column_of,
    read_table,
    read_text,
    table_of,
)
from t3c.errors import DataError
from t3c.nn.inputs import check_like
from t3c.runtime.reading import read_arrays

LENGTH = 128  # tokens of a text, unless told
PAIRED = ("token_type_ids",)  # which of two texts a token is of, where a model asks
SEPARATOR = "<|endoftext|>"
Watch = Callable[[str, int, int], object]


def read_data(
    source: Source,
    data: Any,
    *,
    length: int | None = None,
    watch: Watch = lambda what, done, total: None,
) -> Data:
    """Read what a user calls data, as inputs of the model, with labels where there are any."""
    if isinstance(data, str | Path):
        found = _of_path(source, Path(data), length, watch)
    else:
        given = gathered(data)
        found = given if isinstance(given, Data) else _of_rows(source, given, length)
    if not source.reads_text:
        check_like(found.inputs, source.example, "the data")
    return _checked_labels(source, found)


def _of_path(source: Source, path: Path, length: int | None, watch: Watch) -> Data:
    if path.suffix == ".npz":
        return read_npz(path)
    if path.is_dir():
        if source.pictures is None:
            raise DataError(
                f"{path} is a folder: {source.name} does not say how pictures are prepared: "
                "give an .npz with arrays x and y"
            )
        return read_pictures(source, path, watch)
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder")
    if not source.reads_text:
        raise DataError(f"{path}: {source.name} does not read text: give a folder or an .npz")
    if source.task is Task.LANGUAGE:
        return read_running(source, path, _length(source, length))
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: texts come as {', '.join(SUFFIXES)} with a header")
    return read_texts(source, path, _length(source, length))


def _of_rows(source: Source, rows: Rows, length: int | None) -> Data:
    """Read rows of a data set: texts, or pictures, beside a label if there is one."""
    pictures = [name for name, value in rows[0].items() if isinstance(value, Image.Image)]
    if not pictures:
        if not source.reads_text or source.task is Task.LANGUAGE:
            raise DataError(f"{source.name} does not read rows of texts: give batches of inputs")
        return _encoded(source, table_of(rows), _length(source, length))
    if source.pictures is None:
        raise DataError(f"{source.name} does not say how pictures are prepared: give tensors")
    how, name, label = source.pictures, pictures[0], column_of(list(rows[0]), LABELS)
    places = _places(len(rows), how)
    lines = tuple(f"the data, row {place}" for place in places)
    images = [
        prepared(rows[place][name], how, line) for place, line in zip(places, lines, strict=True)
    ]
    labels = None
    if label is not None:
        named = Table((), tuple(str(rows[place][label]) for place in places), lines)
        labels = torch.tensor(class_numbers(named, source.classes or ()))
    return Data(torch.stack(images), labels)


def _length(source: Source, asked: int | None) -> int:
    """Return how many tokens a text has: as asked, else 128 or the most that the model reads."""
    most = source.most_tokens
    if asked is not None and asked > most:
        raise DataError(f"{source.name} reads at most {most} tokens: give --length {most} or less")
    return asked or min(LENGTH, most)


def read_npz(path: Path) -> Data:
    """Read arrays: `x`, or arrays named as the model's inputs, and labels `y`."""
    arrays = read_arrays(path)
    labels = arrays.pop("y", arrays.pop("labels", None))
    if not arrays:
        raise DataError(f"{path}: no array of inputs: call it x, and the labels y")
    values = {name: torch.from_numpy(value) for name, value in arrays.items()}
    target = None if labels is None else torch.from_numpy(labels)
    inputs = next(iter(values.values())) if len(values) == 1 else values
    return Data(inputs, target)


def read_pictures(source: Source, folder: Path, watch: Watch) -> Data:
    """Read a folder of pictures: one folder a class, or flat and without labels."""
    assert source.pictures is not None
    entries = [entry for entry in listed(folder) if not entry.name.startswith(".")]
    folders = [entry for entry in entries if entry.is_dir()]
    if folders:
        numbers = _folder_classes(source, folder, [entry.name for entry in folders])
        found = [(p, numbers[f.name]) for f in folders for p in pictures_of(listed(f))]
        if len({number for _, number in found}) < 2:
            raise DataError(f"{folder} has pictures of fewer than two classes")
    else:
        found = [(path, -1) for path in pictures_of(entries)]
    if not found:
        raise DataError(f"{folder} has no pictures ({', '.join(sorted(PICTURES))})")
    height, width = source.pictures.size
    found = [found[place] for place in _places(len(found), source.pictures)]
    images = torch.empty(len(found), 3, height, width)
    read = partial(read_image, how=source.pictures)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes without holding the lock
        for place, image in enumerate(pool.map(read, (path for path, _ in found))):
            if not place % 32:
                watch("reading pictures", place, len(found))
            images[place] = image
    labels = torch.tensor([number for _, number in found])
    return Data(images, labels if folders else None)


def _places(count: int, how: Preprocessing) -> list[int]:
    """Return the places of all pictures, or of as many, drawn at random, as are held at once."""
    height, width = how.size
    most = MOST_BYTES // (4 * 3 * height * width)
    if count <= most:
        return list(range(count))
    return sorted(np.random.default_rng(0).permutation(count)[:most].tolist())


def _folder_classes(source: Source, folder: Path, names: Sequence[str]) -> dict[str, int]:
    """Return the class of each folder's name: the model's own name of it, or its number."""
    classes = source.classes or ()
    numbers = {name.casefold(): index for index, name in enumerate(classes)}
    found = {name: numbers.get(name.casefold()) for name in names}
    if None in found.values() and all(n.isdecimal() and int(n) < len(classes) for n in names):
        found = {name: int(name) for name in names}
    unknown = [name for name, number in found.items() if number is None]
    if unknown and len(names) == len(classes):
        return {name: index for index, name in enumerate(sorted(names))}
    if unknown:
        known = ", ".join(classes[:3])
        raise DataError(
            f"{folder / unknown[0]}: the model has no class {unknown[0]!r}: it has {known}, ..."
        )
    return {name: number for name, number in found.items() if number is not None}


def read_texts(source: Source, path: Path, length: int) -> Data:
    """Read a table of texts, filled up to `length` tokens or cut to it."""
    return _encoded(source, read_table(path), length)


def _encoded(source: Source, table: Table, length: int) -> Data:
    tokenizer = source.tokenizer
    if tokenizer.pad_token is None:
        raise DataError(f"{source.name}: its tokenizer has no token to pad with")
    columns = [list(column) for column in zip(*table.texts, strict=True)]
    encoded = tokenizer(
        *columns, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
    )
    assert isinstance(source.example, Mapping)
    takes = {*source.example, *(PAIRED if len(columns) == 2 else ())}
    inputs = {name: encoded[name] for name in encoded if name in takes}
    labels = None
    if table.labels is not None and source.classes is not None:
        labels = torch.tensor(class_numbers(table, source.classes))
    return Data(inputs, labels)


def read_running(source: Source, path: Path, length: int) -> Data:
    """Read a running text as windows (n, length) of consecutive tokens, each begun by BOS."""
    tokenizer, text = source.tokenizer, read_text(path)
    bos = tokenizer.bos_token_id
    if SEPARATOR in text:
        text = text.replace(SEPARATOR, tokenizer.bos_token or "\n")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    room = length - (bos is not None)
    windows = len(ids) // room
    if not windows:
        raise DataError(f"{path} has {len(ids)} tokens: fewer than one window of {length}")
    most = MOST_BYTES // (8 * length)
    rows = ids[: windows * room].view(windows, room)[:most]
    if bos is not None:
        rows = torch.cat([torch.full((len(rows), 1), bos), rows], dim=1)
    return Data({"input_ids": rows}, None)


def _checked_labels(source: Source, data: Data) -> Data:
    """Refuse labels the model has no class for; a language model predicts its own inputs."""
    labels = data.labels
    if labels is None or source.task in (Task.LANGUAGE, Task.EMBEDDING):
        return data
    if source.classes is not None:
        if labels.dim() != 1 or labels.is_floating_point():
            raise DataError(f"labels are one class number a sample, got {tuple(labels.shape)}")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= len(source.classes):
            raise DataError(
                f"labels are the model's classes, 0 to {len(source.classes) - 1}, "
                f"got {low} to {high}"
            )
    return data
