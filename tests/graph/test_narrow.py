"""Narrowed topologies compute what whole ones do whose readers ignore the units left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

from t3c.artifact.graph import Axes
from t3c.artifact.manifest import ELASTIC_DOMAIN, elastic_kind, elastic_layer
from t3c.compression.decoder import Decoder
from t3c.convert import elasticize_
from t3c.engines import open_engine
from t3c.engines.torch import TorchSession
from t3c.errors import SpecError
from t3c.exporter.content import topology
from t3c.graph.builder import Builder
from t3c.graph.narrow import Narrowed, narrowed
from t3c.nn.inputs import Inputs
from t3c.nn.view import dense_copy, elastic_weights
from t3c.spec import LayerSpec

transformers = pytest.importorskip("transformers")

Units = tuple[int, int]
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Subject:
    """A topology with all that it takes to run it."""

    graph: onnx.GraphProto
    constants: Arrays
    specs: Mapping[str, LayerSpec]
    weights: Arrays

    @staticmethod
    def of(model: nn.Module, example: Inputs, axes: Axes | None = None) -> Subject:
        """Trace a model of random weights, so that no two biases are one constant of zeros."""
        torch.manual_seed(0)
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if value.dim() == 1 and value.is_floating_point() and "inv_freq" not in name:
                value.data.uniform_(0.2, 1.0)
            elif value.dim() == 4:
                value.data.normal_(0, (2 / value[0].numel()) ** 0.5)  # else little comes through
        elasticize_(model.eval(), example)
        traced = topology(model, axes)
        specs = {name: weight.spec for name, weight in elastic_weights(model).items()}
        plain, weights = dense_copy(model), {}
        for name in specs:
            weight = plain.get_parameter(f"{name}.weight").detach().numpy()
            rows = traced.folded.get(name, np.ones(len(weight), np.float32))
            weights[name] = weight * rows.reshape(-1, *[1] * (weight.ndim - 1))
        graph = traced.model.graph
        constants = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
        return Subject(graph, constants | dict(traced.dense), specs, weights)

    def run(
        self, inputs: list[Any], layers: Mapping[str, Narrowed], engine: str = "torch"
    ) -> Arrays:
        """Return the outputs of the narrowed topology, and check that it is always the same."""
        before = self.graph.SerializeToString()
        graph, constants = narrowed(self.graph, self.constants, layers, self.specs)
        again, _ = narrowed(self.graph, self.constants, layers, self.specs)
        assert graph.SerializeToString() == again.SerializeToString()
        assert self.graph.SerializeToString() == before
        assert all(constants[name] is value for name, value in self.constants.items())
        weights, specs = dict(self.weights), dict(self.specs)
        for name, layer in layers.items():
            weights[name], specs[name] = narrow_weight(weights[name], specs[name], layer)
        return run(graph, constants, weights, specs, inputs, engine)

    def ignoring(self, inputs: list[Any], layers: Mapping[str, Narrowed]) -> Arrays:
        """Return the outputs of the whole topology with zeros for the columns left out."""
        weights = dict(self.weights)
        for name, layer in layers.items():
            weights[name] = without_columns(weights[name], self.specs[name], layer)
        return run(self.graph, self.constants, weights, self.specs, inputs, "torch")

    def fitted(self, layers: Mapping[str, Narrowed]) -> list[str]:
        """Return what operations a narrowed topology has besides the topology's."""
        graph, _ = narrowed(self.graph, self.constants, layers, self.specs)
        kinds = [node.op_type for node in graph.node]
        for node in self.graph.node:
            kinds.remove(node.op_type)
        return sorted(kinds)


def narrow_weight(
    weight: np.ndarray[Any, Any], spec: LayerSpec, layer: Narrowed
) -> tuple[np.ndarray[Any, Any], LayerSpec]:
    rows, columns = (kept(u, n) for u, n in zip(units(layer), channels(spec), strict=True))
    groups, columns_of = (rows, 1) if spec.groups > 1 else (1, columns)
    spec = replace(spec, out_channels=rows, in_channels=columns, groups=groups)
    return weight[:rows, :columns_of], spec


def without_columns(
    weight: np.ndarray[Any, Any], spec: LayerSpec, layer: Narrowed
) -> np.ndarray[Any, Any]:
    columns, weight = kept(layer.columns, spec.in_channels), weight.copy()
    if spec.groups > 1:
        weight[columns:] = 0
    else:
        weight[:, columns:] = 0
    return weight


def units(layer: Narrowed) -> tuple[Units | None, Units | None]:
    return layer.rows, layer.columns


def channels(spec: LayerSpec) -> Units:
    return spec.out_channels, spec.in_channels


def kept(of: Units | None, size: int) -> int:
    return size if of is None else size * of[0] // of[1]


def run(
    graph: onnx.GraphProto, constants: Arrays, weights: Arrays, specs: Mapping[str, LayerSpec],
    inputs: list[Any], engine: str,
) -> Arrays:  # fmt: skip
    builder = Builder(None)
    builder.constants.update(constants)
    for node in graph.node:
        if node.domain != ELASTIC_DOMAIN:
            builder.nodes.append(node)
            continue
        layer = elastic_layer(node)
        stage = weights[layer], np.ones(len(weights[layer]), np.float32)
        kind, bias = elastic_kind(node, specs[layer]), [*node.input[1:], None][0]
        if kind == "embedding":
            table = builder.constant(f"{layer}/table", weights[layer])
            builder.node("Gather", [table, node.input[0]], node.output[0], axis=0)
        else:
            builder.layer(
                node.name, kind, specs[layer], [stage], node.input[0], bias, node.output[0]
            )
    given = [value for value in graph.input if value.name not in constants]
    model = builder.model(given, graph.output)
    onnx.checker.check_model(model)
    session = TorchSession(model) if engine == "torch" else open_engine(engine, 1).compile(model)
    return dict(zip([o.name for o in graph.output], session.run(inputs), strict=True))


def check(
    subject: Subject, inputs: list[Any], layers: Mapping[str, Narrowed], added: list[str],
    engine: str = "torch",
) -> None:  # fmt: skip
    """Check the outputs, and what had to be added for them."""
    found, wanted = subject.run(inputs, layers, engine), subject.ignoring(inputs, layers)
    for name, value in wanted.items():
        scale = float(np.abs(value).max())
        np.testing.assert_allclose(found[name] / scale, value / scale, rtol=0, atol=1e-5)
    whole = subject.run(inputs, {})["output"]
    assert np.abs(whole - wanted["output"]).max() > 1e-3 * np.abs(whole).max()
    assert subject.fitted(layers) == added


def between(first: list[str], last: list[str], of: Units) -> dict[str, Narrowed]:
    """Layers whose outputs are narrowed, and those that read them."""
    return {name: Narrowed(rows=of) for name in first} | {n: Narrowed(columns=of) for n in last}


class Part(nn.Module):
    """One field of what a model of the library returns."""

    def __init__(self, model: nn.Module, field: str, **options: Any) -> None:
        super().__init__()
        self.m, self.field, self.options = model, field, options

    def forward(self, *args: Tensor) -> Tensor:
        out: Tensor = getattr(self.m(*args, **self.options), self.field)
        return out


IDS = torch.randint(0, 90, (2, 8), generator=torch.Generator().manual_seed(0))
PICTURES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def bert() -> Subject:
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=32, initializer_range=0.2,
    )  # fmt: skip
    model = Part(transformers.BertModel(config), "last_hidden_state")
    return Subject.of(model, (IDS, torch.ones_like(IDS)))


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_bert(bert: Subject, engine: str) -> None:
    if engine != "torch":
        pytest.importorskip(engine)
    layers = {}
    for index, (heads, neurons) in enumerate([(3, 80), (1, 40)]):
        block = f"m.encoder.layer.{index}"
        read = [f"{block}.attention.self.{name}" for name in ("query", "key", "value")]
        layers |= between(read, [f"{block}.attention.output.dense"], (heads, 4))
        layers |= between(
            [f"{block}.intermediate.dense"], [f"{block}.output.dense"], (neurons, 128)
        )
    mask = torch.ones_like(IDS)
    mask[:, 6:] = 0
    check(bert, [IDS.numpy(), mask.numpy()], layers, [], engine)
    assert len(layers) == 12


def test_some_heads_of_one_layer_leave_shared_shapes_alone(bert: Subject) -> None:
    block = "m.encoder.layer.0.attention"
    read = [f"{block}.self.{name}" for name in ("query", "key", "value")]
    layers = between(read, [f"{block}.output.dense"], (2, 4))
    check(bert, [IDS.numpy(), np.ones((2, 8), np.int64)], layers, [])


def test_values_alone_are_narrowed_by_cutting_the_shares(bert: Subject) -> None:
    block = "m.encoder.layer.1.attention"
    layers = between([f"{block}.self.value"], [f"{block}.output.dense"], (1, 4))
    check(bert, [IDS.numpy(), np.ones((2, 8), np.int64)], layers, ["Slice"])


def test_vit() -> None:
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        image_size=32, patch_size=8, initializer_range=0.2,
    )  # fmt: skip
    subject = Subject.of(Part(transformers.ViTModel(config), "last_hidden_state"), PICTURES)
    block = "m.layers.1"
    read = [f"{block}.attention.{name}_proj" for name in "qkv"]
    layers = between(read, [f"{block}.attention.o_proj"], (3, 4))
    layers |= between([f"{block}.mlp.fc1"], [f"{block}.mlp.fc2"], (72, 128))
    check(subject, [PICTURES.numpy()], layers, [])


def test_gpt2() -> None:
    config = transformers.GPT2Config(
        vocab_size=100, n_embd=64, n_layer=2, n_head=4, n_positions=32, initializer_range=0.2
    )
    model = Part(transformers.GPT2Model(config), "last_hidden_state", use_cache=False)
    subject = Subject.of(model, IDS)
    layers: dict[str, Narrowed] = {}
    for index in range(2):
        block = f"m.h.{index}.mlp"
        layers |= between([f"{block}.c_fc"], [f"{block}.c_proj"], (200, 256))
    check(subject, [IDS.numpy()], layers, [])


def llama_config() -> Any:
    return transformers.LlamaConfig(
        vocab_size=100, hidden_size=96, num_hidden_layers=2, num_attention_heads=6, head_dim=16,
        num_key_value_heads=3, intermediate_size=128, max_position_embeddings=64,
        initializer_range=0.2,
    )  # fmt: skip


def llama_layers(prefix: str, index: int) -> dict[str, Narrowed]:
    """Two of three groups of heads, half of the neurons."""
    block = f"{prefix}.layers.{index}"
    read = [f"{block}.self_attn.{name}_proj" for name in "qkv"]
    layers = between(read, [f"{block}.self_attn.o_proj"], (2, 3))
    gates = [f"{block}.mlp.gate_proj", f"{block}.mlp.up_proj"]
    return layers | between(gates, [f"{block}.mlp.down_proj"], (64, 128))


def test_llama_with_keys_and_values_of_several_heads() -> None:
    model = Part(transformers.LlamaForCausalLM(llama_config()), "logits", use_cache=False)
    subject = Subject.of(model, IDS)
    layers = llama_layers("m.model", 0) | llama_layers("m.model", 1)
    check(subject, [IDS.numpy()], layers, [])


def test_a_decoder_keeps_the_states_it_returns_whole() -> None:
    model = Decoder(transformers.LlamaForCausalLM(llama_config()))
    subject = Subject.of(model, {"input_ids": IDS}, {"input_ids": {1: "sequence"}})
    layers = llama_layers("model.model", 0)
    states = [np.zeros((2, 3, 0, 16), np.float32)] * 4
    found = subject.run([IDS.numpy(), *states], layers)
    wanted = subject.ignoring([IDS.numpy(), *states], layers)
    for name in wanted:
        length = 2 if "present_0" in name else None  # zeros for the group left out
        np.testing.assert_allclose(
            found[name][:, :length], wanted[name][:, :length], rtol=0, atol=1e-4
        )
    # States are returned whole; queries, keys and values stay together.
    assert subject.fitted(layers) == ["Pad", "Pad", "Pad", "Slice"]


def test_resnet() -> None:
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128], depths=[1, 2], layer_type="bottleneck"
    )
    subject = Subject.of(Part(transformers.ResNetModel(config), "pooler_output"), PICTURES)
    layers: dict[str, Narrowed] = {}
    for stage, block, first, second in ((0, 0, (1, 2), (3, 4)), (1, 1, (3, 4), (1, 4))):
        name = f"m.encoder.stages.{stage}.layers.{block}.layer"
        layers[f"{name}.0.convolution"] = Narrowed(rows=first)
        layers[f"{name}.1.convolution"] = Narrowed(second, first)
        layers[f"{name}.2.convolution"] = Narrowed(columns=second)
    check(subject, [PICTURES.numpy()], layers, [])


def test_mobilenet() -> None:
    config = transformers.MobileNetV2Config(image_size=32, tf_padding=False)
    subject = Subject.of(Part(transformers.MobileNetV2Model(config), "pooler_output"), PICTURES)
    layers = {}
    for index in (0, 3):
        name, of = f"m.layer.{index}", (2, 3)
        layers |= between(
            [f"{name}.expand_1x1.convolution"], [f"{name}.reduce_1x1.convolution"], of
        )
        layers[f"{name}.conv_3x3.convolution"] = Narrowed(of, of)
    # A depthwise convolution that is not elastic has its own weight cut.
    layers |= between(
        ["m.conv_stem.first_conv.convolution"], ["m.conv_stem.reduce_1x1.convolution"], (3, 4)
    )
    check(subject, [PICTURES.numpy()], layers, [])


class Net(nn.Module):
    """Two layers of 64 neurons with something between them; x (n, 5, 32)."""

    def __init__(self, middle: nn.Module, convolution: bool = False) -> None:
        super().__init__()
        if convolution:
            self.first: nn.Module = nn.Conv2d(3, 64, 3, padding=1)
            self.other: nn.Module = nn.Conv2d(3, 64, 3, padding=1)
            self.second: nn.Module = nn.Conv2d(64, 32, 1)
        else:
            self.first, self.other = nn.Linear(32, 64), nn.Linear(32, 64)
            self.second = nn.Linear(64, 32)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.middle(self.first(x), self.other(x)))
        return out


class Middle(nn.Module):
    """What a function does, with parameters of it."""

    def __init__(self, function: Any, **inner: nn.Module) -> None:
        super().__init__()
        self.function, self.inner = function, nn.ModuleDict(inner)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.function(self.inner, a, b)
        return out


X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
BOTH, ONE = between(["first", "other"], ["second"], (3, 8)), between(["first"], ["second"], (3, 8))
SCALE = torch.randn(64, generator=torch.Generator().manual_seed(1))


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (8, 8))


@pytest.mark.parametrize(
    ("function", "added"),
    [
        (lambda _, a, b: F.gelu(a) * torch.sigmoid(b), []),
        (lambda _, a, b: torch.where(a > SCALE, a, b / 3), []),
        (lambda m, a, b: m["act"](a) + SCALE[None, None] * b, []),
        (lambda _, a, b: (heads(a).softmax(-1) * heads(b.mean(1, True))).flatten(2), []),
        (lambda _, a, b: (a.transpose(1, 2) * b.sum(1)[:, :, None]).transpose(1, 2), []),
        (lambda _, a, b: torch.cat([a, b], 1)[:, 2:7].relu(), []),
        (lambda _, a, b: a.softmax(-1) + b, ["Pad", "Slice"]),
        (lambda _, a, b: torch.cat([a[..., 1:], b[..., :1]], -1), ["Pad", "Pad", "Slice"]),
        (lambda _, a, b: a.flip(-1) * b, ["Pad", "Slice"]),
        (lambda m, a, b: m["norm"](a) * b, ["Pad", "Slice"]),
        (lambda _, a, b: a.cumsum(1) + b, ["Pad", "Slice"]),
    ],
)  # fmt: skip
def test_between_linear_layers(function: Any, added: list[str]) -> None:
    inner = {"act": nn.ReLU6(), "norm": nn.LayerNorm(64)}
    subject = Subject.of(Net(Middle(function, **inner)), X)
    if "Pad" not in added:
        check(subject, [X.numpy()], BOTH, added)
    else:
        assert subject.fitted(BOTH) == added
        alike(subject, [X.numpy()], BOTH)


def alike(subject: Subject, inputs: list[Any], layers: Mapping[str, Narrowed]) -> None:
    """Check a topology that mixes units: those left out are zeros before they are mixed.

    Biases that are no input of their layer are added to them all the same.
    """
    found = subject.run(inputs, layers)["output"]
    weights = dict(subject.weights)
    for name, layer in layers.items():
        weights[name] = without_columns(weights[name], subject.specs[name], layer)
        weights[name][kept(layer.rows, len(weights[name])) :] = 0
    wanted = run(subject.graph, subject.constants, weights, subject.specs, inputs, "torch")
    np.testing.assert_allclose(found, wanted["output"], rtol=0, atol=1e-5)


def convolutions(m: nn.ModuleDict, a: Tensor, b: Tensor) -> Tensor:
    """Norms that cannot be folded, constants a channel, pools."""
    a = m["norm"](torch.relu(a)) * SCALE[:, None, None]
    b = F.prelu(m["instance"](b), SCALE.abs() / 2)
    return F.max_pool2d(F.pad(a, (1, 1, 0, 0)), 3, 1, 1)[..., 1:-1] + b.mean((2, 3), keepdim=True)


def test_between_convolutions() -> None:
    inner = {"norm": nn.BatchNorm2d(64), "instance": nn.InstanceNorm2d(64, affine=True)}
    subject = Subject.of(Net(Middle(convolutions, **inner), convolution=True), PICTURES)
    check(subject, [PICTURES.numpy()], BOTH, [])


def test_a_convolution_that_is_flattened_for_a_linear_layer() -> None:
    model = Net(Middle(lambda _, a, b: F.avg_pool2d(a * b, 16).flatten(1)), convolution=True)
    model.second = nn.Linear(64 * 4, 32)
    subject = Subject.of(model, PICTURES)
    check(subject, [PICTURES.numpy()], BOTH, [])


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_channels_that_are_mixed_are_filled_up_with_zeros(engine: str) -> None:
    if engine != "torch":
        pytest.importorskip(engine)
    inner = {"norm": nn.GroupNorm(4, 64)}
    model = Net(Middle(lambda m, a, b: m["norm"](a) + b, **inner), convolution=True)
    subject = Subject.of(model, PICTURES)
    assert subject.fitted(ONE) == ["Pad", "Slice"]
    constants = dict(subject.constants)
    bias = next(node.input[1] for node in subject.graph.node if "first" in node.name)
    assert len(subject.run([PICTURES.numpy()], ONE, engine)["output"]) == 2
    found = subject.run([PICTURES.numpy()], ONE, engine)["output"]
    weights = dict(subject.weights)
    weights["first"] = weights["first"].copy()
    weights["first"][24:] = 0
    weights["second"] = without_columns(weights["second"], subject.specs["second"], ONE["second"])
    constants[bias] = constants[bias] * (np.arange(64) < 24).astype(np.float32)
    wanted = run(subject.graph, constants, weights, subject.specs, [PICTURES.numpy()], "torch")
    np.testing.assert_allclose(found, wanted["output"], rtol=0, atol=1e-5)


def test_what_reads_the_leading_channels_alone_keeps_the_name_of_the_tensor() -> None:
    subject = Subject.of(Net(Middle(lambda _, a, b: a.flip(-1) * b)), X)
    graph, _ = narrowed(subject.graph, subject.constants, ONE, subject.specs)
    readers = [
        next(node.input[0] for node in of.node if node.name == "second")
        for of in (subject.graph, graph)
    ]
    assert readers[0] == readers[1]


def test_a_topology_that_nothing_narrows_is_returned_as_it_is() -> None:
    subject = Subject.of(Net(Middle(lambda _, a, b: a * b)), X)
    graph, constants = narrowed(
        subject.graph, subject.constants, dict.fromkeys(BOTH, Narrowed()), subject.specs
    )
    assert graph is subject.graph
    assert constants == subject.constants


def test_units_that_do_not_divide_the_channels_are_refused() -> None:
    subject = Subject.of(Net(Middle(lambda _, a, b: a * b)), X)
    for units in ((1, 3), (0, 8), (9, 8)):
        with pytest.raises(SpecError):
            narrowed(subject.graph, subject.constants, {"first": Narrowed(units)}, subject.specs)
