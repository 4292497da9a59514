"""Graphs of single layers and groups of them with random weights: for timing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from t3c.artifact.store import Floats
from t3c.errors import SpecError
from t3c.graph.builder import Builder, Member, Stage, fit_one_product
from t3c.graph.int4 import LARGEST, Activations
from t3c.quant.groups import group_of
from t3c.spec import MAX_BITS, Form, Kind, LayerPoint, LayerSpec


def synthetic_layer(
    spec: LayerSpec,
    point: LayerPoint,
    form: Form,
    seed: int = 0,
    *,
    to_float: bool = False,
    activations: Activations = "int8",
) -> onnx.ModelProto:
    """A graph of one layer alone, with random weights: for timing it.

    Its output is rounded to 8 bits, as where another layer follows, or stays float.
    """
    if form is Form.NARROW:
        narrow = spec.narrowed(point.rank)
        return synthetic_layer(
            narrow, LayerPoint(narrow.full_rank, point.bits), Form.DENSE, seed,
            to_float=to_float, activations=activations,
        )  # fmt: skip
    inner = [f"{spec.name}/{end}" for end in ("stage0", "stage1", "stage2", "aligned")]
    builder = Builder(dict.fromkeys(["x", "y", *inner], (-1, 1)), activations)
    group = group_of(spec) if activations == "float" else None
    stages = _random_stages(spec, point, form, np.random.default_rng(seed), group)
    kind = "conv" if spec.convolution else str(spec.kind)
    table = spec.kind is Kind.EMBEDDING
    bias = builder.constant("bias", np.zeros(spec.out_channels, dtype=np.float32))
    x = "x" if table else builder.quantized("x")
    kept = _some_columns(spec, point, form)
    builder.layer(spec.name, kind, spec, stages, x, None if table else bias, "y", kept)
    out = "y" if to_float else builder.quantized("y")
    into, outof = example_shape(spec)
    return builder.model(
        [
            helper.make_tensor_value_info(
                "x", TensorProto.INT64 if table else TensorProto.FLOAT, into
            )
        ],
        [helper.make_tensor_value_info(out, TensorProto.FLOAT, outof)],
    )


def synthetic_group(
    specs: Sequence[LayerSpec],
    points: Sequence[LayerPoint],
    form: Form,
    grouped: bool,
    seed: int = 0,
    activations: Activations = "int8",
) -> onnx.ModelProto:
    """Linear layers on one input, with random weights, as one product or one by one: for timing.

    Outputs stay float, as those of projections do: what follows them is no product by a weight.
    """
    if form is Form.NARROW:
        narrow = [spec.narrowed(point.rank) for spec, point in zip(specs, points, strict=True)]
        whole = [LayerPoint(s.full_rank, p.bits) for s, p in zip(narrow, points, strict=True)]
        return synthetic_group(narrow, whole, Form.DENSE, grouped, seed, activations)
    rng = np.random.default_rng(seed)
    inner = [f"{spec.name}/{end}" for spec in specs for end in ("stage0", "aligned")]
    builder = Builder(dict.fromkeys(["x", *inner], (-1, 1)), activations)
    members = [
        Member(
            spec.name,
            _random_stages(
                spec, point, form, rng, group_of(spec) if activations == "float" else None
            ),
            builder.constant(f"{spec.name}/bias", np.zeros(spec.out_channels, dtype=np.float32)),
            f"{spec.name}/y",
        )
        for spec, point in zip(specs, points, strict=True)
    ]  # fmt: skip
    x = builder.quantized("x")
    if not grouped:
        for spec, point, m in zip(specs, points, members, strict=True):
            kept = _some_columns(spec, point, form)
            builder.layer(m.name, "linear", spec, m.stages, x, m.bias, m.output, kept)
    elif form is not Form.ALIGNED and fit_one_product(members, builder.constants):
        builder.group(members, x)
    else:
        names = ", ".join(spec.name for spec in specs)
        raise SpecError(f"{names}: not all {form} at these points: time them separately")
    shapes = [example_shape(spec) for spec in specs]
    return builder.model(
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shapes[0][0])],
        [
            helper.make_tensor_value_info(member.output, TensorProto.FLOAT, outof)
            for member, (_, outof) in zip(members, shapes, strict=True)
        ],
    )


def _random_stages(
    spec: LayerSpec, point: LayerPoint, form: Form, rng: np.random.Generator, group: int | None
) -> list[Stage]:
    """Integers as large as 4 or 8 bits hold; a recomposed weight has 8, and no groups."""
    shapes = spec.executed_shapes(point, form)
    stored = shapes == spec.stored_shapes(point)
    bits = spec.stored_bits(point) if stored else (MAX_BITS,) * len(shapes)

    def integers(shape: tuple[int, ...], four: bool) -> npt.NDArray[np.int8]:
        if four:
            return (2 * rng.integers(0, LARGEST + 1, shape) - LARGEST).astype(np.int8)
        return rng.integers(-127, 128, shape, dtype=np.int8)

    def scale(index: int, shape: tuple[int, ...]) -> Floats:
        groups = 0 if group is None or index or not stored else shape[1] // group
        return np.full((shape[0], groups) if groups else shape[0], 1e-3, np.float32)

    return [
        (integers(shape, width <= 4), scale(index, shape))
        for index, (shape, width) in enumerate(zip(shapes, bits, strict=True))
    ]


def _some_columns(spec: LayerSpec, point: LayerPoint, form: Form) -> npt.NDArray[np.int64] | None:
    """Columns for an aligned layer to keep, spread over all; None in other forms."""
    if form is not Form.ALIGNED or not spec.alignable(point.rank):
        return None
    return np.arange(point.rank) * spec.in_channels // point.rank


def example_shape(spec: LayerSpec) -> tuple[list[int], list[int]]:
    """Input and output shapes of one layer at batch 1."""
    if spec.kind is Kind.EMBEDDING:
        return [1, spec.in_positions], [1, spec.out_positions, spec.in_channels]
    if spec.kind is Kind.LINEAR:
        return [1, spec.in_positions, spec.in_channels], [1, spec.out_positions, spec.out_channels]
    return [1, spec.in_channels, *spec.in_size], [1, spec.out_channels, *spec.out_size]


def example_input(spec: LayerSpec, seed: int = 0) -> npt.NDArray[Any]:
    """A random input of one layer at batch 1."""
    rng, shape = np.random.default_rng(seed), example_shape(spec)[0]
    if spec.kind is Kind.EMBEDDING:
        return rng.integers(0, spec.out_channels, shape)
    return rng.normal(size=shape).astype(np.float32)
