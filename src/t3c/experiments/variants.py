"""Everything that answers, side by side: profiles, baselines and the original, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from t3c.certify.drift import relative_drift
from t3c.experiments.training import paired_difference
from t3c.runtime.engines import Session
from t3c.runtime.engines.protocol import Array
from t3c.runtime.measured import time_sessions
from t3c.spec import Latency

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


@dataclass(frozen=True)
class Compared:
    """All variants on the same test samples: outputs, what is right, times taken in turns."""

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
        full, time8, ptq8 = self.right("full"), self.times["ptq8"], self.variants["ptq8"]
        rows = []
        for name, variant in self.variants.items():
            mine, taken = self.right(name), self.times[name]
            gap = paired_difference(full, mine)
            rows.append(
                {
                    "name": name, "method": variant.method, "accuracy": float(mine.mean()),
                    "samples": len(full), "drop": gap["difference"], "drop_low": gap["low"],
                    "drop_high": gap["high"], "p50": taken.p50, "p90": taken.p90,
                    "to_ptq8": taken.p50 / time8.p50, "to_ptq8_p90": taken.p90 / time8.p90,
                    "size_mb": variant.size_bytes / MB,
                    "size_to_ptq8": variant.size_bytes / ptq8.size_bytes,
                    "blocks_mb": variant.block_bytes / MB if variant.table_bytes else None,
                    "blocks_to_ptq8": variant.block_bytes / ptq8.block_bytes
                    if variant.table_bytes
                    else None,
                    "epsilon": variant.epsilon,
                    "drift": float(self.drifts(name).mean()), "minutes": variant.minutes,
                    "steps": variant.steps,
                }
            )  # fmt: skip
        return rows


def compare(
    variants: Mapping[str, Variant], test: tuple[Array, Array], rounds: int, watch: Watch
) -> Compared:
    """Answer the test part (samples (n, ...), labels (n,)) with every variant, and time them all.

    Times are taken first, in turns, one sample at a time.
    """
    samples, labels = test
    sessions = {name: variant.session for name, variant in variants.items()}
    times = time_sessions(
        sessions, [samples[:1]], rounds,
        tick=lambda done, total: watch("timing all in turns", done, total),
    )  # fmt: skip
    outputs = {}
    for index, (name, session) in enumerate(sessions.items()):
        watch(f"answering with {name}", index, len(sessions))
        outputs[name] = answers(session, samples)
    return Compared(variants, outputs, labels, times)


def answers(session: Session, samples: Array) -> Array:
    """What a session answers to samples (n, ...), in batches and the rest one by one."""
    whole = len(samples) - len(samples) % BATCH
    parts = [samples[start : start + BATCH] for start in range(0, whole, BATCH)]
    parts += [sample[None] for sample in samples[whole:]]
    return np.concatenate([session.run([np.ascontiguousarray(part)])[0] for part in parts])
