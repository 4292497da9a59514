"""Candidates and plain int8 on one engine: quality on samples, time in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from t3c.artifact.devices import DeviceTable
from t3c.artifact.reader import Artifact
from t3c.compression.place import Candidate, Placed, Plain, place
from t3c.device.execution import example_inputs, execution_of
from t3c.device.machine import describe
from t3c.device.measured import time_sessions
from t3c.engines import Engine, Session
from t3c.engines.openvino import OpenVINO
from t3c.engines.protocol import Array
from t3c.evidence.int8 import Int8, ptq8, ptq8w
from t3c.evidence.quality import Run, Scorer

ROUNDS = 60
Watch = Callable[[str, int, int], object]


def plain_int8(
    engine: OpenVINO,
    original: Path,
    samples: list[Array],
    *,
    transformer: bool,
    weight_only: bool,
) -> Int8:
    """Quantize the original, a file in ONNX, as one would without T3C."""
    make = ptq8w if weight_only else ptq8
    return make(engine.read(original.read_bytes()), samples, transformer=transformer)


def run_of(session: Session) -> Run:
    """Return a session as a function of inputs that gives its first output."""
    return lambda inputs: session.run(inputs)[0]


@dataclass(frozen=True)
class Placing:
    """Places the profiles of a draft by quality."""

    engine: Engine
    scorer: Scorer
    plain: Int8 | None
    watch: Watch

    def place(self, draft: Artifact, table: DeviceTable) -> Placed:
        """Run the candidates of a draft beside plain int8, and choose among them."""
        bits = describe(self.engine).weight_bits
        chain = list(draft.manifest.chain)
        sessions: dict[str, Session] = {}
        losses: dict[str, Array] = {}
        for index, profile in enumerate(chain):
            self.watch("judging candidates", index, len(chain) + 1)
            graph = execution_of(draft, table, profile).graph(draft, bits)
            sessions[profile.name] = self.engine.compile(graph)
            run = run_of(sessions[profile.name])
            losses[profile.name] = self.scorer.losses(run, expected=True)
        self.watch("judging candidates", len(chain), len(chain) + 1)
        if self.plain is not None:
            assert isinstance(self.engine, OpenVINO)
            sessions[""] = self.engine.compile_read(self.plain.model)
            losses[""] = self.scorer.losses(run_of(sessions[""]), expected=True)
        times = time_sessions(sessions, example_inputs(draft), ROUNDS)
        candidates = [
            Candidate(p.name, times[p.name].p50, draft.manifest.size_bytes(p.name), losses[p.name])
            for p in chain
        ]
        beside = None
        if self.plain is not None:
            beside = Plain(times[""].p50, self.plain.size_bytes, losses[""])
        return place(candidates, self._reference(losses), self.scorer.judge.limit, beside)

    def _reference(self, losses: Mapping[str, Array]) -> Array:
        """Return the losses that a drop counts from: the original's, or plain int8's."""
        if self.scorer.judge.beyond_int8 and "" in losses:
            return losses[""]
        return self.scorer.original_losses()
