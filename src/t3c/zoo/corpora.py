"""Running texts to measure language models on: WikiText-2, WikiText-103 and TinyStories."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from t3c.errors import DataError
from t3c.zoo.local import data_root

SEPARATOR = "<|endoftext|>"


@dataclass(frozen=True)
class Corpus:
    """The splits of a corpus and where its files may be, the likeliest place first."""

    splits: tuple[str, ...]
    places: tuple[str, ...]


def _wikitext(number: int) -> Corpus:
    names = (f"wikitext-{number}/wiki.{{}}.{kind}" for kind in ("raw", "tokens"))
    return Corpus(("train", "valid", "test"), (f"text/wikitext{number}-{{}}.txt", *names))


CORPORA = {
    "wikitext-2": _wikitext(2),
    "wikitext-103": _wikitext(103),
    "tinystories": Corpus(("train", "valid"), ("text/tinystories-{}.txt",)),
}


def corpus(name: str, split: str) -> str:
    """The text of one split, as it is in its file of the local data.

    WikiText's files in `text/` and its `.tokens` have rare words as `<unk>`, its `.raw` have them
    as written: perplexities on one are not those on the other.
    """
    known = CORPORA.get(name)
    if known is None:
        raise DataError(f"there is no corpus {name!r}: there are {', '.join(CORPORA)}")
    if split not in known.splits:
        raise DataError(f"{name} has no split {split!r}: it has {', '.join(known.splits)}")
    return read_text(first_file([place.format(split) for place in known.places]))


def corpus_tokens(
    tokenizer: Any, text: str, *, between: str | None = None
) -> npt.NDArray[np.int64]:
    """Ids (tokens,) of a text, without the special tokens a tokenizer adds around it.

    Where `<|endoftext|>` parts it, `between` is read instead of it and of the space around it; by
    default the tokenizer's BOS and a space, as the models of TinyStories were trained.
    """
    if SEPARATOR in text:
        if between is None and not tokenizer.bos_token:
            raise DataError(f"the tokenizer has no BOS to take the place of {SEPARATOR}")
        put = f"{tokenizer.bos_token} " if between is None else between
        text = re.sub(rf"\s*{re.escape(SEPARATOR)}\s*", lambda _: put, text.strip())
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise DataError("the text has no tokens")
    return np.asarray(ids, dtype=np.int64)


def first_file(names: list[str]) -> Path:
    """The first of these files that the local data holds."""
    root = data_root()
    for name in names:
        if (root / name).is_file():
            return root / name
    raise DataError(f"T3C_DATA, {root}, does not hold {' or '.join(names)}")


def read_text(path: Path) -> str:
    """A file's text with its line ends as they are; never an empty one."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 text: {error.reason} at {error.start}") from error
    if not text.strip():
        raise DataError(f"{path} is empty")
    return text
