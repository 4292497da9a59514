"""manifest.json: what the artifact is, and the hashes of its content."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from onnx import NodeProto
from pydantic import Field, model_validator

from t3c.artifact.plain import Record
from t3c.spec import (
    Form,
    ImageSpec,
    LayerPoint,
    LayerSpec,
    Profile,
    ProfileChain,
    TextSpec,
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
    group: int | None = Field(default=None, description="columns that have a grid of their own")

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
    group: int | None = None,
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
        group=group,
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
    weight_scales: Literal["per-row", "groups"] = "per-row"  # "groups": of layers that have some
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
