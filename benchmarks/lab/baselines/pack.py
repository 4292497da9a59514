"""The file a compressed model takes: codes of a few bits, bitmaps of zeros, floats for the rest.

    formats = {"conv1.weight": Format(8), "conv2.weight": Format(4), "fc.weight": Format(8, True)}
    size_bytes = packed_bytes(model, formats, graph)

A weight is named as in `model.state_dict()`, and low-rank factors are weights like any other. What
has no format is written as float32; norms over a batch as one scale and one shift per channel,
which is all that is left of them at inference. Tied weights are written once.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openvino as ov
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from t3c.errors import CorruptError, SpecError
from t3c.spec import MAX_BITS, MIN_BITS

LENGTH = 4  # bytes of the header's length, which comes first


@dataclass(frozen=True)
class Format:
    """Symmetric `bits`-bit codes of a weight (rows, ...), with one float32 scale per row.

    `scale` (rows,) is that of a weight that is on its grid already; None covers the largest of each
    row. `sparse` writes one bit per weight, and codes of those alone that are not zero. With
    `groups` each row is in so many equal parts, whose scales (rows * groups,) come row by row.
    """

    bits: int
    sparse: bool = False
    scale: Tensor | None = None
    groups: int = 1

    def __post_init__(self) -> None:
        if not MIN_BITS <= self.bits <= MAX_BITS:
            raise SpecError(f"bits must be in {MIN_BITS}..{MAX_BITS}, got {self.bits}")

    @property
    def top(self) -> int:
        """The largest code; the smallest is its negative."""
        return int(2 ** (self.bits - 1) - 1)


@torch.no_grad()
def on_grid(weight: Tensor, form: Format) -> Tensor:
    """The weight (rows, ...) as the file has it: each row rounded to codes times its scale."""
    codes, scale = _codes(weight, form)
    return (codes * scale[:, None]).reshape(weight.shape)


def encode(weight: Tensor, form: Format) -> bytes:
    """Scales of the rows, then the bitmap of a sparse weight, then the codes, bit by bit."""
    found, scale = _codes(weight, form)
    codes = found.to(torch.int16).flatten().numpy()
    parts = [scale.numpy().tobytes()]
    if form.sparse:
        parts.append(np.packbits(codes != 0).tobytes())
        codes = codes[codes != 0]
    bits = (codes + form.top).astype(np.uint8)[:, None] >> np.arange(form.bits, dtype=np.uint8) & 1
    return b"".join([*parts, np.packbits(bits).tobytes()])


def decode(raw: bytes, shape: tuple[int, ...], form: Format) -> Tensor:
    """The weight (rows, ...) of this shape from what `encode` wrote; the scales are in there."""
    rows, count = shape[0] * form.groups, int(np.prod(shape))
    content = np.frombuffer(raw, np.uint8)
    scale, content = content[: 4 * rows].view(np.float32), content[4 * rows :]
    present = np.ones(count, np.bool_)
    if form.sparse:
        present = np.unpackbits(content, count=count).astype(np.bool_)
        content = content[-(-count // 8) :]
    kept = int(present.sum())
    if len(content) != -(-kept * form.bits // 8):
        raise CorruptError(f"{len(raw)} bytes are no weight of shape {shape} in {form.bits} bits")
    bits = np.unpackbits(content, count=kept * form.bits).reshape(kept, form.bits)
    codes = np.zeros(count, np.float32)
    codes[present] = bits @ (1 << np.arange(form.bits)) - form.top
    return torch.from_numpy((codes.reshape(rows, -1) * scale[:, None]).reshape(shape))


def pack(model: nn.Module, formats: Mapping[str, Format]) -> bytes:
    """The whole file: what is in it, as JSON, then each tensor."""
    unknown = sorted(set(formats) - set(model.state_dict()))
    if unknown:
        raise SpecError(f"the model has no weight {', '.join(unknown)}")
    listed: list[list[object]] = []
    parts: list[bytes] = []
    for name, value in _tensors(model, formats):
        form = formats.get(name)
        if form is None:
            array = _plain(value)
            listed.append([name, list(value.shape), array.nbytes, array.dtype.str])
            parts.append(array.tobytes())
        else:
            parts.append(encode(value, form))
            listed.append(
                [name, list(value.shape), len(parts[-1]), form.bits, form.sparse, form.groups]
            )
    header = json.dumps(listed, separators=(",", ":")).encode()
    return b"".join([len(header).to_bytes(LENGTH, "little"), header, *parts])


def unpack(raw: bytes) -> dict[str, Tensor]:
    """The tensors of a file by name; norms as `<name>.scale` and `<name>.shift`."""
    start = LENGTH + int.from_bytes(raw[:LENGTH], "little")
    found = {}
    for name, shape, size, kind, *how in json.loads(raw[LENGTH:start]):
        part, start = raw[start : start + size], start + size
        if how:
            sparse, groups = how
            found[name] = decode(part, tuple(shape), Format(kind, sparse, groups=groups))
        else:
            found[name] = torch.from_numpy(np.frombuffer(part, kind).reshape(shape).copy())
    return found


def packed_bytes(model: nn.Module, formats: Mapping[str, Format], graph: ov.Model) -> int:
    """What the file takes on disk, and beside it the topology as OpenVINO writes it.

    `graph` is the model that runs. Its activations' ranges, 16 bytes each, are not counted.
    """
    with tempfile.TemporaryDirectory() as folder:
        packed, topology = Path(folder) / "packed", Path(folder) / "model.xml"
        packed.write_bytes(pack(model, formats))
        ov.save_model(graph, topology, compress_to_fp16=False)
        return packed.stat().st_size + topology.stat().st_size


def _codes(weight: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Codes (rows, inner) as float32 integers and scales (rows,)."""
    flat = weight.detach().float().cpu().reshape(len(weight) * form.groups, -1)
    scale = flat.abs().amax(1) / form.top if form.scale is None else form.scale.detach().float()
    if scale.shape != (len(flat),):
        raise SpecError(f"{len(flat)} rows have scales of shape {tuple(scale.shape)}")
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))  # a row of zeros has codes too
    return (flat / safe[:, None]).round().clamp(-form.top, form.top), scale.contiguous()


def _tensors(model: nn.Module, formats: Mapping[str, Format]) -> Iterator[tuple[str, Tensor]]:
    """What inference needs, each tensor once: of tied ones the name that has a format."""
    state = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_var is not None:
            own = [f"{name}.{key}".lstrip(".") for key in module.state_dict()]
            state = {key: value for key, value in state.items() if key not in own}
            scale, shift = _folded(module)
            yield f"{name}.scale", scale
            yield f"{name}.shift", shift
    seen = set()
    for name in sorted(state, key=lambda name: name not in formats):
        where = (state[name].data_ptr(), state[name].shape)
        if where not in seen or not state[name].numel():
            yield name, state[name]
        seen.add(where)


def _folded(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = (norm.running_var + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.detach()
    shift = -scale * norm.running_mean
    return scale, shift if norm.bias is None else shift + norm.bias.detach()


def _plain(value: Tensor) -> npt.NDArray[np.generic]:
    value = value.detach().cpu().contiguous()
    array: npt.NDArray[np.generic] = (value.float() if value.is_floating_point() else value).numpy()
    return array
