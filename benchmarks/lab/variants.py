"""Everything that answers, side by side: profiles, baselines and the original, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from t3c.certify.drift import relative_drift
from t3c.device.measured import time_sessions
from t3c.engines import Session
from t3c.engines.protocol import Array
from t3c.spec import Latency
from t3c.zoo.views import paired_difference

MB = 1e6
BATCH = 50  # test samples that are answered together: an answer does not depend on the others
Row = dict[str, Any]
Watch = Callable[[str, int, int], object]


@dataclass(frozen=True)
class Variant:
    """Something that answers: how it was made, and what it takes.

    `epsilon` bounds its drift where that is certified; `minutes` and `steps` are of training. Of
    `size_bytes`, `table_bytes` are those of the vocabulary's table.
    """

    name: str
    method: str
    session: Session
    size_bytes: int
    minutes: float = 0.0
    steps: int = 0
    epsilon: float | None = None
    table_bytes: int = 0

    @property
    def block_bytes(self) -> int:
        """What all but the vocabulary's table takes."""
        return self.size_bytes - self.table_bytes


class Comparison(Protocol):
    """All variants on the same test samples, with times taken in turns."""

    @property
    def variants(self) -> Mapping[str, Variant]: ...

    @property
    def times(self) -> Mapping[str, Latency]: ...

    def right(self, name: str) -> Array:
        """Which answers (n,) of a variant are right."""
        ...

    def drifts(self, name: str) -> Array:
        """The drift (n,) of each sample from the original's answer, relative to it."""
        ...

    def rows(self) -> list[Row]:
        """One row for each variant: what its answers are worth, and what they take."""
        ...


@dataclass(frozen=True)
class Compared:
    """All variants on the same labelled samples: outputs, what is right, times taken in turns."""

    variants: Mapping[str, Variant]
    outputs: Mapping[str, Array]
    labels: Array
    times: Mapping[str, Latency]

    def right(self, name: str) -> Array:
        """Which samples (n,) a variant gets right."""
        return np.asarray(self.outputs[name].argmax(axis=-1) == self.labels)

    def drifts(self, name: str) -> Array:
        """The drift (n,) of each sample from the original's answer, relative to it."""
        return relative_drift(self.outputs[name], self.outputs["full"])

    def rows(self) -> list[Row]:
        """One row for each variant: accuracy beside full, time and size beside ptq8."""
        full, rows = self.right("full"), []
        for name, variant in self.variants.items():
            mine = self.right(name)
            gap = paired_difference(full, mine)
            rows.append(
                {
                    "name": name, "method": variant.method, "accuracy": float(mine.mean()),
                    "samples": len(full), "drop": gap.difference, "drop_low": gap.low,
                    "drop_high": gap.high, "drift": float(self.drifts(name).mean()),
                    **costs(self, name, "ptq8"),
                }
            )  # fmt: skip
        return rows


def costs(compared: Comparison, name: str, beside: str) -> Row:
    """What a variant takes, beside another."""
    variant, other = (compared.variants[one] for one in (name, beside))
    taken, theirs = (compared.times[one] for one in (name, beside))
    found: Row = {
        "p50": taken.p50, "p90": taken.p90, f"to_{beside}": taken.p50 / theirs.p50,
        f"to_{beside}_p90": taken.p90 / theirs.p90, "size_mb": variant.size_bytes / MB,
        f"size_to_{beside}": variant.size_bytes / other.size_bytes, "blocks_mb": None,
        f"blocks_to_{beside}": None, "epsilon": variant.epsilon, "minutes": variant.minutes,
        "steps": variant.steps,
    }  # fmt: skip
    if variant.table_bytes:
        found["blocks_mb"] = variant.block_bytes / MB
        found[f"blocks_to_{beside}"] = variant.block_bytes / other.block_bytes
    return found


def compare(
    variants: Mapping[str, Variant],
    samples: Sequence[Array],
    labels: Array,
    rounds: int,
    watch: Watch,
) -> Compared:
    """Answer samples (n, ...) of every input with every variant, and time them all.

    Times are taken first, in turns, one sample at a time.
    """
    sessions = {name: variant.session for name, variant in variants.items()}
    times = time_sessions(
        sessions, [value[:1] for value in samples], rounds,
        tick=lambda done, total: watch("timing all in turns", done, total),
    )  # fmt: skip
    outputs = {}
    for index, (name, session) in enumerate(sessions.items()):
        watch(f"answering with {name}", index, len(sessions))
        outputs[name] = answers(session, samples)
    return Compared(variants, outputs, labels, times)


def answers(session: Session, samples: Sequence[Array]) -> Array:
    """What a session answers to samples (n, ...), in batches and the rest one by one."""
    count = len(samples[0])
    whole = count - count % BATCH
    parts = [slice(start, start + BATCH) for start in range(0, whole, BATCH)]
    parts += [slice(row, row + 1) for row in range(whole, count)]
    return np.concatenate(
        [session.run([np.ascontiguousarray(value[part]) for value in samples])[0] for part in parts]
    )
