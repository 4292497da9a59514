"""Hashes of what a stage is made from: models, data, code, versions."""

from __future__ import annotations

import hashlib
import inspect
from importlib.metadata import version
from pathlib import Path

from torch import Tensor, nn


def fingerprint(model: nn.Module) -> str:
    """A hash of what a model computes: its modules, the code of its class, all of its values."""
    try:
        source = inspect.getsource(inspect.getmodule(type(model)) or type(model))
    except (OSError, TypeError):  # defined where there is no file
        source = ""
    values = [tensor for _, tensor in sorted(model.state_dict().items())]
    digest = hashlib.sha256(f"{model}{source}{hashed(*values)}".encode())
    return digest.hexdigest()[:16]


def hashed(*tensors: Tensor) -> str:
    """A hash of the shapes and values of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().contiguous().numpy().data)
    return digest.hexdigest()[:16]


def hashed_files(folder: Path) -> str:
    """A hash of the Python files of a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Of all that makes or runs a model."""
    return {name: version(name) for name in ("t3c", "torch", "openvino", "nncf")}
