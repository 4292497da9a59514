"""Models that share, freeze, hide or call their layers in ways of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from t3c.convert import ElasticConfig, elasticize_, plan_conversion, state_of
from t3c.errors import ConvertError, DataError, SpecError
from t3c.nn import elastic_weights
from t3c.train import TrainConfig, fit

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
Y = torch.zeros(4, dtype=torch.long)


class Net(nn.Module):
    """Two layers, to be made odd."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(torch.relu(self.a(x)))
        return y


def test_a_weight_that_something_else_has_too_stays() -> None:
    class Alias(Net):
        def __init__(self) -> None:
            super().__init__()
            self.w = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x @ self.w

    model = Alias()
    report = elasticize_(model, X)
    assert dict(report.skipped)["a"] == "its weight is also that of the model itself"
    assert model.a.weight is model.w
    before = state_of(model).original(X)
    fit(model, [(X, Y)], TrainConfig(steps=2))
    assert torch.equal(state_of(model).original(X), before)


def test_memory_that_is_shared_does_not_move_the_original() -> None:
    model = Net()
    model.big = nn.Parameter(torch.randn(128, 64))
    model.a.weight = nn.Parameter(model.big.data[:64])
    elasticize_(model, X)
    before = state_of(model).original(X)
    with torch.no_grad():
        model.big.zero_()
    assert torch.equal(state_of(model).original(X), before)


def test_what_is_frozen_stays_frozen_and_tied_biases_tied() -> None:
    model = Net()
    model.a.requires_grad_(False)
    model.b.bias = model.a.bias
    elasticize_(model, X)
    assert model.a.bias is model.b.bias
    assert not any(p.requires_grad for p in model.a.parameters())
    assert elastic_weights(model)["b"].dense.requires_grad


def test_plans_and_failures_leave_modes_and_inputs() -> None:
    class InPlace(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    model = InPlace().train()
    model.b.eval()
    x = X.clone()
    plan_conversion(model, x)
    assert (model.a.training, model.b.training) == (True, False)
    assert torch.equal(x, X)
    elasticize_(model, x)
    assert (model.a.training, model.b.training) == (True, False)
    assert torch.equal(x, X)


def test_a_layer_called_behind_the_models_back_is_named() -> None:
    class Hidden(Net):
        def __init__(self) -> None:
            super().__init__()
            self.held = [self.a]

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.b(self.held[0](x))
            return y

    model = Hidden()
    with pytest.raises(ConvertError, match=r"layer 'a' is not called by its name: exclude it"):
        elasticize_(model, X)
    assert type(model.a) is nn.Linear
    report = elasticize_(model, X, ElasticConfig(exclude=("a",)))
    assert [p.spec.name for p in report.converted] == ["b"]


def test_layers_keep_what_models_read_of_them() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(80, 64, padding_idx=3)
            self.conv = nn.Conv1d(64, 64, 3, stride=2, padding=1)

        def forward(self, ids: Tensor) -> Tensor:
            assert self.table.embedding_dim == 64
            assert self.conv.stride == (2,)
            y: Tensor = self.conv(input=self.table(ids).transpose(1, 2))
            return y

    model, ids = Reads(), torch.randint(0, 80, (2, 8))
    ids[0, 0] = 3
    report = elasticize_(model, ids, calibration=[ids])
    assert {p.spec.name for p in report.converted} == {"table", "conv"}
    model(ids).sum().backward()
    gradient = elastic_weights(model)["table"].dense.grad
    assert gradient is not None
    assert not gradient[3].any()
    assert gradient[ids[0, 1]].any()


def test_tied_packed_attention_stays_packed() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.MultiheadAttention(64, 4, batch_first=True) for _ in range(2))
            self.b.in_proj_weight = self.a.in_proj_weight
            self.head = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = self.b(*[self.a(x, x, x)[0]] * 3)[0]
            y: Tensor = self.head(x)
            return y

    model = Tied().eval()
    report = elasticize_(model, torch.randn(2, 5, 64))
    assert report.params.total == sum(p.numel() for p in Tied().parameters())
    assert [p.spec.name for p in report.converted] == ["head"]
    assert model.a.in_proj_weight is model.b.in_proj_weight


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_masks_of_torch_transformers() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            y: Tensor = self.encoder(x, src_key_padding_mask=padding)
            return y[:, :3]

    torch.manual_seed(0)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    report = elasticize_(Masked().eval(), (torch.randn(2, 5, 64), padding))
    assert report.error < 1e-4
    assert len({p.block for p in report.converted if p.block}) == 2


class Pair(nn.Module):
    """Two attentions in one module, and softmax that is no attention."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q1", "k1", "v1", "o1", "q2", "k2", "v2", "o2", "c", "d", "e"):
            setattr(self, name, nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        for n in "12":
            q, k, v = (getattr(self, f"{name}{n}")(x) for name in "qkv")
            x = getattr(self, f"o{n}")(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)
        y: Tensor = self.e(torch.softmax(self.c(x), dim=-1) * self.d(x))
        return y


def test_attentions_of_one_module_are_two_blocks() -> None:
    plan = plan_conversion(nn.Sequential(Pair()), torch.randn(2, 5, 64))
    blocks: dict[str, set[str]] = {}
    for layer in plan.layers:
        if layer.block:
            blocks.setdefault(layer.block, set()).add(layer.spec.name)
    assert sorted(map(sorted, blocks.values())) == [
        ["0.k1", "0.o1", "0.q1", "0.v1"], ["0.k2", "0.o2", "0.q2", "0.v2"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "example", [None, {}, (), torch.tensor(1.0), torch.zeros(0, 64), (X, None)]
)
def test_examples_that_are_none(example: Any) -> None:
    with pytest.raises(DataError, match="the example"):
        plan_conversion(Net(), example)


@pytest.mark.parametrize(
    ("calibration", "message"),
    [(X, "an iterable of batches"), ([X[:, :3]], "the calibration data has inputs of"),
     ([], "empty"), ([torch.full((2, 64), float("inf"))], "NaN or infinite")],
)  # fmt: skip
def test_calibration_data_that_does_not_fit(calibration: Any, message: str) -> None:
    model = Net()
    with pytest.raises((DataError, ConvertError), match=message):
        elasticize_(model, X, calibration=calibration)
    assert type(model.a) is nn.Linear


@pytest.mark.parametrize(
    "wrong",
    [{"tile": 1.5}, {"bits": (4.5, 8)}, {"min_weights": -1}, {"include": (1,)},
     {"rank_caps": {"linear": "x"}}, {"exclude": "(a)"}],
)  # fmt: skip
def test_configs_that_mean_nothing(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        ElasticConfig(**wrong)
