"""Units of channels: found by behaviour, reordered without a trace, left out without a remnant."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from t3c.convert.smooth import Evened
from t3c.errors import SpecError
from t3c.nn.canonical import canonicalize_
from t3c.nn.inputs import Inputs, call
from t3c.nn.units import Member, UnitGroup, find_units, permute_

transformers = pytest.importorskip("transformers")
IDS = torch.arange(18).reshape(2, 9)
SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
}  # fmt: skip
MLP = {"up": (1, 0), "down": (0, 1)}


def bert() -> tuple[nn.Module, Inputs]:
    config = transformers.BertConfig(vocab_size=60, **SMALL)
    mask = torch.ones_like(IDS)
    mask[1, 6:] = 0
    inputs = {"input_ids": IDS, "attention_mask": mask}
    return transformers.BertForSequenceClassification(config), inputs


def vit() -> tuple[nn.Module, Inputs]:
    config = transformers.ViTConfig(image_size=16, patch_size=4, **SMALL)
    return transformers.ViTForImageClassification(config), torch.randn(2, 3, 16, 16)


def llama() -> tuple[nn.Module, Inputs]:
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(vocab_size=60, num_key_value_heads=2, **ends, **SMALL)
    return transformers.LlamaForCausalLM(config), (IDS,)


def gpt2() -> tuple[nn.Module, Inputs]:
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(
        vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=16, **ends
    )
    return transformers.GPT2LMHeadModel(config), IDS


def resnet() -> tuple[nn.Module, Inputs]:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], layer_type="bottleneck"
    )
    return transformers.ResNetForImageClassification(config), torch.randn(2, 3, 32, 32)


def mobilenet() -> tuple[nn.Module, Inputs]:
    config = transformers.MobileNetV2Config(depth_multiplier=0.25, image_size=32)
    return transformers.MobileNetV2ForImageClassification(config), torch.randn(2, 3, 32, 32)


KNOWN = [bert, vit, llama, gpt2, resnet, mobilenet]


def made(build: Callable[[], tuple[nn.Module, Inputs]]) -> tuple[nn.Module, Inputs]:
    """Return a model whose every parameter and buffer has values of its own, and an example."""
    torch.manual_seed(0)
    model, example = build()
    canonicalize_(model)
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if value.is_floating_point() and "inv_freq" not in name:
                value.add_(torch.rand_like(value), alpha=0.1)
    return model.eval().requires_grad_(False), example


def sides(group: UnitGroup) -> dict[str, tuple[int, int]]:
    """Return (rows, columns) of each layer by its name."""
    return {member.layer: (member.rows, member.columns) for member in group.members}


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def forget_last_(model: nn.Module, group: UnitGroup, keep: int, *, makers: bool) -> None:
    """Zero the columns of all units but the first; of `makers`, fill what they had with others."""
    for member in group.members:
        layer: Any = model.get_submodule(member.layer)
        if member.layer == group.name:
            layer.weight.data[:, keep * member.columns :] = 0
        elif makers:
            layer.weight.data[keep * member.rows :].normal_()
            if layer.bias is not None:
                layer.bias.data[keep * member.rows :].normal_()
    for name in group.vectors if makers else ():
        owner, _, leaf = name.rpartition(".")
        vector = getattr(model.get_submodule(owner), leaf).data.view(group.units, -1)
        vector[keep:] = torch.rand_like(vector[keep:])


@pytest.mark.parametrize("build", KNOWN)
def test_a_permutation_leaves_the_function(build: Callable[[], tuple[nn.Module, Inputs]]) -> None:
    model, example = made(build)
    before, weights = call(model, example), copy.deepcopy(model.state_dict())
    groups, _ = find_units(model, example)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), f"{name} was changed by looking"
    orders = [torch.randperm(group.units) for group in groups]
    for group, order in zip(groups, orders, strict=True):
        permute_(model, group, order)
    assert apart(call(model, example), before) < 1e-5
    for group, order in zip(groups, orders, strict=True):
        permute_(model, group, order.argsort())
    assert all(torch.equal(v, weights[n]) for n, v in model.state_dict().items())


@pytest.mark.parametrize("build", KNOWN)
def test_what_is_left_out_is_gone(build: Callable[[], tuple[nn.Module, Inputs]]) -> None:
    """Without its columns a unit's rows and vectors may hold anything."""
    model, example = made(build)
    groups, _ = find_units(model, example)
    before = call(model, example)
    models = copy.deepcopy(model), copy.deepcopy(model)
    for group in groups:
        for one, makers in zip(models, (False, True), strict=True):
            forget_last_(one, group, group.units // 2, makers=makers)
    zeroed, narrow = (call(one, example) for one in models)
    assert apart(zeroed, before) > 1e-4
    assert apart(narrow, zeroed) < 1e-5


@pytest.mark.parametrize("build", KNOWN)
def test_two_runs_agree(build: Callable[[], tuple[nn.Module, Inputs]]) -> None:
    model, example = made(build)
    model.train()
    assert find_units(model, example) == find_units(model, example)
    assert model.training


def test_heads_and_neurons_of_bert() -> None:
    groups, skipped = find_units(*made(bert))
    assert [group.units for group in groups] == [4, 48, 4, 48, 32]
    layer = "bert.encoder.layer.0"
    query, key, value = (f"{layer}.attention.self.{n}" for n in ("query", "key", "value"))
    output = f"{layer}.attention.output.dense"
    assert sides(groups[0]) == {query: (8, 0), key: (8, 0), value: (8, 0), output: (0, 8)}
    assert sides(groups[1]) == {
        f"{layer}.intermediate.dense": (1, 0),
        f"{layer}.output.dense": (0, 1),
    }
    assert dict(skipped)[output].startswith("several layers read it")


def test_heads_with_their_keys_and_gates_of_llama() -> None:
    groups, _ = find_units(*made(llama))
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    assert [group.units for group in groups] == [2, 48, 2, 48]
    assert sides(groups[0]) == {
        f"{attention}.q_proj": (16, 0), f"{attention}.k_proj": (8, 0),
        f"{attention}.v_proj": (8, 0), f"{attention}.o_proj": (0, 16),
    }  # fmt: skip
    assert sides(groups[1]) == {
        f"{mlp}.gate_proj": (1, 0), f"{mlp}.up_proj": (1, 0), f"{mlp}.down_proj": (0, 1)
    }  # fmt: skip


def test_neurons_of_gpt2_and_why_not_its_heads() -> None:
    groups, skipped = find_units(*made(gpt2))
    assert [(group.name, group.units) for group in groups] == [
        (f"transformer.h.{i}.mlp.c_proj", 128) for i in (0, 1)
    ]
    reasons = dict(skipped)
    assert "mix, or change places" in reasons["transformer.h.0.attn.c_attn"]
    assert "transformer.wte" in reasons["lm_head"]


def test_a_bottleneck_has_two_groups_with_norms() -> None:
    groups, skipped = find_units(*made(resnet))
    block = "resnet.encoder.stages.0.layers.0.layer"
    first, second = groups[:2]
    assert sides(first) == {
        f"{block}.0.convolution": (1, 0), f"{block}.1.convolution": (0, 1)
    }  # fmt: skip
    assert sides(second) == {
        f"{block}.1.convolution": (1, 0), f"{block}.2.convolution": (0, 1)
    }  # fmt: skip
    parts = ("weight", "bias", "running_mean", "running_var")
    assert first.vectors == tuple(f"{block}.0.normalization.{part}" for part in parts)
    assert len(groups) == 8
    assert dict(skipped).keys() >= {
        f"{block}.2.convolution",
        "resnet.embedder.embedder.convolution",
    }


def test_a_depthwise_convolution_has_rows_and_columns() -> None:
    groups, _ = find_units(*made(mobilenet))
    group = next(g for g in groups if g.name == "mobilenet_v2.layer.3.reduce_1x1.convolution")
    assert list(sides(group).values()) == [(1, 0), (1, 1), (0, 1)]
    assert len(group.vectors) == 8


class Between(nn.Module):
    """Two layers, and a function of the module and what the first makes between them."""

    def __init__(self, between: Any, *, into: int = 16, **extra: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.first, self.up = nn.Linear(8, 8), nn.Linear(8, 16)
        self.down, self.last = nn.Linear(into, 8), nn.Linear(8, 3)
        for name, part in extra.items():
            setattr(self, name, part)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = x + self.down(self.between(self, self.up(x), x))
        out: Tensor = self.last(x)
        return out


def found(model: nn.Module, shape: tuple[int, ...] = (2, 5, 8)) -> dict[str, UnitGroup]:
    """Return the groups by name; every one withstands a permutation."""
    torch.manual_seed(1)
    model, x = model.eval().requires_grad_(False), torch.randn(shape)
    groups, _ = find_units(model, x)
    before = call(model, x)
    for group in groups:
        permute_(model, group, torch.randperm(group.units))
    assert apart(call(model, x), before) < 1e-5
    return {group.name: group for group in groups}


def why(model: nn.Module, layer: str, shape: tuple[int, ...] = (2, 5, 8)) -> str:
    torch.manual_seed(1)
    return dict(find_units(model.eval(), torch.randn(shape))[1])[layer]


@pytest.mark.parametrize(
    ("model", "units", "vectors"),
    [
        (Between(lambda m, h, x: torch.relu(h)), 16, ()),
        (Between(lambda m, h, x: torch.relu_(h)), 16, ()),
        (Between(lambda m, h, x: nn.functional.elu(h)), 16, ()),
        (Between(lambda m, h, x: h * m.scale, scale=nn.Parameter(torch.rand(16))), 16, ("scale",)),
        (
            Between(lambda m, h, x: h * m.scale, scale=nn.Parameter(torch.zeros(1, 1, 16) + 1)),
            16,
            ("scale",),
        ),
        (Between(lambda m, h, x: h + x.repeat(1, 1, 2)), 2, ()),  # two halves, in any order
        (Between(lambda m, h, x: h.softmax(-2)), 16, ()),
        (Between(lambda m, h, x: h.flip(-2)), 16, ()),
        (Between(lambda m, h, x: h.unflatten(-1, (8, 2)).amax(-1), into=8), 8, ()),
        (Between(lambda m, h, x: h.repeat_interleave(2, -1), into=32), 16, ()),
        (Between(lambda m, h, x: h.unflatten(-1, (4, 4)).softmax(-1).flatten(-2)), 4, ()),
    ],
)
def test_elementwise_and_blockwise(model: nn.Module, units: int, vectors: tuple[str, ...]) -> None:
    groups = found(model)
    assert groups.keys() == {"down"}
    rows, columns = 16 // units, model.get_submodule("down").in_features // units  # type: ignore[operator]
    assert groups["down"] == UnitGroup(
        "down", units, (Member("up", rows=rows), Member("down", columns=columns)), vectors
    )


def test_layers_multiplied_are_one_group() -> None:
    gate = Between(lambda m, h, x: h * torch.sigmoid(m.gate(x)), gate=nn.Linear(8, 16))
    assert sides(found(gate)["down"]) == {"up": (1, 0), "gate": (1, 0), "down": (0, 1)}


def test_smoothed_layers_have_their_factor_along() -> None:
    model = Between(lambda m, h, x: torch.relu(h))
    model.down = Evened(model.down, torch.rand(16) + 0.5)  # type: ignore[assignment]
    group = found(model)["down.linear"]
    assert group.vectors == ("down.inverse",)


MIXES = "mix, or change places"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Between(lambda m, h, x: m.norm(h), norm=nn.LayerNorm(16)), MIXES),
        (Between(lambda m, h, x: h.softmax(-1)), MIXES),
        (Between(lambda m, h, x: h.flip(-1)), MIXES),
        (Between(lambda m, h, x: h.unflatten(-1, (4, 4)).mT.flatten(-2)), MIXES),
        (Between(lambda m, h, x: h * h.mean(-1, keepdim=True)), MIXES),
        (Between(lambda m, h, x: h[..., :8] * h[..., 8:].tanh(), into=8), MIXES),
        (Between(lambda m, h, x: torch.cat([h, x], -1), into=24), MIXES),
        (Between(lambda m, h, x: torch.cat([m.more(x), h], -1), into=32, more=nn.Linear(8, 16)),
         MIXES),
        (Between(lambda m, h, x: h + x.repeat_interleave(2, -1)), "too"),
        (Between(lambda m, h, x: h * torch.linspace(1, 2, 16)), "something else"),
        (Between(lambda m, h, x: torch.relu(h), spare=nn.Linear(16, 16)), ""),
    ],
)  # fmt: skip
def test_what_breaks_units(model: nn.Module, reason: str) -> None:
    if not reason:
        assert "down" in found(model)
        assert why(model, "spare") == "the example does not reach it"
        return
    assert "down" not in found(model)
    assert reason in why(model, "up")


def test_a_squeeze_and_a_shared_reader_break_units() -> None:
    class Squeezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 1)
            self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x).relu()
            gate = self.excite(self.squeeze(h.mean((2, 3), keepdim=True)).relu()).sigmoid()
            out: Tensor = self.down(h * gate).mean((2, 3))
            return out

    model, shape = Squeezed(), (2, 3, 8, 8)
    assert found(model, shape).keys() == {"excite"}
    assert why(model, "up", shape) == "several layers read it: squeeze, down"
    assert "down reads up too" in why(model, "excite", shape)


def test_shared_and_repeated_layers_are_refused() -> None:
    tied = Between(lambda m, h, x: torch.relu(h), table=nn.Embedding(8, 16))
    tied.down.weight = tied.table.weight  # type: ignore[union-attr, assignment]
    assert not found(tied)
    assert "also that of table" in why(tied, "up")
    twice = Between(lambda m, h, x: torch.relu(h) + m.up(x))
    assert not found(twice)
    assert why(twice, "up") == "it runs 2 times"
    hooked = Between(lambda m, h, x: torch.relu(h))
    hooked.down.register_forward_hook(lambda *_: None)
    assert "hooks" in why(hooked, "up")


def test_convolutions() -> None:
    def chain(*between: nn.Module) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), *between, nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )

    shape = (2, 3, 10, 10)
    assert (
        found(chain(nn.BatchNorm2d(8), nn.Hardswish(True), nn.MaxPool2d(2)), shape)["4"].units == 8
    )
    assert found(chain(nn.PReLU(8)), shape)["2"].vectors == ("1.weight",)
    assert not found(chain(nn.ChannelShuffle(2)), shape)
    assert not found(chain(nn.GroupNorm(1, 8)), shape)
    assert not found(chain(nn.Conv2d(8, 8, 3, groups=2)), shape)
    assert "in 2 groups" in why(chain(nn.Conv2d(8, 8, 3, groups=2)), "0", shape)
    grouped = found(chain(nn.GroupNorm(4, 8)), shape)["2"]
    assert (grouped.units, grouped.vectors) == (4, ("1.weight", "1.bias"))
    flat = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(True), nn.Flatten(), nn.Linear(6 * 64, 4))
    assert sides(found(flat, shape)["3"]) == {"0": (1, 0), "3": (0, 64)}
    line = nn.Sequential(nn.Conv1d(3, 6, 3), nn.Conv1d(6, 6, 3, groups=6), nn.Conv1d(6, 4, 1))
    assert sides(found(line, (2, 3, 9))["2"]) == {"0": (1, 0), "1": (1, 1), "2": (0, 1)}


def test_a_narrow_network_is_the_one_with_units_left_out() -> None:
    model = Between(lambda m, h, x: torch.relu(h) * m.scale, scale=nn.Parameter(torch.rand(16)))
    group = found(model)["down"]
    narrow = copy.deepcopy(model)
    narrow.up = nn.Linear(8, 10).requires_grad_(False)
    narrow.down = nn.Linear(10, 8).requires_grad_(False)
    with torch.no_grad():
        narrow.up.weight.copy_(model.up.weight[:10])
        narrow.up.bias.copy_(model.up.bias[:10])
        narrow.down.weight.copy_(model.down.weight[:, :10])
        narrow.down.bias.copy_(model.down.bias)
    narrow.scale = nn.Parameter(model.scale[:10], False)  # type: ignore[index]
    forget_last_(model, group, 10, makers=False)
    x = torch.randn(3, 5, 8)
    assert apart(call(narrow, x), call(model, x)) < 1e-6


@settings(max_examples=25, deadline=None)
@given(
    heads=st.integers(2, 4),
    size=st.integers(1, 4),
    share=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_attention_of_any_size(heads: int, size: int, share: int, seed: int) -> None:
    """Units are heads of keys with all their queries, whatever their number and size."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(12, heads * share * size)
            self.k, self.v = nn.Linear(12, heads * size), nn.Linear(12, heads * size)
            self.o = nn.Linear(heads * share * size, 12)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                layer(x).unflatten(-1, (-1, size)).transpose(1, 2)
                for layer in (self.q, self.k, self.v)
            )
            k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
            mixed = (q @ k.mT / size**0.5).softmax(-1) @ v
            out: Tensor = x + self.o(mixed.transpose(1, 2).flatten(2))
            return out

    torch.manual_seed(seed)
    model, x = Attention().eval().requires_grad_(False), torch.randn(2, 5, 12)
    (group,), _ = find_units(model, x)
    assert group.units == heads
    assert list(sides(group).values()) == [
        (share * size, 0),
        (size, 0),
        (size, 0),
        (0, share * size),
    ]
    before = call(model, x)
    permute_(model, group, torch.randperm(heads))
    assert apart(call(model, x), before) < 1e-5


def test_an_example_of_one_token_shows_no_heads() -> None:
    model, _ = made(bert)
    reasons = dict(find_units(model, IDS[:, :1])[1])
    name = "bert.encoder.layer.0.attention.self"
    assert reasons[f"{name}.query"] == "no layer reads it"
    assert reasons[f"{name}.value"].startswith(f"{name}.key runs beside it")


def test_an_order_is_a_permutation() -> None:
    model = Between(lambda m, h, x: torch.relu(h))
    group = found(model)["down"]
    with pytest.raises(SpecError, match=r"0\.\.15"):
        permute_(model, group, torch.zeros(16, dtype=torch.long))
