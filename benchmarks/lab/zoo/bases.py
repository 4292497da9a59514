"""Networks that we train ourselves, and where their weights are kept.

`python benchmarks/base.py` trains them; the weights lie in T3C_BASE, by default `base` in the cache
folder of T3C, outside the repository: one file a network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from lab.zoo.minilm import minilm_classifier
from lab.zoo.small_vit import SmallViT
from lab.zoo.wide_cnn import WideCnn, whiten_
from t3c.engines.cache import default_folder
from t3c.errors import DataError

RECIPE = "recipe"  # in the metadata of a weights file: the key of the recipe that made it


def _wide_cnn(images: Tensor) -> nn.Module:
    model = WideCnn()
    whiten_(model, images[:5_000])
    return model


def _small_vit(images: Tensor) -> nn.Module:
    return SmallViT()


def _minilm(images: Tensor) -> nn.Module:
    return minilm_classifier()


# Each takes images (n, 3, 32, 32) that it will be trained on, if it reads any.
NETWORKS: Mapping[str, Callable[[Tensor], nn.Module]] = {
    "cifar10-cnn": _wide_cnn,
    "cifar10-vit": _small_vit,
    "minilm": _minilm,
}
SENTENCES = frozenset({"minilm"})  # which read no images, but texts


def base_folder() -> Path:
    """Where weights of trained networks are kept."""
    named = os.environ.get("T3C_BASE")
    return Path(named) if named else default_folder() / "base"


def base_file(name: str, folder: Path | None = None) -> Path:
    """The weights of a network, whether they are there or not."""
    return (folder or base_folder()) / f"{name}.safetensors"


def made_by(path: Path) -> str | None:
    """The key of the recipe that made a weights file; None where there is no such file."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            return str((file.metadata() or {}).get(RECIPE, ""))
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {_line(error)}") from error


def new_network(name: str) -> nn.Module:
    """A network of ours, not trained."""
    if name not in NETWORKS:
        raise DataError(f"no network {name!r}: known are {', '.join(NETWORKS)}")
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        return NETWORKS[name](torch.randn(8, 3, 32, 32, generator=generator))


def base_network(name: str, folder: Path | None = None) -> nn.Module:
    """A trained network in evaluation mode."""
    path = base_file(name, folder)
    if not path.is_file():
        raise DataError(f"{path} is not there: train it with `python benchmarks/base.py {name}`")
    model = new_network(name)
    try:
        model.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise DataError(f"{path} holds no weights of {name}: {_line(error)}") from error
    return model.eval().requires_grad_(True)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
