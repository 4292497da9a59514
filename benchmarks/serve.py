"""`make bench-serve`: one server under changing load, beside servers of one model.

Open-loop load on loopback steps from 0.3 of what `max` can hold to 0.9 of what `tiny` can hold and
back. The network, for CIFAR-10, is trained and exported first if that was not done
(`make results-cifar10-cnn` says how); what is done is kept in out/bench-serve.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.figures import Figure, finish
from lab.load import (
    Body,
    Outcome,
    Phase,
    arrivals,
    bodies,
    hold,
    offer,
    share_within,
    summary,
)
from lab.results import ARTIFACT, MODEL, Results, load_results
from lab.sentences import load_any, train_any
from lab.servers import Server, server, standing_in
from lab.zoo.bases import base_folder
from t3c.errors import T3CError
from t3c.progress import showing
from t3c.runtime.runtime import load

ROOT = Path(__file__).parents[1]
WORK, OUT = Path("out/bench-serve"), Path("out/bench-serve.json")
SUBJECT = "cifar10-cnn"
ROWS = 16  # images of a request
THREADS = 1  # of the engine: the other core receives, answers and sends the load
OBJECTIVE = 10.0  # times what a request takes of the largest profile
LEVELS, SECONDS, PROBE_SECONDS, RUNS = 5, 8.0, 8.0, 3
ADAPTIVE = "t3c adaptive"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each level of load")
    given = parser.parse_args()
    try:
        tables = measure(given.runs, given.seconds)
    except T3CError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return finish(OUT, figures(tables), tables)


def measure(runs: int, seconds: float) -> dict[str, list[dict[str, Any]]]:
    artifact, ptq8, samples, labels = _made()
    runtime = load(artifact, "openvino", THREADS)
    requests = bodies(
        runtime.inputs[0].name, runtime.artifact.manifest.model.outputs[0].name, samples, labels,
        ROWS,
    )  # fmt: skip
    names = [candidate.profile for candidate in runtime.candidates]
    took = {name: _request_ms(runtime.session(name), samples[:ROWS]) for name in names}
    objective = round(OBJECTIVE * took[names[-1]])
    runtime.close()
    say(f"objective {objective} ms; a request takes {took[names[0]]:.3g} to {took[names[-1]]:.3g}")
    common = ["--threads", str(THREADS), "--objective-ms", str(objective)]
    kinds: dict[str, tuple[list[str], Path | None]] = {
        ADAPTIVE: ([], None),
        "fixed max": (["--profile", names[-1]], None),
        "fixed tiny": (["--profile", names[0]], None),
        "fixed ptq8": (["--profile", names[-1]], ptq8),
    }
    with ExitStack() as stack:
        servers = {}
        for name, (options, model) in kinds.items():
            say(f"starting {name}")
            python = standing_in(model) if model else ("-m", "t3c.cli")
            servers[name] = stack.enter_context(
                server(artifact, [*common, *options], python=python)
            )
        held = {
            name: _held(servers[name], requests, objective, took[profile])
            for name, profile in (("fixed max", names[-1]), ("fixed tiny", names[0]))
        }
        low, high = 0.3 * held["fixed max"], 0.9 * held["fixed tiny"]
        phases = _steps(low, high, seconds)
        rows, series = [], list[dict[str, Any]]()
        for run in range(runs):
            due = arrivals(phases, seed=run)
            for name, one in servers.items():  # in turns
                say(f"run {run + 1} of {runs}: {name}, {len(due)} requests")
                outcomes = asyncio.run(offer(one.infer, requests, due))
                rows.append({"run": run + 1, "server": name, **summary(outcomes, objective)})
                if run == 0:
                    series += _series(name, outcomes, objective)
    holds = [
        {"server": name, "requests_per_s": rate, "request_ms": took[profile]}
        for (name, rate), profile in zip(held.items(), (names[-1], names[0]), strict=True)
    ]
    about = {
        "objective_ms": objective, "images_of_a_request": ROWS, "threads": THREADS,
        "lowest_rate": low, "highest_rate": high, "seconds_a_level": seconds, "runs": runs,
        "profiles": names,
    }  # fmt: skip
    return {
        "holds": holds,
        "servers": _means(rows),
        "runs": rows,
        "about": [about],
        "series": series,
    }


def figures(tables: dict[str, list[dict[str, Any]]]) -> list[Figure]:
    """The adaptive server in every run, and its accuracy over that of the smallest profile."""
    by_run = {(row["server"], row["run"]): row for row in tables["runs"]}
    mean = {row["server"]: row for row in tables["servers"]}
    runs = sorted({row["run"] for row in tables["runs"]})
    found = [
        Figure(f"adaptive_within_run{run}", by_run[ADAPTIVE, run]["within"], 0.99, at_least=True)
        for run in runs
    ]
    gained = mean[ADAPTIVE]["accuracy"] - mean["fixed tiny"]["accuracy"]
    return [
        *found,
        Figure("adaptive_within", mean[ADAPTIVE]["within"], 0.99, at_least=True),
        Figure("adaptive_accuracy_over_tiny", gained, 1e-9, at_least=True),
        Figure("adaptive_lost", mean[ADAPTIVE]["lost"], 0),
    ]


def _made() -> tuple[Path, Path, Any, Any]:
    """The artifact, NNCF's int8 of the same network, and all test images with their classes."""
    spec = load_results(ROOT / "configs" / "results" / f"{SUBJECT}.yaml")
    export = replace(spec.export, threads=THREADS)
    spec = replace(spec, recipe=replace(spec.recipe, export=export))
    with showing() as show:
        base = load_any(ROOT / "configs" / "base" / f"{SUBJECT}.yaml")
        train_any(base, base_folder(), say=say, watch=show.watch)
        results = Results(spec, WORK, say, show.watch)
        made = results.artifact(spec.seeds[0])
        ptq8 = results.baseline("ptq8", results.task(made))
    samples, labels = (part.numpy() for part in results.subject.test)
    return made.folder / ARTIFACT, ptq8.folder / MODEL, samples, labels


def _request_ms(session: Any, samples: Any, calls: int = 15) -> float:
    """What the engine takes for a request's images, one by one as a server without batches."""
    taken = []
    for _ in range(calls):
        start = time.perf_counter()
        for row in samples:
            session.run([row[None]])
        taken.append((time.perf_counter() - start) * 1e3)
    return float(np.median(taken))


def _held(one: Server, requests: Sequence[Body], objective: float, took: float) -> float:
    """The rate at which 99% of random arrivals are answered within the objective."""

    def probe(rate: float) -> float:
        due = arrivals([Phase(PROBE_SECONDS, rate)], seed=99)
        share = share_within(asyncio.run(offer(one.infer, requests, due)), objective)
        say(f"at {rate:.1f} requests a second {share:.2%} within the objective")
        return share

    return hold(probe, 0.2e3 / took, 1.6e3 / took)


def _steps(low: float, high: float, seconds: float) -> list[Phase]:
    """Levels of load from the lowest to the highest and back, each so many times the last."""
    up = np.geomspace(low, high, LEVELS).tolist()
    return [Phase(seconds, rate) for rate in (*up, *up[-2::-1])]


def _series(name: str, outcomes: Sequence[Outcome], objective: float) -> list[dict[str, Any]]:
    """Second by second: what was offered and missed, the p99, and who answered most."""
    rows = []
    for second in range(int(max(o.due for o in outcomes)) + 1):
        mine = [o for o in outcomes if second <= o.due < second + 1]
        took = [o.ms for o in mine if o.status == 200]
        served = [o.profile for o in mine if o.profile]
        rows.append(
            {
                "server": name, "second": second, "offered": len(mine),
                "missed": sum(o.status != 200 or o.ms > objective for o in mine),
                "p99": float(np.percentile(took, 99)) if took else None,
                "profile": max(set(served), key=served.count) if served else None,
            }
        )  # fmt: skip
    return rows


def _means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every server over its runs: shares and accuracies weighted alike, counts added up."""
    found = []
    for name in dict.fromkeys(row["server"] for row in rows):
        mine = [row for row in rows if row["server"] == name]
        total = {
            key: sum(row[key] for row in mine)
            for key in ("offered", "late", "refused", "lost", "images")
        }
        means = {
            key: float(np.mean([row[key] for row in mine]))
            for key in ("within", "accuracy", "p50", "p90", "p99")
        }
        worst = min(row["within"] for row in mine)
        found.append({"server": name, **means, "worst_within": worst, **total})
    return found


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} · {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
