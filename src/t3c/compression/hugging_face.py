"""Hugging Face models from a folder, a configuration or the hub, each with an example input."""

from __future__ import annotations

import textwrap
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from t3c.errors import DataError, MissingExtraError
from t3c.nn.inputs import Inputs
from t3c.silence import silenced

CONFIGS = Path(__file__).parent / "configs"
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
SIDE, TOKENS = 224, 32
PROBE_SECONDS = 3


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode and an example of its inputs."""

    name: str
    model: nn.Module
    example: Inputs
    pretrained: bool


def bundled() -> tuple[str, ...]:
    """Short names of the full-size configurations that come with T3C."""
    return tuple(sorted(path.stem for path in CONFIGS.glob("*.json")))


def load_model(name_or_path: str, *, meta: bool = False, seed: int = 0, samples: int = 2) -> Loaded:
    """A folder's, a config file's, a bundled or a hub model in float32, or its shape on `meta`.

    Weights are those of the folder or the hub; where there are none, random ones of `seed`.
    """
    try:
        transformers = _library()
        from huggingface_hub.errors import StrictDataclassError
    except ImportError as missing:
        raise MissingExtraError("transformers", "train") from missing
    path = _local(name_or_path)
    source = path or name_or_path
    offline = path is not None or not _hub_answers()
    pretrained = not meta and (path is None or _has_weights(path))
    # A configuration is foreign data, and the library checks it by tripping over it.
    trips = (
        AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError,
        SafetensorError, StrictDataclassError,
    )  # fmt: skip
    try:
        with quiet():
            config = transformers.AutoConfig.from_pretrained(
                source, local_files_only=offline, trust_remote_code=False
            )
            if hasattr(config, "use_cache"):
                config.use_cache = False
            kind = _kind(config)
            if pretrained:
                model = _with_weights(kind, source, config, offline)
            else:
                model = _without_weights(kind, config, seed, meta)
            example = _example(model, config, seed, samples, meta)
    except DataError as refusal:
        raise DataError(f"{name_or_path}: {refusal}") from refusal
    except trips as trip:
        raise DataError(_refusal(name_or_path, path, offline, trip)) from trip
    name = path.resolve().name.removesuffix(".json") if path else name_or_path
    return Loaded(name, model.eval(), example, pretrained)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what transformers tells of its own accord, bars and warnings, from the terminal."""
    from transformers.utils import logging

    told: Any = logging  # parts of it have no types
    bars = told.is_progress_bar_enabled()
    told.disable_progress_bar()
    try:
        with silenced("transformers", "huggingface_hub"):
            yield
    finally:
        if bars:
            told.enable_progress_bar()


def _library() -> Any:
    """Import transformers with what its models need.

    That brings torchao where it is installed, for quantizers that nothing here uses, and torchao
    logs which of its own kernels it cannot load.
    """
    with silenced("torchao", "torch.utils._pytree"):
        import transformers
        import transformers.modeling_utils
    return transformers


def _local(name_or_path: str) -> Path | None:
    """The folder or file behind a name, or None for the hub."""
    path = Path(name_or_path)
    try:
        if (path / "config.json").is_file() or (path.suffix == ".json" and path.is_file()):
            return path
    except OSError as error:
        raise DataError(f"{name_or_path}: {error.strerror}") from error
    return CONFIGS / f"{name_or_path}.json" if name_or_path in bundled() else None


def _has_weights(path: Path) -> bool:
    return any(file for pattern in WEIGHTS for file in path.glob(pattern))


def _hub_answers() -> bool:
    """Whether the hub can be reached; its own client tries for half a minute before it says no."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()
    except urllib.error.HTTPError as answer:
        answer.close()
    except OSError:
        return False
    return True


def _kind(config: Any) -> Any:
    """The class a configuration names, or the library's own choice where it names none."""
    import transformers

    if not config.architectures:
        return transformers.AutoModel
    name = config.architectures[0]
    kind = getattr(transformers, name, None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise DataError(f"transformers {transformers.__version__} has no architecture {name!r}")
    if not isinstance(config, kind.config_class or ()):
        raise DataError(f"{name} is no architecture of model type {config.model_type!r}")
    return kind


def _with_weights(kind: Any, source: Path | str, config: Any, offline: bool) -> Any:
    model, report = kind.from_pretrained(
        source, config=config, local_files_only=offline, trust_remote_code=False,
        dtype=torch.float32, output_loading_info=True,
    )  # fmt: skip
    # The library fills what it misses with random numbers.
    if lacking := sorted(report["missing_keys"]):
        raise DataError(f"its weights lack {len(lacking)} tensors, {lacking[0]!r} among them")
    return model


def _without_weights(kind: Any, config: Any, seed: int, meta: bool) -> Any:
    build = getattr(kind, "from_config", kind)  # an auto class cannot be called
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]), torch.device("meta") if meta else nullcontext():
        torch.manual_seed(seed)
        return build(config)


def _example(model: Any, config: Any, seed: int, samples: int, meta: bool) -> dict[str, Tensor]:
    """Random inputs as the configuration describes them."""
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", None) or SIDE
        height, width = (size, size) if isinstance(size, int) else size
        shape = samples, getattr(config, "num_channels", 3), height, width
        example = {"pixel_values": torch.randn(shape, generator=generator)}
    elif model.main_input_name == "input_ids":
        length = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
        ids = torch.randint(config.vocab_size, (samples, length), generator=generator)
        # A mask per token is read on its way to the layers, which nothing on `meta` can be; one
        # per pair of tokens is handed on as it is.
        mask = torch.ones(samples, 1, length, length).bool() if meta else torch.ones_like(ids)
        example = {"input_ids": ids, "attention_mask": mask}
    else:
        raise DataError(f"it takes {model.main_input_name}: neither images nor text")
    return {name: value.to("meta") if meta else value for name, value in example.items()}


def _refusal(name: str, path: Path | None, offline: bool, trip: Exception) -> str:
    """One line: what was tried, what came of it, what there is."""
    cause = textwrap.shorten(str(trip) or type(trip).__name__, 200, placeholder=" ...")
    if path is not None or not isinstance(trip, OSError):
        return f"{name} is no model that transformers can load: {cause}"
    hub = "the hub cannot be reached" if offline else f"the hub says: {cause}"
    return (
        f"{name} is no folder with a config.json, no config file and no bundled name, and {hub}; "
        f"bundled are {', '.join(bundled())}"
    )
