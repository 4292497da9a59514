"""Checkpoints of a run: tensors and JSON alone, whole or not there, restored bit for bit."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, nn

from t3c.errors import TrainError
from t3c.files import locked, replacing, writing

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
STATE, FORMAT, KEPT = "state.json", 1, 2

JSON = Mapping[str, "JSON"] | Sequence["JSON"] | str | int | float | bool | None

# The hidden one is the old folder of a step saved twice, if the process died between two renames.
_NAME = re.compile(r"step-(\d+)|\.step-(\d+)\.previous")


class Restored(NamedTuple):
    """What a checkpoint holds beside the model and the optimizer."""

    step: int
    state: dict[str, Any]


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder, which is made if need be, for as long as this one goes."""
    folder = folder.resolve()
    with writing(folder, TrainError):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, error=TrainError):
        yield


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, JSON],
) -> Path:
    """Write `folder/step-00001234`, and remove all checkpoints but the newest two.

    The optimizer's parameters are all the model's: several modules go in as one `nn.ModuleDict`.
    If it fails, or the process dies, the checkpoints that were there are there still.
    """
    if step < 0:
        raise TrainError(f"a checkpoint's step is at least 0, got {step}")
    folder = folder.resolve()
    final = folder / f"step-{step:08d}"
    moments, settings = _optimizer_content(model, optimizer)
    content = {MODEL: _tensors(model), OPTIMIZER: moments}
    body = {"format": FORMAT, "step": step, "state": state, "optimizer": settings}
    _dump(body)  # what is no JSON is refused before anything is written
    with writing(folder, TrainError):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "checkpoints", error=TrainError):
        _make_way(folder, step)
        with replacing(final, TrainError) as staging, writing(final, TrainError):
            files = {n: _write(staging / n, t, final) for n, t in content.items()}
            (staging / STATE).write_bytes(_dump(body | {"files": files}))
        _prune(folder, final)
    return final


def latest(folder: Path, say: Callable[[str], object] | None = None) -> Path | None:
    """The newest whole checkpoint, None where there is none; `say` hears what is passed over."""
    found = _found(folder)
    reasons = []
    for _, path in found:
        damage = _damage(path)
        if damage is None:
            return path
        reasons.append(f"{path.name} is passed over: {damage}")
        if say is not None:
            say(reasons[-1])
    if found:
        raise TrainError(f"{folder}: no checkpoint is whole: {'; '.join(reasons)}")
    return None


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Restored:
    """Put parameters, buffers and the optimizer's state back as they were, in place.

    A checkpoint that is damaged or of another model is refused, and nothing has changed then.
    """
    body = _read_state(path)
    if body["format"] != FORMAT:
        raise TrainError(f"{path}: format {body['format']} is not one this version reads")
    files = {name: _read(path / name, digest) for name, digest in body["files"].items()}
    mine = _tensors(model)
    _check_same(path, files[MODEL], mine)
    saved = _optimizer_state(path, body["optimizer"], files[OPTIMIZER], model, optimizer)
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(files[MODEL][name])
    optimizer.load_state_dict(saved)
    return Restored(body["step"], body["state"])


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; one that has several names goes by its first."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _optimizer_content(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's tensors as key/parameter, and as JSON its kind, groups and other values."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                shape = tuple(parameter.shape)
                raise TrainError(f"group {index} has a parameter {shape} that is not the model's")
        plain = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items()}
        groups.append(plain | {"params": [names[p] for p in group["params"]]})
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{key}/{names[parameter]}"] = value
            else:
                values.setdefault(names[parameter], {})[key] = value
    return tensors, {"kind": type(optimizer).__name__, "groups": groups, "values": values}


def _optimizer_state(
    path: Path,
    saved: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """What `optimizer.load_state_dict` takes, of an optimizer of the same kind and parameters."""
    _, mine = _optimizer_content(model, optimizer)
    if saved["kind"] != mine["kind"]:
        raise TrainError(f"{path}: the optimizer is {saved['kind']} there and {mine['kind']} here")
    counts = [len(side["groups"]) for side in (saved, mine)]
    if counts[0] != counts[1]:
        raise TrainError(f"{path}: the optimizer has {counts[0]} groups there and {counts[1]} here")
    order: dict[str, int] = {}
    groups = []
    sides = zip(saved["groups"], mine["groups"], optimizer.param_groups, strict=True)
    for there, here, current in sides:
        if there["params"] != here["params"]:
            pairs = zip_longest(there["params"], here["params"], fillvalue="")
            name = next(a or b for a, b in pairs if a != b)
            raise TrainError(f"{path}: the optimizer's groups differ in {name}")
        numbers = [order.setdefault(name, len(order)) for name in there["params"]]
        kept = {key: _like(value, current.get(key)) for key, value in there.items()}
        groups.append(kept | {"params": numbers})
    state: dict[int, dict[str, Any]] = {order[n]: dict(v) for n, v in saved["values"].items()}
    parameters = dict(model.named_parameters())
    for address, tensor in tensors.items():
        key, _, name = address.partition("/")
        state.setdefault(order[name], {})[key] = _laid_out(tensor, parameters[name])
    return {"state": state, "param_groups": groups}


def _laid_out(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A tensor in the parameter's strides: fused optimizers go through both by address."""
    if tensor.shape != parameter.shape:
        return tensor
    with torch.no_grad():
        return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _like(value: Any, current: Any) -> Any:
    """A setting from JSON in the type the optimizer has it in."""
    if isinstance(current, Tensor):
        return torch.full_like(current, value)
    return tuple(value) if isinstance(current, tuple) else value


def _check_same(path: Path, there: Mapping[str, Tensor], here: Mapping[str, Tensor]) -> None:
    """Refuse tensors that differ in a name, a shape or a type."""
    for name in [*here, *there]:
        shown = [
            f"{tuple(side[name].shape)} {side[name].dtype}" if name in side else "absent"
            for side in (there, here)
        ]
        if shown[0] != shown[1]:
            raise TrainError(f"{path}: {name} is {shown[0]} there and {shown[1]} here")


def _write(path: Path, tensors: Mapping[str, Tensor], final: Path) -> str:
    """Write tensors of any layout, also those that share memory; the file's hash."""
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            raise TrainError(f"{final}: cannot be written: {name} is {tensor.layout}")
        value = tensor.detach().cpu().contiguous()
        storage = value.untyped_storage().data_ptr()
        plain[name] = value.clone() if storage in seen else value
        seen.add(storage)
    try:
        save_file(plain, str(path))
    except (SafetensorError, ValueError, KeyError) as error:  # a full disk, an odd type
        reason = " ".join(str(error).split())
        raise TrainError(f"{final}: cannot be written: {path.name}: {reason}") from error
    return _digest(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path, digest: str) -> dict[str, Tensor]:
    """The tensors of a file, if it is the one that was written."""
    try:
        raw = path.read_bytes()
        if hashlib.sha256(raw).hexdigest() != digest:
            raise TrainError(f"{path} is not the file that was written")
        return dict(load(raw))
    except (OSError, SafetensorError) as error:
        raise TrainError(f"{path} cannot be read: {error}") from error


def _dump(body: Mapping[str, Any]) -> bytes:
    """JSON that holds its own hash."""
    try:
        digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
        return json.dumps({"sha256": digest, "body": body}, indent=1).encode()
    except (TypeError, ValueError) as error:
        raise TrainError(f"a checkpoint's state is plain JSON: {error}") from error


def _read_state(path: Path) -> dict[str, Any]:
    try:
        outer = json.loads((path / STATE).read_bytes())
        body: dict[str, Any] = outer["body"]
        right = hashlib.sha256(json.dumps(body).encode()).hexdigest() == outer["sha256"]
    except OSError as error:
        raise TrainError(f"{path / STATE} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TrainError(f"{path / STATE} is cut off or no checkpoint's") from error
    if not right:
        raise TrainError(f"{path / STATE} is not the file that was written")
    return body


def _damage(path: Path) -> str | None:
    """Why a checkpoint is not whole, None if it is."""
    try:
        for name, digest in _read_state(path)["files"].items():
            if _digest(path / name) != digest:
                return f"{name} is not the file that was written"
    except TrainError as error:
        return str(error)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    return None


def _found(folder: Path) -> list[tuple[int, Path]]:
    """All that is named like a checkpoint, with its step, newest first."""
    try:
        paths = list(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise TrainError(f"{folder} cannot be read: {error.strerror or error}") from error
    named = [(_NAME.fullmatch(path.name), path) for path in paths]
    found = [(int(match[1] or match[2]), path) for match, path in named if match]
    return sorted(found, key=lambda pair: (pair[0], pair[1].name), reverse=True)


def _make_way(folder: Path, step: int) -> None:
    """Remove what writers that died left; the lock says that none is alive."""
    for later, path in _found(folder):
        if later > step and _damage(path) is None:
            told = f"{folder} holds {path.name}, later than step {step}"
            raise TrainError(f"{told}: go on from it, or give another folder")
    for stale in folder.glob(".step-*.partial"):
        shutil.rmtree(stale, ignore_errors=True)


def _prune(folder: Path, new: Path) -> None:
    """Leave the newest checkpoints that are whole, one of a step."""
    kept: set[int] = set()
    for step, path in _found(folder):
        wanted = len(kept) < KEPT and step not in kept
        if path == new or (wanted and _damage(path) is None):
            kept.add(step)
        else:
            shutil.rmtree(path, ignore_errors=True)
