"""Writing an artifact's content into a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from safetensors.numpy import save_file

from t3c.artifact.manifest import (
    CONTENT,
    DENSE,
    FACTORS,
    GRAPH,
    MANIFEST,
    SCHEMA_VERSION,
    FileEntry,
    LayerEntry,
    Manifest,
    ModelEntry,
    ProfileEntry,
    dump_manifest,
)
from t3c.artifact.reader import sha256_file
from t3c.artifact.store import Tensors, layer_bytes
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
) -> Manifest:
    """Write graph, factors, dense tensors and, last, the manifest that holds their hashes."""
    (folder / GRAPH).write_bytes(graph.SerializeToString())
    save_file({n: np.ascontiguousarray(v) for n, v in factors.items()}, str(folder / FACTORS))
    save_file({n: np.ascontiguousarray(v) for n, v in dense.items()}, str(folder / DENSE))
    files = {
        name: FileEntry(sha256=sha256_file(folder / name), bytes=(folder / name).stat().st_size)
        for name in CONTENT
    }
    shared = files[GRAPH].bytes + files[DENSE].bytes

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
            profiles=entries, seeds=seeds, files=files,
        )  # fmt: skip

    # The manifest counts itself: its length settles with the second draft.
    draft = dump_manifest(manifest(0))
    final = manifest(len(dump_manifest(manifest(len(draft)))))
    (folder / MANIFEST).write_bytes(dump_manifest(final))
    return final
