"""Reading an artifact, strictly: everything is checked before anything is used."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import DecodeError
from safetensors import SafetensorError, safe_open

from t3c.artifact.devices import DeviceTable
from t3c.artifact.folder import MANIFEST, recover
from t3c.artifact.hostile import check_graph
from t3c.artifact.ledger import Certification, Ledger, ParityEntry, QualityEntry
from t3c.artifact.manifest import (
    CONTENT,
    CONTROLLER,
    DENSE,
    FACTORS,
    GRAPH,
    NORMS,
    RANGES,
    TOKENIZER,
    LayerEntry,
)
from t3c.artifact.manifest_file import load_manifest
from t3c.artifact.norms import OwnNorms, read_norms
from t3c.artifact.plain import check_plain, parse, read_plain
from t3c.artifact.store import Floats, Tensors, read_layer, trim_layer
from t3c.control.policy import Policy
from t3c.control.proposed import Controlled
from t3c.control.token import About
from t3c.errors import ArtifactError, CorruptError, SpecError
from t3c.files import locked, write_atomic
from t3c.spec import LayerPoint, Level, Profile

LEDGER, DEVICES = "ledger.json", "devices"
STORED = ("BOOL", "F16", "F32", "F64", "I8", "I16", "I32", "I64", "U8")  # types of tensors
WIDEST = 1e30  # activation: products of it are still numbers
LEDGER_SECONDS = 30.0  # to wait for another process that is adding to it


class Artifact:
    """An opened artifact. Weights are read when asked for; `tokenizer` is that file, if any."""

    def __init__(self, path: str | Path, *, verify: bool = True) -> None:
        self.path = Path(path)
        recover(self.path)
        if not self.path.is_dir():
            raise ArtifactError(f"{self.path}: no such artifact folder")
        if not (self.path / MANIFEST).is_file():
            raise CorruptError(f"{self.path}: not an artifact: {MANIFEST} is missing")
        self.manifest, self.content = load_manifest(self.path / MANIFEST)
        self._check_files(verify)
        # Held open from here on: an artifact that takes this one's place does not mix with it.
        self._graph, self._checked = read_plain(self.path / GRAPH), False
        carried = TOKENIZER in self.manifest.files
        self.tokenizer = read_plain(self.path / TOKENIZER) if carried else None
        self._factors, self._dense = (_opened(self.path / name) for name in (FACTORS, DENSE))

    @cached_property
    def _norms(self) -> dict[str, OwnNorms]:
        """The norms of the profile that was asked for last."""
        return {}

    @cached_property
    def entries(self) -> dict[str, LayerEntry]:
        return {layer.spec.name: layer for layer in self.manifest.layers}

    def stages(self, layer: str, point: LayerPoint) -> list[tuple[npt.NDArray[np.int8], Floats]]:
        """(int8 weight, scale) of each stored stage of a layer at a point."""
        return read_layer(self._factors, self.entries[layer], point)

    def weights(self, profile: Profile, layer: str) -> list[tuple[npt.NDArray[np.int8], Floats]]:
        """(int8 weight, scale) of each stage of a layer, with the profile's gains applied."""
        stages = self.stages(layer, profile.points[layer])
        gain = self.norms(profile.name).gains.get(layer)
        if gain is not None:  # what is added up for a narrowed layer is multiplied term by term
            last = len(stages) - 1
            for index in {0, last} if self.entries[layer].spec.narrows else {last}:
                codes, scale = stages[index]
                mine = gain[: len(scale)]
                stages[index] = codes, scale * (mine if scale.ndim == 1 else mine[:, None])
        return stages

    def norms(self, profile: str) -> OwnNorms:
        """The norms that a profile has for itself; of some profiles there are none."""
        known = self._norms.get(profile)
        if known is not None:
            return known
        key, found = f"{NORMS}{profile}", OwnNorms()
        if key in self._dense.keys():  # noqa: SIM118
            try:
                found = read_norms(self._dense.get_tensor(key), self.manifest)
                self._check_replaced(found.biases)
            except SpecError as error:
                raise CorruptError(f"{self.path / DENSE}: {key}: {error}") from error
        self._norms = {profile: found}  # the next layers are the same profile's
        return found

    def _check_replaced(self, biases: Mapping[str, Floats]) -> None:
        """Refuse biases in the place of what is not there, or has another shape."""
        for name, bias in biases.items():
            stored = name in self._dense.keys()  # noqa: SIM118
            if not stored or list(bias.shape) != self._dense.get_slice(name).get_shape():
                raise SpecError(f"there is no bias {name!r} of {len(bias)} channels")

    def trimmed_layer(self, wanted: LayerEntry) -> Tensors:
        """The tensors that store as much of a layer as `wanted` has."""
        return trim_layer(self._factors, self.entries[wanted.spec.name], wanted)

    def graph(self) -> onnx.ModelProto:
        """The topology, without weights."""
        try:
            model = onnx.load_model_from_string(self._graph)
            if not self._checked:
                wanted = [entry.name for entry in self.manifest.model.inputs]
                if [value.name for value in model.graph.input][: len(wanted)] != wanted:
                    raise SpecError("its inputs are not the manifest's")
                check_graph(model, self.manifest.specs)
                self._checked = True
        except (DecodeError, SpecError, UnicodeDecodeError) as error:
            raise CorruptError(f"{self.path / GRAPH}: {error}") from error
        return model

    def dense(self, profile: str | None = None) -> dict[str, npt.NDArray[np.generic]]:
        """Every tensor that is not elastic, and the activation ranges.

        Of a `profile` those that it has for itself stand in the place of those that all share.
        """
        shared = {n: self._dense.get_tensor(n) for n in self._dense.keys()}  # noqa: SIM118
        return shared if profile is None else shared | dict(self.norms(profile).biases)

    @property
    def weight_only(self) -> bool:
        """Whether only weights are of few bits, and activations stay float."""
        return self.manifest.numerics.activations == "float32"

    def ranges(self, profile: str) -> dict[str, tuple[float, float]]:
        """The activation ranges a profile was calibrated with; none where activations are float."""
        if self.weight_only:
            return {}
        names, key = self.manifest.model.quantized, f"{RANGES}{profile}"
        stored = key in self._dense.keys()  # noqa: SIM118
        values = np.asarray(self._dense.get_tensor(key) if stored else [])
        if values.shape != (len(names), 2):
            raise CorruptError(f"{self.path / DENSE}: {key} does not hold {len(names)} ranges")
        known = np.flatnonzero(np.isfinite(values).all(axis=1))
        low, high = values[known].astype(np.float64).T
        if (low > high).any() or (np.maximum(-low, high) > WIDEST).any():
            raise CorruptError(f"{self.path / DENSE}: {key} holds ranges that cannot be")
        if self.manifest.numerics.activation_zero == "zero":
            low = np.where(low < 0, -np.maximum(-low, high), low)
            high = np.where(low < 0, -low, high)
        return {names[i]: (float(a), float(b)) for i, a, b in zip(known, low, high, strict=True)}

    def controller(self) -> Controlled | None:
        """The controller, if the artifact carries one."""
        entry = self.manifest.controller
        if entry is None:
            return None
        names = [n for n in self._dense.keys() if n.startswith(CONTROLLER)]  # noqa: SIM118
        tensors = {n.removeprefix(CONTROLLER): self._dense.get_tensor(n) for n in names}
        try:
            units = {unit.name: tuple(map(_level, unit.points)) for unit in entry.units}
            profiles = {
                name: {unit: _level(point) for unit, point in points.items()}
                for name, points in entry.profiles.items()
            }
            about = About(units, entry.devices, entry.summarized, entry.token)
            policy = Policy.from_tensors(tensors, about)
            return Controlled(policy, profiles, entry.shares)
        except SpecError as error:
            raise CorruptError(f"{self.path / DENSE}: the controller: {error}") from error

    def ledger(self) -> Ledger | None:
        """The certificates, if the artifact was certified."""
        path = self.path / LEDGER
        if not path.exists():
            return None
        ledger = parse(Ledger, read_plain(path), path)
        self._check_content(ledger.content, path)
        return ledger

    def devices(self) -> list[DeviceTable]:
        """The tables of all devices it was calibrated on."""
        tables = []
        for path in sorted((self.path / DEVICES).glob("*.json")):
            if path.parent.is_symlink():
                raise CorruptError(f"{path.parent}: not a plain folder")
            table = parse(DeviceTable, read_plain(path), path)
            self._check_content(table.content, path)
            tables.append(table)
        return tables

    def add_certification(self, certification: Certification) -> Ledger:
        """Put a certification into the ledger, beside those of other engines and forms."""
        return self._changed_ledger(lambda ledger: ledger.added(certification))

    def add_parity(self, rows: Sequence[ParityEntry]) -> Ledger:
        """Put into the ledger how far engines are from torch, in place of what it said before."""
        return self._changed_ledger(lambda ledger: ledger.compared(rows))

    def add_quality(self, rows: Sequence[QualityEntry]) -> Ledger:
        """Put into the ledger how good profiles are, in place of what it said before."""
        return self._changed_ledger(lambda ledger: ledger.judged(rows))

    def _changed_ledger(self, change: Callable[[Ledger], Ledger]) -> Ledger:
        with locked(self.path / LEDGER, wait=LEDGER_SECONDS):
            self._check_not_replaced()
            ledger = change(self.ledger() or Ledger(content=self.content))
            self.put_ledger(ledger)
        return ledger

    def put_ledger(self, ledger: Ledger) -> None:
        write_atomic(self.path / LEDGER, ledger.model_dump_json(indent=1).encode())

    def add_device(self, table: DeviceTable) -> None:
        self._check_not_replaced()
        path = self.path / DEVICES / f"{table.device.key}.json"
        write_atomic(path, table.model_dump_json(indent=1).encode())

    def content_bytes(self) -> int:
        """Bytes of the files that are needed to run it."""
        return sum((self.path / name).stat().st_size for name in (*CONTENT, MANIFEST))

    def size_on_disk(self) -> int:
        """Bytes of all its files, what is known of it included."""
        return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())

    def _check_files(self, verify: bool) -> None:
        for name, entry in self.manifest.files.items():
            path = self.path / name
            check_plain(path)
            size = path.stat().st_size
            if size != entry.bytes:
                raise CorruptError(f"{path}: {size} bytes, the manifest says {entry.bytes}")
            if verify and sha256_file(path) != entry.sha256:
                raise CorruptError(f"{path}: its hash is not the manifest's: the file was changed")

    def _check_not_replaced(self) -> None:
        if load_manifest(self.path / MANIFEST)[1] != self.content:
            raise ArtifactError(
                f"{self.path}: was replaced while it was measured: measure it again"
            )

    def _check_content(self, content: str, path: Path) -> None:
        if content != self.content:
            raise CorruptError(
                f"{path}: belongs to other content ({content[:12]}, this is {self.content[:12]}): "
                "the manifest was changed, or the file was copied from another artifact"
            )


def _level(stored: LayerPoint) -> Level:
    """Return the level of a unit that a manifest has as a rank."""
    return Level(stored.rank, stored.bits)


def _opened(path: Path) -> Any:  # safetensors has no types
    try:
        file: Any = safe_open(str(path), framework="numpy")
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CorruptError(f"{path}: {error}") from error
    odd = next((name for name, kind in kinds.items() if kind not in STORED), None)
    if odd is not None:
        raise CorruptError(f"{path}: {odd!r} is of a type that no artifact has: {kinds[odd]}")
    return file


def sha256_file(path: Path) -> str:
    """The hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
