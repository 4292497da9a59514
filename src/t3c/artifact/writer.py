"""Writing an artifact's content into a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import save_file

from t3c.artifact.draft import Draft, sized
from t3c.artifact.folder import MANIFEST
from t3c.artifact.manifest import (
    CONTENT,
    DENSE,
    FACTORS,
    GRAPH,
    TOKENIZER,
    FileEntry,
    Manifest,
    dump_manifest,
)
from t3c.artifact.reader import sha256_file
from t3c.errors import ArtifactError
from t3c.files import writing


def write_content(folder: Path, draft: Draft) -> Manifest:
    """Write graph, factors, dense tensors and, last, the manifest with their sizes and hashes.

    A tokenizer is written beside them; profiles run without it, and it is none of their bytes.
    """
    with writing(folder):
        (folder / GRAPH).write_bytes(draft.topology)
        _save(folder / FACTORS, draft.factors)
        _save(folder / DENSE, draft.tensors)
        if draft.tokenizer is not None:
            (folder / TOKENIZER).write_bytes(draft.tokenizer)
    files = {
        name: FileEntry(sha256=sha256_file(folder / name), bytes=(folder / name).stat().st_size)
        for name in (*CONTENT, *([] if draft.tokenizer is None else [TOKENIZER]))
    }
    manifest = sized(draft.manifest, files, header_bytes(folder / FACTORS), draft.tensors)
    with writing(folder):
        (folder / MANIFEST).write_bytes(dump_manifest(manifest))
    return manifest


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
