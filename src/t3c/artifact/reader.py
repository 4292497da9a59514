"""Reading an artifact, strictly: everything is checked before anything is used."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import DecodeError
from onnx import NodeProto, TensorProto, numpy_helper
from safetensors import SafetensorError, safe_open

from t3c.artifact.devices import DeviceTable
from t3c.artifact.folder import MANIFEST, recover
from t3c.artifact.ledger import Certification, Ledger, ParityEntry
from t3c.artifact.manifest import (
    CONTENT,
    CONTROLLER,
    DENSE,
    ELASTIC_DOMAIN,
    FACTORS,
    GRAPH,
    OPSET,
    RANGES,
    LayerEntry,
    check_plain,
    elastic_kind,
    elastic_layer,
    load_manifest,
    parse,
    read_plain,
)
from t3c.artifact.store import Floats, Tensors, read_layer, trim_layer
from t3c.control.policy import Policy
from t3c.control.proposed import Controlled
from t3c.control.token import About
from t3c.errors import ArtifactError, CorruptError, SpecError
from t3c.files import locked, write_atomic
from t3c.spec import Factorization, LayerPoint, LayerSpec

LEDGER, DEVICES = "ledger.json", "devices"
STORED = ("BOOL", "F16", "F32", "F64", "I8", "I16", "I32", "I64", "U8")  # types of tensors
WIDEST = 1e30  # activation: products of it are still numbers
ONNX = ("", "ai.onnx")  # names of the domain of its own operations
NUMBERS = (
    TensorProto.BOOL, TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT8,
    TensorProto.INT16, TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8, TensorProto.UINT16,
    TensorProto.UINT32, TensorProto.UINT64,
)  # fmt: skip
LEDGER_SECONDS = 30.0  # to wait for another process that is adding to it


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
        # Held open from here on: an artifact that takes this one's place does not mix with it.
        self._graph, self._checked = read_plain(self.path / GRAPH), False
        self._factors, self._dense = (_opened(self.path / name) for name in (FACTORS, DENSE))

    @cached_property
    def entries(self) -> dict[str, LayerEntry]:
        return {layer.spec.name: layer for layer in self.manifest.layers}

    def stages(self, layer: str, point: LayerPoint) -> list[tuple[npt.NDArray[np.int8], Floats]]:
        """(int8 weight, row scale) of each stored stage of a layer at a point."""
        return read_layer(self._factors, self.entries[layer], point)

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
                _check_graph(model, self.manifest.specs)
                self._checked = True
        except (DecodeError, SpecError, UnicodeDecodeError) as error:
            raise CorruptError(f"{self.path / GRAPH}: {error}") from error
        return model

    def dense(self) -> dict[str, npt.NDArray[np.generic]]:
        """Every tensor that is not elastic, and the activation ranges."""
        return {name: self._dense.get_tensor(name) for name in self._dense.keys()}  # noqa: SIM118

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
        return {names[i]: (float(values[i, 0]), float(values[i, 1])) for i in known}

    def controller(self) -> Controlled | None:
        """The controller, if the artifact carries one."""
        entry = self.manifest.controller
        if entry is None:
            return None
        names = [n for n in self._dense.keys() if n.startswith(CONTROLLER)]  # noqa: SIM118
        tensors = {n.removeprefix(CONTROLLER): self._dense.get_tensor(n) for n in names}
        try:
            units = {unit.name: unit.points for unit in entry.units}
            about = About(units, entry.devices, entry.summarized, entry.token)
            policy = Policy.from_tensors(tensors, about)
            return Controlled(policy, entry.profiles, entry.shares)
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
        with locked(self.path / LEDGER, wait=LEDGER_SECONDS):
            self._check_not_replaced()
            ledger = (self.ledger() or Ledger(content=self.content)).added(certification)
            self.put_ledger(ledger)
        return ledger

    def add_parity(self, rows: Sequence[ParityEntry]) -> Ledger:
        """Put into the ledger how far engines are from torch, in place of what it said before."""
        with locked(self.path / LEDGER, wait=LEDGER_SECONDS):
            self._check_not_replaced()
            ledger = (self.ledger() or Ledger(content=self.content)).compared(rows)
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
        for name in CONTENT:
            path, entry = self.path / name, self.manifest.files[name]
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


def _check_graph(model: onnx.ModelProto, specs: Mapping[str, LayerSpec]) -> None:
    """Refuse what is more than operations of ONNX, constants and uses of known layers.

    Engines are not made to be given anything else: a body of a loop, a file to read.
    """
    graph = model.graph
    texts = [value.name for value in (*graph.input, *graph.output, *graph.initializer)]
    for node in graph.node:
        texts += [node.name, node.op_type, node.domain, *node.input, *node.output]
    if not all(isinstance(text, str) for text in texts):  # protobuf gives bytes for what is none
        raise SpecError("it has a name that is no text")
    if any(entry.version != OPSET for entry in model.opset_import if entry.domain in ONNX):
        raise SpecError(f"its operations are not of opset {OPSET}")
    if model.functions or model.training_info or graph.sparse_initializer:
        raise SpecError("functions, training and sparse constants are not for artifacts")
    for node in graph.node:
        if not node.output or not node.output[0]:
            raise SpecError(f"{node.name!r} has no output")
        if node.domain == ELASTIC_DOMAIN:
            _check_elastic(node, specs)
        elif node.domain not in ONNX:
            raise SpecError(f"{node.name!r} is an operation of {node.domain!r}, not of ONNX")
        if any(a.HasField("g") or a.graphs or a.HasField("sparse_tensor") for a in node.attribute):
            raise SpecError(f"{node.name!r} has a graph of its own, or a sparse constant")
    for tensor in _constants(graph):
        _check_constant(tensor)
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise SpecError(str(error).strip().splitlines()[0]) from error


def _check_elastic(node: NodeProto, specs: Mapping[str, LayerSpec]) -> None:
    layer = elastic_layer(node)
    if layer not in specs:
        raise SpecError(f"the graph names an unknown layer {layer!r}")
    spec = specs[layer]
    kind = elastic_kind(node, spec)
    kinds = ("conv",) if spec.convolution else ("linear", "embedding")
    if kind not in kinds or (kind == "embedding" and spec.factorization is not Factorization.NONE):
        raise SpecError(f"{layer!r} cannot be used as {kind!r}")
    if node.op_type != "Elastic" or not 1 <= len(node.input) <= 2 or len(node.output) != 1:
        raise SpecError(f"{node.name!r}: an elastic layer has an input, maybe a bias, an output")
    if not all(node.input):
        raise SpecError(f"{node.name!r} has an input without a name")


def _constants(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for attribute in (a for node in graph.node for a in node.attribute):
        yield from attribute.tensors
        if attribute.HasField("t"):
            yield attribute.t


def _check_constant(tensor: TensorProto) -> None:
    if tensor.data_location == TensorProto.EXTERNAL or tensor.external_data:
        raise SpecError(f"{tensor.name!r} lies outside of the graph")
    if tensor.data_type not in NUMBERS or min(tensor.dims, default=0) < 0:
        raise SpecError(f"{tensor.name!r} is no constant of numbers")
    # No number takes less than a byte, so what is allocated is never more than was read.
    if prod(tensor.dims) > tensor.ByteSize():
        raise SpecError(f"{tensor.name!r} does not hold what its sizes {list(tensor.dims)} say")
    try:
        numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as error:
        raise SpecError(f"{tensor.name!r}: {error}") from error
