"""An artifact in memory: what is measured and narrowed before anything is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from t3c.artifact.devices import DeviceTable
from t3c.artifact.ledger import Ledger
from t3c.artifact.manifest import (
    DENSE,
    FACTORS,
    GRAPH,
    NORMS,
    TOKENIZER,
    FileEntry,
    Manifest,
    ProfileEntry,
    dump_manifest,
)
from t3c.artifact.reader import Artifact
from t3c.artifact.store import Tensors, layer_bytes
from t3c.spec import ProfileChain

UNWRITTEN = 64 * "0"  # in place of the hash of what is in no file


class Draft(Artifact):
    """An artifact that is in no file yet: codes, other tensors and topology as they would be."""

    def __init__(
        self,
        manifest: Manifest,
        graph: bytes,
        factors: Tensors,
        dense: Tensors,
        tokenizer: bytes | None = None,
    ) -> None:
        self.path, self.content, self.tokenizer = Path("draft"), UNWRITTEN, tokenizer
        self.factors, self.tensors, self.topology = factors, dense, graph
        self._graph, self._checked = graph, True
        self._factors, self._dense = Held(factors), Held(dense)
        sizes = {GRAPH: len(graph), FACTORS: _file_bytes(factors), DENSE: _file_bytes(dense)}
        if tokenizer is not None:
            sizes[TOKENIZER] = len(tokenizer)
        files = {name: FileEntry(sha256=UNWRITTEN, bytes=size) for name, size in sizes.items()}
        self.manifest = sized(manifest, files, sizes[FACTORS] - _total(factors), dense)

    def ledger(self) -> Ledger | None:
        return None

    def devices(self) -> list[DeviceTable]:
        return []


class Held(dict[str, npt.NDArray[np.generic]]):
    """Tensors in memory, read as if from a file."""

    get_tensor = dict.__getitem__

    def get_slice(self, name: str) -> HeldSlice:
        return HeldSlice(self[name])


@dataclass(frozen=True)
class HeldSlice:
    """One tensor in memory, of which rows are read."""

    tensor: npt.NDArray[np.generic]

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, rows: slice) -> npt.NDArray[np.generic]:
        return self.tensor[rows]


def sized(draft: Manifest, files: Mapping[str, FileEntry], header: int, dense: Tensors) -> Manifest:
    """Return the manifest with these files, and with the bytes that each profile needs.

    `header` are the bytes of factors.safetensors before its data; of the tensors that are `dense`
    a profile needs no norms but its own.
    """
    norms = {n.removeprefix(NORMS): v.nbytes for n, v in dense.items() if n.startswith(NORMS)}
    shared = files[GRAPH].bytes + files[DENSE].bytes - sum(norms.values()) + header

    def manifest(own_bytes: int) -> Manifest:
        rest = shared + own_bytes
        entries = [
            p.model_copy(
                update={"size_bytes": rest + norms.get(p.name, 0) + _points_bytes(draft, p)}
            )
            for p in draft.profiles
        ]
        return draft.model_copy(update={"profiles": tuple(entries), "files": dict(files)})

    # The manifest counts itself, until its length settles.
    own = 0
    while (length := len(dump_manifest(manifest(own)))) != own:
        own = length
    return manifest(own)


def drafted(chain: ProfileChain) -> tuple[ProfileEntry, ...]:
    """Return the profiles of a manifest that is yet to be written, and with it what they take."""
    return tuple(ProfileEntry(name=p.name, points=dict(p.points), size_bytes=1) for p in chain)


def _points_bytes(manifest: Manifest, profile: ProfileEntry) -> int:
    return sum(layer_bytes(e, profile.points[e.spec.name]) for e in manifest.layers)


def _total(tensors: Tensors) -> int:
    return sum(value.nbytes for value in tensors.values())


def _file_bytes(tensors: Tensors) -> int:
    """Return the bytes of a safetensors file: a header, which is JSON, and the data."""

    def place(item: tuple[str, npt.NDArray[np.generic]]) -> tuple[int, str, str]:
        return -item[1].itemsize, item[1].dtype.kind, item[0]

    entries, end = {}, 0
    for name, value in sorted(tensors.items(), key=place):
        dtype = f"{value.dtype.kind.upper()}{8 * value.itemsize}"
        offsets = end, end + value.nbytes
        entries[name] = {"dtype": dtype, "shape": value.shape, "data_offsets": offsets}
        end += value.nbytes
    header = len(json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + -(-header // 8) * 8 + end
