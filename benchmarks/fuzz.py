"""`make bench-fuzz`: artifacts that are broken on purpose are refused, and never crash a reader.

Half of the time manifests alone are read, in memory, and half whole artifacts, in processes that
may not grow. Whatever crashes is kept in out/bench-fuzz, for `--replay`. Anything but an artifact
or one of T3C's own errors is a crash: another exception, the death of a process, more than
10 seconds, more than 512 MB, a file opened outside of the artifact, code run.
"""

from __future__ import annotations

import argparse
import os
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from lab.figures import Figure, finish
from lab.fuzz import Guard, load_all, open_manifest
from lab.mutations import Content, mutate, mutate_json, read_folder, write_folder
from t3c.artifact.folder import MANIFEST
from t3c.artifact.reader import Artifact
from t3c.artifact.trim import trim
from t3c.engines import open_engine
from t3c.errors import T3CError

OUT = Path("out/bench-fuzz.json")
KEPT = Path("out/bench-fuzz")
SEED = Path(__file__).parents[1] / "tests" / "artifact" / "version1.t3c"
SECONDS, GROWTH = 10.0, 512 * 2**20
BATCH = 1000  # cases of a process, whose own growth is no finding then
EVERY = 4  # of how many artifacts one is compiled and run
CRASH = "CRASH"
MEMORY = Path("/dev/shm")  # cases are written and read there where it can be


@dataclass
class Tally:
    """Outcomes of cases, and the seeds of crashes with what they were."""

    outcomes: Counter[str] = field(default_factory=Counter)
    crashes: dict[str, list[int]] = field(default_factory=dict)

    def add(self, seed: int, outcome: str) -> None:
        kind, _, what = outcome.partition(": ")
        self.outcomes[kind] += 1
        if kind == CRASH:
            self.crashes.setdefault(what, []).append(seed)

    def __iadd__(self, other: Tally) -> Tally:
        self.outcomes += other.outcomes
        for what, seeds in other.crashes.items():
            self.crashes.setdefault(what, []).extend(seeds)
        return self


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", default="onnxruntime")
    parser.add_argument("--artifact", type=Path, nargs="*", default=[], help="more to begin with")
    parser.add_argument("--only", choices=("manifests", "artifacts"))
    parser.add_argument("--replay", type=Path, help="a kept folder or manifest")
    parser.add_argument("--atheris", action="store_true", help="guided by coverage, manifests")
    given, rest = parser.parse_known_args()
    if given.replay:
        return replay(given.replay, given.engine)
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as scratch:
        bases = seeds(Path(scratch)) + [read_folder(path) for path in given.artifact]
        if given.atheris:
            seconds = f"-max_total_time={given.seconds:.0f}"
            return guided([base[MANIFEST] for base in bases], [seconds, *rest])
        return bench(given, bases, Path(scratch))


def seeds(scratch: Path) -> list[Content]:
    """A small artifact of each schema version."""
    artifact = Artifact(SEED)
    names = [profile.name for profile in artifact.manifest.profiles]
    present = trim(artifact, names, scratch / "present.t3c")
    return [read_folder(SEED), read_folder(present.path)]


def bench(given: argparse.Namespace, bases: list[Content], scratch: Path) -> int:
    started = time.monotonic()
    shares = [kind for kind in ("manifests", "artifacts") if given.only in (None, kind)]
    tallies: dict[str, Tally] = {}
    rows, seconds = [], given.seconds / len(shares)
    for kind in shares:
        began = time.monotonic()
        left = given.cases - sum(t.outcomes.total() for t in tallies.values())
        work = manifest_case(bases) if kind == "manifests" else None
        lanes = [
            Lane(range(given.first + lane, given.first + left, given.workers), began + seconds,
                 work or artifact_case(bases, scratch / str(lane), given.engine))
            for lane in range(given.workers)
        ]  # fmt: skip
        tallies[kind] = run(lanes)
        took = time.monotonic() - began
        counts = tallies[kind].outcomes
        rows += [
            {"of": kind, "outcome": what, "cases": n, "per_second": round(n / took, 1)}
            for what, n in counts.most_common()
        ]
        keep(kind, tallies[kind], bases)
    found = [
        {"of": kind, "crash": what, "cases": len(at), "first_seed": at[0]}
        for kind, tally in tallies.items()
        for what, at in tally.crashes.items()
    ]
    total = sum(t.outcomes.total() for t in tallies.values())
    done = max(total / given.cases, (time.monotonic() - started) / given.seconds)
    figures = [
        Figure("crashes", sum(t.outcomes[CRASH] for t in tallies.values()), 0),
        Figure("share_of_cases_or_time", done, 0.99, at_least=True),
    ]
    return finish(OUT, figures, {"outcomes": rows, "crashes": found})


Case = Callable[[int], str]


def manifest_case(bases: list[Content]) -> Case:
    raws = [base[MANIFEST] for base in bases]

    def case(seed: int) -> str:
        rng = Random(seed)
        return judged(lambda: open_manifest(mutate_json(rng.choice(raws), rng)))

    return case


def artifact_case(bases: list[Content], scratch: Path, name: str) -> Case:
    """Opens artifacts in a folder of its own; the guard and the engine are the process's."""
    made: dict[str, Any] = {}

    def case(seed: int) -> str:
        if not made:
            made.update(guard=Guard(scratch), engine=open_engine(name, 1))
            for index, base in enumerate(bases):
                write_folder(base, scratch / f"sound{index}")
                assert load_all(scratch / f"sound{index}", made["engine"]) == "loaded"
            limit_memory()
        rng, folder = Random(seed), scratch / "case"
        shutil.rmtree(folder, ignore_errors=True)
        write_folder(mutate(rng.choice(bases), rng), folder)
        engine = made["engine"] if seed % EVERY == 0 else None
        made["guard"].start()
        outcome = judged(lambda: load_all(folder, engine))
        seen = made["guard"].stop()
        return f"{CRASH}: {seen[0]}" if seen else outcome

    return case


def judged(action: Callable[[], str | None]) -> str:
    """What came of it: loaded, one of our errors, or a crash and where."""
    try:
        return action() or "loaded"
    except T3CError as error:
        return type(error).__name__
    except BaseException as error:  # this is what is looked for
        frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
        where = f"{Path(frame.f_code.co_filename).name} line {line}"
        return f"{CRASH}: {type(error).__name__} at {where}: {str(error)[:100]}"


def limit_memory() -> None:
    """This process may not grow by more than GROWTH from here on."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + GROWTH
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Lane:
    """Cases one after the other, in a child that is started again when it dies."""

    def __init__(self, seeds: range, until: float, case: Case) -> None:
        self.seeds, self.until, self.case = seeds, until, case
        self.tally, self.at, self.buffer = Tally(), 0, b""
        self.pid = self.pipe = -1

    @property
    def over(self) -> bool:
        return self.at >= len(self.seeds) or time.monotonic() >= self.until

    def start(self) -> None:
        batch = self.seeds[self.at : self.at + BATCH * (1 if self.slow else 50)]
        self.pipe, write = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self.pipe)
            _child(batch, self.case, write, self.until)
        os.close(write)
        self.heard = time.monotonic()

    @property
    def slow(self) -> bool:
        return self.case.__qualname__.startswith("artifact")

    def hear(self) -> bool:
        """Take what the child says; whether it is still there."""
        data = os.read(self.pipe, 1 << 16)
        self.heard = time.monotonic()
        self.buffer += data
        while len(self.buffer) >= 4 and len(self.buffer) >= 4 + (n := _length(self.buffer)):
            self.tally.add(self.seeds[self.at], self.buffer[4 : 4 + n].decode())
            self.buffer, self.at = self.buffer[4 + n :], self.at + 1
        return bool(data)

    def stop(self, *, hung: bool = False) -> None:
        """Reap the child; what it died of is a crash of the case it was at."""
        if hung:
            os.kill(self.pid, signal.SIGKILL)
        os.close(self.pipe)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.buffer = b""
        if status and self.at < len(self.seeds):
            died = f"over {SECONDS:g} s" if hung else f"died with {status}"
            self.tally.add(self.seeds[self.at], f"{CRASH}: {died}")
            self.at += 1


def _length(data: bytes) -> int:
    return int(struct.unpack("<I", data[:4])[0])


def _child(batch: range, case: Case, pipe: int, until: float) -> None:
    """Never returns: it writes an outcome for each seed, and ends."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)  # engines write there what they refuse
    status = 1
    try:
        for seed in batch:
            outcome = case(seed).encode(errors="replace")
            os.write(pipe, struct.pack("<I", len(outcome)) + outcome)
            if time.monotonic() >= until:
                break
        status = 0
    finally:
        os._exit(status)


def run(lanes: list[Lane]) -> Tally:
    """Drive lanes side by side until their seeds or their time are over."""
    for lane in lanes:
        lane.start()
    active, total = list(lanes), Tally()
    while active:
        ready, _, _ = select.select([lane.pipe for lane in active], [], [], 0.5)
        for lane in list(active):
            if lane.pipe in ready and lane.hear():
                continue
            hung = lane.pipe not in ready
            if hung and time.monotonic() - lane.heard < SECONDS:
                continue
            lane.stop(hung=hung)
            if lane.over:
                active.remove(lane)
                total += lane.tally
            else:
                lane.start()
    return total


def keep(kind: str, tally: Tally, bases: list[Content]) -> None:
    """The first case of each crash as files."""
    for at in tally.crashes.values():
        rng, place = Random(at[0]), KEPT / f"{kind}-{at[0]}"
        place.mkdir(parents=True, exist_ok=True)
        base = rng.choice(bases)
        made = {MANIFEST: mutate_json(base[MANIFEST], rng)} if kind == "manifests" else None
        write_folder(made or mutate(base, rng), place)


def replay(path: Path, engine: str) -> int:
    """One kept case, with its traceback if it crashes."""
    if path.is_dir() and len(list(path.iterdir())) > 1:
        action: Callable[[], str | None] = lambda: load_all(path, open_engine(engine, 1))  # noqa: E731
    else:
        raw = (path / MANIFEST if path.is_dir() else path).read_bytes()
        action = lambda: open_manifest(raw)  # noqa: E731
    try:
        print(action() or "loaded")
    except T3CError as error:
        print(f"{type(error).__name__}: {error}")
    return 0


def guided(raws: list[bytes], options: list[str]) -> int:
    """Manifests as libFuzzer finds them by the branches they reach; its options follow ours."""
    try:
        import atheris  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        print("atheris is not installed: pip install 't3c[fuzz]'", file=sys.stderr)
        return 1
    for name in [name for name in sys.modules if name.startswith(("t3c.artifact.", "t3c.spec"))]:
        del sys.modules[name]
    with atheris.instrument_imports(include=["t3c.artifact", "t3c.spec"]):
        from t3c.artifact.manifest_file import parse_manifest
    corpus = KEPT / "corpus"
    write_folder({f"seed{index}.json": raw for index, raw in enumerate(raws)}, corpus)

    def one(raw: bytes) -> None:
        try:
            parse_manifest(raw, Path(MANIFEST))
        except T3CError:
            return

    def mutator(raw: bytes, most: int, seed: int) -> bytes:
        if seed % 2:
            return mutate_json(raw, Random(seed))[:most]
        return bytes(atheris.Mutate(raw, most))

    limits = ["-timeout=10", "-max_len=200000", "-rss_limit_mb=2048", f"-artifact_prefix={KEPT}/"]
    atheris.Setup([sys.argv[0], str(corpus), *limits, *options], one, custom_mutator=mutator)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
