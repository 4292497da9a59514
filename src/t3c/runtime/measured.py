"""What an engine is measured by: layer points one by one, profiles as a whole."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from t3c.artifact.devices import Device, LayerTiming
from t3c.measure.latency import interleave
from t3c.runtime.assemble import example_input, synthetic_layer
from t3c.runtime.engines import Engine, Session
from t3c.runtime.engines.protocol import Array
from t3c.spec import MAX_BITS, Form, Latency, LayerPoint, LayerSpec

ROUNDS = 40
DOT_PRODUCTS = ("avx512_vnni", "avx_vnni", "amx_int8")


def describe(engine: Engine) -> Device:
    """The device: this machine, the engine and its threads."""
    return Device(
        cpu=cpu_name(),
        engine=engine.name,
        engine_version=engine.version,
        threads=engine.threads,
        weight_bits=_exact_weight_bits(engine),
    )


def time_layer(engine: Engine, spec: LayerSpec, ranks: Iterable[int]) -> list[LayerTiming]:
    """Time a layer at each rank in each form it can run in, interleaved, on random weights.

    Bits do not matter to the time: codes of fewer bits run on the same int8 kernels.
    """
    candidates: dict[tuple[int, Form], Session] = {}
    dense = engine.compile(synthetic_layer(spec, _point(spec.full_rank), Form.DENSE))
    for rank in ranks:
        candidates[rank, Form.DENSE] = dense
        if Form.FACTORED in spec.forms(_point(rank)):
            graph = synthetic_layer(spec, _point(rank), Form.FACTORED)
            candidates[rank, Form.FACTORED] = engine.compile(graph)
    x = [example_input(spec)]
    distinct = {id(session): session for session in candidates.values()}
    calls = {str(key): _runner(session, x) for key, session in distinct.items()}
    timed = interleave(calls, ROUNDS)
    ms: dict[int, dict[Form, float]] = {}
    for (rank, form), session in candidates.items():
        ms.setdefault(rank, {})[form] = timed[str(id(session))].p50
    return [LayerTiming(layer=spec.name, rank=rank, ms=times) for rank, times in ms.items()]


def time_sessions(
    sessions: Mapping[str, Session],
    inputs: list[Array],
    rounds: int,
) -> dict[str, Latency]:
    """Latency of each session on the same input, taken in turns."""
    calls = {name: _runner(session, inputs) for name, session in sessions.items()}
    return interleave(calls, rounds)


def _runner(session: Session, inputs: list[Array]) -> Callable[[], object]:
    return lambda: session.run(inputs)


def _point(rank: int) -> LayerPoint:
    return LayerPoint(rank, MAX_BITS)


def cpu_name() -> str:
    """The processor, with the vector instructions that decide between int8 kernels."""
    fields = _cpu_fields()
    flags = fields.get("flags", "").split()
    kernels = [flag for flag in ("avx2", "avx512f", *DOT_PRODUCTS) if flag in flags]
    return " ".join([fields.get("model name", platform.machine()), *kernels])


def _exact_weight_bits(engine: Engine) -> int:
    """8, but for x86 without dot-product instructions 7: its int8 kernels add u8 x s8 products in
    pairs in 16 bits, which 255 x 127 x 2 overflows and 255 x 64 x 2 does not."""
    flags = _cpu_fields().get("flags", "").split()
    if engine.name == "torch" or "avx2" not in flags:
        return 8
    return 8 if any(flag in flags for flag in DOT_PRODUCTS) else 7


def _cpu_fields() -> dict[str, str]:
    info = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    for line in info.read_text().splitlines() if info.exists() else []:
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    return fields
