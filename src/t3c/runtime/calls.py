"""Other ways to call a runtime: a budget held over many calls, many requests at once, async."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from t3c.errors import SpecError
from t3c.runtime.engines.protocol import Array
from t3c.runtime.select import Choice
from t3c.spec import Budget

if TYPE_CHECKING:
    from t3c.runtime.runtime import Answer, Runtime


class Held:
    """A budget for many calls of one thread: its profile is chosen once, and stays warm.

    It is chosen again when the budget is changed, or heat, load or an alarm say so; the new
    session is there before the old one goes.

    >>> with rt.hold(Budget(latency_ms=5)) as held:  # doctest: +SKIP
    ...     y = held(x)
    ...     held.budget = Budget(latency_ms=2)
    """

    def __init__(self, runtime: Runtime, budget: Budget | None = None) -> None:
        self._runtime = runtime
        self._budget = budget
        self._now = self._state()
        self._choice, self._lease = runtime.lease(runtime.choose(budget))

    @property
    def profile(self) -> str:
        return self._choice.profile

    @property
    def budget(self) -> Budget | None:
        return self._budget

    @budget.setter
    def budget(self, budget: Budget | None) -> None:
        self._choose(budget)

    def __call__(self, inputs: Any) -> Array:
        return self.answer(inputs).output

    def answer(self, inputs: Any) -> Answer:
        """What the held profile answers."""
        arrays = self._runtime.check(inputs)
        if self._now != self._state():
            self._choose(self._budget)
        runtime, choice = self._runtime, self._choice
        outputs, shift = runtime.run(choice.profile, self._lease.session, arrays)
        return runtime.told(outputs, choice, self._budget, shift)

    def release(self) -> None:
        """Let the profile go; later calls are refused."""
        self._lease.release()

    def _choose(self, budget: Budget | None) -> None:
        """Move to the profile for a budget; where that fails, all stays as it was."""
        now, before = self._state(), self._lease
        before.session  # noqa: B018  (refused once it was released)
        choice, lease = self._runtime.lease(self._runtime.choose(budget))
        self._now, self._budget, self._choice, self._lease = now, budget, choice, lease
        before.release()

    def _state(self) -> tuple[object, ...]:
        """What a choice depends on besides the budget."""
        runtime = self._runtime
        return runtime.signals.steps, runtime.alarm.raised, len(runtime.refused)

    def __enter__(self) -> Held:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


@dataclass(frozen=True)
class Request:
    """Inputs of any batch size, and what their answer may cost."""

    inputs: Any
    budget: Budget | None = None


def answer_all(runtime: Runtime, requests: Iterable[Request]) -> list[Answer]:
    """The answers to requests, in order; those that one profile serves run as one batch.

    All are checked before any runs. Latencies are known of single samples: a batch takes longer.
    """
    requests = list(requests)
    if any(not isinstance(request, Request) for request in requests):
        raise SpecError("requests are t3c.Request(inputs, budget)")
    arrays = [runtime.check(request.inputs) for request in requests]
    lots: dict[tuple[object, ...], list[int]] = {}
    choices: list[Choice] = []
    for index, (given, request) in enumerate(zip(arrays, requests, strict=True)):
        choices.append(runtime.choose(request.budget, given[0]))
        shapes = tuple(array.shape[1:] for array in given)
        lots.setdefault((choices[-1].profile, shapes), []).append(index)
    answers: dict[int, Answer] = {}
    for members in lots.values():
        first = members[0]
        choice, lease = runtime.lease(choices[first])
        columns = zip(*(arrays[index] for index in members), strict=True)
        with lease as session:
            joined = [np.concatenate(column) for column in columns]
            outputs, shift = runtime.run(choice.profile, session, joined)
        fell_back = choice is not choices[first]
        why = choice.warnings[len(choices[first].warnings) :]
        start = 0
        for index in members:
            end = start + len(arrays[index][0])
            mine = [np.ascontiguousarray(output[start:end]) for output in outputs]
            said = choices[index]
            if fell_back:  # with what is said of its own budget, not of another's
                said = replace(choice, warnings=(*said.warnings, *why))
            answers[index] = runtime.told(mine, said, requests[index].budget, shift)
            start = end
    return [answers[index] for index in range(len(requests))]
