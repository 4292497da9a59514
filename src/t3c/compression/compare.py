"""Candidates and plain int8 on one engine: quality on samples, time in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from t3c.artifact.devices import DeviceTable
from t3c.artifact.reader import Artifact
from t3c.compression.place import TINY_TIMES, Candidate, Placed, Plain, in_order, place
from t3c.device.execution import example_inputs, execution_of
from t3c.device.machine import describe
from t3c.device.measured import runners, time_sessions
from t3c.engines import Engine, Session
from t3c.engines.openvino import OpenVINO
from t3c.engines.protocol import Array
from t3c.evidence.int8 import Int8, ptq8, ptq8w
from t3c.evidence.quality import Scorer
from t3c.evidence.served import run_of
from t3c.measure.latency import paced

ROUNDS, TIMED_SECONDS = 60, 12.0  # at the least, of all candidates together
BEYOND = 2  # candidates in a row that lose more than tiny may: smaller ones do too
Watch = Callable[[str, int, int], object]


def plain_int8(
    engine: OpenVINO,
    original: bytes,
    samples: list[Array],
    *,
    transformer: bool,
    weight_only: bool,
) -> Int8:
    """Quantize the original in ONNX, as it was handed over, as one would without T3C."""
    make = ptq8w if weight_only else ptq8
    return make(engine.read(original), samples, transformer=transformer)


@dataclass(frozen=True)
class Placing:
    """Places the profiles of a draft by time and quality, from the largest down."""

    engine: Engine
    scorer: Scorer
    plain: Int8 | None
    watch: Watch

    def place(self, draft: Artifact, table: DeviceTable) -> Placed:
        """Time the candidates of a draft beside plain int8, judge those that are worth it, choose.

        What is slower than a larger one is not judged.
        """
        sessions = self._compiled(draft, table)
        inputs = example_inputs(draft)
        self.watch(f"timing {len(sessions)} candidates in turns", 0, 1)
        rounds = paced(runners(sessions, inputs), ROUNDS, seconds=TIMED_SECONDS)
        times = time_sessions(sessions, inputs, rounds)
        losses = dict[str, Array]()
        if self.plain is not None:
            self.watch("judging plain int8", 0, 1)
            losses[""] = self.scorer.losses(run_of(sessions[""]), expected=True)
        reference, limit = self._reference(losses), self.scorer.judge.limit
        sizes = {p.name: draft.manifest.size_bytes(p.name) for p in draft.manifest.chain}
        chain = [Candidate(name, times[name].p50, size) for name, size in sizes.items()]
        wanted, beyond = [chain[index].name for index in in_order(chain)], 0
        for index, name in enumerate(reversed(wanted)):
            if beyond == BEYOND:
                break
            self.watch("judging candidates", index, len(wanted))
            losses[name] = self.scorer.losses(run_of(sessions[name]), expected=True)
            lost = float((losses[name] - reference).mean())
            beyond = beyond + 1 if lost > TINY_TIMES * limit else 0
        beside = None
        if self.plain is not None:
            beside = Plain(times[""].p50, self.plain.size_bytes, losses[""])
        judged = [replace(one, losses=losses.get(one.name)) for one in chain]
        return place(judged, reference, limit, beside)

    def _compiled(self, draft: Artifact, table: DeviceTable) -> dict[str, Session]:
        """Return a session of each candidate, and that of plain int8 under the name ""."""
        sessions, bits = dict[str, Session](), describe(self.engine).weight_bits
        if self.plain is not None:
            assert isinstance(self.engine, OpenVINO)
            sessions[""] = self.engine.compile_read(self.plain.model)
        for index, profile in enumerate(draft.manifest.chain):
            self.watch("compiling candidates", index, len(draft.manifest.chain))
            graph = execution_of(draft, table, profile).graph(draft, bits)
            sessions[profile.name] = self.engine.compile(graph)
        return sessions

    def _reference(self, losses: Mapping[str, Array]) -> Array:
        """Return the losses that a drop counts from: the original's, or plain int8's."""
        if self.scorer.judge.beyond_int8 and "" in losses:
            return losses[""]
        return self.scorer.original_losses()
