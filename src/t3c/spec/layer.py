"""The geometry of one elastic layer: enough to cost, store and assemble it without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from t3c.errors import SpecError
from t3c.spec.points import MAX_BITS, MIN_BITS, LayerPoint

LARGEST = 2**31 - 1  # size of an axis

Shape = tuple[int, ...]


class Form(StrEnum):
    """How an engine executes a layer point."""

    FACTORED = "factored"
    DENSE = "dense"
    ALIGNED = "aligned"  # k of the input's channels as they are, and the others by way of them
    NARROW = "narrow"  # the leading outputs, or inputs, alone


class Kind(StrEnum):
    """What a layer computes."""

    LINEAR = "linear"
    CONV1D = "conv1d"
    CONV2D = "conv2d"
    EMBEDDING = "embedding"


class Factorization(StrEnum):
    """How a layer's weight is stored below full rank."""

    NONE = "none"  # elastic in bits alone
    SVD = "svd"
    TUCKER1 = "tucker1"  # over the input channels of a kernel
    TUCKER2 = "tucker2"  # over its input and its output channels
    CP = "cp"
    # Width: the rank counts leading channels, of one weight that is stored once.
    ROWS = "rows"  # its outputs
    COLUMNS = "columns"  # its inputs
    CORNER = "corner"  # both, as many of each


# Of a product that is added to a weight some three times its size: MiniLM at 0.75 of its neurons
# drifts 0.236 with 5 of them, 0.233 with 6, 0.230 with 8.
CORRECTION_BITS = 6
WIDTHS = frozenset({Factorization.ROWS, Factorization.COLUMNS, Factorization.CORNER})


@dataclass(frozen=True)
class LayerSpec:
    """One elastic weight and the layer it belongs to.

    `in_size` and `out_size` are those of one sample at the example's size: the sides of a
    convolution's input, (tokens, 1) of a linear layer or an embedding. `runs` is how often the
    weight is used in one pass. `bit_offsets` adds to a point's bits, stage by stage. `aligned` are
    the ranks at which an artifact says how to align the factors, `unaligned` those at which it
    does not, and why. A layer that is narrowed in width belongs to a `unit`, whose layers keep the
    same share of their channels; below full width its inputs that are left out are made up for by
    a product of rank `correction`, one for each width.
    """

    name: str
    kind: Kind
    factorization: Factorization
    out_channels: int
    in_channels: int
    kernel: Shape = (1, 1)
    stride: Shape = (1, 1)
    padding: Shape = (0, 0)
    dilation: Shape = (1, 1)
    groups: int = 1
    in_size: Shape = (1, 1)
    out_size: Shape = (1, 1)
    tile: int = 8
    runs: int = 1
    bit_offsets: tuple[int, ...] = ()
    aligned: tuple[int, ...] = ()
    unaligned: tuple[tuple[int, str], ...] = ()
    unit: str = ""
    correction: int = 0

    def __post_init__(self) -> None:
        axes = [self.kernel, self.stride, self.dilation, self.in_size, self.out_size]
        if len({len(axis) for axis in [*axes, self.padding]}) != 1:
            raise SpecError(f"{self.name}: kernel, stride, padding and sizes differ in their axes")
        if len(self.kernel) != (1 if self.kind is Kind.CONV1D else 2):
            raise SpecError(f"{self.name}: a {self.kind} does not have {len(self.kernel)} axes")
        sizes = [self.out_channels, self.in_channels, self.groups, self.tile, self.runs]
        sizes += [side for axis in axes for side in axis]
        if min(sizes) < 1 or min(self.padding) < 0:
            raise SpecError(f"{self.name}: sizes, strides and groups must be positive")
        if max(*sizes, *self.padding) > LARGEST:
            raise SpecError(f"{self.name}: sizes must be at most {LARGEST}")
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise SpecError(f"{self.name}: channels do not divide into {self.groups} groups")
        self._check_groups()
        if not all(self.alignable(rank) for rank in self.aligned):
            raise SpecError(f"{self.name}: no aligned form at the ranks {self.aligned}")

    def _check_groups(self) -> None:
        """Raise for a factorization that does not fit how channels are grouped."""
        depthwise = self.groups == self.in_channels == self.out_channels
        single = self.factorization in (Factorization.NONE, Factorization.SVD)
        corner = self.factorization is Factorization.CORNER
        if self.groups > 1 and not single and not (corner and depthwise):
            raise SpecError(f"{self.name}: {self.factorization} has no channels in groups")
        if corner and self.in_channels != self.out_channels:
            raise SpecError(f"{self.name}: a corner has as many inputs as outputs")
        if self.narrows != bool(self.unit) or not 0 <= self.correction <= self.out_channels:
            raise SpecError(f"{self.name}: a narrowed layer has a unit and a correction's rank")
        if self.correction and not self.cuts_inputs:
            raise SpecError(f"{self.name}: a correction is for inputs that are left out")

    @property
    def narrows(self) -> bool:
        """Whether ranks are widths: how many leading channels are kept."""
        return self.factorization in WIDTHS

    @property
    def cuts_outputs(self) -> bool:
        """Whether ranks count outputs."""
        return self.factorization in (Factorization.ROWS, Factorization.CORNER)

    @property
    def cuts_inputs(self) -> bool:
        """Whether ranks count columns of the weight; a depthwise one has none to leave out."""
        return self.narrows and self.factorization is not Factorization.ROWS and self.groups == 1

    def narrowed(self, rank: int) -> LayerSpec:
        """Return the layer as it runs at a width: an ordinary one with fewer channels."""
        if not self.narrows or rank >= self.full_rank:
            return self
        out, into = self.corner(rank)[:2]
        groups = self.groups if self.groups == 1 else rank
        return replace(
            self, factorization=Factorization.NONE, out_channels=out, in_channels=into * groups,
            groups=groups, unit="", correction=0,
        )  # fmt: skip

    def corner(self, rank: int) -> Shape:
        """Return the shape of the leading part of the weight that a width keeps."""
        out, into, *kernel = self.dense_shape
        return (
            rank if self.cuts_outputs else out, rank if self.cuts_inputs else into, *kernel
        )  # fmt: skip

    @property
    def geometry(self) -> LayerSpec:
        """Return what decides its time: the layer by no name, in no unit of its own."""
        unit = "unit" if self.narrows else ""
        return replace(self, name="", aligned=(), unaligned=(), unit=unit)

    @property
    def convolution(self) -> bool:
        return self.kind in (Kind.CONV1D, Kind.CONV2D)

    @property
    def full_rank(self) -> int:
        """The rank from which on a layer is stored dense."""
        if self.factorization in (Factorization.TUCKER2, Factorization.CP):
            return max(self.out_channels, self.in_channels)
        if self.factorization in (Factorization.TUCKER1, Factorization.COLUMNS):
            return self.in_channels
        if self.narrows:
            return self.out_channels
        return min(self.out_channels, math.prod(self.dense_shape[1:]))

    @property
    def in_positions(self) -> int:
        return math.prod(self.in_size)

    @property
    def out_positions(self) -> int:
        return math.prod(self.out_size)

    @property
    def per_token(self) -> LayerSpec:
        """The layer as it runs in decoding: at one position. A convolution stays as it is."""
        return self if self.convolution else replace(self, in_size=(1, 1), out_size=(1, 1))

    @property
    def dense_shape(self) -> Shape:
        return self._shape(self.out_channels, self.in_channels // self.groups, self.kernel)

    def channel_ranks(self, rank: int) -> tuple[int, int]:
        """The monotone schedule k -> (r_out, r_in), whole tiles, in proportion to the channels."""
        if self.factorization is not Factorization.TUCKER2:
            return rank, rank

        def share(channels: int) -> int:
            exact = rank * channels / self.full_rank
            return min(channels, self.tile * math.ceil(exact / self.tile))

        return share(self.out_channels), share(self.in_channels)

    def stage_shapes(self, rank: int) -> tuple[Shape, ...]:
        """Weight shapes of the factored stages at `rank`, in order of execution.

        SVD: reduce (k, in, *kernel), expand (out, k). Tucker-1: reduce (k, in), core
        (out, k, *kernel). Tucker-2: reduce (r_in, in), core (r_out, r_in, *kernel), expand
        (out, r_out). CP: reduce (k, in), depthwise (k, 1, *kernel),
        expand (out, k). Elastic in bits alone: the dense weight. Width: the leading corner of the
        dense weight, then the correction that is added to it, reduce (r, in, *kernel) and expand
        (out, r).
        """
        if not 1 <= rank <= self.full_rank:
            raise SpecError(f"{self.name}: rank {rank} is outside 1..{self.full_rank}")
        if self.factorization is Factorization.NONE:
            return (self.dense_shape,)
        point = (1,) * len(self.kernel)
        if self.narrows:
            corner = self.corner(rank)
            if not self.correction or rank >= self.full_rank:
                return (corner,)
            expand = self._shape(corner[0], self.correction, point)
            return corner, (self.correction, *corner[1:]), expand
        r_out, r_in = self.channel_ranks(rank)
        expand = self._shape(self.out_channels, r_out, point)
        if self.factorization is Factorization.SVD:
            return self._shape(rank, self.in_channels // self.groups, self.kernel), expand
        reduce = self._shape(r_in, self.in_channels, point)
        if self.factorization is Factorization.TUCKER1:
            return reduce, self._shape(self.out_channels, rank, self.kernel)
        middle = 1 if self.factorization is Factorization.CP else r_in
        return reduce, self._shape(r_out, middle, self.kernel), expand

    def stage_groups(self, rank: int) -> tuple[int, ...]:
        """The convolution groups of each factored stage at `rank`."""
        if self.factorization is Factorization.CP:
            return 1, rank, 1
        return (1,) * len(self.stage_shapes(rank))

    def stage_bits(self, bits: int) -> tuple[int, ...]:
        """The bits of each factored stage at a point of `bits`."""
        count = len(self.stage_shapes(1))
        offsets = (*self.bit_offsets, *(0,) * count)
        return tuple(min(MAX_BITS, max(MIN_BITS, bits + extra)) for extra in offsets[:count])

    def forms(self, point: LayerPoint) -> tuple[Form, ...]:
        """The forms a point can be executed in.

        A weight whose channels come in groups is stored factored and executed dense: its factors
        would be run on every channel.
        """
        if self.narrows and point.rank < self.full_rank:
            return (Form.NARROW,)
        if self.stored_dense(point) or self.groups > 1:
            return (Form.DENSE,)
        aligned = (Form.ALIGNED,) if point.rank in self.aligned else ()
        return (Form.FACTORED, Form.DENSE, *aligned)

    def alignable(self, rank: int) -> bool:
        """Whether factors of this rank can be aligned at all: those of a linear layer can."""
        linear = self.kind is Kind.LINEAR and self.factorization is Factorization.SVD
        return linear and self.groups == 1 and 0 < rank < self.full_rank

    def executed_shapes(self, point: LayerPoint, form: Form) -> tuple[Shape, ...]:
        """Weight shapes an engine multiplies by when `point` runs in `form`.

        Aligned: rest (k, in - k), expand (out, k).
        """
        if form is Form.ALIGNED and self.alignable(point.rank):
            rest = self._shape(point.rank, self.in_channels - point.rank, ())
            return rest, self.stage_shapes(point.rank)[-1]
        if form is Form.NARROW and form in self.forms(point):
            return (self.corner(point.rank),)
        if form is Form.DENSE or form not in self.forms(point):
            return (self.dense_shape,)
        return self.stage_shapes(point.rank)

    def stored_shapes(self, point: LayerPoint) -> tuple[Shape, ...]:
        """Weight shapes an artifact keeps to run `point`."""
        return (self.dense_shape,) if self.stored_dense(point) else self.stage_shapes(point.rank)

    def stored_bits(self, point: LayerPoint) -> tuple[int, ...]:
        """The bits of each stored weight; those of a correction are always the same."""
        if self.narrows:
            return (point.bits, *[CORRECTION_BITS] * (len(self.stage_shapes(point.rank)) - 1))
        return (point.bits,) if self.stored_dense(point) else self.stage_bits(point.bits)

    def stored_dense(self, point: LayerPoint) -> bool:
        """Whether an artifact keeps this point as one dense tensor, as it does at full rank."""
        return self.factorization is Factorization.NONE or point.rank >= self.full_rank

    def strided_stage(self) -> int:
        """Which factored stage carries stride, padding and dilation."""
        return 0 if self.factorization is Factorization.SVD else 1

    def _shape(self, out: int, into: int, kernel: Shape) -> Shape:
        return (out, into, *kernel) if self.convolution else (out, into)
