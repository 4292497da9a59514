"""The record of a run: what told it apart and every decision that measuring took."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from t3c.artifact.devices import LayerTiming
from t3c.compression.choice import Choice
from t3c.compression.data import Data
from t3c.errors import DataError
from t3c.spec import Factorization

RECORD = "record.json"
SAME = ("model", "data", "seed", "length")  # that a replay shares with the run it repeats


class Known(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")


class Chosen(Known):
    """How kernels are factored."""

    kernels: dict[str, Factorization]


class Narrowed(Known):
    """The units that layers are narrowed by."""

    units: tuple[str, ...]


class Layers(Known):
    """The times of layer points, and the activations they are on."""

    layers: tuple[LayerTiming, ...]
    activations: Literal["int8", "float"]


class Rounded(Known):
    """How weights are rounded."""

    choices: tuple[Choice, ...]


class Taught(Known):
    """Whether the original's answers are kept, instead of asked for in every step."""

    kept: bool


class TrainedBy(Known):
    """An optimizer and its learning rate."""

    optimizer: Literal["adamw", "sgd"]
    learning_rate: float = Field(gt=0)


class Probed(Known):
    """What training aims at, and for how long."""

    worst_drift: float
    steps: int
    way: TrainedBy


class Shipped(Known):
    """The candidates that are shipped, each with its profile's name."""

    profiles: dict[str, str]


class Decided(BaseModel):
    """The result of each stage that measures, by its name."""

    model_config = ConfigDict(frozen=True)

    choose: Chosen
    widths: Narrowed
    time: Layers
    round: Rounded
    teacher: Taught
    probe: Probed
    place: Shipped


class Record(Known):
    """What a replay reads of a record."""

    made_from: dict[str, Any]
    decided: Decided


def read_record(path: Path) -> Record:
    """Read the record that a run left in its work folder."""
    try:
        return Record.model_validate(json.loads(path.read_bytes()))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise DataError(
            f"{path} is no record of a run: {where}: {error.errors()[0]['msg']}: "
            f"give the {RECORD} in the work folder of a finished run of this version of t3c"
        ) from error
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}") from error


def refuse_other(path: Path, record: Record, made_from: Mapping[str, Any]) -> None:
    """Raise DataError where a record is of another model, other data or another seed."""
    other = [name for name in SAME if record.made_from.get(name) != made_from[name]]
    if other:
        raise DataError(
            f"{path} was recorded with another {', '.join(other)}: replay it with what it was of"
        )


def fingerprint(model: nn.Module) -> str:
    """Return a hash of a model's weights and of what it is made of."""
    found = hashlib.sha256(repr(model).encode())
    for name, value in model.state_dict().items():
        found.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def hashed(data: Data) -> str:
    """Return a hash of samples and labels."""
    found = hashlib.sha256("".join(data.keys()).encode())
    if data.labels is not None:
        found.update(data.labels.numpy().tobytes())
    return found.hexdigest()
