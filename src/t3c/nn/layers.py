"""Elastic layers: full-rank stages as parameters, any prefix of ranks and bits as a view."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from t3c.factor.compose import compose, prefix
from t3c.quant.straight_through import fake_quantize, fit_gains
from t3c.spec import Kind, LayerPoint, LayerSpec


class ElasticLayer(nn.Module):
    """A layer whose weight is a product of stages; `point` selects the view, None is full float.

    `stages` are the weights at full rank in order of execution, (out, in) or (out, in, h, w).
    `cap` is the largest rank ever stored factored: row scales of the codes cover that much.
    """

    def __init__(
        self, spec: LayerSpec, stages: Sequence[Tensor], bias: Tensor | None, cap: int
    ) -> None:
        super().__init__()
        self.spec = spec
        self.cap = cap
        self.point: LayerPoint | None = None
        self.stages = nn.ParameterList([nn.Parameter(stage.detach().clone()) for stage in stages])
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        self.dense_gains = nn.Parameter(fit_gains(compose(list(self.stages))))
        stored = prefix(list(self.stages), spec.stage_shapes(cap)) if len(stages) > 1 else []
        self.stage_gains = nn.ParameterList([nn.Parameter(fit_gains(stage)) for stage in stored])

    def stored_stages(self) -> list[Tensor]:
        """The stages up to `cap`, which an artifact keeps; none if elastic in bits alone."""
        if len(self.stages) == 1:
            return []
        return prefix(list(self.stages), self.spec.stage_shapes(self.cap))

    def quantized_stages(self, point: LayerPoint) -> list[Tensor]:
        """The quantized weights that `point` is stored as: one dense tensor, or factored stages."""
        if self.spec.stored_dense(point):
            dense = compose(list(self.stages))
            return [fake_quantize(dense, self.dense_gains, point.bits)]
        stored = [
            fake_quantize(stage, gains, point.bits)
            for stage, gains in zip(self.stored_stages(), self.stage_gains, strict=True)
        ]
        return prefix(stored, self.spec.stage_shapes(point.rank))

    def weight_at(self, point: LayerPoint | None) -> Tensor:
        """The weight of a view, composed; None is full rank in float."""
        return compose(list(self.stages) if point is None else self.quantized_stages(point))

    @property
    def weight(self) -> Tensor:
        """The weight of the current view: models look at its dtype or device."""
        return self.weight_at(self.point)

    def extra_repr(self) -> str:
        s = self.spec
        return f"{s.dense_shape}, {s.factorization}, full_rank={s.full_rank}, cap={self.cap}"


class ElasticLinear(ElasticLayer):
    """A linear layer, input (..., in) -> (..., out)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_at(self.point), self.bias)


class ElasticConv2d(ElasticLayer):
    """A convolution, input (batch, in, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        s = self.spec
        weight = self.weight_at(self.point)
        return F.conv2d(x, weight, self.bias, s.stride, s.padding, s.dilation, s.groups)


ELASTIC: dict[Kind, type[ElasticLayer]] = {Kind.LINEAR: ElasticLinear, Kind.CONV2D: ElasticConv2d}
