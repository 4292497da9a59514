"""Plans: every architecture of the paper at full size, patterns, caps, blocks, bad input."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from t3c.compression.hugging_face import bundled, load_model
from t3c.convert import ElasticConfig, LayerPlan, elasticize_, plan_conversion, units
from t3c.convert.config import Role
from t3c.errors import ConvertError, SpecError
from t3c.quant.policy import RankTiedBits
from t3c.spec import Factorization, Kind, LayerPoint

transformers = pytest.importorskip("transformers")

BLOCKS = {
    "bert-base": 12, "convnext-tiny": 0, "distilbert-base": 6, "resnet-101": 0, "resnet-50": 0,
    "roberta-base": 12, "swin-tiny": 12, "tinyllama-1.1b": 22, "vit-base": 12, "vit-large": 24,
}  # fmt: skip


@pytest.mark.parametrize("name", bundled())
def test_architectures_of_the_paper_at_full_size(name: str) -> None:
    loaded = load_model(name, meta=True)
    plan = plan_conversion(loaded.model, loaded.example)
    counted = plan.layer_params
    assert counted.rank_elastic + counted.bit_elastic >= 0.95 * counted.total
    assert counted.rank_elastic >= 0.80 * counted.total
    assert plan.params.total == sum(p.numel() for p in loaded.model.parameters())
    blocks = Counter(layer.block for layer in plan.layers if layer.block)
    assert len(blocks) == BLOCKS[name]
    assert set(blocks.values()) <= {4}
    named = {n for layer in plan.layers for n in layer.modules} | {n for n, _ in plan.skipped}
    owners = {n.rpartition(".")[0] for n, _ in loaded.model.named_parameters()}
    assert owners == named


class Attention(nn.Module):
    """Grouped queries: four heads of keys and values for eight of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(64, 64), nn.Linear(64, 64)
        self.b, self.c = nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        q = self.a(x).unflatten(-1, (8, 8)).transpose(1, 2)
        k, v = (
            f(x).unflatten(-1, (4, 8)).repeat_interleave(2, dim=2).transpose(1, 2)
            for f in (self.b, self.c)
        )
        mixed = torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
        y: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return y


def test_attention_is_known_by_what_runs() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend, self.up, self.down = Attention(), nn.Linear(64, 64), nn.Linear(64, 64)
            self.gate, self.head = nn.Linear(64, 64), nn.Linear(64, 96)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attend(x)
            x = self.down(self.up(x) * self.gate(x))
            y: Tensor = self.head(torch.softmax(x, dim=-1))
            return y

    plan = plan_conversion(Net(), torch.randn(2, 5, 64))
    blocks = {layer.spec.name: layer.block for layer in plan.layers}
    assert {n for n, block in blocks.items() if block == "attend"} == {
        f"attend.{n}" for n in "abco"
    }
    assert all(not blocks[n] for n in ("up", "down", "gate", "head"))
    roles = {layer.spec.name: layer.role for layer in plan.layers}
    assert roles["attend.b"] is Role.PROJECTION
    assert roles["up"] is Role.LINEAR


@given(st.sets(st.sampled_from([1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2]), min_size=1), st.booleans())
@settings(max_examples=20)
def test_a_block_moves_together(fractions: set[float], tied: bool) -> None:
    """Along a unit's points every layer's rank and bits rise, at shares of rank they have alike."""
    config = ElasticConfig(
        rank_fractions=tuple(sorted(fractions)), store_ratio=1.0,
        rank_tied_bits=RankTiedBits(0.8, 1.5) if tied else None,
    )  # fmt: skip
    plan = plan_conversion(nn.Sequential(Attention()), torch.randn(2, 5, 64), config)
    (unit,) = units(plan.layers)
    assert len(unit.layers) == 4
    for low, high in itertools.permutations(unit.points(), 2):
        if low <= high:
            below, above = unit.layer_points(low), unit.layer_points(high)
            assert all(below[name] <= above[name] for name in below)
    top = unit.layer_points(unit.points()[-1])
    assert top == {p.spec.name: LayerPoint(p.ranks[-1], 8) for p in plan.layers}
    for point in unit.points():
        share = unit.levels[point.level - 1]
        for layer in unit.layers:
            mine = unit.layer_points(point)[layer.spec.name]
            assert mine.rank in layer.ranks
            assert layer.shares[layer.ranks.index(mine.rank)] >= share


def layers_of(model: nn.Module, x: Tensor, config: ElasticConfig) -> dict[str, LayerPlan]:
    return {layer.spec.name: layer for layer in plan_conversion(model, x, config).layers}


def mixed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3), nn.Conv2d(64, 64, 7, padding=3, groups=64),
        nn.Conv2d(64, 128, 3, padding="same"), nn.Flatten(2),
        nn.Conv1d(128, 128, 5, padding=2, dilation=1), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
        nn.Linear(128, 128),
    )  # fmt: skip


X = torch.randn(2, 3, 32, 32)


def test_each_kind_of_layer_has_its_factorization() -> None:
    layers = layers_of(mixed(), X, ElasticConfig())
    kinds = {n: (p.spec.kind, p.spec.factorization, p.role) for n, p in layers.items()}
    assert kinds == {
        "0": (Kind.CONV2D, Factorization.SVD, Role.CONVOLUTION),  # three inputs: one-sided
        "1": (Kind.CONV2D, Factorization.SVD, Role.DEPTHWISE),
        "2": (Kind.CONV2D, Factorization.TUCKER2, Role.CONVOLUTION),
        "4": (Kind.CONV1D, Factorization.TUCKER2, Role.CONVOLUTION),
        "7": (Kind.LINEAR, Factorization.SVD, Role.LINEAR),
    }
    assert layers["2"].spec.padding == (1, 1)
    cp = layers_of(mixed(), X, ElasticConfig(convolution=Factorization.CP))
    assert {n for n, p in cp.items() if p.spec.factorization is Factorization.CP} == {"2", "4"}


def test_patterns_choose_layers() -> None:
    assert set(layers_of(mixed(), X, ElasticConfig(include=("[02]",)))) == {"0", "2"}
    plan = plan_conversion(mixed(), X, ElasticConfig(exclude=("7",)))
    assert ("7", "excluded") in plan.skipped
    for config in (
        ElasticConfig(include=("*.nothing",)),
        ElasticConfig(exclude=("*.nothing",)),
    ):
        with pytest.raises(ConvertError, match=r"nothing' matches no layer: layers are 0, 1, 2"):
            plan_conversion(mixed(), X, config)


def test_ranks_are_capped_by_role() -> None:
    free = layers_of(mixed(), X, ElasticConfig(store_ratio=1.0))
    capped = layers_of(
        mixed(), X, ElasticConfig(store_ratio=1.0, rank_caps={"linear": 0.2, "convolution": 0.5})
    )
    assert free["7"].cap > 0.4 * 128 > 0.2 * 128 >= capped["7"].cap
    assert free["2"].cap > 0.5 * 128 >= capped["2"].cap
    assert free["1"].ranks == capped["1"].ranks
    for wrong in ({"rank_caps": {"linear": 1.5}}, {"rank_caps": {"head": 0.5}},
                  {"include": "*"},
                  {"convolution": Factorization.SVD}):  # fmt: skip
        with pytest.raises(SpecError):
            ElasticConfig(**wrong)  # type: ignore[arg-type]


def test_bits_tied_to_ranks_rise_with_them() -> None:
    config = ElasticConfig(rank_tied_bits=RankTiedBits(1.0, 2.0, offsets=(1, 0, 1)), store_ratio=1)
    plan = plan_conversion(mixed(), X, config)
    for unit in units(plan.layers):
        (layer,) = unit.layers
        if not layer.rank_elastic:
            continue
        points = [unit.layer_points(point)[layer.spec.name] for point in unit.points()]
        assert [p.rank for p in points] == list(layer.ranks)
        assert [p.bits for p in points] == sorted(p.bits for p in points)
        assert points[-1].bits == 8
        assert len({p.bits for p in points}) > 1
        assert layer.spec.stage_bits(4)[:2] == (5, 4)


def broken(index: str, change: str) -> nn.Module:
    model = mixed()
    module = model.get_submodule(index)
    weight = module.weight
    assert isinstance(weight, Tensor)
    if change == "nan":
        weight.data[0, 0] = float("nan")
    elif change == "quantized":
        with warnings.catch_warnings(action="ignore"):
            codes = torch.quantize_per_tensor(weight.detach(), 0.1, 0, torch.qint8)
        module.weight = nn.Parameter(codes, requires_grad=False)
    elif change == "int8":
        module.weight = nn.Parameter(weight.detach().to(torch.int8), requires_grad=False)
    elif change == "meta":
        module.to("meta")
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nan", r"layer '2': its weight holds NaN or infinite"),
        ("quantized", r"layer '2': its weight is quantized \(torch\.qint8\)"),
        ("int8", r"layer '2': its weight is quantized \(torch\.int8\)"),
        ("meta", r"layer '2': its weight is on the meta device"),
    ],
)
def test_weights_that_cannot_be_converted_are_named(change: str, message: str) -> None:
    model = broken("2", change)
    modules = list(model.modules())
    with pytest.raises(ConvertError, match=message):
        elasticize_(model, X)
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))


def test_layers_of_no_size_are_named() -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        empty = nn.Linear(0, 16)
    with pytest.raises(ConvertError, match=r"layer '0': its weight is empty, of shape \(16, 0\)"):
        plan_conversion(nn.Sequential(empty), torch.zeros(2, 0))
