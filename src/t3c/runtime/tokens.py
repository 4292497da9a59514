"""Text as a model's inputs, and ids as text, by the tokenizer.json of an artifact."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t3c.artifact.manifest import TOKENIZER, ModelEntry
from t3c.artifact.plain import LARGEST_PLAIN
from t3c.artifact.reader import Artifact
from t3c.engines.protocol import Array
from t3c.errors import ArtifactError, DataError, MissingExtraError
from t3c.runtime.remarks import Code, Remark
from t3c.spec import TextSpec

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
PADS = ("[PAD]", "<pad>", "<|pad|>")
UNFINISHED = "�"  # what a character is as long as some of its bytes are missing


class Tokenizer:
    """A tokenizer.json, read by the library `tokenizers`.

    >>> words = Tokenizer.of(rt.artifact)  # doctest: +SKIP
    >>> words.decode(words.encode("Once upon a time"))  # doctest: +SKIP
    """

    def __init__(self, raw: bytes, where: str | Path) -> None:
        try:
            import tokenizers
        except ImportError as missing:
            raise MissingExtraError("tokenizers", "text") from missing
        self.where = where
        try:
            self._rust = tokenizers.Tokenizer.from_str(raw.decode())
        except Exception as error:  # the library raises no other
            raise ArtifactError(f"{where}: not a tokenizer: {error}") from error
        padding = self._rust.padding
        pads = (self._rust.token_to_id(name) for name in PADS)
        self.pad = int(padding["pad_id"]) if padding else next((p for p in pads if p), 0)
        self._rust.no_padding()
        self._rust.no_truncation()

    @classmethod
    def of(cls, artifact: Artifact, file: Path | None = None) -> Tokenizer:
        """That of a file, or the artifact's own."""
        if file is not None:
            return cls(_read(file), file)
        if artifact.tokenizer is None:
            raise DataError(
                f"{artifact.path}: no tokenizer in it: give one, or export it with tokenizer=..."
            )
        return cls(artifact.tokenizer, artifact.path / TOKENIZER)

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """The ids of a text, with what the tokenizer puts around it; of the `most` first."""
        if not text.strip():
            raise DataError("the prompt is empty")
        if most is not None:
            self._rust.enable_truncation(most)
        try:
            ids = list(self._rust.encode(text).ids)
        except Exception as error:  # the library raises no other
            raise DataError(f"{self.where}: cannot encode the prompt: {error}") from error
        finally:
            self._rust.no_truncation()
        if not ids:
            raise DataError(f"{self.where}: has no token for any of the prompt")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special tokens."""
        return str(self._rust.decode(list(ids)))


class Continued:
    """The text of ids that come one by one, in pieces that later ids do not change."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer, self._ids = tokenizer, list(prompt)
        self._shown = self._begun = len(tokenizer.decode(prompt))
        self._whole = ""

    @property
    def text(self) -> str:
        """All of it, behind the prompt."""
        return self._whole[self._begun :]

    def add(self, token: int) -> str:
        """What one more id adds; nothing while a character is unfinished."""
        self._ids.append(token)
        # As a whole: whether a space comes before a word depends on what is before it.
        self._whole = self._tokenizer.decode(self._ids)
        return "" if self._whole.endswith(UNFINISHED) else self.rest()

    def rest(self) -> str:
        """What was not yet told."""
        piece = self._whole[self._shown :]
        self._shown = max(self._shown, len(self._whole))
        return piece


def prompt_ids(tokenizer: Tokenizer, text: str, spec: TextSpec | None) -> Array:
    """A prompt as ids (1, length), which begin as texts of the model do."""
    ids = tokenizer.encode(text)
    if spec is not None and spec.bos is not None and ids[0] != spec.bos:
        ids = [spec.bos, *ids]
    return np.array([ids], dtype=np.int64)


def text_inputs(
    tokenizer: Tokenizer, text: str, model: ModelEntry
) -> tuple[dict[str, Array], list[Remark]]:
    """Return a text as the inputs of a model that reads it at once, and warnings.

    It is padded or cut to the length that the model takes, where that is fixed.
    """
    names = _parts(model)
    ids, warnings = tokenizer.encode(text), list[Remark]()
    sizes = model.inputs[names.index(IDS)].shape[1:]
    length = next((size for size in sizes if isinstance(size, int)), len(ids))
    if len(ids) > length:
        warnings.append(Remark(Code.PROMPT_CUT, count=len(ids), limit=length))
        ids = tokenizer.encode(text, length)
    short = length - len(ids)
    if short and MASK not in names:
        warnings.append(Remark(Code.PADDING_READ, other=model.name, names=(MASK,), count=short))
    rows = {
        IDS: ids + [tokenizer.pad] * short,
        MASK: [1] * len(ids) + [0] * short,
        TYPES: [0] * length,
    }
    given = zip(model.inputs, names, strict=True)
    return {e.name: np.array([rows[name]], e.dtype) for e, name in given}, warnings


def _parts(model: ModelEntry) -> list[str]:
    """What of a text each input takes; a single one takes ids, whatever it is called."""
    names = [entry.name for entry in model.inputs]
    whole = all(entry.dtype in ("int32", "int64") for entry in model.inputs if entry.name != MASK)
    if whole and len(names) == 1:
        return [IDS]
    if not whole or IDS not in names or not {IDS, MASK, TYPES}.issuperset(names):
        raise DataError(f"{model.name} takes {', '.join(names)}: text gives {IDS}, {MASK}, {TYPES}")
    return names


def read_tokenizer(source: Any) -> tuple[bytes, TextSpec | None]:
    """The tokenizer.json of a file, a folder or a fast tokenizer of Hugging Face, and what that
    says of where texts begin and end."""
    if isinstance(source, str | Path):
        raw, where, spec = _read(Path(source)), str(source), None
    elif hasattr(source, "backend_tokenizer"):
        raw, where = source.backend_tokenizer.to_str().encode(), type(source).__name__
        bos, eos = (getattr(source, f"{kind}_token_id", None) for kind in ("bos", "eos"))
        spec = TextSpec(bos, () if eos is None else (eos,))
    else:
        raise DataError(f"{type(source).__name__}: not a path and not a fast tokenizer")
    if len(raw) > LARGEST_PLAIN:
        raise DataError(f"{where}: larger than {LARGEST_PLAIN} bytes")
    Tokenizer(raw, where)
    return raw, spec


def _read(path: Path) -> bytes:
    file = path / TOKENIZER if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{file}: no such file")
    return file.read_bytes()
