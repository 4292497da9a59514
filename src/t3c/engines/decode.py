"""Decoding token by token: what a model remembers is carried from call to call by the caller.

A graph with states takes them after its other inputs and gives, after its output, what they become.
They belong to no session, so that every step may run another profile.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from t3c.artifact.manifest import STATE, StateEntry
from t3c.engines.protocol import Array
from t3c.errors import DataError, SpecError

Run = Callable[[list[Array]], list[Array]]
Declared = tuple[Sequence[int | str | None], npt.DTypeLike]  # sizes, those not free, and a type


@dataclass(frozen=True)
class Step:
    """One token of every row: its ids (batch,), the logits (batch, vocabulary) they were chosen by,
    and the rows (batch,) that have come to a stop by now, which repeat what they stopped at."""

    index: int
    ids: Array
    logits: Array
    stopped: npt.NDArray[np.bool_]


class Generation:
    """A text of some rows as it grows: what is to be read next, and what is remembered.

    At temperature 0 the likeliest token is taken, else one is drawn. Rows are of one length:
    nothing tells padding from text. `states` are what an earlier text left.

    >>> generation = Generation(ids)  # doctest: +SKIP
    >>> first = generation.step(rt.session("max").run)  # doctest: +SKIP
    >>> second = generation.step(rt.session("tiny").run)  # doctest: +SKIP
    """

    def __init__(
        self,
        ids: Any,
        *,
        states: Sequence[Array] = (),
        stop: Iterable[int] = (),
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        prompt = np.asarray(ids)
        if prompt.ndim != 2 or not prompt.size or prompt.dtype.kind not in "iu":
            raise DataError(f"ids are whole numbers (batch, length), got shape {prompt.shape}")
        if not (math.isfinite(temperature) and temperature >= 0):
            raise SpecError(f"temperature must be at least 0, got {temperature:g}")
        if seed < 0:
            raise SpecError(f"seed must be at least 0, got {seed}")
        self.next = prompt.astype(np.int64)
        self.states = list(states)
        self.stop = np.array(sorted(set(stop)), dtype=np.int64)
        self.stopped = np.zeros(len(prompt), dtype=np.bool_)
        self.temperature = temperature
        self._rng = np.random.default_rng(seed)
        self._steps = itertools.count()

    def step(self, run: Run) -> Step:
        """Read what is next by `run`, which may differ from step to step, and choose a token."""
        return self.take(run(self.inputs))

    @property
    def inputs(self) -> list[Array]:
        """The ids to read next, and the states remembered so far."""
        return [self.next, *self.states]

    def take(self, outputs: Sequence[Array]) -> Step:
        """Choose a token by the outputs for `inputs`."""
        output, *states = outputs
        if not states:
            raise DataError("the graph carries no states: export a model that has some")
        logits = output[:, -1]
        chosen = np.where(self.stopped, self.next[:, -1], self._choose(logits))
        self.stopped = self.stopped | np.isin(chosen, self.stop)
        self.next, self.states = chosen[:, None], states
        return Step(next(self._steps), chosen, logits, self.stopped)

    def _choose(self, logits: Array) -> npt.NDArray[np.int64]:
        if self.temperature == 0:
            return np.asarray(logits.argmax(axis=-1))
        # The largest of logits with Gumbel noise is a draw from their softmax.
        noise = self._rng.gumbel(size=logits.shape)
        return np.asarray((logits / self.temperature + noise).argmax(axis=-1))


def empty_states(entries: Iterable[StateEntry], batch: int, length: int = 0) -> list[Array]:
    """States that remember nothing yet, or so many tokens as zeros."""
    return [_empty((entry.shape, entry.dtype), batch, length) for entry in entries]


def declared_inputs(model: onnx.ModelProto) -> dict[str, Declared]:
    """The inputs a graph declares, in order; a size that is free is None."""
    found: dict[str, Declared] = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        sizes = [d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim]
        found[value.name] = sizes, onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
    return found


def completed(inputs: Sequence[Array], declared: Mapping[str, Declared]) -> list[Array]:
    """Inputs as a graph declares them, with empty states where it has some and none are given."""
    states = [state for name, state in declared.items() if name.startswith(STATE)]
    if not states or len(inputs) != len(declared) - len(states):
        return list(inputs)
    return [*inputs, *(_empty(state, len(inputs[0])) for state in states)]


def _empty(declared: Declared, batch: int, length: int = 0) -> Array:
    sizes, dtype = declared
    rest = [size if isinstance(size, int) else length for size in sizes[1:]]
    return np.zeros([batch, *rest], dtype=dtype)
