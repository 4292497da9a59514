"""Servers in processes of their own, as users start them; and one that serves another model."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from t3c.errors import EngineError

STARTED = re.compile(r"protocol\s+(http://\S+)/v2/models/(\S+)/infer")
READY_SECONDS, STOP_SECONDS = 180.0, 30.0


@dataclass(frozen=True)
class Server:
    """A server that answers: where, and the process that it is."""

    url: str
    model: str
    process: subprocess.Popen[str]

    @property
    def infer(self) -> str:
        return f"{self.url}/v2/models/{self.model}/infer"


@contextmanager
def server(
    artifact: Path,
    options: Sequence[str],
    token: str = "",
    python: Sequence[str] = ("-m", "t3c.cli"),
) -> Iterator[Server]:
    """`t3c serve` on a free port until the block ends; `python` is how the command line is run."""
    command = [sys.executable, *python, "serve", str(artifact), "--port", "0", *options]
    with tempfile.NamedTemporaryFile("w", suffix=".token") as file:
        file.write(token or "a token nobody needs")
        file.flush()
        command += ["--token-file", file.name]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                yield _started(process)
            finally:
                process.terminate()
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()


def standing_in(model: Path) -> list[str]:
    """How the command line is run with a model in the place of every profile."""
    return ["-m", "lab.servers", str(model)]


def _started(process: subprocess.Popen[str]) -> Server:
    """Wait until the server says where it is; what it says later is read, so that it goes on."""
    assert process.stderr is not None
    giving_up = threading.Timer(READY_SECONDS, process.kill)
    giving_up.start()
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if found := STARTED.search(line):
                rest = threading.Thread(target=process.stderr.read, daemon=True)
                rest.start()
                return Server(found[1], found[2], process)
    finally:
        giving_up.cancel()
    raise EngineError(f"the server did not start: {' '.join(said[-3:]).strip()}")


def _main(model: str, arguments: Sequence[str]) -> None:
    """The command line, in which a model takes the place of every profile's session."""
    import openvino as ov

    from t3c.engines.openvino import OpenVINO
    from t3c.runtime.pool import Pool
    from t3c.runtime.runtime import Runtime, load
    from t3c.serve import versions

    def other(*given: object, **options: object) -> Runtime:
        runtime = load(*given, **options)  # type: ignore[arg-type]
        engine = runtime.engine
        assert isinstance(engine, OpenVINO)
        session = engine.compile_read(ov.Core().read_model(model))
        runtime.pool = Pool(lambda key: session, lambda key: 1)
        return runtime

    vars(versions)["load"] = other
    sys.argv = ["t3c", *arguments]
    runpy.run_module("t3c.cli", run_name="__main__")


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
