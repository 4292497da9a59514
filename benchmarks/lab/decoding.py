"""Language models side by side: perplexity and drift on text, and what writing takes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lab.perplexity import Perplexity, Window, sliding_windows, token_losses
from lab.variants import Row, Variant, Watch, costs
from t3c.certify.drift import relative_drift
from t3c.engines import Session
from t3c.engines.decode import Generation
from t3c.engines.protocol import Array
from t3c.measure.latency import quantiles
from t3c.spec import Latency
from t3c.zoo.views import Z95

BESIDE = "ptq8w"  # weights in 8 bits, activations float: what decoders are compressed to
AT_ONCE = 4  # windows that are read together


@dataclass(frozen=True)
class Reading:
    """What one variant made of a text: of every token the loss and whether it was the likeliest
    (tokens,), and the drift of every window (n,)."""

    losses: Array
    right: Array
    drifts: Array


@dataclass(frozen=True)
class ComparedText:
    """All variants on the same text; `times` are of one token, `first` of a prompt and its token.

    Tokens of one window are `windows` (tokens,) alike.
    """

    variants: Mapping[str, Variant]
    readings: Mapping[str, Reading]
    windows: Array
    times: Mapping[str, Latency]
    first: Mapping[str, Latency]

    def right(self, name: str) -> Array:
        """Of which tokens (n,) a variant had thought before all others."""
        return self.readings[name].right

    def drifts(self, name: str) -> Array:
        """The drift (n,) of each window from the original's logits, relative to these."""
        return self.readings[name].drifts

    def rows(self) -> list[Row]:
        """One row for each variant: perplexity beside full, time and size beside 8-bit weights."""
        return [self._row(name) for name in self.variants]

    def _row(self, name: str) -> Row:
        mine, full = self.readings[name], self.readings["full"]
        low, middle, high = ratio_interval(mine.losses - full.losses, self.windows)
        found = costs(self, name, BESIDE)
        return {
            "name": name, "method": self.variants[name].method,
            "perplexity": Perplexity(mine.losses).value, "tokens": len(mine.losses),
            "over": middle, "over_low": low, "over_high": high,
            "accuracy": float(mine.right.mean()), "samples": len(mine.drifts),
            "drift": float(mine.drifts.mean()), **found,
            "tokens_per_second": 1e3 / found["p50"],
            f"speed_to_{BESIDE}": 1 / found[f"to_{BESIDE}"],
            "first_ms": self.first[name].p50, "first_p90": self.first[name].p90,
        }  # fmt: skip


def ratio_interval(gaps: Array, groups: Array) -> tuple[float, float, float]:
    """By how much a perplexity is over another, as a share, with its 95% interval around it.

    `gaps` (n,) are differences of losses; those of one of `groups` (n,) are alike, so that the
    interval is that of a mean over groups.
    """
    count, middle = len(gaps), float(gaps.mean())
    _, owner = np.unique(groups, return_inverse=True)
    sums = np.bincount(owner, weights=gaps - middle)
    k = len(sums)
    error = math.sqrt(k / (k - 1) * float((sums**2).sum())) / count if k > 1 else math.inf
    low, high = (math.expm1(middle + sign * Z95 * error) for sign in (-1, 1))
    return low, math.expm1(middle), high


def time_writing(
    sessions: Mapping[str, Session], prompt: Array, tokens: int, rounds: int, watch: Watch
) -> tuple[dict[str, Latency], dict[str, Latency]]:
    """What a token takes behind a prompt (1, length), and the first one with the prompt.

    Every round each session reads the prompt and writes so many tokens more, with what it
    remembers, in turns; one more round before is not counted.
    """
    first: dict[str, list[float]] = {name: [] for name in sessions}
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for index in range(rounds + 1):
        watch("writing in turns", index, rounds + 1)
        for name, session in sessions.items():
            generation, marks = Generation(prompt), [time.perf_counter()]
            for _ in range(tokens + 1):
                generation.step(session.run)
                marks.append(time.perf_counter())
            if index:
                taken = (1e3 * np.diff(marks)).tolist()
                first[name].append(taken[0])
                times[name] += taken[1:]
    blocks = np.repeat(np.arange(rounds), tokens).tolist()
    return (
        {name: quantiles(found, blocks=blocks) for name, found in times.items()},
        {name: quantiles(found) for name, found in first.items()},
    )


def compare_text(
    variants: Mapping[str, Variant],
    ids: Array,
    *,
    length: int,
    bos: int,
    rounds: int,
    watch: Watch,
) -> ComparedText:
    """Read a text (tokens,) with every variant, by windows that overlap by half, and time them all.

    Times are taken first: half a window is read, and as many tokens are written. Drift is of
    windows that share no text.
    """
    windows = sliding_windows(ids, length, length // 2, bos)
    windows = [window for window in windows if len(window.ids) == length]
    sessions = {name: variant.session for name, variant in variants.items()}
    half = length // 2
    times, first = time_writing(sessions, windows[0].ids[None, :half], half, rounds, watch)
    parts: dict[str, list[Reading]] = {name: [] for name in sessions}
    for done, batch in _batches(windows):
        watch("reading the text", done, len(windows))
        given = np.stack([window.ids for window in batch])
        wanted = sessions["full"].run([given])[0]
        for name, session in sessions.items():
            logits = wanted if name == "full" else session.run([given])[0]
            parts[name].append(_read(batch, done, given, logits, wanted))
    scored = [len(window.ids) - window.first for window in windows]
    return ComparedText(
        variants, {name: _joined(found) for name, found in parts.items()},
        np.repeat(np.arange(len(windows)), scored), times, first,
    )  # fmt: skip


def _batches(windows: list[Window]) -> Iterator[tuple[int, list[Window]]]:
    for start in range(0, len(windows), AT_ONCE):
        yield start, windows[start : start + AT_ONCE]


def _read(batch: list[Window], index: int, given: Array, logits: Array, wanted: Array) -> Reading:
    """What logits (n, t, v) of windows make of their tokens; every other window drifts."""
    losses, right = token_losses(logits, given), logits[:, :-1].argmax(-1) == given[:, 1:]
    apart = [row for row in range(len(batch)) if (index + row) % 2 == 0]
    firsts = [window.first - 1 for window in batch]
    return Reading(
        np.concatenate([row[f:] for row, f in zip(losses, firsts, strict=True)]),
        np.concatenate([row[f:] for row, f in zip(right, firsts, strict=True)]),
        relative_drift(logits[apart], wanted[apart]),
    )


def _joined(parts: list[Reading]) -> Reading:
    columns = zip(*((part.losses, part.right, part.drifts) for part in parts), strict=True)
    return Reading(*(np.concatenate(column) for column in columns))
