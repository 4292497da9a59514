"""What a run writes about itself: its metrics, what it ran on, and which data it saw."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from t3c.errors import DataError, TrainError
from t3c.files import write_atomic, writing
from t3c.version import __version__

log = logging.getLogger("t3c.train")

METRICS, MANIFEST, BOARD = "metrics.jsonl", "run.json", "tensorboard"

Kind = Literal["train", "validation"]


class Recorder:
    """Metrics by step: a line of JSON each in `metrics.jsonl`, and TensorBoard's scalars.

    Where TensorBoard is not to be had nothing is written for it, and the log says why. Without a
    folder nothing is written at all.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._make_board: Any = None  # tensorboard has no types
        self._board: Any = None
        self._purge: int | None = None
        if folder is None:
            return
        with writing(folder, TrainError):
            folder.mkdir(parents=True, exist_ok=True)
        self._keep(None)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except (ImportError, AttributeError, TypeError) as error:  # missing, too old or broken
            log.info("no TensorBoard: %s: pip install 't3c[train]'", error)
        else:
            self._make_board = SummaryWriter

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, step: int, kind: Kind, values: Mapping[str, float]) -> None:
        """Write the values of a step; one that is not finite is null."""
        if self.folder is None:
            return
        plain = {name: float(value) for name, value in values.items()}
        shown = {name: value if math.isfinite(value) else None for name, value in plain.items()}
        line = json.dumps({"step": int(step), "kind": kind, "values": shown}) + "\n"
        path = self.folder / METRICS
        with writing(path, TrainError), path.open("ab") as file:
            file.write(line.encode())
        self._show(self.folder, step, {f"{kind}/{name}": v for name, v in plain.items()})

    def rewind(self, step: int) -> int:
        """Forget `step`, where the run goes on, and all after it; the number of lines dropped."""
        if self.folder is None:
            return 0
        self.close()
        self._purge = step
        return self._keep(step)

    def close(self) -> None:
        """Have all on disk; a later `log` opens it again."""
        board, self._board = self._board, None
        if board is not None:
            try:
                board.close()
            except OSError as error:
                self._give_up(error)

    def _keep(self, end: int | None) -> int:
        """Drop the lines from step `end` on, and one that is torn since a kill fell into it."""
        assert self.folder is not None
        path = self.folder / METRICS
        with writing(path, TrainError):
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if _counts(line, end)]
        if len(kept) < len(lines):
            write_atomic(path, b"".join(kept), TrainError)
        return len(lines) - len(kept)

    def _show(self, folder: Path, step: int, values: Mapping[str, float]) -> None:
        if self._make_board is None:
            return
        try:
            if self._board is None:
                self._board = self._make_board(str(folder / BOARD), purge_step=self._purge)
                self._purge = None
            for tag, value in values.items():
                self._board.add_scalar(tag, value, step)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Go on without TensorBoard: a run does not end for a picture of it."""
        log.info("no TensorBoard: it cannot be written: %s", error)
        self._make_board = self._board = None


class DataFingerprint:
    """A hash over batches as they are seen: every tensor's bytes, type and shape, in order.

    Each batch is hashed together with the hash before it; of no batch the hash is empty.
    """

    def __init__(self) -> None:
        self._digest, self._batches, self._samples = "", 0, 0

    def update(self, batch: Any) -> None:
        """See a batch: tensors, in tuples, lists and dicts as they come."""
        found = hashlib.sha256(self._digest.encode())
        first = _hash_into(found, batch)
        self._digest = found.hexdigest()
        self._batches += 1
        self._samples += first or 0

    def as_json(self) -> dict[str, Any]:
        return {"sha256": self._digest, "batches": self._batches, "samples": self._samples}


def run_manifest(
    config: Mapping[str, Any], seeds: Mapping[str, int], data: Mapping[str, Any]
) -> dict[str, Any]:
    """All that it takes to run it again: config, seeds, data, code, versions and machine."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": _plain("config", config),
        "seeds": seeds,
        "data": data,
        "code": {"t3c": __version__, "sha256": _code_digest()},
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "t3c": __version__,
        },
        "platform": platform.platform(),
        "threads": {
            "cpus": len(os.sched_getaffinity(0)),
            "torch": torch.get_num_threads(),
            "torch_interop": torch.get_num_interop_threads(),
        },
    }


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write `run.json`, whole or not at all."""
    with writing(folder, TrainError):
        folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(manifest, indent=1, allow_nan=False)
    write_atomic(folder / MANIFEST, text.encode() + b"\n", TrainError)


def _counts(line: bytes, end: int | None) -> bool:
    try:
        entry = json.loads(line)
        return line.endswith(b"\n") and (end is None or entry["step"] < end)
    except (ValueError, KeyError, TypeError):
        return False


def _hash_into(found: hashlib._Hash, value: Any) -> int | None:
    """Hash a batch or a part of it; the number of samples of its first tensor."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(flat.view(torch.uint8).numpy().data)
        return value.shape[0] if value.dim() else None
    if isinstance(value, Mapping):
        parts = [(repr(key), part) for key, part in value.items()]
    elif isinstance(value, tuple | list):
        parts = [("", part) for part in value]
    else:
        raise DataError(f"a batch holds tensors, got {type(value).__name__}")
    found.update(f"{len(parts)} of {'names' if isinstance(value, Mapping) else 'parts'}".encode())
    first = None
    for key, part in parts:
        found.update(key.encode())
        samples = _hash_into(found, part)
        first = samples if first is None else first
    return first


def _code_digest() -> str:
    """A hash over the package's own files, by their paths in it."""
    package = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        raw = path.read_bytes()
        found.update(f"{path.relative_to(package).as_posix()} {len(raw)}\n".encode())
        found.update(raw)
    return found.hexdigest()


def _plain(where: str, value: Any) -> Any:
    """A value as JSON has it; numbers that are not finite go by their names."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{where}.{key}", part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(f"{where}[{index}]", part) for index, part in enumerate(value)]
    raise TrainError(f"{where} is of {type(value).__name__}, which JSON has not")
