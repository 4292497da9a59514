"""Candidates and plain int8 on one engine: quality on samples, time in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from t3c.artifact.devices import DeviceTable
from t3c.artifact.reader import Artifact
from t3c.compression.place import TINY_TIMES, Candidate, Placed, Plain, place
from t3c.device.execution import example_inputs, execution_of
from t3c.device.machine import describe
from t3c.device.measured import time_sessions
from t3c.engines import Engine, Session
from t3c.engines.openvino import OpenVINO
from t3c.engines.protocol import Array
from t3c.evidence.int8 import Int8, ptq8, ptq8w
from t3c.evidence.quality import Scorer
from t3c.evidence.served import run_of

ROUNDS = 60
BEYOND = 2  # candidates in a row that lose more than tiny may: smaller ones do too
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


@dataclass
class Placing:
    """Places the profiles of a draft by quality, from the largest down; keeps what it saw."""

    engine: Engine
    scorer: Scorer
    plain: Int8 | None
    watch: Watch
    placed: Placed | None = None

    def __call__(self, draft: Artifact, table: DeviceTable) -> Mapping[str, str]:
        losses, sessions = dict[str, Array](), dict[str, Session]()
        if self.plain is not None:
            assert isinstance(self.engine, OpenVINO)
            self.watch("judging plain int8", 0, 1)
            sessions[""] = self.engine.compile_read(self.plain.model)
            losses[""] = self.scorer.losses(run_of(sessions[""]), expected=True)
        reference, limit = self._reference(losses), self.scorer.judge.limit
        chain, bits, beyond = list(draft.manifest.chain), describe(self.engine).weight_bits, 0
        for index, profile in enumerate(reversed(chain)):
            if beyond == BEYOND:
                break
            self.watch("judging candidates", index, len(chain))
            graph = execution_of(draft, table, profile).graph(draft, bits)
            sessions[profile.name] = self.engine.compile(graph)
            run = run_of(sessions[profile.name])
            losses[profile.name] = self.scorer.losses(run, expected=True)
            lost = float((losses[profile.name] - reference).mean())
            beyond = beyond + 1 if lost > TINY_TIMES * limit else 0
        times = time_sessions(sessions, example_inputs(draft), ROUNDS)
        candidates = [
            Candidate(p.name, times[p.name].p50, draft.manifest.size_bytes(p.name), losses[p.name])
            for p in chain
            if p.name in losses
        ]
        beside = None
        if self.plain is not None:
            beside = Plain(times[""].p50, self.plain.size_bytes, losses[""])
        self.placed = place(candidates, reference, limit, beside)
        return {candidate: name for name, candidate in self.placed.profiles}

    def _reference(self, losses: Mapping[str, Array]) -> Array:
        """Return the losses that a drop counts from: the original's, or plain int8's."""
        if self.scorer.judge.beyond_int8 and "" in losses:
            return losses[""]
        return self.scorer.original_losses()
