from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from t3c.convert import elasticize_, plan_conversion
from t3c.nn import elastic_layers
from t3c.nn.canonical import UnpackedAttention, canonical, rewrite

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("batch_first", "bias", "separate"), list(itertools.product([True, False], repeat=3))
)
def test_unpacked_attention_is_the_packed_one(
    batch_first: bool, bias: bool, separate: bool
) -> None:
    torch.manual_seed(0)
    sizes = {"kdim": 24, "vdim": 40} if separate else {}
    packed = nn.MultiheadAttention(32, 4, bias=bias, batch_first=batch_first, **sizes).eval()
    for parameter in packed.parameters():
        nn.init.normal_(parameter, std=0.3)
    unpacked = rewrite(packed)
    assert isinstance(unpacked, UnpackedAttention)
    shape = (2, 5) if batch_first else (5, 2)
    query = torch.randn(*shape, 32)
    key = torch.randn(*shape, sizes.get("kdim", 32))
    value = torch.randn(*shape, sizes.get("vdim", 32))
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    extra = torch.randn(8, 5, 5)
    masks: list[dict[str, Any]] = [
        {}, {"key_padding_mask": padding}, {"attn_mask": causal}, {"attn_mask": causal < 0},
        {"attn_mask": extra}, {"attn_mask": extra, "need_weights": False},
        {"key_padding_mask": padding, "attn_mask": causal < 0, "average_attn_weights": False},
        {"attn_mask": causal, "is_causal": True, "need_weights": False},
    ]  # fmt: skip
    for given in masks:
        wanted, got = (module(query, key, value, **given) for module in (packed, unpacked))
        torch.testing.assert_close(got[0], wanted[0], rtol=1e-5, atol=1e-5)
        assert (got[1] is None) == (wanted[1] is None)
        if wanted[1] is not None:
            torch.testing.assert_close(got[1], wanted[1], rtol=1e-5, atol=1e-5)
    alone = [x[0] if batch_first else x[:, 0] for x in (query, key, value)]
    torch.testing.assert_close(unpacked(*alone)[0], packed(*alone)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_transformers_convert(batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=batch_first, dropout=0.0)
    model = nn.Sequential(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 64)
    ).eval()
    x = torch.randn(3, 3, 64)
    with torch.no_grad():
        before = model(x)
    assert all(p.block for p in plan_conversion(model, x).layers if "self_attn" in p.spec.name)
    assert isinstance(model[0].layers[0].self_attn, nn.MultiheadAttention)
    report = elasticize_(model, x, calibration=[x])
    blocks = {p.block for p in report.converted if p.block}
    assert blocks == {"0.layers.0.self_attn", "0.layers.1.self_attn"}
    with torch.no_grad():
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
    names = {n.rpartition(".")[2] for n in elastic_layers(model)}
    assert {"q_proj", "k_proj", "v_proj", "out_proj", "linear1", "linear2"} <= names


def test_attention_with_more_to_it_stays() -> None:
    assert rewrite(nn.MultiheadAttention(32, 4, add_bias_kv=True)) is None
    assert rewrite(nn.MultiheadAttention(32, 4, add_zero_attn=True)) is None
    assert rewrite(nn.Linear(4, 4)) is None


def test_conv1d_of_hugging_face_is_a_linear_layer() -> None:
    module = transformers.pytorch_utils.Conv1D(48, 32)
    module.weight.requires_grad_(False)
    linear = rewrite(module)
    assert isinstance(linear, nn.Linear)
    assert linear.weight.shape == (48, 32)
    assert linear.weight.data_ptr() == module.weight.data_ptr()
    assert not linear.weight.requires_grad
    x = torch.randn(3, 32)
    torch.testing.assert_close(linear(x), module(x))


def test_a_rewritten_model_is_put_back() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.MultiheadAttention(16, 2)
            self.b = self.a

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.b(*[self.a(x, x, x)[0]] * 3)[0]
            return y

    model = Twice()
    before = model.a
    with canonical(model):
        assert isinstance(model.a, UnpackedAttention)
        assert model.b is model.a
    assert model.a is before
    assert model.b is before
