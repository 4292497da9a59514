"""manifest.json: what the artifact is, and the hashes of its content."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Literal

from onnx import NodeProto
from pydantic import Field, model_validator

from t3c.artifact.plain import Record, parse, read_plain
from t3c.artifact.upgrade import upgraded
from t3c.errors import CorruptError, SpecError
from t3c.spec import (
    MAX_BITS,
    MIN_BITS,
    Form,
    ImageSpec,
    LayerPoint,
    LayerSpec,
    Profile,
    ProfileChain,
    TextSpec,
    check_menu,
)

ELASTIC_DOMAIN, OPSET = "t3c", 21  # of elastic nodes; of all others
GRAPH, FACTORS, DENSE = "graph.onnx", "factors.safetensors", "dense.safetensors"
CONTENT = (GRAPH, FACTORS, DENSE)
TOKENIZER = "tokenizer.json"  # content too, of artifacts that carry one
CONTROLLER = "controller/"  # what the names of a controller's tensors begin with
PIVOTS = "aligned/"  # those of the columns that aligned layers keep, by layer and rank
RANGES = "ranges/"  # and those of a profile's activation ranges
NORMS = "norms/"  # and those of its own norms
STATE = "past_"  # what the names of a graph's states begin with
LARGEST_SAMPLE = 2**25  # numbers of one input: what is allocated before anything is run
DTYPES = ("bool", "float16", "float32", "float64", "int8", "int32", "int64", "uint8")


Shape = tuple[int | str | None, ...]  # None is the batch, a string the name of a free size


class TensorEntry(Record):
    """An input or output. Where axes are free, `example` are the sizes of one sample (1, ...) that
    what depends on them was measured at."""

    name: str
    dtype: str
    shape: Shape
    example: tuple[int, ...] | None = None

    @model_validator(mode="after")
    def _fits(self) -> TensorEntry:
        if self.example is not None:
            pairs = zip(self.shape, self.example, strict=False)
            apart = [n for s, n in pairs if n < 1 or (isinstance(s, int) and s != n)]
            if apart or len(self.example) != len(self.shape):
                raise ValueError(f"its example {self.example} does not fit its shape")
        return self


class StateEntry(Record):
    """What is carried from call to call: an input, and the output that it becomes. Sizes with a
    name are 0 at first, and grow."""

    input: str
    output: str
    dtype: Literal["float16", "float32", "float64"]
    shape: Shape


class NormedEntry(Record):
    """A layer that profiles may have norms of their own for, and the tensor that holds its bias."""

    layer: str
    bias: str


class ModelEntry(Record):
    """What the artifact computes. `quantized` names the tensors that have a range per profile,
    `normed` the layers that profiles may have their own gains and biases for."""

    name: str
    parameters: int = Field(ge=0, lt=2**63)
    inputs: tuple[TensorEntry, ...]
    outputs: tuple[TensorEntry, ...]
    quantized: tuple[str, ...]
    classes: tuple[str, ...] | None = None
    image: ImageSpec | None = None
    text: TextSpec | None = None
    states: tuple[StateEntry, ...] = ()
    normed: tuple[NormedEntry, ...] = ()


class LayoutEntry(Record):
    """How a layer lies in memory: the order of a stored weight's axes, row-major, the last of them
    contiguous; how many lanes each stored rank is short of whole tiles; and whether the batch norm
    behind it is folded into its rows and bias."""

    order: Literal["OI", "OIL", "OIHW"]
    paddings: tuple[int, ...] = ()
    folded_norm: bool = False


class LayerEntry(Record):
    """One elastic layer: its geometry, its menu, and what of it is stored."""

    spec: LayerSpec
    menu: tuple[LayerPoint, ...]
    ranks: tuple[int, ...] = Field(description="ranks stored factored, rising")
    bits: tuple[int, ...] = Field(description="factored views that have a scale, rising")
    dense_bits: tuple[int, ...] = Field(description="dense views that have a scale, rising")
    layout: LayoutEntry

    def stores(self, point: LayerPoint) -> bool:
        """Whether the point can be read."""
        if self.spec.stored_dense(point):
            return point.bits in self.dense_bits
        return point.rank in self.ranks and point.bits in self.bits


def layer_entry(
    spec: LayerSpec,
    menu: Sequence[LayerPoint],
    points: Iterable[LayerPoint],
    *,
    folded_norm: bool = False,
) -> LayerEntry:
    """A layer with what these points need of it: no rank and no view is stored that none runs."""
    points = set(points)
    dense = {point for point in points if spec.stored_dense(point)}
    ranks = tuple(sorted({point.rank for point in points - dense}))
    order: Literal["OI", "OIL", "OIHW"] = "OI"
    if spec.convolution:
        order = "OIHW" if len(spec.kernel) == 2 else "OIL"
    return LayerEntry(
        spec=spec,
        menu=tuple(menu),
        ranks=ranks,
        bits=tuple(sorted({point.bits for point in points - dense})),
        dense_bits=tuple(sorted({point.bits for point in dense})),
        layout=LayoutEntry(
            order=order, paddings=tuple(-rank % spec.tile for rank in ranks),
            folded_norm=folded_norm,
        ),
    )  # fmt: skip


class ProfileEntry(Record):
    """One profile, and the bytes needed to run it."""

    name: str
    points: dict[str, LayerPoint]
    size_bytes: int = Field(gt=0, lt=2**63)


class UnitEntry(Record):
    """A unit under a controller, and the chain of levels it may take, stored as ranks."""

    name: str
    points: tuple[LayerPoint, ...]


class ControllerEntry(Record):
    """A controller, whose tensors are in dense.safetensors: what it decides on, and the shipped
    profiles as levels of its units with their shares of latency, size and energy."""

    units: tuple[UnitEntry, ...]
    devices: tuple[str, ...]
    summarized: tuple[str, ...]
    token: Literal["tuple", "scalar"]
    profiles: dict[str, dict[str, LayerPoint]]
    shares: dict[str, tuple[float | None, float | None, float | None]]


class NumericsEntry(Record):
    """What numbers are and how they are rounded, so that no other reader has to guess."""

    codes: Literal["sign-magnitude"] = "sign-magnitude"
    planes: Literal["sign-first"] = "sign-first"
    views: Literal["truncated-midpoint"] = "truncated-midpoint"
    weight_rounding: Literal["half-to-even"] = "half-to-even"
    weight_scales: Literal["per-row"] = "per-row"
    activations: Literal["int8", "float32"] = "int8"
    activation_rounding: Literal["half-to-even"] = "half-to-even"
    activation_scales: Literal["per-tensor"] = "per-tensor"
    activation_zero: Literal["zero", "range"] = "zero"  # "range": where a range is uneven
    accumulators: Literal["int32"] = "int32"


class DeterminismEntry(Record):
    """What was left to chance when the content was made: nothing but what the seeds fix."""

    stochastic_rounding: Literal[False] = False
    masks: Literal["hard-prefix"] = "hard-prefix"


class KernelEntry(Record):
    """What an engine has to have for an artifact: forms of layers, and types of weights."""

    forms: tuple[Form, ...]
    weights: tuple[Literal["int4", "int8"], ...] = ("int8",)
    opset: int = OPSET


class FileEntry(Record):
    """One content file."""

    sha256: str
    bytes: int


class Manifest(Record):
    """The whole of manifest.json."""

    schema_version: int
    t3c_version: str
    model: ModelEntry
    layers: tuple[LayerEntry, ...]
    profiles: tuple[ProfileEntry, ...]
    seeds: dict[str, int]
    files: dict[str, FileEntry]
    calibrated_on: tuple[str, ...] | None = Field(
        default=None, description="hashes of the samples that set activation ranges"
    )
    controller: ControllerEntry | None = None
    numerics: NumericsEntry = NumericsEntry()
    determinism: DeterminismEntry = DeterminismEntry()
    kernels: dict[str, KernelEntry] = Field(
        default_factory=dict, description="what each engine it was checked on has to have"
    )
    trimmed_from: str | None = Field(
        default=None, description="content hash of the artifact this one is a part of"
    )

    @property
    def specs(self) -> dict[str, LayerSpec]:
        return {layer.spec.name: layer.spec for layer in self.layers}

    @property
    def chain(self) -> ProfileChain:
        return ProfileChain(tuple(Profile(p.name, p.points) for p in self.profiles))

    def size_bytes(self, profile: str) -> int:
        return next(p.size_bytes for p in self.profiles if p.name == profile)


def pivots_name(layer: str, rank: int) -> str:
    """What the columns are called that an aligned layer keeps at a rank."""
    return f"{PIVOTS}{layer}/{rank}"


def elastic_layer(node: NodeProto) -> str:
    """The layer whose weight an elastic node uses."""
    named = next((a.s.decode() for a in node.attribute if a.name == "layer"), None)
    return named or str(node.name)


def elastic_kind(node: NodeProto, spec: LayerSpec) -> str:
    """What an elastic node computes: conv, linear or embedding."""
    named = next((a.s.decode() for a in node.attribute if a.name == "kind"), None)
    return named or ("conv" if spec.convolution else str(spec.kind))


def dump_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json; their hash is the artifact's content hash."""
    return manifest.model_dump_json(exclude_none=True).encode()


def load_manifest(path: Path) -> tuple[Manifest, str]:
    """The manifest and the content hash of the artifact it stands for."""
    return parse_manifest(read_plain(path), path)


def parse_manifest(raw: bytes, path: Path) -> tuple[Manifest, str]:
    """The manifest that the bytes of a file are, and their hash; `path` is for its errors."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path}: not JSON: {error}") from error
    present = upgraded(data, path)
    try:
        whole = raw if present is data else json.dumps(present).encode()
    except RecursionError as error:
        raise CorruptError(f"{path}: not a manifest: {error}") from error
    manifest = parse(Manifest, whole, path)
    try:
        _check(manifest)
    except SpecError as error:
        raise CorruptError(f"{path}: {error}") from error
    return manifest, hashlib.sha256(raw).hexdigest()


def _check(manifest: Manifest) -> None:
    """What the types alone do not say."""
    if set(manifest.files) - {TOKENIZER} != set(CONTENT):
        raise SpecError(f"files must be {', '.join(CONTENT)}, and {TOKENIZER} if there is one")
    specs = manifest.specs
    if len(specs) != len(manifest.layers):
        raise SpecError("layer names repeat")
    for tensor in (*manifest.model.inputs, *manifest.model.outputs):
        if tensor.dtype not in DTYPES:
            raise SpecError(f"{tensor.name}: unknown dtype {tensor.dtype!r}")
    given = [(tensor.name, tensor.example or tensor.shape) for tensor in manifest.model.inputs]
    for name, shape in given + [(state.input, state.shape) for state in manifest.model.states]:
        sizes = [size for size in shape if isinstance(size, int)]
        if min(sizes, default=1) < 1 or math.prod(sizes) > LARGEST_SAMPLE:
            raise SpecError(f"{name}: a sample has 1 to {LARGEST_SAMPLE} numbers, got {shape}")
    unknown = {entry.layer for entry in manifest.model.normed} - set(specs)
    if unknown:
        raise SpecError(f"norms are for layers that there are not: {', '.join(sorted(unknown))}")
    for names in zip(*((e.layer, e.bias) for e in manifest.model.normed), strict=True):
        if len(set(names)) != len(names):
            raise SpecError("layers with norms of their own, or their biases, repeat")
    for layer in manifest.layers:
        check_menu(layer.menu)
        views = (layer.bits, layer.dense_bits)
        rising = all(sorted(set(v)) == list(v) for v in (layer.ranks, *views))
        if not rising or any(not 0 < rank < layer.spec.full_rank for rank in layer.ranks):
            raise SpecError(f"{layer.spec.name}: ranks and bits must rise, ranks below full rank")
        if any(not MIN_BITS <= q <= MAX_BITS for view in views for q in view):
            raise SpecError(f"{layer.spec.name}: bits must be in {MIN_BITS}..{MAX_BITS}")
    if manifest.controller is not None:
        _check_controller(manifest.controller, [profile.name for profile in manifest.profiles])
    for profile in manifest.chain:
        if profile.points.keys() != specs.keys():
            raise SpecError(f"profile {profile.name!r} does not name every layer")
        for layer in manifest.layers:
            point = profile.points[layer.spec.name]
            if not layer.stores(point):
                raise SpecError(f"profile {profile.name!r}: {layer.spec.name}: {point} not stored")
        _check_units(profile, specs)


def _check_units(profile: Profile, specs: Mapping[str, LayerSpec]) -> None:
    """Raise unless the layers of a unit keep the same share of their channels."""
    shares: dict[str, tuple[str, Fraction]] = {}
    for name, spec in specs.items():
        if spec.narrows:
            share = Fraction(profile.points[name].rank, spec.full_rank)
            first, known = shares.setdefault(spec.unit, (name, share))
            if share != known:
                raise SpecError(
                    f"profile {profile.name!r}: {first} keeps {known} of its channels and {name} "
                    f"{share}: they are narrowed together"
                )


def _check_controller(controller: ControllerEntry, profiles: list[str]) -> None:
    if list(controller.profiles) != profiles:
        raise SpecError("the controller does not have the artifact's profiles")
    if controller.shares.keys() != controller.profiles.keys():
        raise SpecError("the controller does not have the shares of its profiles")
    if len({unit.name for unit in controller.units}) != len(controller.units):
        raise SpecError("the controller's units repeat")
