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
    TOKENIZER,
    FileEntry,
    Manifest,
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
    draft: Manifest,
    *,
    graph: onnx.ModelProto,
    factors: Tensors,
    dense: Mapping[str, npt.NDArray[np.generic]],
    tokenizer: bytes | None = None,
) -> Manifest:
    """Write graph, factors, dense tensors and, last, the manifest with their sizes and hashes.

    A tokenizer is written beside them; profiles run without it, and it is none of their bytes.
    """
    with writing(folder):
        (folder / GRAPH).write_bytes(graph.SerializeToString())
        _save(folder / FACTORS, factors)
        _save(folder / DENSE, dense)
        if tokenizer is not None:
            (folder / TOKENIZER).write_bytes(tokenizer)
    files = {
        name: FileEntry(sha256=sha256_file(folder / name), bytes=(folder / name).stat().st_size)
        for name in (*CONTENT, *([] if tokenizer is None else [TOKENIZER]))
    }
    shared = files[GRAPH].bytes + files[DENSE].bytes + header_bytes(folder / FACTORS)

    def manifest(own_bytes: int) -> Manifest:
        entries = [
            p.model_copy(update={"size_bytes": shared + own_bytes + _points_bytes(draft, p)})
            for p in draft.profiles
        ]
        return draft.model_copy(update={"profiles": tuple(entries), "files": files})

    # The manifest counts itself, until its length settles.
    own = 0
    while len(raw := dump_manifest(manifest(own))) != own:
        own = len(raw)
    with writing(folder):
        (folder / MANIFEST).write_bytes(raw)
    return manifest(own)


def drafted(chain: ProfileChain) -> tuple[ProfileEntry, ...]:
    """Profiles of a manifest that is yet to be written, and with it what they take."""
    return tuple(ProfileEntry(name=p.name, points=dict(p.points), size_bytes=1) for p in chain)


def _points_bytes(manifest: Manifest, profile: ProfileEntry) -> int:
    return sum(layer_bytes(e, profile.points[e.spec.name]) for e in manifest.layers)


def header_bytes(path: Path) -> int:
    """Bytes of a safetensors file before its data: what any of its tensors needs to be found."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _save(path: Path, tensors: Mapping[str, npt.NDArray[np.generic]]) -> None:
    path.touch()  # with the rights of any new file: what is shipped is read by others
    rights = path.stat().st_mode
    try:
        save_file({n: np.ascontiguousarray(v) for n, v in tensors.items()}, str(path))
    except SafetensorError as error:  # such as a full disk
        raise ArtifactError(f"{path}: cannot be written: {error}") from error
    path.chmod(rights)
