"""A model as its artifact describes it: name, inputs, outputs, states, what they mean."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import TensorShapeProto, ValueInfoProto, helper
from torch import nn

from t3c.artifact.graph import BATCH_AXIS, Traced
from t3c.artifact.manifest import ModelEntry, StateEntry, TensorEntry
from t3c.convert import state_of
from t3c.errors import SpecError
from t3c.nn.inputs import tensors
from t3c.spec import ImageSpec, TextSpec


@dataclass(frozen=True)
class Described:
    """A model, and all that its artifact says of it whatever its profiles are."""

    model: nn.Module
    traced: Traced
    name: str
    seed: int = 0
    image: ImageSpec | None = None
    classes: tuple[str, ...] | None = None
    text: TextSpec | None = None
    tokenizer: bytes | None = None
    weight_only: bool = False

    def __post_init__(self) -> None:
        graph = self.traced.model.graph
        into, out = (
            [d.dim_value for d in v.type.tensor_type.shape.dim]
            for v in (graph.input[0], graph.output[0])
        )
        if self.classes is not None and len(self.classes) != out[-1]:
            raise SpecError(f"{len(self.classes)} classes for an output of shape {tuple(out[1:])}")
        image = self.image
        if image is not None and into[1:] != [len(image.mean), image.height, image.width]:
            raise SpecError(
                f"pictures of {len(image.mean)}x{image.height}x{image.width} for an input of "
                f"shape {tuple(into[1:])}"
            )

    @property
    def entry(self) -> ModelEntry:
        """Return what the manifest says of the model, but for the tensors that have ranges."""
        state, graph = state_of(self.model), self.traced.model.graph
        example = tensors(state.example)
        inputs = []
        for value, given in zip(graph.input, example, strict=False):
            entry = _tensor_entry(value)
            if any(isinstance(size, str) for size in entry.shape):
                entry = entry.model_copy(update={"example": (1, *given.shape[1:])})
            inputs.append(entry)
        # What comes after the inputs and the output are states, and what they become.
        states = zip(list(graph.input)[len(example) :], list(graph.output)[1:], strict=False)
        return ModelEntry(
            name=self.name,
            parameters=sum(p.numel() for p in state.original.parameters()),
            inputs=tuple(inputs),
            outputs=(_tensor_entry(graph.output[0]),),
            states=tuple(_state_entry(value, becomes.name) for value, becomes in states),
            quantized=(),
            classes=self.classes,
            image=self.image,
            text=self.text,
        )


def _state_entry(value: ValueInfoProto, output: str) -> StateEntry:
    entry = _tensor_entry(value)
    stored = {"input": entry.name, "output": output, "dtype": entry.dtype, "shape": entry.shape}
    return StateEntry.model_validate(stored)


def _tensor_entry(value: ValueInfoProto) -> TensorEntry:
    kind = value.type.tensor_type
    dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
    return TensorEntry(
        name=value.name, dtype=dtype.name, shape=tuple(_size(d) for d in kind.shape.dim)
    )


def _size(dim: TensorShapeProto.Dimension) -> int | str | None:
    """Return a size, the name of a free one, or None for the batch and what is not known."""
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    named = dim.dim_param != BATCH_AXIS and dim.dim_param.isidentifier()
    return str(dim.dim_param) if named else None
