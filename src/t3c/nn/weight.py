"""An elastic weight: dense at full rank, factored below it, any prefix of ranks and bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn.utils import parametrizations

from t3c.factor.compose import compose, prefix
from t3c.factor.ranks import RANK_AXES, scaled, strengths
from t3c.nn.masks import soft_top_k
from t3c.quant.groups import group_of
from t3c.quant.straight_through import fake_quantize, fit_gains, rounded_rows
from t3c.spec import CORRECTION_BITS, LayerPoint, LayerSpec


class Product(nn.Module):
    """Stages as they are, (out, in, *kernel) each."""

    def __init__(self, stages: Sequence[Tensor]) -> None:
        super().__init__()
        self.stages = nn.ParameterList([nn.Parameter(s.detach().clone()) for s in stages])

    def forward(self) -> list[Tensor]:
        return list(self.stages)

    def set_(self, stages: Sequence[Tensor]) -> None:
        for mine, stage in zip(self.stages, stages, strict=True):
            mine.copy_(stage)


class Spectral(nn.Module):
    """U (m, k) and V (n, k), orthonormal for as long as they are trained, and singular values."""

    def __init__(self, reduce: Tensor, expand: Tensor) -> None:
        super().__init__()
        self.shapes = (reduce.shape, expand.shape)
        size = reduce.detach().flatten(1).norm(dim=1)
        self.values = nn.Parameter(size)
        self.u = nn.Parameter(expand.detach().flatten(1).clone())
        unit = reduce.detach().flatten(1) / size.clamp_min(1e-12)[:, None]
        self.v = nn.Parameter(unit.T.contiguous())
        for name in ("u", "v"):
            parametrizations.orthogonal(self, name, orthogonal_map="householder")

    def forward(self) -> list[Tensor]:
        reduce, expand = self.values[:, None] * self.v.T, self.u
        return [reduce.reshape(self.shapes[0]), expand.reshape(self.shapes[1])]

    def set_(self, stages: Sequence[Tensor]) -> None:
        reduce, expand = (stage.flatten(1) for stage in stages)
        size = reduce.norm(dim=1)
        self.values.copy_(size)
        unit = reduce / size.clamp_min(1e-12)[:, None]
        self.u, self.v = expand, unit.T  # type: ignore[assignment]


@dataclass(frozen=True)
class Relaxation:
    """How a point is softened in training: a mask over ranks, and stochastic rounding."""

    temperature: float
    generator: Generator | None
    stochastic_rounding: bool = True


class ElasticWeight(nn.Module):
    """A weight of shape `spec.dense_shape`; `point` selects the view, None is full rank in float.

    `dense` is the weight at full rank, and `factors` give the stages of all ranks up to `cap`, the
    largest ever stored factored: an artifact keeps the two apart, so they are trained apart, and
    the full view is the original's whatever the factorization. Elastic in bits alone: no factors.
    Nor has a weight that is narrowed: `dense` serves all widths, and `corrections` give, by width,
    the product that makes up for inputs that are left out. Its view is as wide as the weight, with
    zeros for these inputs; outputs that are left out are those that nothing reads.
    """

    def __init__(
        self,
        spec: LayerSpec,
        dense: Tensor,
        factors: Product | Spectral | None,
        cap: int,
        corrections: Mapping[int, Sequence[Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.cap = cap
        self.dense = nn.Parameter(dense.detach().clone())
        self.factors = factors
        self.point: LayerPoint | None = None
        self.relaxation: Relaxation | None = None
        self.group: int | None = None  # columns with a grid of their own
        self.dense_gains = nn.Parameter(fit_gains(self.dense))
        stages = self.stored_stages()
        self.stage_gains = nn.ParameterList([nn.Parameter(fit_gains(s)) for s in stages])
        self.corrections = nn.ModuleDict(
            {str(width): Product(stages) for width, stages in (corrections or {}).items()}
        )

    def stored_stages(self) -> list[Tensor]:
        """The stages up to `cap`, which an artifact keeps; none if elastic in bits alone."""
        stages: list[Tensor] = [] if self.factors is None else self.factors()
        return stages

    @property
    def gains(self) -> list[Tensor]:
        """The log gains of all views: of the dense weight, then of each stage."""
        return [self.dense_gains, *self.stage_gains]

    @property
    def stage_groups(self) -> tuple[int | None, ...]:
        """The columns that share a grid in each stage: the first reads what the layer reads."""
        return self.group, *[None] * (len(self.stage_gains) - 1)

    @torch.no_grad()
    def group_(self, grouped: bool) -> bool:
        """Give groups of columns grids of their own, or rows; whether that changed anything.

        Scales of the views are fitted to a new grid: what they had learned is of the old one.
        """
        group = group_of(self.spec) if grouped else None
        if group == self.group:
            return False
        self.group = group
        self.dense_gains.copy_(fit_gains(self.dense, group=group))
        for gains, stage in zip(self.stage_gains[:1], self.stored_stages(), strict=False):
            gains.copy_(fit_gains(stage, group=group))
        return True

    def quantized_stages(self, point: LayerPoint) -> list[Tensor]:
        """The quantized weights that `point` is stored as: one dense tensor, or factored stages."""
        if self.spec.narrows:
            out, into = self.spec.corner(point.rank)[:2]
            return [self._quantized(point)[0][:out, :into], *self._correction(point.rank)]
        stored = self._quantized(point)
        if self.spec.stored_dense(point):
            return stored
        return prefix(stored, self.spec.stage_shapes(point.rank))

    def weight_at(self, point: LayerPoint | None) -> Tensor:
        """The weight of a view, composed; None is full rank in float."""
        if point is None:
            return self.dense
        if self.spec.narrows:
            return self._narrowed(point)
        if self.relaxation is None or self.spec.stored_dense(point):
            return compose(self.quantized_stages(point))
        return compose(self._masked(self._quantized(point), point, self.relaxation))

    def _narrowed(self, point: LayerPoint) -> Tensor:
        """The weight at a width, as wide as ever: what is left out is zero."""
        weight, spec = self._quantized(point)[0], self.spec
        if point.rank >= spec.full_rank:
            return weight
        rows, columns = spec.corner(point.rank)[:2]
        kept = weight[:rows, :columns]
        correction = self._correction(point.rank)
        if correction:
            kept = kept + compose(correction)
        wide = torch.cat([kept, torch.zeros_like(weight[:rows, columns:])], dim=1)
        # Nothing reads the outputs that are left out: they are as they were, and no change counts.
        return torch.cat([wide, self.dense[rows:]]) if spec.cuts_outputs else wide

    def corrections_at(self, width: int) -> list[Tensor]:
        """The stages of the correction at a width; none at full width."""
        if str(width) not in self.corrections:
            return []
        stages: list[Tensor] = self.corrections[str(width)]()
        return stages

    def _correction(self, width: int) -> list[Tensor]:
        return [rounded_rows(stage, CORRECTION_BITS) for stage in self.corrections_at(width)]

    def _quantized(self, point: LayerPoint) -> list[Tensor]:
        relaxed = self.relaxation
        noise = relaxed.generator if relaxed and relaxed.stochastic_rounding else None
        if self.spec.narrows or self.spec.stored_dense(point):
            bits: tuple[int, ...] = (point.bits,)
            stages, gains = list[Tensor]([self.dense]), [self.dense_gains]
            groups: tuple[int | None, ...] = (self.group,)
        else:
            bits, groups = self.spec.stage_bits(point.bits), self.stage_groups
            stages, gains = self.stored_stages(), list(self.stage_gains)
        return [
            fake_quantize(stage, gain, q, generator=noise, group=group)
            for stage, gain, q, group in zip(stages, gains, bits, groups, strict=True)
        ]

    def _masked(self, stages: list[Tensor], point: LayerPoint, relaxed: Relaxation) -> list[Tensor]:
        """All stored ranks, each with its share of a relaxed choice of as many as `point` has."""
        ranks = self.spec.channel_ranks(point.rank)
        for axes, rank in zip(RANK_AXES[self.spec.factorization], ranks, strict=False):
            scores = strengths(stages, axes).clamp_min(1e-30).log()
            mask = soft_top_k(scores, rank, relaxed.temperature, generator=relaxed.generator)
            stages = scaled(stages, axes, mask)
        return stages

    @torch.no_grad()
    def sort_(self) -> bool:
        """Put the ranks in the order of their strength; whether that changed anything.

        Deployment is a hard prefix, so what training made strong has to stand first.
        """
        changed = False
        if self.factors is None:
            return changed
        for axes in RANK_AXES[self.spec.factorization]:
            stages = self.stored_stages()
            order = strengths(stages, axes).argsort(descending=True, stable=True)
            if torch.equal(order, torch.arange(len(order), device=order.device)):
                continue
            for stage, axis in axes:
                stages[stage] = stages[stage].index_select(axis, order)
                if axis == 0:
                    gains = self.stage_gains[stage]
                    gains.copy_(gains[:, order].clone())
            self.factors.set_(stages)
            changed = True
        return changed

    def extra_repr(self) -> str:
        s = self.spec
        return f"{s.dense_shape}, {s.factorization}, full_rank={s.full_rank}, cap={self.cap}"
