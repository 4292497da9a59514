"""The aligned form of stored linear layers: which columns they keep, and what they multiply by.

An artifact names the kept columns; the stages follow from the stored factors, in numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from t3c.artifact.draft import Held
from t3c.artifact.manifest import LayerEntry, pivots_name
from t3c.artifact.store import Tensors, read_layer
from t3c.errors import CorruptError
from t3c.factor.aligned import Floats, Indices, align, gauge
from t3c.graph.builder import Stage, dequantized, execution_stages, narrow_stages
from t3c.spec import MAX_BITS, Form, LayerPoint, LayerSpec

WORST_CONDITION = 1e4
WORST_ROUNDING = 2.0  # times the error that the factors' own rounding makes
BLOCK = 32  # rows that are rounded before the others hear of it
DAMPING = 1e-3  # of the mean square of a row: directions that hardly matter are not made up for


@dataclass(frozen=True)
class Execution:
    """The stages an engine multiplies by; of an aligned layer also the columns it keeps."""

    stages: Sequence[Stage]
    kept: Indices | None = None

    @property
    def inner(self) -> tuple[str, ...]:
        """Return the names of the tensors between the stages, behind the name of a use."""
        if self.kept is not None:
            return ("aligned",)
        return tuple(f"stage{index}" for index in range(len(self.stages) - 1))

    @property
    def weights(self) -> list[Floats]:
        """The matrix of each stage on all of its input: of an aligned layer [I R], expand."""
        weights: list[Floats] = [dequantized(stage) for stage in self.stages]
        if self.kept is not None:
            weights[0] = gauge(weights[0], self.kept)
        return weights


def execution(
    dense: Mapping[str, npt.NDArray[np.generic]],
    spec: LayerSpec,
    stored: Sequence[Stage],
    form: Form,
    weight_bits: int,
    *,
    exact: bool = False,
) -> Execution:
    """Return the stages an engine executes of a layer's in a form; `exact` is not rounded.

    `dense` are the artifact's tensors that are not elastic, the kept columns among them.
    """
    if spec.narrows:
        return Execution(narrow_stages(stored, weight_bits, exact=exact))
    if form is not Form.ALIGNED:
        return Execution(execution_stages(stored, form, weight_bits, exact=exact))
    kept = kept_columns(dense, spec, len(stored[0][0]))
    stages = aligned_stages(stored, kept, weight_bits, exact=exact)
    if stages is None:
        raise CorruptError(f"{spec.name}: the columns its aligned form keeps are not independent")
    return Execution(stages, kept)


def kept_columns(
    dense: Mapping[str, npt.NDArray[np.generic]], spec: LayerSpec, rank: int
) -> Indices:
    """The columns (rank,), rising, that a layer's aligned form keeps."""
    name = pivots_name(spec.name, rank)
    if name not in dense:
        raise CorruptError(f"{spec.name}: the artifact has no aligned form of rank {rank}")
    kept = dense[name].astype(np.int64)
    rising = kept.shape == (rank,) and bool((np.diff(kept) > 0).all())
    if not rising or kept[0] < 0 or kept[-1] >= spec.in_channels:
        raise CorruptError(f"{name}: not {rank} of {spec.in_channels} columns, rising")
    return kept


def aligned_stages(
    stored: Sequence[Stage], kept: Indices, weight_bits: int = MAX_BITS, *, exact: bool = False
) -> list[Stage] | None:
    """rest (k, n - k) and expand (m, k) of stored factors; None if the kept block is singular.

    Each is rounded so that its errors cancel in the product with the other, and expand is fitted
    to the rounded rest: rank by rank, what rounding one did is made up for by the next.
    """
    reduce, expand = (dequantized(stage) for stage in stored)
    found = align(expand, reduce, kept=kept, worst_condition=None)
    if found is None:
        return None
    if exact:
        floats = [weight.astype(np.float32) for weight in (found.rest, found.expand)]
        return [(weight, np.ones(len(weight), dtype=np.float32)) for weight in floats]
    try:
        return _rounded_stages(found.rest, reduce, expand, kept, weight_bits)
    except np.linalg.LinAlgError:
        return None


def _rounded_stages(
    rest: Floats, reduce: Floats, expand: Floats, kept: Indices, weight_bits: int
) -> list[Stage]:
    """int8 and a scale per row of rest, then of the expand factor that fits it best."""
    # Where pairs of products are summed in 16 bits, what is left of 8 bits is 6 and a sign.
    largest = 127 if weight_bits == MAX_BITS else 63
    absorbed = expand @ reduce[:, kept]
    weigh = absorbed.T @ absorbed
    weigh += DAMPING * max(np.trace(weigh), 1e-30) / len(weigh) * np.eye(len(weigh))
    scale = _scale(rest, largest)
    codes = _rounded(rest, weigh, scale[:, None].astype(np.float64), largest)
    first: Stage = (codes, scale)
    whole = gauge(dequantized(first), kept)
    gram = whole @ whole.T
    fitted = np.linalg.solve(gram, (whole @ reduce.T) @ expand.T)
    scale = _scale(fitted.T, largest)
    codes = _rounded(fitted, gram, scale[None, :].astype(np.float64), largest)
    return [first, (np.ascontiguousarray(codes.T), scale)]


def choose_columns(views: Sequence[Sequence[Stage]], weight: Floats) -> Indices | str:
    """The columns to keep of a layer's factors of one rank, or why it has no aligned form there.

    `views` are the stored factors in each number of bits, the most last; `weight` (m, n) is what
    they stand for, unrounded.
    """
    reduce, expand = (dequantized(stage) for stage in views[-1])
    found = align(expand, reduce, worst_condition=WORST_CONDITION)
    if found is None:
        return f"no block of its factors has a condition below {WORST_CONDITION:g}"
    for stored in views:
        stages = aligned_stages(stored, found.kept)
        if stages is None:
            return "the block it would absorb is singular"
        own, aligned = (
            _relative(made.weights, weight)
            for made in (Execution(stored), Execution(stages, found.kept))
        )
        if not aligned <= WORST_ROUNDING * own:
            return f"int8 would be off by {aligned:.2%}, of the factors it is by {own:.2%}"
    return found.kept


def align_layer(
    codes: Tensors,
    entry: LayerEntry,
    points: Collection[LayerPoint],
    weight: Callable[[int], Floats],
) -> tuple[LayerEntry, Tensors]:
    """Return the entry with the ranks its packed layer can be aligned at, and the columns it keeps.

    `weight` is what the factors of a rank stand for, unrounded; the entry says why a rank cannot.
    """
    fit: dict[int, Indices] = {}
    refused: dict[int, str] = {}
    for rank in filter(entry.spec.alignable, entry.ranks):
        views = sorted({p for p in points if p.rank == rank}, key=lambda p: p.bits)
        read = [read_layer(Held(codes), entry, point) for point in views]
        found = choose_columns(read, weight(rank))
        if isinstance(found, str):
            refused[rank] = found
        else:
            fit[rank] = found
    pivots: Tensors = {
        pivots_name(entry.spec.name, rank): kept.astype(np.int32) for rank, kept in fit.items()
    }
    spec = replace(entry.spec, aligned=tuple(fit), unaligned=tuple(refused.items()))
    return entry.model_copy(update={"spec": spec}), pivots


def from_reduced(stored: Sequence[Stage], kept: Indices) -> Floats:
    """The matrix (k, k) that makes x_kept + rest x_others of what the reduce factor makes of x."""
    return np.asarray(np.linalg.inv(dequantized(stored[0])[:, kept]))


def _relative(weights: Sequence[Floats], wanted: Floats) -> float:
    reduce, expand = weights
    error, size = (float(np.linalg.norm(w)) for w in (expand @ reduce - wanted, wanted))
    return error / max(size, 1e-30)


def _scale(weight: Floats, largest: int) -> npt.NDArray[np.float32]:
    """The step of each row, of which the largest entry is `largest`."""
    size = np.abs(weight).max(axis=1, initial=0) / largest
    return np.asarray(np.maximum(size, 1e-12), dtype=np.float32)


def _rounded(weight: Floats, gram: Floats, scale: Floats, largest: int) -> npt.NDArray[np.int8]:
    """Codes of `weight` (k, columns) whose error e makes e^T gram e small, column by column.

    Rows are rounded one after the other; those that are left take over what the error of each does
    in the directions that `gram` (k, k) weighs.
    """
    left, codes = weight.copy(), np.zeros(weight.shape, dtype=np.int8)
    step = np.broadcast_to(scale, weight.shape)
    passed = np.linalg.cholesky(np.linalg.inv(gram))
    for start in range(0, len(weight), BLOCK):
        end = min(len(weight), start + BLOCK)
        errors = np.empty((end - start, weight.shape[1]))
        for j in range(start, end):
            code = np.clip(np.rint(left[j] / step[j]), -largest, largest)
            codes[j] = code
            error = (left[j] - code * step[j]) / passed[j, j]
            left[j + 1 : end] -= np.outer(passed[j + 1 : end, j], error)
            errors[j - start] = error
        left[end:] -= passed[end:, start:end] @ errors
    return codes
