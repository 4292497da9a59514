"""Reading an artifact, strictly: everything is checked before anything is used."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import DecodeError
from safetensors import SafetensorError, safe_open

from t3c.artifact.devices import DeviceTable, Ledger
from t3c.artifact.folder import recover, write_atomic
from t3c.artifact.manifest import (
    CONTENT,
    DENSE,
    FACTORS,
    GRAPH,
    MANIFEST,
    LayerEntry,
    load_manifest,
    parse,
)
from t3c.artifact.store import Floats, read_layer
from t3c.errors import ArtifactError, CorruptError
from t3c.spec import LayerPoint

LEDGER, DEVICES = "ledger.json", "devices"


class Artifact:
    """An opened artifact. Weights are read when asked for."""

    def __init__(self, path: str | Path, *, verify: bool = True) -> None:
        self.path = Path(path)
        recover(self.path)
        if not self.path.is_dir():
            raise ArtifactError(f"{self.path}: no such artifact folder")
        if not (self.path / MANIFEST).is_file():
            raise CorruptError(f"{self.path}: not an artifact: {MANIFEST} is missing")
        self.manifest, self.content = load_manifest(self.path / MANIFEST)
        self._check_files(verify)

    @cached_property
    def entries(self) -> dict[str, LayerEntry]:
        return {layer.spec.name: layer for layer in self.manifest.layers}

    def stages(self, layer: str, point: LayerPoint) -> list[tuple[npt.NDArray[np.int8], Floats]]:
        """(int8 weight, row scale) of each stored stage of a layer at a point."""
        return read_layer(str(self.path / FACTORS), self.entries[layer], point)

    def graph(self) -> onnx.ModelProto:
        """The topology, without weights."""
        try:
            return onnx.load_model_from_string((self.path / GRAPH).read_bytes())
        except DecodeError as error:
            raise CorruptError(f"{self.path / GRAPH}: {error}") from error

    def dense(self) -> dict[str, npt.NDArray[np.generic]]:
        """Every tensor that is not elastic."""
        path = self.path / DENSE
        try:
            with safe_open(str(path), framework="numpy") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CorruptError(f"{path}: {error}") from error

    def ledger(self) -> Ledger | None:
        """The certificates, if the artifact was certified."""
        path = self.path / LEDGER
        if not path.is_file():
            return None
        ledger = parse(Ledger, path.read_bytes(), path)
        self._check_content(ledger.content, path)
        return ledger

    def devices(self) -> list[DeviceTable]:
        """The tables of all devices it was calibrated on."""
        tables = []
        for path in sorted((self.path / DEVICES).glob("*.json")):
            if path.is_symlink() or path.parent.is_symlink():
                raise CorruptError(f"{path}: not a plain file")
            table = parse(DeviceTable, path.read_bytes(), path)
            self._check_content(table.content, path)
            tables.append(table)
        return tables

    def add_ledger(self, ledger: Ledger) -> None:
        write_atomic(self.path / LEDGER, ledger.model_dump_json(indent=1).encode())

    def add_device(self, table: DeviceTable) -> None:
        path = self.path / DEVICES / f"{table.device.key}.json"
        write_atomic(path, table.model_dump_json(indent=1).encode())

    def size_on_disk(self) -> int:
        return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())

    def _check_files(self, verify: bool) -> None:
        for name in CONTENT:
            path, entry = self.path / name, self.manifest.files[name]
            if not path.is_file() or path.is_symlink():
                raise CorruptError(f"{path}: missing, or not a plain file")
            size = path.stat().st_size
            if size != entry.bytes:
                raise CorruptError(f"{path}: {size} bytes, the manifest says {entry.bytes}")
            if verify and sha256_file(path) != entry.sha256:
                raise CorruptError(f"{path}: its hash is not the manifest's: the file was changed")

    def _check_content(self, content: str, path: Path) -> None:
        if content != self.content:
            raise CorruptError(
                f"{path}: belongs to other content ({content[:12]}, this is {self.content[:12]}): "
                "the manifest was changed, or the file was copied from another artifact"
            )


def sha256_file(path: Path) -> str:
    """The hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
