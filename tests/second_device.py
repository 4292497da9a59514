"""A second device where there is no GPU: `second_device`, whose tensors hold ordinary CPU values.

It refuses what a GPU refuses: two devices in one operation, a generator of another device, numpy.
Installing it changes the process for good, so its tests have one of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

SECOND = "second_device"
aten = torch.ops.aten
MOVING = {aten.copy_.default, aten._to_copy.default}
# CPU indices of a tensor that is elsewhere are taken there by torch itself.
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
JOINING = {aten.cat.default, aten.stack.default}  # not even numbers of two devices


class OnSecond(Tensor):
    """A tensor of the second device; `raw` has its values."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> OnSecond:
        made: OnSecond = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(),
            dtype=raw.dtype, device=f"{SECOND}:0",
        )  # fmt: skip
        made.raw = raw
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            refuse(f"can't convert {self.device} device type tensor to numpy")
        return self.raw.numpy(force=True)

    def tolist(self) -> Any:
        return self.raw.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()


def refuse(message: str) -> None:
    raise RuntimeError(message)


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation as the second device has it: on the values, if all are there."""
    given = tree_leaves((args, kwargs))
    asked = kwargs.get("device")
    here = any(isinstance(v, OnSecond) for v in given) if asked is None else _is_second(asked)
    _check(func, args, given, here)
    raws, named = tree_map(_raw, (args, kwargs))
    if asked is not None:
        named["device"] = "cpu"
    out = func(*raws, **named)
    if func is aten.copy_.default:
        return args[0]
    if not here:
        return out
    wrapped = tree_map(lambda v: OnSecond(v) if isinstance(v, Tensor) else v, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _check(func: Any, args: tuple[Any, ...], given: list[Any], here: bool) -> None:
    if here and any(isinstance(v, torch.Generator) for v in given):
        refuse(f"{func}: expected a {SECOND!r} generator, found one of the CPU")
    if func in MOVING or not any(isinstance(v, OnSecond) for v in given):
        return
    looked = tree_leaves((args[0], args[2:])) if func in INDEXING else given
    others = [v for v in looked if isinstance(v, Tensor) and not isinstance(v, OnSecond)]
    changed = func._schema.is_mutable and any(v is args[0] for v in others)
    if any(v.dim() or func in JOINING or changed for v in others):
        shapes = ", ".join(f"{tuple(v.shape)}" for v in others)
        refuse(f"{func}: expected all tensors on one device, found some of the CPU: {shapes}")


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, OnSecond) else value


def _is_second(device: Any) -> bool:
    return torch.device(device).type == SECOND


def install() -> None:
    """Make the device known to torch, once in a process and before its first backward pass."""
    _setup_privateuseone_for_python_backend(SECOND)
    # Parameters become others in place, so that tied ones stay tied.
    torch.__future__.set_swap_module_params_on_conversion(True)
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: run(func, args, kwargs), "PrivateUse1")
    _LIBRARIES.append(library)


_LIBRARIES: list[torch.library.Library] = []  # what is registered lasts as long as they do
