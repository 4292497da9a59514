"""What a spec of results names, read as `t3c compress` reads it: a model, its data, a test set.

A model is a network of `benchmarks/base.py` by its name, or what `t3c compress` takes: a Hugging
Face folder, or `file.py:function`. Data are `cifar10/train` and `cifar10/test`, or a path. Paths
are looked for in T3C_DATA first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from lab.zoo.bases import NETWORKS, SENTENCES, base_network
from t3c.compression.data import Data, Parts, split
from t3c.compression.reading import read_data
from t3c.compression.source import Source, Task, open_source
from t3c.engines.protocol import Array
from t3c.errors import DataError
from t3c.nn.inputs import tensors
from t3c.zoo.cifar10 import cifar10
from t3c.zoo.local import data_root

TOKENS = 10_000  # of a text that is tested on
# The first tokens of the text were tested on before defaults were settled: those after them count.
SEEN = 10_000

Watch = Callable[[str, int, int], object]


@dataclass(frozen=True)
class Text:
    """A running text (tokens,), read in windows of `length` tokens of which `bos` is the first."""

    ids: Array
    length: int
    bos: int


@dataclass(frozen=True)
class Subject:
    """A model with the data it is compressed with, and the set it is tested on.

    `given` is what `t3c.compress` is called with; `source` is the same, read, and stays as it is.
    """

    given: str | nn.Module
    source: Source
    data: Data
    test: Data

    def fresh(self) -> str | nn.Module:
        """Return the model to compress: what compresses it makes it elastic in place."""
        return self.given if isinstance(self.given, str) else copy.deepcopy(self.given)

    @cached_property
    def parts(self) -> Parts:
        """Return the parts that the door makes of the data: baselines get the same ones."""
        return split(self.data, self.test)

    @property
    def text(self) -> Text | None:
        """Return the text a language model is tested on; None of other models."""
        if self.source.task is not Task.LANGUAGE:
            return None
        bos = self.source.tokenizer.bos_token_id
        if bos is None:
            raise DataError(f"{self.source.name}: its tokenizer has no BOS to begin a window with")
        windows = tensors(self.test.inputs)[0]
        return Text(windows[:, 1:].flatten()[:TOKENS].numpy(), windows.shape[1], bos)

    @property
    def vocabulary(self) -> int | None:
        """Return how many tokens the table of a text model has; None of other models."""
        if not self.source.reads_text:
            return None
        tables = [m for m in self.source.model.modules() if isinstance(m, nn.Embedding)]
        return max((table.num_embeddings for table in tables), default=None)


def open_subject(
    model: str,
    data: str,
    test: str,
    length: int | None = None,
    watch: Watch = lambda what, done, total: None,
) -> Subject:
    """Read what a spec names."""
    given: str | nn.Module
    if model in NETWORKS and model not in SENTENCES:
        given = base_network(model)
        source = open_source(given, torch.zeros(2, 3, 32, 32))
    else:
        given = _located(model)
        source = open_source(given)
    held = _read(source, test, length, watch)
    if source.task is Task.LANGUAGE:
        held = _unseen(held, test)
    return Subject(given, source, _read(source, data, length, watch), held)


def _read(source: Source, name: str, length: int | None, watch: Watch) -> Data:
    if name == "cifar10/train":
        return Data(*cifar10("train"))
    if name == "cifar10/test":
        return Data(*cifar10("test"))
    return read_data(source, _located(name), length=length, watch=watch)


def _located(name: str) -> str:
    """Return a path in T3C_DATA, or the path as it is; of `file.py:function` the function stays."""
    path, colon, function = name.rpartition(":") if ".py:" in name else (name, "", "")
    if Path(path).exists():
        return name
    found = data_root() / path
    if not found.exists():
        raise DataError(f"{path} is neither here nor in T3C_DATA, {data_root()}")
    return f"{found}{colon}{function}"


def _unseen(windows: Data, name: str) -> Data:
    """Return the windows of a text behind the tokens that were tested on before."""
    room = tensors(windows.inputs)[0].shape[1] - 1
    start, count = -(-SEEN // room), -(-TOKENS // room)
    if len(windows) < start + count:
        raise DataError(
            f"{name} has {len(windows) * room:,} tokens: {TOKENS:,} behind the first {SEEN:,} "
            "are tested on"
        )
    return windows.at(slice(start, start + count))
