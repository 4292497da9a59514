"""Compile and run a profile's graph."""

from __future__ import annotations

import importlib
import os

from t3c.engines.cache import CompileCache
from t3c.engines.protocol import Counting, Engine, Operations, Session
from t3c.errors import EngineError, MissingExtraError

__all__ = ["ENGINES", "Counting", "Engine", "Operations", "Session", "open_engine"]

# name -> (module, class, distribution, extra)
ENGINES: dict[str, tuple[str, str, str, str]] = {
    "openvino": ("t3c.engines.openvino", "OpenVINO", "openvino", "openvino"),
    "onnxruntime": ("t3c.engines.onnxruntime", "ONNXRuntime", "onnxruntime", "onnxruntime"),
    "torch": ("t3c.engines.torch", "Torch", "torch", "train"),
}

# Those that start much faster from what they compiled before. ONNX Runtime does not: it spends
# little on a graph that loading the optimized one would save.
CACHED = ("openvino",)


def check_engine(name: str) -> None:
    """Raise EngineError for a name that is no engine's."""
    if name not in ENGINES:
        raise EngineError(f"unknown engine {name!r}: there are {', '.join(sorted(ENGINES))}")


def open_engine(name: str, threads: int | None = None, cache: CompileCache | None = None) -> Engine:
    """An engine by name; by default it uses every core this process may run on.

    Given a cache, it keeps what it compiles there, if that is of use to it.
    """
    check_engine(name)
    cores = len(os.sched_getaffinity(0))
    most = 4 * (os.cpu_count() or cores)
    if threads is not None and not (isinstance(threads, int) and 1 <= threads <= most):
        raise EngineError(f"threads must be from 1 to {most} on this machine, got {threads}")
    module, kind, package, extra = ENGINES[name]
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.split(".")[0] != package:
            raise
        raise MissingExtraError(package, extra) from missing
    options = {"cache": cache} if name in CACHED else {}
    engine: Engine = getattr(loaded, kind)(threads or cores, **options)
    return engine
