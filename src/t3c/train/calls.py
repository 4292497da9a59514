"""What single modules of a model are given and answer while it runs."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from t3c.convert import state_of
from t3c.nn.inputs import Inputs, call, evaluating
from t3c.nn.view import at


@dataclass(frozen=True)
class Call:
    """What a block is given, and the answer that is wanted."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor


@torch.no_grad()
def runs_of(model: nn.Module) -> dict[str, int]:
    """How often each module that answers with a tensor runs on the example, in order."""
    runs: Counter[str] = Counter()
    odd: set[str] = set()

    def watch(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            runs[name] += 1
            if tensor_of(output) is None:
                odd.add(name)

        return hook

    handles = [m.register_forward_hook(watch(name)) for name, m in model.named_modules()]
    try:
        with evaluating(model), at(model, None):
            call(model, _copied(state_of(model).example))
    finally:
        for handle in handles:
            handle.remove()
    return {name: count for name, count in runs.items() if name not in odd}


class _ReachedError(Exception):
    """The block has run: the rest of the model need not."""


class UnevenError(Exception):
    """The block runs now more often, now less."""


@torch.no_grad()
def record(model: nn.Module, name: str, inputs: Inputs, runs: int) -> list[Call]:
    """What the block is given and answers in a run of the model that ends with it."""
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    calls: list[Call] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.append((_copied(args), _copied(kwargs)))  # a block may work on its input in place

    def after(_: nn.Module, __: Any, output: Any) -> None:
        answer = tensor_of(output)
        assert answer is not None
        calls.append(Call(*given[-1], answer.clone()))
        if len(calls) == runs:
            raise _ReachedError

    block = model.get_submodule(name)
    start = block.register_forward_pre_hook(before, with_kwargs=True)
    end = block.register_forward_hook(after)
    try:
        call(model, _copied(inputs))
    except _ReachedError:
        return calls
    finally:
        start.remove()
        end.remove()
    raise UnevenError(f"it runs {runs} times on the example, {len(calls)} on other samples")


def answer(block: nn.Module, given: Call) -> Tensor:
    """What a block answers to the same inputs."""
    found = tensor_of(block(*_copied(given.args), **_copied(given.kwargs)))
    assert found is not None
    return found


def tensor_of(output: Any) -> Tensor | None:
    """The tensor a block answers with, or that its tuple begins with; None if there is none."""
    if isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) and output.is_floating_point() else None


def _copied(value: Any) -> Any:
    """A copy of inputs that a block may change, caches included; of a view only what it shows."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):
        return type(value)(_copied(item) for item in value)
    if type(value) is dict:
        return {name: _copied(item) for name, item in value.items()}
    return copy.deepcopy(value)
