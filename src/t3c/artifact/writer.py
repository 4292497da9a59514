"""Writing an artifact's content into a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from safetensors import SafetensorError
from safetensors.numpy import save_file

from t3c.artifact.folder import MANIFEST
from t3c.artifact.manifest import (
    CONTENT,
    DENSE,
    FACTORS,
    GRAPH,
    SCHEMA_VERSION,
    ControllerEntry,
    FileEntry,
    LayerEntry,
    Manifest,
    ModelEntry,
    ProfileEntry,
    dump_manifest,
)
from t3c.artifact.reader import sha256_file
from t3c.artifact.store import Tensors, layer_bytes
from t3c.errors import ArtifactError
from t3c.files import writing
from t3c.spec import ProfileChain


def write_content(
    folder: Path,
    *,
    model: ModelEntry,
    layers: tuple[LayerEntry, ...],
    profiles: ProfileChain,
    graph: onnx.ModelProto,
    factors: Tensors,
    dense: Mapping[str, npt.NDArray[np.generic]],
    seeds: dict[str, int],
    version: str,
    calibrated_on: tuple[str, ...] | None = None,
    controller: ControllerEntry | None = None,
) -> Manifest:
    """Write graph, factors, dense tensors and, last, the manifest that holds their hashes."""
    with writing(folder):
        (folder / GRAPH).write_bytes(graph.SerializeToString())
        _save(folder / FACTORS, factors)
        _save(folder / DENSE, dense)
    files = {
        name: FileEntry(sha256=sha256_file(folder / name), bytes=(folder / name).stat().st_size)
        for name in CONTENT
    }
    shared = files[GRAPH].bytes + files[DENSE].bytes + header_bytes(folder / FACTORS)

    def manifest(own_bytes: int) -> Manifest:
        entries = tuple(
            ProfileEntry(
                name=profile.name,
                points=dict(profile.points),
                size_bytes=shared
                + own_bytes
                + sum(layer_bytes(e, profile.points[e.spec.name]) for e in layers),
            )
            for profile in profiles
        )
        return Manifest(
            schema_version=SCHEMA_VERSION, t3c_version=version, model=model, layers=layers,
            profiles=entries, seeds=seeds, files=files, calibrated_on=calibrated_on,
            controller=controller,
        )  # fmt: skip

    # The manifest counts itself, until its length settles.
    own = 0
    while len(raw := dump_manifest(manifest(own))) != own:
        own = len(raw)
    with writing(folder):
        (folder / MANIFEST).write_bytes(raw)
    return manifest(own)


def header_bytes(path: Path) -> int:
    """Bytes of a safetensors file before its data: what any of its tensors needs to be found."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _save(path: Path, tensors: Mapping[str, npt.NDArray[np.generic]]) -> None:
    try:
        save_file({n: np.ascontiguousarray(v) for n, v in tensors.items()}, str(path))
    except SafetensorError as error:  # such as a full disk
        raise ArtifactError(f"{path}: cannot be written: {error}") from error
