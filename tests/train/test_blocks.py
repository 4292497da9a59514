from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import recorded
from t3c.convert import ElasticConfig, elasticize_, state_of
from t3c.errors import ConvertError, DataError, SpecError, TrainError
from t3c.nn import at, elastic_weights
from t3c.nn.inputs import Inputs, call, select
from t3c.spec import LayerPoint, Profile
from t3c.train.blocks import BlockConfig, find_blocks, reconstruct
from t3c.train.one_block import Block
from t3c.zoo.cifar10 import CifarResNet
from t3c.zoo.digits import Digits

SHORT = BlockConfig(steps=16)
TEXT = {
    "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture(scope="session")
def converted(trained: nn.Module, digits: Digits) -> nn.Module:
    net = copy.deepcopy(trained)
    elasticize_(net, digits.train[0][:2], calibration=digits.loader(64))
    return net


@pytest.fixture
def model(converted: nn.Module) -> nn.Module:
    return copy.deepcopy(converted)


def level(model: nn.Module, index: int, bits: int) -> Profile:
    plans = state_of(model).plan.layers
    ranks = {p.spec.name: p.ranks[min(index, len(p.ranks) - 1)] for p in plans}
    return Profile("level", {name: LayerPoint(rank, bits) for name, rank in ranks.items()})


@torch.no_grad()
def drift(model: nn.Module, profile: Profile | None, inputs: Inputs) -> float:
    with at(model, profile):
        z, original = call(model, inputs), call(state_of(model).original, inputs)
    return float(((z - original).norm(dim=-1) / original.norm(dim=-1)).mean())


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def changed(module: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, v in module.state_dict().items() if not torch.equal(v, before[name])}


def elastic(model: nn.Module, samples: Inputs) -> nn.Module:
    # Blocks are drawn to their own outputs: so are factors that suit inputs alone.
    config = ElasticConfig(metric="inputs")
    elasticize_(model.eval(), select(samples, slice(0, 2)), config, calibration=[samples])
    return model


def test_compressed_views_come_closer_and_the_full_one_stays(
    model: nn.Module, digits: Digits
) -> None:
    unseen, original = digits.test[0][:100], state_of(model).original
    low, top = level(model, 1, 6), level(model, 99, 8)
    before, best = drift(model, low, unseen), drift(model, top, unseen)
    kept = values(original)
    with at(model, None), torch.no_grad():
        full = model(unseen)
    report = reconstruct(model, [digits.train[0][:80]], SHORT)
    assert drift(model, low, unseen) < 0.8 * before
    assert drift(model, top, unseen) == best
    with at(model, None), torch.no_grad():
        assert torch.equal(model(unseen), full)
    assert not changed(original, kept)
    assert [row.block for row in report.rows] == find_blocks(model)
    for row in report.rows[:-1]:
        assert row.kept
        assert row.before is not None
        assert row.after is not None
        assert row.after < row.before
    assert all(p.grad is None for p in model.parameters())


def test_given_profiles_are_what_is_trained(model: nn.Module, digits: Digits) -> None:
    low, unseen = level(model, 1, 6), digits.test[0][:100]
    before = drift(model, low, unseen)
    start = values(model)
    reconstruct(model, [digits.train[0][:80]], SHORT, profiles=[low])
    assert drift(model, low, unseen) < 0.8 * before
    weights = elastic_weights(model)
    factored = {n for n, w in weights.items() if not w.spec.stored_dense(low.points[n])}
    moved = {n.partition(".elastic")[0] for n in changed(model, start) if ".factors." in n}
    assert moved == factored
    with pytest.raises(SpecError, match="does not fit the model"):
        reconstruct(
            model, [digits.train[0][:8]], SHORT, profiles=[Profile("odd", {"x": LayerPoint(1, 4)})]
        )


def test_a_block_leaves_the_others_alone_and_stops_where_it_should(
    model: nn.Module, digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    last = values(model)
    step = Block._step

    def stepped(self: Block, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        nonlocal last
        step(self, loss, optimizer)
        assert loss > 0
        moved = changed(model, last)
        assert all(name.startswith(f"{self.name}.") for name in moved)
        assert moved or seen[-1:] == [self.name]
        seen.append(self.name)
        last = values(model)

    monkeypatch.setattr(Block, "_step", stepped)
    told = recorded(monkeypatch)

    mode = {name: m.training for name, m in model.named_modules()}
    reconstruct(
        model, [(digits.train[0][:40], digits.train[1][:40])], BlockConfig(steps=2),
    )  # fmt: skip
    names = find_blocks(model)
    assert seen == [name for name in names for _ in range(2)]
    assert told == [f"reconstructing block {name}" for name in names]
    assert {name: m.training for name, m in model.named_modules()} == mode


def test_what_got_worse_is_rolled_back(model: nn.Module, digits: Digits) -> None:
    before = values(model)
    config = BlockConfig(steps=3, learning_rate=0.5)
    report = reconstruct(model, [digits.train[0][:64]], config)
    assert not changed(model, before)
    for row in report.rows:
        assert not row.kept
        assert "worse on held-out samples" in row.reason
        assert row.before is not None
        assert row.after is None or not row.after <= row.before


def test_two_runs_agree_and_seeds_differ() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 64)
    model = elastic(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)), x)
    runs, config = [], BlockConfig(steps=4, batch=8)
    for one in (config, config, replace(config, seed=1)):
        net = copy.deepcopy(model)
        runs.append((reconstruct(net, [x], one), values(net)))
        torch.rand(1)
    assert runs[0][0] == runs[1][0] != runs[2][0]
    assert all(torch.equal(v, runs[1][1][name]) for name, v in runs[0][1].items())


def test_reconstruction_that_cannot_go_on(model: nn.Module, digits: Digits) -> None:
    with pytest.raises(DataError, match="empty"):
        reconstruct(model, [])
    with pytest.raises(DataError, match="at least 2 samples"):
        reconstruct(model, [digits.train[0][:1]])
    with pytest.raises(ConvertError, match="not elastic"):
        reconstruct(nn.Linear(2, 2), [digits.train[0][:2]])
    bad = digits.train[0][:20].clone()
    bad[3] = float("nan")
    before = values(model)
    with pytest.raises(TrainError, match=r"block 'blocks.0'.* is not finite"):
        reconstruct(model, [bad], SHORT)
    with pytest.raises(TrainError, match=r"block 'blocks.0', step \d: the loss is not finite"):
        reconstruct(model, [digits.train[0][:20]], BlockConfig(steps=9, learning_rate=1e30))
    assert not changed(model, before)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be positive, got nan"),
    ],
)
def test_configs_that_cannot_be(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        BlockConfig(**wrong)


def test_blocks_of_residual_networks(model: nn.Module) -> None:
    assert find_blocks(model) == ["blocks.0", "blocks.1", "blocks.2", "head"]
    torch.manual_seed(0)
    cifar = elastic(CifarResNet(20), torch.randn(4, 3, 32, 32))
    stages = [f"layer{stage}.{index}" for stage in (1, 2, 3) for index in range(3)]
    assert [name for name in find_blocks(cifar) if name.startswith("layer")] == stages


def test_blocks_of_hugging_face_models() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ids, images = {"input_ids": torch.randint(0, 100, (4, 16))}, torch.randn(4, 3, 32, 32)
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT))
    layers = [f"bert.encoder.layer.{index}" for index in range(2)]
    tables = ["bert.embeddings.word_embeddings", "bert.embeddings.position_embeddings"]
    assert [n for n in find_blocks(elastic(bert, ids)) if n not in tables] == [
        *layers, "bert.pooler.dense",
    ]  # fmt: skip
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))
    assert find_blocks(elastic(llama, ids)) == [
        "model.embed_tokens", *(f"model.layers.{index}" for index in range(2)), "lm_head",
    ]  # fmt: skip
    wide = TEXT | {"image_size": 32, "patch_size": 8}
    wide = {name: value for name, value in wide.items() if name[:3] not in ("voc", "max")}
    vit = transformers.ViTForImageClassification(transformers.ViTConfig(**wide))
    inside = [n for n in find_blocks(elastic(vit, images)) if "layer" in n]
    assert [n.rpartition(".")[2] for n in inside] == ["0", "1"]
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2], num_labels=7
    )
    resnet = transformers.ResNetForImageClassification(config)
    bottlenecks = [f"resnet.encoder.stages.{s}.layers.{i}" for s in (0, 1) for i in (0, 1)]
    assert [n for n in find_blocks(elastic(resnet, images)) if "stages" in n] == bottlenecks
    config = transformers.ConvNextConfig(
        num_stages=2, hidden_sizes=[32, 64], depths=[2, 3], num_labels=7
    )
    convnext = transformers.ConvNextForImageClassification(config)
    inside = [n for n in find_blocks(elastic(convnext, images)) if "stages" in n]
    assert [n.removeprefix("convnext.encoder.stages.") for n in inside] == [
        "0.layers.0", "0.layers.1", "1.downsampling_layer.1",
        "1.layers.0", "1.layers.1", "1.layers.2",
    ]  # fmt: skip


def test_masks_and_caches_reach_a_block() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ids = torch.randint(0, 100, (60, 16))
    mask = (torch.arange(16) < torch.randint(8, 17, (60, 1))).long()
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT))
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, use_cache=True))
    for model, part in ((bert, "bert.encoder.layer."), (llama, "model.layers.")):
        samples = {"input_ids": ids, "attention_mask": mask}
        low = level(elastic(model, samples), 0, 8)
        before = {name: value[40:] for name, value in samples.items()}
        start = drift(model, low, before)
        rows = reconstruct(
            model, [{name: value[:40] for name, value in samples.items()}],
            BlockConfig(steps=8), profiles=[low],
        ).rows  # fmt: skip
        assert [row.block for row in rows if row.block.startswith(part) and row.kept] == [
            f"{part}{index}" for index in range(2)
        ]
        assert drift(model, low, before) < start


class Odd(nn.Module):
    """A layer that works on its input in place and answers with a dict, or is never called."""

    def __init__(self, called: bool) -> None:
        super().__init__()
        self.a, self.b, self.called = nn.Linear(64, 64), nn.Linear(64, 64), called

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.b(torch.relu_(self.a(x.mul_(2))))}


class Net(nn.Module):
    """Odd layers, a layer that runs twice, and a weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.ModuleList(Odd(called) for called in (True, False))
        self.twice = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True))])
        self.alias = self.twice[0]
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.odd[0](x)["y"]
        x = self.odd[1].b(self.odd[1].a(x)) + x
        x = self.twice[0](self.twice[0](x)) + x
        y: Tensor = self.second(self.first(x))
        return y


def test_odd_blocks_are_divided_and_shared_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(120, 64)
    elasticize_(model, x[:2].clone())
    assert find_blocks(model) == [
        "odd.0.a", "odd.0.b", "odd.1.a", "odd.1.b", "twice.0", "first", "second",
    ]  # fmt: skip
    before, kept = values(model), x.clone()
    runs: list[str] = []
    step = Block._step
    monkeypatch.setattr(Block, "_step", lambda b, *given: (runs.append(b.name), step(b, *given)))
    report = reconstruct(model, [x], BlockConfig(steps=20, batch=64))
    assert torch.equal(x, kept)
    reasons = {row.block: row.reason for row in report.rows if row.before is None}
    assert reasons == {
        "first": "its weights are also those of second",
        "second": "its weights are also those of first",
    }
    assert runs.count("twice.0") == 20
    assert not any(name.startswith(("first", "second")) for name in changed(model, before))


def test_frozen_blocks_and_blocks_that_run_now_and_then_are_named() -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            y: Tensor = self.c(self.b(x) if len(x) == 2 else x)
            return y

    torch.manual_seed(0)
    model, x = Moody(), torch.randn(40, 64)
    model.a.requires_grad_(False)
    elasticize_(model, x[:2])
    before = values(model)
    rows = {row.block: row for row in reconstruct(model, [x], BlockConfig(steps=40)).rows}
    assert rows["a"].reason == "its weights are frozen"
    assert rows["b"].reason == "it runs 1 times on the example, 0 on other samples"
    assert rows["c"].kept
    assert {name[0] for name in changed(model, before)} == {"c"}
