"""manifest.json: what the artifact is, and the hashes of its content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from t3c.errors import CorruptError, SpecError, VersionError
from t3c.spec import ImageSpec, LayerPoint, LayerSpec, Profile, ProfileChain

SCHEMA_VERSION = 1
MANIFEST, GRAPH, FACTORS, DENSE = (
    "manifest.json",
    "graph.onnx",
    "factors.safetensors",
    "dense.safetensors",
)
CONTENT = (GRAPH, FACTORS, DENSE)


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
    size_bytes: int


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

    @property
    def specs(self) -> dict[str, LayerSpec]:
        return {layer.spec.name: layer.spec for layer in self.layers}

    @property
    def chain(self) -> ProfileChain:
        return ProfileChain(tuple(Profile(p.name, p.points) for p in self.profiles))

    def size_bytes(self, profile: str) -> int:
        return next(p.size_bytes for p in self.profiles if p.name == profile)


def dump_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json; their hash is the artifact's content hash."""
    return manifest.model_dump_json(exclude_none=True).encode()


def load_manifest(path: Path) -> tuple[Manifest, str]:
    """The manifest and the content hash of the artifact it stands for."""
    raw = path.read_bytes()
    try:
        data = json.loads(raw)
    except ValueError as error:
        raise CorruptError(f"{path}: not JSON: {error}") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
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
    for profile in manifest.chain:
        if profile.points.keys() != specs.keys():
            raise SpecError(f"profile {profile.name!r} does not name every layer")
        for layer in manifest.layers:
            point = profile.points[layer.spec.name]
            stored = layer.spec.stored_dense(point) or point.rank in layer.ranks
            if not stored or point.bits not in layer.bits:
                raise SpecError(f"profile {profile.name!r}: {layer.spec.name}: {point} not stored")
