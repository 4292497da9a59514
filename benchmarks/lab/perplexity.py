"""Perplexity of a language model by sliding windows, in which every token counts once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from t3c.errors import DataError, SpecError

Ids = npt.NDArray[np.int64]
Losses = npt.NDArray[np.float64]
Run = Callable[[Ids], npt.ArrayLike]


@dataclass(frozen=True, eq=False)
class Window:
    """Tokens (length,) given to the model at once; those before `first` are context only."""

    ids: Ids
    first: int


@dataclass(frozen=True, eq=False)
class Perplexity:
    """Negative log likelihoods (tokens,) of a text in its order, in nats."""

    losses: Losses

    @property
    def tokens(self) -> int:
        """How many tokens were scored."""
        return len(self.losses)

    @property
    def value(self) -> float:
        """The exponential of the mean loss."""
        with np.errstate(over="ignore"):
            return float(np.exp(self.losses.mean()))


def sliding_windows(
    ids: npt.ArrayLike, length: int, stride: int, bos: int | None = None
) -> list[Window]:
    """Windows of `length` tokens, each `stride` further into the text than the one before.

    With `bos` a window is that token and length - 1 of the text, and every token of the text is
    scored; without it all but the first, which nothing precedes. The last window may be shorter.
    """
    text = _text(ids)
    if not 1 <= stride < length:
        raise SpecError(f"stride must be from 1 to under the length {length}, got {stride}")
    opening = np.array([] if bos is None else [bos], dtype=np.int64)
    room = length - len(opening)
    windows: list[Window] = []
    start, scored = 0, 1 - len(opening)
    while scored < len(text):
        piece = text[start : start + room]
        first = len(opening) + scored - start
        windows.append(Window(np.concatenate([opening, piece]), first))
        start, scored = start + stride, start + len(piece)
    return windows


def token_losses(logits: npt.ArrayLike, ids: npt.ArrayLike) -> Losses:
    """Negative log likelihoods (n, t-1) of ids (n, t) under logits (n, t, v), but the first's."""
    scores, tokens = np.asarray(logits), np.asarray(ids)
    if scores.ndim != 3 or scores.shape[:2] != tokens.shape or 0 in scores.shape:
        raise DataError(f"logits are {scores.shape}, not (n, t, v) for ids {tokens.shape}")
    words = scores.shape[2]
    if tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= words:
        raise DataError(f"ids must be integers from 0 to {words - 1}, as the logits are of {words}")
    losses = np.empty((tokens.shape[0], tokens.shape[1] - 1))
    for row, (score, token) in enumerate(zip(scores, tokens, strict=True)):
        losses[row] = _losses(score[:-1], token[1:])
    return losses


def perplexity(
    run: Run, ids: npt.ArrayLike, *, length: int, stride: int, bos: int | None = None,
    batch: int = 8,
) -> Perplexity:  # fmt: skip
    """The perplexity of a text (tokens,) for a model that makes ids (n, t) logits (n, t, v).

    Each token is scored in the first window that holds it, as `sliding_windows` lays them.
    """
    if batch < 1:
        raise SpecError(f"batch must be at least 1, got {batch}")
    parts: list[Losses] = []
    for windows in _batches(sliding_windows(ids, length, stride, bos), batch):
        given = np.stack([window.ids for window in windows])
        losses = token_losses(run(given), given)
        parts += [row[w.first - 1 :] for w, row in zip(windows, losses, strict=True)]
    return Perplexity(np.concatenate(parts))


def _text(ids: npt.ArrayLike) -> Ids:
    text = np.asarray(ids)
    if text.ndim != 1 or (text.size and text.dtype.kind not in "iu"):
        raise DataError(f"ids must be integers (tokens,), got {text.dtype} {text.shape}")
    if len(text) < 2:
        raise DataError(f"a text is at least 2 tokens, got {len(text)}")
    return text.astype(np.int64)


def _losses(scores: npt.NDArray[np.floating], targets: Ids) -> Losses:
    """One sample's losses (t,): a whole batch in float64 would take too much memory."""
    wide = scores.astype(np.float64)
    highest = wide.max(axis=1, keepdims=True)
    if not np.isfinite(highest).all():
        raise DataError("logits hold NaN or infinite values")
    wide -= highest
    chosen = wide[np.arange(len(targets)), targets]
    return np.asarray(np.log(np.exp(wide, out=wide).sum(axis=1)) - chosen)


def _batches(windows: list[Window], size: int) -> Iterator[list[Window]]:
    """Windows of one length each, in order: a shorter last one comes alone."""
    for _, alike in groupby(windows, key=lambda window: len(window.ids)):
        group = list(alike)
        for start in range(0, len(group), size):
            yield group[start : start + size]
