"""manifest.json: what the artifact is, and the hashes of its content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal, TypeVar

from onnx import NodeProto
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from t3c.errors import ArtifactError, CorruptError, SpecError, VersionError
from t3c.spec import ImageSpec, LayerPoint, LayerSpec, Menu, Profile, ProfileChain

SCHEMA_VERSION = 1
ELASTIC_DOMAIN, OPSET = "t3c", 21  # of elastic nodes; of all others
GRAPH, FACTORS, DENSE = "graph.onnx", "factors.safetensors", "dense.safetensors"
CONTENT = (GRAPH, FACTORS, DENSE)
CONTROLLER = "controller/"  # what the names of a controller's tensors begin with
DTYPES = ("bool", "float16", "float32", "float64", "int8", "int32", "int64", "uint8")


T = TypeVar("T", bound="Record")


class Record(BaseModel):
    """A JSON object of an artifact: immutable, and nothing in it that is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TensorEntry(Record):
    """An input or output; the batch axis is None."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


class ModelEntry(Record):
    """What the artifact computes. `quantized` names the tensors that have a range per profile."""

    name: str
    parameters: int
    inputs: tuple[TensorEntry, ...]
    outputs: tuple[TensorEntry, ...]
    quantized: tuple[str, ...]
    classes: tuple[str, ...] | None = None
    image: ImageSpec | None = None


class LayerEntry(Record):
    """One elastic layer: its geometry, its menu, and what of it is stored."""

    spec: LayerSpec
    menu: tuple[LayerPoint, ...]
    ranks: tuple[int, ...] = Field(description="ranks stored factored, rising")
    bits: tuple[int, ...] = Field(description="views that have a scale, rising")


class ProfileEntry(Record):
    """One profile, and the bytes needed to run it."""

    name: str
    points: dict[str, LayerPoint]
    size_bytes: int = Field(gt=0)


class UnitEntry(Record):
    """What shares a point under a controller, and the chain of points it may take."""

    name: str
    points: tuple[LayerPoint, ...]


class ControllerEntry(Record):
    """A controller, whose tensors are in dense.safetensors: what it decides on, and the shipped
    profiles as points of its units with their shares of latency, size and energy."""

    units: tuple[UnitEntry, ...]
    devices: tuple[str, ...]
    summarized: tuple[str, ...]
    token: Literal["tuple", "scalar"]
    profiles: dict[str, dict[str, LayerPoint]]
    shares: dict[str, tuple[float | None, float | None, float | None]]


class FileEntry(Record):
    """One content file."""

    sha256: str
    bytes: int


class Manifest(Record):
    """The whole of manifest.json."""

    schema_version: int
    t3c_version: str
    model: ModelEntry
    layers: tuple[LayerEntry, ...]
    profiles: tuple[ProfileEntry, ...]
    seeds: dict[str, int]
    files: dict[str, FileEntry]
    calibrated_on: tuple[str, ...] | None = Field(
        default=None, description="hashes of the samples that set activation ranges"
    )
    controller: ControllerEntry | None = None

    @property
    def specs(self) -> dict[str, LayerSpec]:
        return {layer.spec.name: layer.spec for layer in self.layers}

    @property
    def chain(self) -> ProfileChain:
        return ProfileChain(tuple(Profile(p.name, p.points) for p in self.profiles))

    def size_bytes(self, profile: str) -> int:
        return next(p.size_bytes for p in self.profiles if p.name == profile)


def elastic_layer(node: NodeProto) -> str:
    """The layer whose weight an elastic node uses."""
    named = next((a.s.decode() for a in node.attribute if a.name == "layer"), None)
    return named or str(node.name)


def elastic_kind(node: NodeProto, spec: LayerSpec) -> str:
    """What an elastic node computes: conv, linear or embedding."""
    named = next((a.s.decode() for a in node.attribute if a.name == "kind"), None)
    return named or ("conv" if spec.convolution else str(spec.kind))


def dump_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json; their hash is the artifact's content hash."""
    return manifest.model_dump_json(exclude_none=True).encode()


def load_manifest(path: Path) -> tuple[Manifest, str]:
    """The manifest and the content hash of the artifact it stands for."""
    raw = read_plain(path)
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path}: not JSON: {error}") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise VersionError(
            f"{path}: schema_version {version!r} is not one this t3c reads "
            f"(it reads {SCHEMA_VERSION}): use a t3c that wrote it, or export again"
        )
    manifest = parse(Manifest, raw, path)
    try:
        _check(manifest)
    except SpecError as error:
        raise CorruptError(f"{path}: {error}") from error
    return manifest, hashlib.sha256(raw).hexdigest()


def read_plain(path: Path) -> bytes:
    """The bytes of a plain file of an artifact; a link could lead out of the folder."""
    check_plain(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error


def check_plain(path: Path) -> None:
    """Refuse what is missing, a link or no file."""
    if path.is_symlink() or not path.is_file():
        raise CorruptError(f"{path}: missing, or not a plain file")


def parse(kind: type[T], raw: bytes, path: Path) -> T:
    """A record from the bytes of a file, or one clear error."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CorruptError(f"{path}: {where}: {first['msg']}") from error


def _check(manifest: Manifest) -> None:
    """What the types alone do not say."""
    if set(manifest.files) != set(CONTENT):
        raise SpecError(f"files must be {', '.join(CONTENT)}")
    specs = manifest.specs
    if len(specs) != len(manifest.layers):
        raise SpecError("layer names repeat")
    for tensor in (*manifest.model.inputs, *manifest.model.outputs):
        if tensor.dtype not in DTYPES:
            raise SpecError(f"{tensor.name}: unknown dtype {tensor.dtype!r}")
    for layer in manifest.layers:
        Menu(layer.menu)
        rising = all(sorted(set(v)) == list(v) for v in (layer.ranks, layer.bits))
        if not rising or any(not 0 < rank < layer.spec.full_rank for rank in layer.ranks):
            raise SpecError(f"{layer.spec.name}: ranks and bits must rise, ranks below full rank")
    if manifest.controller is not None:
        _check_controller(manifest.controller, [profile.name for profile in manifest.profiles])
    for profile in manifest.chain:
        if profile.points.keys() != specs.keys():
            raise SpecError(f"profile {profile.name!r} does not name every layer")
        for layer in manifest.layers:
            point = profile.points[layer.spec.name]
            stored = layer.spec.stored_dense(point) or point.rank in layer.ranks
            if not stored or point.bits not in layer.bits:
                raise SpecError(f"profile {profile.name!r}: {layer.spec.name}: {point} not stored")


def _check_controller(controller: ControllerEntry, profiles: list[str]) -> None:
    if list(controller.profiles) != profiles:
        raise SpecError("the controller does not have the artifact's profiles")
    if len({unit.name for unit in controller.units}) != len(controller.units):
        raise SpecError("the controller's units repeat")
