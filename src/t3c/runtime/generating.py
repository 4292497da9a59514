"""Text through the runtime: a profile per token, one memory for all of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from t3c.engines.decode import Generation, Step
from t3c.engines.protocol import Array
from t3c.errors import DataError, SpecError
from t3c.runtime.remarks import Code, Remark
from t3c.spec import Budget, Certificate

if TYPE_CHECKING:
    from t3c.runtime.runtime import Runtime


@dataclass(frozen=True)
class Token(Step):
    """One token of every row, and what it stands for: the profile that gave it, why, with what
    certificate, and the seconds it took."""

    profile: str
    certificate: Certificate | None
    reason: Remark
    warnings: tuple[Remark, ...]
    seconds: float


class Writing(Iterator[Token]):
    """A text as it is written, of one thread at a time; nothing is leased between two tokens.

    The next token is of the budget, or the profile, that was set last. Where several profiles have
    read the text, no certificate is of it: each is of texts that one profile reads.

    >>> text = rt.generate(ids, Budget(latency_ms=9), tokens=64)  # doctest: +SKIP
    >>> first = next(text)  # doctest: +SKIP
    >>> text.budget = Budget(latency_ms=2)  # doctest: +SKIP
    """

    def __init__(
        self,
        runtime: Runtime,
        generation: Generation,
        tokens: int,
        budget: Budget | None = None,
        profile: str | None = None,
    ) -> None:
        if tokens < 1:
            raise SpecError(f"tokens must be at least 1, got {tokens}")
        if profile is not None and budget is not None:
            raise SpecError("name a budget or a profile, not both")
        self._runtime, self._generation, self._tokens = runtime, generation, tokens
        self._columns = [generation.next]
        self._seconds: list[float] = []
        self._readers: dict[str, None] = {}
        self.budget = budget
        if profile is not None:
            self.profile = profile

    @property
    def budget(self) -> Budget | None:
        """What the next token may take; setting it lets a profile that was named go."""
        return self._budget

    @budget.setter
    def budget(self, budget: Budget | None) -> None:
        self._runtime.choose(budget)  # refused here, where it cannot be
        self._budget = budget
        self._profile: str | None = None

    @property
    def profile(self) -> str | None:
        """The profile of the next token, by name; setting it lets the budget go."""
        return self._profile

    @profile.setter
    def profile(self, profile: str | None) -> None:
        self._profile = None if profile is None else self._runtime.chain[profile].name
        self._budget = None

    @property
    def ids(self) -> Array:
        """The prompt and all tokens so far (batch, length)."""
        return np.concatenate(self._columns, axis=1)

    @property
    def first_seconds(self) -> float | None:
        """The time to the first token, with that to compile its profile if it was not warm."""
        return self._seconds[0] if self._seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Of a row, after the first token; what the caller does between tokens is not counted."""
        later = self._seconds[1:]
        return len(later) / sum(later) if later else None

    def __next__(self) -> Token:
        generation = self._generation
        if len(self._seconds) == self._tokens or generation.stopped.all():
            raise StopIteration
        start = time.perf_counter()
        ids, *states = generation.inputs
        inputs = [ids.astype(self._runtime.inputs[0].dtype, copy=False), *states]
        answer = self._runtime.served(inputs, self._budget, self._profile)
        step = generation.take(answer.outputs)
        seconds = time.perf_counter() - start
        self._seconds.append(seconds)
        self._columns.append(generation.next)
        self._readers[answer.profile] = None
        certificate, warnings = answer.certificate, answer.warnings
        if len(self._readers) > 1:
            mixed = Remark(Code.SEVERAL_READERS, names=tuple(self._readers))
            certificate, warnings = None, (*warnings, mixed)
        return Token(
            step.index, step.ids, step.logits, step.stopped, answer.profile, certificate,
            answer.reason, warnings, seconds,
        )  # fmt: skip


def begin(
    runtime: Runtime, ids: Any, *, stop: Iterable[int], temperature: float, seed: int
) -> Generation:
    """A text that begins with ids (batch, length), or one clear error."""
    model = runtime.artifact.manifest.model
    if not model.states:
        raise SpecError(f"{model.name} has no states: only a model that has some writes text")
    if len(model.inputs) != 1:
        names = ", ".join(entry.name for entry in model.inputs)
        raise SpecError(f"{model.name} takes {names}: only a model of ids alone writes text")
    prompt, *states = runtime.check(ids)
    vocabulary = model.outputs[0].shape[-1]
    if isinstance(vocabulary, int) and (prompt.min() < 0 or prompt.max() >= vocabulary):
        low, high = prompt.min(), prompt.max()
        raise DataError(f"ids are of 0 to {vocabulary - 1}, got {low} to {high}")
    return Generation(prompt, states=states, stop=stop, temperature=temperature, seed=seed)
