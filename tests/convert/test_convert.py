from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from t3c.convert import ElasticConfig, elasticize_, plan_conversion, state_of
from t3c.errors import ConvertError, DataError, SpecError
from t3c.nn import dense_copy, elastic_layers
from t3c.nn.inputs import gather, split_batch
from t3c.spec import Factorization


def mixed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, 2, 1, groups=32), nn.Conv2d(32, 64, 1, bias=False), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=2, dilation=2), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(256, 96), nn.Linear(96, 4),
    ).eval()  # fmt: skip


def test_conversion_keeps_the_function_and_reports_everything() -> None:
    model, x = mixed(), torch.randn(3, 3, 16, 16)
    before = model(x)
    total = sum(p.numel() for p in model.parameters())
    report = elasticize_(model, x, calibration=[x])
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)
    assert report.error < 1e-5
    kinds = {p.spec.name: p.spec.factorization for p in report.converted}
    assert kinds == {
        "0": Factorization.NONE,
        "4": Factorization.SVD,
        "6": Factorization.TUCKER2,
        "9": Factorization.SVD,
    }
    assert dict(report.skipped) == {
        "1": "BatchNorm2d has no elastic form",
        "3": "288 weights are fewer than min_weights=512",
        "10": "384 weights are fewer than min_weights=512",
    }
    p = report.params
    assert p.rank_elastic + p.bit_elastic + p.untouched == total
    assert "0: bits only (no rank of 8 or more takes under 0.4 of its weights)" in str(report)
    torch.testing.assert_close(state_of(model).original(x), before)


def test_a_plan_changes_nothing_and_keeps_its_limits() -> None:
    model, x = mixed(), torch.randn(1, 3, 16, 16)
    before = {name: p.clone() for name, p in model.named_parameters()}
    plan = plan_conversion(model, x, ElasticConfig(tile=4, store_ratio=0.3))
    assert not elastic_layers(model)
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    for layer in plan.layers:
        for rank in layer.ranks[:-1]:
            size = sum(torch.Size(s).numel() for s in layer.spec.stage_shapes(rank))
            assert size <= 0.3 * layer.weights
            assert rank % 4 == 0
        assert layer.ranks[-1] == layer.spec.full_rank
    assert model.training is False


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(80, 64)
        self.a, self.b, self.twice, self.once, self.unused = (nn.Linear(64, 64) for _ in range(5))
        self.again = self.a
        self.head = nn.Linear(64, 80, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.twice(self.twice(self.b(self.again(self.a(self.embed(ids))))))
        logits: Tensor = self.head(self.once(x))
        return logits


def test_what_is_shared_stays_one() -> None:
    model = Shared()
    ids = torch.randint(0, 80, (2, 5))
    before = model(ids)
    total = sum(p.numel() for p in model.parameters())
    report = elasticize_(model, ids)
    runs = {p.spec.name: (p.modules, p.spec.runs) for p in report.converted}
    assert runs == {
        "head": (("head", "embed"), 1),
        "a": (("a",), 2),
        "b": (("b",), 1),
        "twice": (("twice",), 2),
        "once": (("once",), 1),
    }
    assert dict(report.skipped) == {"unused": "the example does not reach it"}
    assert model.head.elastic is model.embed.elastic
    assert model.again is model.a
    plain = dense_copy(model)
    assert plain.head.weight is plain.embed.weight
    assert plain.again is plain.a
    torch.testing.assert_close(plain(ids), before, rtol=1e-4, atol=1e-5)
    assert report.params.total == total
    torch.testing.assert_close(model(ids), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(bad: float) -> None:
    model = mixed()
    with torch.no_grad():
        model[6].weight[0, 0, 0, 0] = bad
    with pytest.raises(ConvertError, match="layer '6': its weight holds NaN or infinite values"):
        elasticize_(model, torch.randn(1, 3, 16, 16))
    assert not elastic_layers(model)
    model.train()
    with pytest.raises(ConvertError):
        elasticize_(model, torch.randn(1, 3, 16, 16))
    assert model.training


def test_models_that_cannot_be_converted() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(ConvertError, match="no layer that can be made elastic"):
        elasticize_(nn.Sequential(nn.ReLU()), x)
    with pytest.raises(ConvertError, match=r"wrap it in nn\.Sequential"):
        elasticize_(nn.Linear(64, 64), torch.randn(2, 64))
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(ConvertError, match=r"call model\.float\(\) first"):
            elasticize_(nn.Sequential(nn.Linear(64, 64)).to(dtype), torch.zeros(2, 64, dtype=dtype))
    model = nn.Sequential(nn.Linear(64, 64))
    elasticize_(model, torch.randn(2, 64))
    with pytest.raises(ConvertError, match="elastic already"):
        elasticize_(model, torch.randn(2, 64))
    with pytest.raises(ConvertError, match="not elastic"):
        state_of(nn.Linear(2, 2))
    with pytest.raises(ConvertError, match="calibration data is empty"):
        elasticize_(nn.Sequential(nn.Linear(64, 64)), torch.randn(2, 64), calibration=[])
    with pytest.raises(DataError, match="the example holds NaN"):
        elasticize_(nn.Sequential(nn.Linear(64, 64)), torch.full((2, 64), float("nan")))


def test_examples_are_tensors_tuples_or_dicts() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 32)

        def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor] | Tensor:
            y: Tensor = self.fc(a + b)
            return y

    a, b = torch.randn(2, 5, 64), torch.randn(2, 5, 64)
    for example in ((a, b), {"a": a, "b": b}):
        model = Two()
        report = elasticize_(model, example, calibration=[(example, torch.zeros(2))])
        assert report.error < 1e-5
        assert report.converted[0].spec.in_size == (5, 1)


def test_batches() -> None:
    x, y = torch.zeros(4, 2), torch.ones(4)
    assert split_batch((x, y))[1] is y
    assert split_batch({"a": x})[1] is None
    assert len(gather([(x, y), (x, y)])) == 8
    assert len(gather([[x], [x]])) == 8
    assert not gather([x.clone().requires_grad_()]).requires_grad
    with pytest.raises(DataError, match="an iterable of batches"):
        gather(x)
    with pytest.raises(DataError, match="a batch has inputs of"):
        gather([x, torch.zeros(4, 3)])
    for bad in ([], [(x[:0], y[:0])]):
        with pytest.raises(DataError, match="empty"):
            gather(bad)
    with pytest.raises(DataError, match="got 3 elements"):
        split_batch((x, y, y))
    with pytest.raises(DataError, match="got str"):
        split_batch("x")


@pytest.mark.parametrize(
    "wrong",
    [{"bits": ()}, {"bits": (4, 6)}, {"bits": (1, 8)}, {"tile": 0}, {"store_ratio": 0},
     {"rank_fractions": (1.5,)}, {"rank_fractions": (0.5, 0.25)}],
)  # fmt: skip
def test_impossible_configs(wrong: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        ElasticConfig(**wrong)  # type: ignore[arg-type]


def test_a_failed_conversion_leaves_the_model_as_it_was() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(self.b, nn.Linear)
            y: Tensor = self.b(self.a(x))
            return y

    model = Picky().train()
    before = model(torch.ones(2, 64))
    with pytest.raises(ConvertError, match="does not take the example: AssertionError"):
        elasticize_(model, torch.ones(2, 64))
    assert type(model.a) is nn.Linear
    assert model.training
    torch.testing.assert_close(model(torch.ones(2, 64)), before)
    with pytest.raises(ConvertError, match="does not take the example"):
        elasticize_(model, torch.ones(2, 3))
    model.a.bias.data[0] = float("nan")
    with pytest.raises(ConvertError, match=r"parameter 'a\.bias' holds NaN"):
        elasticize_(model, torch.ones(2, 64))


def test_layers_that_are_more_than_a_layer_are_left() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    torch.nn.utils.parametrizations.weight_norm(model[1])
    report = elasticize_(model, torch.ones(2, 64))
    assert [p.spec.name for p in report.converted] == ["2"]
    assert ("0", "it has hooks of its own") in report.skipped


def test_outputs_without_samples_are_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Flatten(0))
    with pytest.raises(ConvertError, match=r"the output has shape \(128,\) for 2 samples"):
        elasticize_(model, torch.ones(2, 64))
