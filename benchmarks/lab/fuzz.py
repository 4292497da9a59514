"""Artifacts that are not what they should be, and what becomes of those who open them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import t3c
from t3c.artifact.folder import MANIFEST
from t3c.artifact.manifest_file import parse_manifest
from t3c.artifact.reader import Artifact
from t3c.artifact.store import layer_bytes
from t3c.artifact.trim import trim
from t3c.cost.proxy import features
from t3c.device.execution import example_inputs
from t3c.engines.protocol import Engine
from t3c.errors import T3CError
from t3c.graph.assemble import assemble
from t3c.runtime.placed import Placed
from t3c.spec import Profile


def open_manifest(raw: bytes) -> None:
    """What follows from a manifest alone: shapes, bytes and work of every profile."""
    manifest, _ = parse_manifest(raw, Path(MANIFEST))
    specs = manifest.specs
    for profile in manifest.chain:
        for entry in manifest.layers:
            layer_bytes(entry, profile.points[entry.spec.name])
        forms = {name: specs[name].forms(point)[-1] for name, point in profile.points.items()}
        features(specs, profile, forms)
        manifest.size_bytes(profile.name) / 1e6


def load_all(folder: Path, engine: Engine | None = None) -> str:
    """What users do with an artifact, all of it: "loaded", or the first of T3C's errors.

    Given an engine, every profile is placed, compiled and run on it too.
    """
    try:
        artifact = Artifact(folder)
    except T3CError as error:
        return type(error).__name__
    part = folder.with_name(f"{folder.name}.part")
    top = artifact.manifest.chain.top.name
    steps: list[Callable[[], object]] = [
        artifact.graph, artifact.dense, artifact.ledger, artifact.devices, artifact.controller,
        lambda: trim(artifact, [top], part),
    ]  # fmt: skip
    for profile in artifact.manifest.chain:
        points = profile.points.items()
        steps += [partial(artifact.stages, layer, point) for layer, point in points]
        steps += [partial(_assemble, artifact, profile, last) for last in (False, True)]
        if engine is not None:
            steps.append(partial(_run, artifact, engine, profile.name))
    found = [_outcome(step) for step in steps]
    return next((outcome for outcome in found if outcome != "loaded"), "loaded")


def _assemble(artifact: Artifact, profile: Profile, last: bool) -> None:
    """A profile in the first or the last form each of its layers has."""
    specs = artifact.manifest.specs
    forms = {name: specs[name].forms(point)[-last] for name, point in profile.points.items()}
    assemble(artifact, profile, forms, artifact.ranges(profile.name))


def _run(artifact: Artifact, engine: Engine, profile: str) -> None:
    graph = Placed(artifact, engine).graph(profile)
    engine.compile(graph).run(example_inputs(artifact))


def _outcome(step: Callable[[], object]) -> str:
    try:
        step()
    except T3CError as error:
        return type(error).__name__
    return "loaded"


class Guard:
    """Sees files opened outside of a folder, programs started and code run, from `start` to `stop`.

    It hears what Python does, for as long as the process lives; engines it does not hear.
    """

    def __init__(self, folder: Path) -> None:
        own = (str(folder.resolve()), sys.prefix, sys.base_prefix, str(Path(t3c.__file__).parent))
        self._own = (*own, "/proc/", "/sys/", os.devnull)
        self._seen: list[str] = []
        self._watching = False
        sys.addaudithook(self._hear)

    def start(self) -> None:
        self._seen, self._watching = [], True

    def stop(self) -> list[str]:
        """What should not have been since the start."""
        self._watching = False
        return self._seen

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._watching:
            return
        if event == "open" and isinstance(args[0], str | bytes):
            path, beneath = Path(os.fsdecode(args[0])), args[1] is None
            # A folder that is removed is opened by names that are beneath it.
            whole = os.path.normpath(path if beneath else path.absolute())
            if not whole.startswith(self._own) and (path.is_absolute() or not beneath):
                self._seen.append(f"opened {whole}")
        elif event in RUNS:
            self._seen.append(f"{event} {str(args)[:99]}")
        elif event == "exec" and not str(args[0].co_filename).startswith((*self._own, "<frozen")):
            self._seen.append(f"code of {args[0].co_filename}")


RUNS = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.startfile",
    "pickle.find_class", "marshal.loads", "socket.connect", "shutil.move", "os.symlink",
)  # fmt: skip
