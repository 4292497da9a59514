"""Drift as it is measured: a profile on its engine, one sample at a time, beside the original."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn

from t3c.artifact.reader import Artifact
from t3c.certify.drift import Measure, measured
from t3c.engines import Session
from t3c.engines.protocol import Array
from t3c.evidence.original import Original
from t3c.evidence.program import Program, unchanged
from t3c.evidence.served import Samples, answers, chunks, run_of
from t3c.nn.inputs import Inputs, call, tensors

CHUNK = 16  # samples of which outputs are held at once: those of a language model are large

Reference = Callable[[Samples], Array]  # the original, whatever runs it
Drifts = Mapping[str, Array]  # of each sample and profile (n, profiles), by measure
Watch = Callable[[str, int, int], object]


def program_reference(artifact: Artifact, original: Original) -> Reference:
    """The original by the artifact's own topology, in float32."""
    program, executed = Program(artifact), unchanged(artifact, original, torch.float32)

    @torch.no_grad()
    def run(samples: Samples) -> Array:
        return program(executed, [torch.from_numpy(value) for value in samples]).numpy()

    return run


def model_reference(model: nn.Module, example: Inputs) -> Reference:
    """The original as a torch model that takes inputs like the example."""

    @torch.no_grad()
    def run(samples: Samples) -> Array:
        values = tuple(torch.from_numpy(value) for value in samples)
        if isinstance(example, Mapping):
            return call(model, dict(zip(example, values, strict=True))).numpy()
        return call(model, values[0] if isinstance(example, torch.Tensor) else values).numpy()

    return run


def session_reference(session: Session) -> Reference:
    """The original by an engine, one sample at a time."""
    return lambda samples: answers(run_of(session), samples)


def arrays(inputs: Inputs) -> list[Array]:
    """Inputs of a torch model as a runtime takes them."""
    return [value.detach().contiguous().numpy() for value in tensors(inputs)]


def measure_drifts(
    reference: Reference,
    sessions: Mapping[str, Session],
    samples: Samples,
    measures: Mapping[str, str | Measure],
    watch: Watch = lambda what, done, total: None,
) -> Drifts:
    """The drift of every session from the reference; only a few outputs are held at once."""
    found: dict[str, list[Array]] = {name: [] for name in measures}
    parts = chunks(samples, CHUNK)
    for index, part in enumerate(parts):
        watch("measuring drift", index, len(parts))
        truth = reference(part)
        served = [answers(run_of(session), part) for session in sessions.values()]
        for name, measure in measures.items():
            columns = [measured(measure, answer, truth) for answer in served]
            found[name].append(np.stack(columns, axis=1))
    return {name: np.concatenate(rows) for name, rows in found.items()}
