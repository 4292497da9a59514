"""Zeros for NaN of masked rows are put behind the product, and answers stay the same."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from t3c.artifact.attention import zero_after_products
from t3c.artifact.graph import to_onnx
from t3c.engines.openvino import OpenVINO


class Attention(nn.Module):
    """Two heads; keys that are zeros are masked, in a row of nothing else all of them."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.reshape(len(x), x.shape[1], 2, -1).transpose(1, 2)
        mask = (x != 0).any(-1)[:, None, None]
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)


def graph_of(x: Tensor) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    model = to_onnx(Attention().eval(), x)
    found = {i.name: onnx.numpy_helper.to_array(i) for i in model.graph.initializer}
    return model, found


def samples() -> Tensor:
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    x[1, 3:] = 0
    x[2] = 0  # nothing to attend to
    return x


def test_masked_rows_are_zeros_still() -> None:
    x = samples()
    model, constants = graph_of(x)
    wanted = Attention()(x).numpy()
    assert np.isfinite(wanted).all()
    assert not wanted[2].any()
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.index("IsNaN") < len(kinds) - 1 - kinds[::-1].index("MatMul")
    zero_after_products(model.graph, constants)
    onnx.checker.check_model(model)
    kinds = [node.op_type for node in model.graph.node]
    soft = kinds.index("Softmax")
    assert kinds[soft : soft + 4] == ["Softmax", "MatMul", "IsNaN", "Where"]
    found = OpenVINO(1).compile(model).run([x.numpy()])[0]
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("change", ["other fill", "read elsewhere", "second factor"])
def test_what_is_not_that_stays(change: str) -> None:
    model, constants = graph_of(samples())
    choice = next(
        node for node in model.graph.node if node.op_type == "Where" and _of_nan(model, node)
    )
    if change == "other fill":
        constants[choice.input[1]] = np.ones((), np.float32)
    elif change == "read elsewhere":
        model.graph.node.append(onnx.helper.make_node("Identity", [choice.output[0]], ["more"]))
    else:
        product = next(n for n in model.graph.node if choice.output[0] in n.input)
        product.input[0], product.input[1] = product.input[1], product.input[0]
    before = model.graph.SerializeToString()
    zero_after_products(model.graph, constants)
    assert model.graph.SerializeToString() == before


def _of_nan(model: onnx.ModelProto, choice: onnx.NodeProto) -> bool:
    made = {name: node for node in model.graph.node for name in node.output}
    return choice.input[0] in made and made[choice.input[0]].op_type == "IsNaN"
