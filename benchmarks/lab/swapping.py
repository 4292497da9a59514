"""What a runtime adds to an engine: switching profiles, many threads, overhead, memory."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t3c.device.execution import example_inputs
from t3c.engines import Session
from t3c.engines.openvino import OpenVINOSession
from t3c.engines.protocol import Array
from t3c.measure.latency import interleave
from t3c.measure.memory import rss
from t3c.runtime.runtime import Runtime
from t3c.spec import Budget

Row = dict[str, Any]
INPUTS = 16  # different ones that threads ask about
TARGET_MS = 1.0  # of the model that overhead is measured on


def budgets_of(runtime: Runtime) -> dict[str, Budget]:
    """A budget that each profile serves."""
    found = {c.profile: Budget(size_mb=c.size_mb) for c in runtime.candidates}
    served = {name: runtime.choose(budget).profile for name, budget in found.items()}
    assert all(name == profile for name, profile in served.items()), served
    return found


def swap_rows(runtime: Runtime, model: str, calls: int, seed: int = 0) -> list[Row]:
    """Times of the first call after a changed budget, and of the next with the same, in turns."""
    runtime.warm()
    budgets, x = budgets_of(runtime), tuple(example_inputs(runtime.artifact))
    names, rng = list(budgets), np.random.default_rng(seed)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    before = None
    for _ in range(calls):
        name = str(rng.choice([n for n in names if n != before]))
        for kind in range(2):
            start = time.perf_counter()
            runtime(x, budgets[name])
            times[name][kind].append((time.perf_counter() - start) * 1e3)
        before = name
    firsts, plains = ([t for pair in times.values() for t in pair[kind]] for kind in range(2))
    found = {**times, "all": (firsts, plains)}
    return [{"model": model, "profile": name, **_beside(*pair)} for name, pair in found.items()]


def _beside(first: Sequence[float], plain: Sequence[float]) -> Row:
    """Quantiles of first and of plain calls, and what the p99 may differ by."""
    (p50, p99), (plain50, plain99) = (np.percentile(t, [50, 99]).tolist() for t in (first, plain))
    return {
        "calls": len(first), "first_p50": p50, "plain_p50": plain50, "first_p99": p99,
        "plain_p99": plain99, "over_ms": p99 - plain99, "allowed_ms": max(2.0, 0.15 * plain99),
    }  # fmt: skip


def stress(runtime: Runtime, calls: int, threads: int = 8, every: int = 50) -> Row:
    """Calls from several threads, each with a new budget after every so many; what went wrong."""
    runtime.warm()
    budgets, rng = budgets_of(runtime), np.random.default_rng(0)
    (entry,) = runtime.inputs
    shape = [INPUTS, *(size for size in entry.shape[1:] if isinstance(size, int))]
    inputs = rng.normal(size=shape).astype(entry.dtype)
    wanted = {name: [runtime(x[None], profile=name) for x in inputs] for name in budgets}
    before = runtime.counters.snapshot()["calls"]
    answered, mixed, errors = [0] * threads, [0] * threads, [0] * threads

    def work(index: int) -> None:
        mine = np.random.default_rng(index)
        names = list(budgets)
        for call in range(calls // threads):
            if call % every == 0:
                name = names[mine.integers(len(names))]
            at = int(mine.integers(INPUTS))
            try:
                answer = runtime.answer(inputs[at][None], budgets[name])
            except Exception:  # whatever it is, the call is lost
                errors[index] += 1
                continue
            answered[index] += 1
            same = np.array_equal(answer.output, wanted[answer.profile][at])
            mixed[index] += not (same and answer.profile == name)

    start = time.perf_counter()
    workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    after = runtime.counters.snapshot()
    counted = sum(after["calls"].values()) - sum(before.values())
    total = threads * (calls // threads)
    return {
        "calls": total, "threads": threads, "swap_every": every,
        "lost": total - sum(answered), "mixed": sum(mixed), "counted": counted,
        "seconds": time.perf_counter() - start, "engine": runtime.engine.name,
    }  # fmt: skip


def overhead_row(runtime: Runtime, rounds: int = 400) -> Row:
    """`rt(x, budget)` beside its session and the engine's own call, at a batch that takes 1 ms."""
    name = runtime.chain.top.name
    budget, session = budgets_of(runtime)[name], runtime.session(name)
    one = example_inputs(runtime.artifact)[0]
    inputs = one
    while (took := _median_ms(session, inputs)) < TARGET_MS and len(inputs) < 512:
        more = max(len(inputs) + 1, round(len(inputs) * min(2.0, TARGET_MS / took)))
        inputs = np.concatenate([one] * more)
    calls: dict[str, Callable[[], object]] = {
        "engine": _bare(session, inputs),
        "session": lambda: session.run([inputs]),
        "runtime": lambda: runtime(inputs, budget),
    }
    times = interleave(calls, rounds)
    return {
        "engine": runtime.engine.name, "batch": len(inputs), "engine_ms": times["engine"].p50,
        "session_p50": times["session"].p50 / times["engine"].p50,
        "runtime_p50": times["runtime"].p50 / times["engine"].p50,
        "runtime_p90": times["runtime"].p90 / times["engine"].p90,
        "added_us": (times["runtime"].p50 - times["engine"].p50) * 1e3,
    }  # fmt: skip


def _bare(session: Any, inputs: Array) -> Callable[[], object]:
    """The engine's own call, with its outputs copied as a caller would have to."""
    if isinstance(session, OpenVINOSession):
        request = session.request((inputs.shape,))

        def infer() -> list[Array]:
            request.infer({0: inputs}, share_inputs=True)
            return [np.array(output.data) for output in request.output_tensors]

        return infer
    inner, (name,) = session.session, session.declared
    return lambda: inner.run(None, {name: inputs})


def _median_ms(session: Session, inputs: Array, times: int = 15) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        session.run([inputs])
        taken.append((time.perf_counter() - start) * 1e3)
    return float(np.median(taken))


def memory_rows(artifact: Path, model: str, engine: str = "openvino") -> list[Row]:
    """Resident memory of a process with the largest profile warm, and with all of them."""
    rows = []
    for which in ("none", "one", "all"):
        command = [sys.executable, "-m", "lab.swapping", str(artifact), engine, which]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append({"model": model, "warm": which, **json.loads(done.stdout.splitlines()[-1])})
    return rows


def cold_rows(artifact: Path, model: str, folder: Path) -> list[Row]:
    """From the process that has imported what it needs to the first answer, twice with a cache."""
    rows = []
    for start in ("no cache", "cache empty", "cache filled"):
        command = [sys.executable, "-m", "lab.swapping", str(artifact), "openvino"]
        command += ["cold", "" if start == "no cache" else str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append({"model": model, "start": start, **json.loads(done.stdout.splitlines()[-1])})
    return rows


def _child(artifact: str, engine: str, which: str, cache: Sequence[str]) -> None:
    """Open an artifact, answer, and print what that took."""
    from t3c.artifact.reader import Artifact
    from t3c.engines.cache import CompileCache

    kept = CompileCache(Path(cache[0])) if cache and cache[0] else None
    start = time.perf_counter()
    runtime = Runtime(Artifact(artifact), engine, cache=kept)
    opened = (time.perf_counter() - start) * 1e3
    if which != "none":
        inputs = tuple(example_inputs(runtime.artifact))
        names = [p.name for p in runtime.chain] if which == "all" else [runtime.chain.top.name]
        for name in names:
            runtime(inputs, profile=name)
    first = (time.perf_counter() - start) * 1e3
    figures = {"opened_ms": opened, "first_answer_ms": first}
    if which != "cold":
        figures = {
            "rss_mb": (rss() or 0) / 1e6,
            "weighed_mb": sum(runtime.pool.resident.values()) / 1e6,
        }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    _child(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
