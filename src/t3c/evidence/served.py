"""Answers as they are served: one sample at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from t3c.engines import Session
from t3c.engines.protocol import Array

Samples = Sequence[Array]
Run = Callable[[list[Array]], Array]  # the first output of what is asked


def run_of(session: Session) -> Run:
    """Return a session as a function of inputs that gives its first output."""
    return lambda inputs: session.run(inputs)[0]


def answers(run: Run, samples: Samples, size: int = 1) -> Array:
    """Return what `run` answers to samples (n, ...), asked one by one or `size` together."""
    return np.concatenate([run(one) for one in chunks(samples, size)])


def chunks(samples: Samples, size: int) -> list[list[Array]]:
    """Return the samples again, in parts of at most `size`."""
    return [
        [np.ascontiguousarray(value[start : start + size]) for value in samples]
        for start in range(0, len(samples[0]), size)
    ]
