"""Elastic layers: thin modules around an elastic weight, which several of them may share."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from torch import Tensor, nn
from torch.nn import functional as F

from t3c.nn.weight import ElasticWeight
from t3c.spec import Kind, LayerSpec


class ElasticLayer(nn.Module):
    """A layer that runs the current view of its weight."""

    kind: Kind
    bias: nn.Parameter | None

    def __init__(self, elastic: ElasticWeight, replaced: nn.Module) -> None:
        super().__init__()
        self.elastic = elastic
        self.bias = getattr(replaced, "bias", None)  # as it is: frozen, or tied to another
        for name in getattr(replaced, "__constants__", ()):  # models read strides and widths
            setattr(self, name, getattr(replaced, name))
        self.train(replaced.training)

    @property
    def weight(self) -> Tensor:
        """The weight of the current view: models look at its dtype or device."""
        return self.elastic.weight_at(self.elastic.point)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return self.apply_weight(input, self.weight, self.bias)

    def apply_weight(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The layer's map with a given weight."""
        raise NotImplementedError

    def plain(self, weight: nn.Parameter) -> nn.Module:
        """The layer as an ordinary module with a given weight."""
        raise NotImplementedError


class ElasticLinear(ElasticLayer):
    """A linear layer, input (..., in) -> (..., out)."""

    kind = Kind.LINEAR

    def apply_weight(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def plain(self, weight: nn.Parameter) -> nn.Module:
        out, into = weight.shape
        return _fill(nn.Linear(into, out, self.bias is not None, device="meta"), weight, self.bias)


class _ElasticConv(ElasticLayer):
    run: Callable[..., Tensor]
    module: type[nn.Conv1d] | type[nn.Conv2d]

    def apply_weight(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        s = self.elastic.spec
        return type(self).run(x, weight, bias, s.stride, s.padding, s.dilation, s.groups)

    def plain(self, weight: nn.Parameter) -> nn.Module:
        s = self.elastic.spec
        module = self.module(
            s.in_channels, s.out_channels, s.kernel, s.stride, s.padding, s.dilation,  # type: ignore[arg-type]
            s.groups, self.bias is not None, device="meta",
        )  # fmt: skip
        return _fill(module, weight, self.bias)


class ElasticConv1d(_ElasticConv):
    """A convolution, input (batch, in, L)."""

    kind, run, module = Kind.CONV1D, staticmethod(F.conv1d), nn.Conv1d


class ElasticConv2d(_ElasticConv):
    """A convolution, input (batch, in, H, W)."""

    kind, run, module = Kind.CONV2D, staticmethod(F.conv2d), nn.Conv2d


class ElasticEmbedding(ElasticLayer):
    """A table of vectors, ids (...) -> (..., size)."""

    kind = Kind.EMBEDDING
    padding_idx: int | None

    def apply_weight(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.embedding(x, weight, self.padding_idx)

    def plain(self, weight: nn.Parameter) -> nn.Module:
        rows, size = weight.shape
        return _fill(nn.Embedding(rows, size, self.padding_idx, device="meta"), weight, None)


def _fill(module: nn.Module, weight: nn.Parameter, bias: Tensor | None) -> nn.Module:
    module.weight = weight
    if bias is not None:
        module.bias = nn.Parameter(bias.detach().clone())
    return module


ELASTIC: dict[type[nn.Module], type[ElasticLayer]] = {
    nn.Linear: ElasticLinear,
    nn.Conv1d: ElasticConv1d,
    nn.Conv2d: ElasticConv2d,
    nn.Embedding: ElasticEmbedding,
}


def elastic_type(module: nn.Module) -> type[ElasticLayer] | None:
    """The elastic layer for a module, if there is one: its forward has to be the ordinary one."""
    for plain, elastic in ELASTIC.items():
        if isinstance(module, plain) and type(module).forward is plain.forward:
            return elastic
    return None


def geometry(module: nn.Module) -> dict[str, object]:
    """The fields of a LayerSpec that the module itself knows."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    fields: dict[str, object] = {"out_channels": weight.shape[0], "in_channels": weight.shape[1]}
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        fields |= {
            "in_channels": module.in_channels, "kernel": tuple(module.kernel_size),
            "stride": tuple(module.stride), "padding": same_padding(module),
            "dilation": tuple(module.dilation), "groups": module.groups,
        }  # fmt: skip
    return fields


def same_padding(module: nn.Conv1d | nn.Conv2d) -> tuple[int, ...]:
    """The padding in numbers; of an uneven "same" padding there are none."""
    if not isinstance(module.padding, str):
        return tuple(module.padding)
    if module.padding == "valid":
        return (0,) * len(module.kernel_size)
    around = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    return tuple(total // 2 for total in around) if not any(t % 2 for t in around) else ()


def patches(spec: LayerSpec, x: Tensor) -> Tensor:
    """What the rows of the weight, flattened, are multiplied by: (n, in / groups * kernel)."""
    if not spec.convolution:
        return x.reshape(-1, spec.in_channels)
    if prod(spec.kernel) == prod(spec.stride) == spec.groups == 1 and not any(spec.padding):
        return channels_last(spec, x)
    if x.dim() == len(spec.kernel) + 1:
        x = x[None]
    x = x.reshape(-1, spec.in_channels // spec.groups, *x.shape[2:])
    if spec.kind is Kind.CONV1D:
        sides = [(1, side) for side in (*spec.kernel, *spec.dilation, *spec.stride)]
        kernel, dilation, stride = sides
        columns = F.unfold(x[:, :, None], kernel, dilation, (0, *spec.padding), stride)
    else:
        columns = F.unfold(x, spec.kernel, spec.dilation, spec.padding, spec.stride)
    return columns.movedim(1, -1).reshape(-1, columns.shape[1])


def channels_last(spec: LayerSpec, x: Tensor) -> Tensor:
    """Input vectors of single positions: (n, in)."""
    return _positions(spec, x).reshape(-1, spec.in_channels)


def output_rows(spec: LayerSpec, out: Tensor) -> Tensor:
    """Output vectors of single positions: (n, out)."""
    return _positions(spec, out).reshape(-1, spec.out_channels)


def _positions(spec: LayerSpec, x: Tensor) -> Tensor:
    return x.movedim(-1 - len(spec.kernel), -1) if spec.convolution else x
