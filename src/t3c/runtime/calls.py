"""Other ways to call a runtime: a budget held over many calls, many requests at once, async."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from t3c.engines.protocol import Array
from t3c.errors import SpecError
from t3c.runtime.answer import Answer
from t3c.runtime.monitor import Shift
from t3c.runtime.select import Choice
from t3c.spec import Budget

if TYPE_CHECKING:
    from t3c.runtime.runtime import Runtime


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
        runtime, asked = self._runtime, self._runtime.signals.asked
        return asked.steps, asked.ceilings, runtime.alarm.raised, len(runtime.refused)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(frozen=True)
class Request:
    """Inputs of any batch size, and what their answer may cost."""

    inputs: Any
    budget: Budget | None = None


class Chosen(NamedTuple):
    """A request that was checked, and the profile that is to serve it; `named` is one that was
    asked for by name, in whose place no other serves."""

    arrays: list[Array]
    choice: Choice
    budget: Budget | None = None
    named: bool = False

    @property
    def alike(self) -> tuple[object, ...]:
        """What requests have in common that can run as one batch."""
        return self.choice.profile, self.named, tuple(array.shape[1:] for array in self.arrays)


def answer_all(runtime: Runtime, requests: Iterable[Request]) -> list[Answer]:
    """The answers to requests, in order; those that one profile serves run as one batch.

    All are checked before any runs. Latencies are known of single samples: a batch takes longer.
    """
    requests = list(requests)
    if any(not isinstance(request, Request) for request in requests):
        raise SpecError("requests are t3c.Request(inputs, budget)")
    arrays = [runtime.check(request.inputs) for request in requests]
    chosen = [
        Chosen(given, runtime.choose(request.budget, given[0]), request.budget)
        for given, request in zip(arrays, requests, strict=True)
    ]
    lots: dict[tuple[object, ...], list[int]] = {}
    for index, one in enumerate(chosen):
        lots.setdefault(one.alike, []).append(index)
    answers: dict[int, Answer] = {}
    for members in lots.values():
        lot = answer_lot(runtime, [chosen[index] for index in members])
        answers.update(zip(members, lot, strict=True))
    return [answers[index] for index in range(len(requests))]


def answer_lot(runtime: Runtime, lot: Sequence[Chosen], largest: int | None = None) -> list[Answer]:
    """The answers to requests that are alike, run as one batch, or in parts.

    With `largest`, parts are of that many samples or of smaller powers of two: an engine that
    compiles for each batch size then has few of them to compile.
    """
    first = lot[0]
    choice, lease = runtime.lease(first.choice, named=first.named)
    whole = [np.concatenate(c) for c in zip(*(one.arrays for one in lot), strict=True)]
    shifts: list[Shift] = []

    def run(part: list[Array]) -> list[Array]:
        outputs, shift = runtime.run(choice.profile, session, part)
        shifts.extend([shift] if shift is not None else [])
        return outputs

    with lease as session:
        joined = in_parts(run, whole, largest)
    shift = shifts[0] if shifts else None
    why = choice.warnings[len(first.choice.warnings) :]
    answers, start = [], 0
    for one in lot:
        end = start + len(one.arrays[0])
        mine = [np.ascontiguousarray(output[start:end]) for output in joined]
        said = one.choice
        if choice is not first.choice:  # with what is said of its own budget, not of another's
            said = replace(choice, warnings=(*said.warnings, *why))
        answers.append(runtime.told(mine, said, one.budget, shift))
        start = end
    return answers


def in_parts(
    run: Callable[[list[Array]], list[Array]], arrays: list[Array], largest: int | None
) -> list[Array]:
    """What `run` makes of arrays (n, ...), by parts of at most `largest` samples."""
    parts = _parts(len(arrays[0]), largest)
    if len(parts) == 1:
        return run(arrays)
    made = [run([array[start:end] for array in arrays]) for start, end in parts]
    return [np.concatenate(column) for column in zip(*made, strict=True)]


def part_sizes(rows: int, largest: int) -> list[int]:
    """So many samples as parts of `largest`, a power of two, and of smaller ones.

    >>> part_sizes(13, 4)
    [4, 4, 4, 1]
    """
    sizes = [largest] * (rows // largest)
    rest = rows % largest
    return sizes + [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]


def _parts(rows: int, largest: int | None) -> list[tuple[int, int]]:
    """Where each part begins and ends."""
    ends = list(accumulate([rows] if largest is None else part_sizes(rows, largest)))
    return list(zip([0, *ends], ends, strict=False))
