"""The model a user hands over: what it does, how its inputs are made, what it needs said of it."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from t3c.compression.decoder import Decoder
from t3c.compression.hugging_face import load_model, quiet
from t3c.compression.pictures import Preprocessing, read_preprocessing
from t3c.errors import DataError
from t3c.nn.inputs import Inputs, check_inputs, split_batch, tensors
from t3c.spec import ImageSpec

LONGEST = 1 << 20  # tokens, for models that name no limit
PREPROCESSOR = "preprocessor_config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model")


class Task(StrEnum):
    """The task of a model, which decides how its quality is measured."""

    IMAGES = "image classification"
    TEXTS = "text classification"
    EMBEDDING = "embedding"
    LANGUAGE = "language modelling"
    OUTPUTS = "outputs"  # of a plain module: classes if labels come with the data, else values


@dataclass(frozen=True)
class Source:
    """A trained model in evaluation mode and float32, and how data becomes its inputs.

    `pictures` is how a folder of them is read, `image` how a runtime prepares one.
    `notes` say what was done to it on the way: a half-precision model is converted, for one.
    """

    name: str
    model: nn.Module
    example: Inputs
    task: Task
    classes: tuple[str, ...] | None = None
    pictures: Preprocessing | None = None
    image: ImageSpec | None = None
    tokenizer: Any = None
    notes: tuple[str, ...] = field(default=())

    @property
    def reads_text(self) -> bool:
        return self.task in (Task.TEXTS, Task.EMBEDDING, Task.LANGUAGE)

    @property
    def most_tokens(self) -> int:
        """Return how many tokens the model reads at once, by its configuration and tokenizer."""
        configs = [getattr(module, "config", None) for module in self.model.modules()]
        positions = [getattr(config, "max_position_embeddings", None) for config in configs]
        return int(min(self.tokenizer.model_max_length, *filter(None, positions), LONGEST))

    def like(self, samples: Inputs) -> Source:
        """Return the model with samples as its example: texts are as long as they were read."""
        return replace(self, example=samples) if self.reads_text else self


class Classifier(nn.Module):
    """A Hugging Face image classifier: images (n, 3, h, w) -> logits (n, classes)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=images).logits
        return logits


class Embedding(nn.Module):
    """A text encoder as it is used: ids and mask (n, t) -> mean of the words' features (n, d)."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        output = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        features: Tensor = output.last_hidden_state
        words = attention_mask[..., None].to(features.dtype)
        embedding: Tensor = (features * words).sum(dim=1) / words.sum(dim=1)
        return embedding


def open_source(model: str | Path | nn.Module, example: Any = None) -> Source:
    """Return a model of a folder, of the hub, of `file.py:function`, or one given as a module."""
    if isinstance(model, nn.Module):
        if example is None:
            raise DataError("a module needs an example of its inputs: data, or example=...")
        return _checked(_of_module(type(model).__name__.lower(), model, example))
    text = str(model)
    path, colon, name = text.rpartition(":")
    if colon and path.endswith(".py"):
        return _checked(_of_function(Path(path), name))
    return _checked(_of_hugging_face(text))


def _of_module(name: str, model: nn.Module, example: Any) -> Source:
    """A module says what its classes are called, and how pictures become inputs, by attributes."""
    inputs, _ = split_batch(example)
    check_inputs(inputs, "the example")
    classes, image = getattr(model, "classes", None), getattr(model, "image", None)
    return Source(
        name, model, inputs, Task.OUTPUTS,
        tuple(map(str, classes)) if isinstance(classes, list | tuple) else None,
        image=image if isinstance(image, ImageSpec) else None,
    )  # fmt: skip


def _of_function(path: Path, name: str) -> Source:
    """Call a function of a Python file: it returns a module and an example of its inputs."""
    module = _imported(path)
    function = getattr(module, name, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if inspect.isfunction(v) and n[0] != "_"]
        raise DataError(f"{path} has no function {name!r}: it has {', '.join(known) or 'none'}")
    made = _called(function, f"{path}:{name}")
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise DataError(
            f"{path}:{name} has to return a torch.nn.Module and an example of its inputs, "
            f"got {type(made).__name__}"
        )
    return _of_module(name, *made)


def _imported(path: Path) -> ModuleType:
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _called(partial(spec.loader.exec_module, module), str(path))
    return module


def _called(function: Callable[[], Any], what: str) -> Any:
    """Call what a user wrote, which may raise anything; its error is told in one line."""
    try:
        return function()
    except Exception as error:
        cause = " ".join(str(error).split())[:200]
        raise DataError(f"{what} raised {type(error).__name__}: {cause}") from error


def _of_hugging_face(name: str) -> Source:
    loaded = load_model(name)
    if not loaded.pretrained:
        raise DataError(f"{name} holds a configuration and no weights to compress")
    task = task_of(loaded.model)
    config: Any = loaded.model.config
    notes: tuple[str, ...] = ()
    if str(getattr(config, "dtype", "") or "").endswith("16"):
        notes = (f"its {config.dtype} weights were converted to float32",)
    classes = _classes(config) if task in (Task.IMAGES, Task.TEXTS) else None
    source = Source(loaded.name, loaded.model, loaded.example, task, classes, notes=notes)
    if task is Task.IMAGES:
        assert isinstance(loaded.example, Mapping)
        pixels = loaded.example["pixel_values"]
        how = _preprocessing(name)
        return replace(
            source, model=Classifier(loaded.model).eval(), example=_sized(pixels, how),
            pictures=how, image=how.image,
        )  # fmt: skip
    if not source.reads_text:
        return source
    return _reading(source, tokenizer_of(name, loaded.model))


def _reading(source: Source, tokenizer: Any) -> Source:
    """Return a text model as it is called, with its tokenizer."""
    assert isinstance(source.example, Mapping)
    if source.task is Task.LANGUAGE:
        model: nn.Module = Decoder(source.model).eval()
        example: Inputs = {"input_ids": source.example["input_ids"]}
    elif source.task is Task.EMBEDDING:
        model, example = Embedding(source.model).eval(), source.example
    else:
        model, example = source.model, source.example
    return replace(source, model=model, example=example, tokenizer=tokenizer)


def task_of(model: nn.Module) -> Task:
    """Return what a Hugging Face model does, by its class."""
    from transformers.models.auto import modeling_auto as auto

    kind = type(model).__name__
    for task, names in (
        (Task.IMAGES, auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
        (Task.TEXTS, auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
        (Task.LANGUAGE, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    ):
        if any(kind == n if isinstance(n, str) else kind in n for n in names.values()):
            return task
    main: str = getattr(model, "main_input_name", "")
    return Task.EMBEDDING if main == "input_ids" else Task.OUTPUTS


def _classes(config: Any) -> tuple[str, ...]:
    return tuple(str(config.id2label[index]) for index in sorted(config.id2label))


def _preprocessing(name: str) -> Preprocessing:
    """Return how a folder's, or a hub model's, own files say that pictures are prepared."""
    path = Path(name) / PREPROCESSOR
    if not path.is_file():
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError

        try:
            path = Path(hf_hub_download(name, PREPROCESSOR))
        except (HfHubHTTPError, OSError, ValueError) as error:
            raise DataError(
                f"{name} has no {PREPROCESSOR}, which says how pictures are prepared"
            ) from error
    return read_preprocessing(path)


def _sized(pixels: Tensor, how: Preprocessing) -> Tensor:
    """Return an example as large as the pictures that will be read."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*pixels.shape[:2], *how.size, generator=generator)


def tokenizer_of(name: str, model: Any) -> Any:
    """Load the tokenizer of a folder or of the hub; it gives only what the model takes."""
    from transformers import AutoTokenizer

    if Path(name).is_dir() and not any((Path(name) / file).is_file() for file in TOKENIZERS):
        raise DataError(f"{name} has no tokenizer: put its tokenizer.json into the folder")
    try:
        with quiet():
            tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (AttributeError, ImportError, KeyError, OSError, TypeError, ValueError) as error:
        cause = " ".join(str(error).split())[:200]
        raise DataError(f"{name}: its tokenizer cannot be loaded: {cause}") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise DataError(f"{name}: its tokenizer knows special tokens alone")
    takes = inspect.signature(model.forward).parameters
    tokenizer.model_input_names = [n for n in tokenizer.model_input_names if n in takes]
    return tokenizer


def _checked(source: Source) -> Source:
    """Return the model in float32 and evaluation mode; refuse weights that are not finite."""
    notes = list(source.notes)
    floats = {p.dtype for p in source.model.parameters() if p.is_floating_point()}
    if floats - {torch.float32}:
        told = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in floats))
        source.model.float()
        notes.append(f"its {told} weights were converted to float32")
    if source.model.training:
        source.model.eval()
        notes.append("it was in training mode and is now in evaluation mode")
    for name, value in source.model.state_dict().items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise DataError(f"{source.name}: {name} holds NaN or infinite values")
    if not any(p.numel() for p in source.model.parameters()):
        raise DataError(f"{source.name} has no weights: there is nothing to compress")
    assert tensors(source.example)
    return replace(source, notes=tuple(notes))
