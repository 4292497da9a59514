"""Observed drift: now and then the largest profile answers as well, while nobody waits."""

from __future__ import annotations

import random

from t3c.certify.drift import relative_drift
from t3c.engines.protocol import Array
from t3c.runtime.answer import Answer
from t3c.runtime.calls import in_parts
from t3c.runtime.runtime import Runtime
from t3c.runtime.sessions import SessionKey
from t3c.serve.policy import LoadPolicy

SHADOWED = 0.25  # of the objective: a shadow that takes longer is left out


class Shadow:
    """Asks the largest profile for a `share` of the answers that another one gave."""

    def __init__(self, runtime: Runtime, policy: LoadPolicy, share: float) -> None:
        self._runtime, self._policy, self._share = runtime, policy, share
        self._random = random.Random(0)

    def seconds(self, rows: int, profile: str) -> float | None:
        """Return what a shadow of an answer may take; None if the answer gets none."""
        policy = self._policy
        top = policy.chain[-1]
        took = policy.pace.careful(top, rows)
        rare = self._random.random() >= self._share
        if rare or profile == top or took > SHADOWED * policy.within_ms:
            return None
        return took / 1e3

    def drifts(self, arrays: list[Array], answer: Answer) -> list[float]:
        """Return how far an answer is from the largest profile's; counted as no client's call."""
        policy = self._policy
        with self._runtime.pool.lease(SessionKey(policy.chain[-1])) as session:
            wanted = in_parts(session.run, arrays, policy.pace.largest)
        far: list[float] = relative_drift(answer.output, wanted[0]).tolist()
        return far
