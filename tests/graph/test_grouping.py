"""Layers that read one tensor, as one product: the same numbers from fewer products."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from t3c.artifact.reader import Artifact
from t3c.convert import elasticize_, state_of
from t3c.device.machine import cpu_name
from t3c.engines import ENGINES, open_engine
from t3c.engines.protocol import Array
from t3c.errors import CorruptError, SpecError
from t3c.exporter.allocate import Allocated
from t3c.exporter.content import pack, topology, write
from t3c.exporter.described import Described
from t3c.graph.assemble import Group, assemble, candidate_groups
from t3c.graph.synthetic import example_input, synthetic_group
from t3c.nn.inputs import Inputs, select
from t3c.spec import Factorization, Form, Kind, LayerPoint, LayerSpec, Profile, ProfileChain

transformers = pytest.importorskip("transformers")

BLOCKS = 2
IDS = np.random.default_rng(1).integers(0, 100, (4, 16))
VECTORS = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)


class Heads(nn.Module):
    """Layers on one vector: three that fit a group, one of them with a bias, and one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 32)
        self.third, self.twice = nn.Linear(64, 48, bias=False), nn.Linear(64, 64)
        nn.init.normal_(self.second.bias)

    def forward(self, x: Tensor) -> Tensor:
        heads = [self.first(x), self.second(x), self.third(x), self.twice(self.twice(x))]
        return torch.cat([head.relu() for head in heads], dim=1)


def written(model: nn.Module, samples: Inputs, folder: Path) -> Artifact:
    """A model's content with two profiles: all layers at their lowest rank, and all at full."""
    elasticize_(model.eval(), select(samples, slice(0, 2)), calibration=[samples])
    plans = state_of(model).plan.layers
    ends = [{p.spec.name: LayerPoint(p.ranks[i], p.bits[-1]) for p in plans} for i in (0, -1)]
    chain = ProfileChain((Profile("tiny", ends[0]), Profile("max", ends[1])))
    allocated = Allocated.of(chain)
    packed = pack(Described(model, topology(model), "grouped"), allocated)
    return write(folder, packed, allocated, samples)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Two blocks, with biases on all projections of the second and on the first one's query."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=BLOCKS, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=128, max_position_embeddings=32, use_cache=False,
        attention_bias=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    first = model.model.layers[0].self_attn
    first.k_proj.bias = first.v_proj.bias = None
    samples = {"input_ids": torch.randint(0, 100, (12, 16))}
    return written(model, samples, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    torch.manual_seed(0)
    return written(Heads(), torch.randn(32, 64), tmp_path_factory.mktemp("heads"))


def graph_of(
    artifact: Artifact, profile: str, grouped: Sequence[Group], forms: dict[str, Form] | None = None
) -> onnx.ModelProto:
    points = artifact.manifest.chain[profile]
    forms = dict.fromkeys(points.points, Form.FACTORED) | (forms or {})
    return assemble(artifact, points, forms, artifact.ranges(profile), grouped=grouped)


def candidates(artifact: Artifact) -> tuple[Group, ...]:
    return candidate_groups(artifact.graph().graph, artifact.entries)


def count(model: onnx.ModelProto, kind: str) -> int:
    return sum(node.op_type == kind for node in model.graph.node)


def outputs(engine: str, model: onnx.ModelProto, x: Array) -> list[Array]:
    return open_engine(engine, 1).compile(model).run([x])


def assert_same(engine: str, first: onnx.ModelProto, second: onnx.ModelProto, x: Array) -> None:
    pairs = zip(outputs(engine, first, x), outputs(engine, second, x), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(one).max())


def test_candidates_are_what_reads_one_tensor(llama: Artifact, heads: Artifact) -> None:
    wanted = []
    for block in (f"model.layers.{index}" for index in range(BLOCKS)):
        wanted.append(tuple(f"{block}.self_attn.{part}_proj" for part in "qkv"))
        wanted.append((f"{block}.mlp.gate_proj", f"{block}.mlp.up_proj"))
    assert candidates(llama) == tuple(wanted)
    assert candidates(heads) == (("first", "second", "third"),)


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize(("profile", "form"), [("max", Form.DENSE), ("tiny", Form.FACTORED)])
def test_one_product_gives_the_numbers_of_several(
    llama: Artifact, heads: Artifact, engine: str, profile: str, form: Form
) -> None:
    pairs = [(llama, IDS), (heads, VECTORS)]
    if engine == "openvino" and form is Form.FACTORED and "avx512f" in cpu_name().split():
        # Of single vectors at rank 8, OpenVINO 2026.4 reads what it did not write where it
        # multiplies 512 bits at once, grouped or not.
        pairs.pop()
    for artifact, x in pairs:
        groups = candidates(artifact)
        specs, points = artifact.manifest.specs, artifact.manifest.chain[profile].points
        for name in (name for group in groups for name in group):
            assert specs[name].forms(points[name])[0] is form
        separate, grouped = (graph_of(artifact, profile, g) for g in ((), groups))
        onnx.checker.check_model(grouped, full_check=True)
        saved = sum(len(group) - 1 for group in groups)
        assert count(grouped, "MatMul") == count(separate, "MatMul") - saved
        assert count(grouped, "Split") == count(separate, "Split") + len(groups)
        assert_same(engine, separate, grouped, x)


def test_a_bias_is_added_once_to_all_of_a_dense_group(llama: Artifact, heads: Artifact) -> None:
    """Where the graph adds it behind the layer, and where the layer has it as an input."""
    block = "model.layers.0.self_attn"
    adds = [count(graph_of(llama, "max", groups), "Add") for groups in ((), candidates(llama))]
    assert adds[1] == adds[0] - 2  # three of the second block became one
    for artifact, name, owner in ((llama, f"{block}.q_proj", 0), (heads, "first", 1)):
        graph = graph_of(artifact, "max", candidates(artifact)).graph
        named = {i.name: onnx.numpy_helper.to_array(i) for i in graph.initializer}
        sizes, bias = named[f"{name}/grouped/sizes"], named[f"{name}/grouped/bias"]
        parts = np.split(bias, np.cumsum(sizes)[:-1])
        assert [bool(part.any()) for part in parts] == [index == owner for index in range(3)]


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_float_references_and_recomposed_weights_are_the_same_too(
    heads: Artifact, engine: str
) -> None:
    tiny = heads.manifest.chain["tiny"]
    forms = dict.fromkeys(tiny.points, Form.DENSE)
    for ranges in (None, heads.ranges("tiny")):
        graphs = [assemble(heads, tiny, forms, ranges, 7, g) for g in ((), candidates(heads))]
        assert count(graphs[1], "MatMul") == count(graphs[0], "MatMul") - 2
        assert_same(engine, graphs[0], graphs[1], VECTORS)


def test_what_fits_no_product_runs_separately(heads: Artifact) -> None:
    separate = graph_of(heads, "tiny", (), mixed := {"second": Form.DENSE})
    for groups, forms in (
        ([("first", "second", "third")], mixed),
        ([("first", "twice")], mixed),
        ([("first",)], mixed),
        ([("first", "first"), ()], mixed),
    ):
        assert graph_of(heads, "tiny", groups, forms) == separate
    pair, both = ("third", "first"), [("first", "third"), ("first", "second")]
    assert graph_of(heads, "tiny", [pair], mixed) == graph_of(heads, "tiny", both, mixed)
    assert count(graph_of(heads, "tiny", [pair], mixed), "Split") == 1


def test_an_unknown_layer_is_refused(heads: Artifact) -> None:
    with pytest.raises(CorruptError, match="a group names an unknown layer 'fourth'"):
        graph_of(heads, "max", [("first", "fourth")])


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("form", [Form.FACTORED, Form.DENSE])
def test_synthetic_groups_differ_in_time_alone(engine: str, form: Form) -> None:
    specs = [
        LayerSpec(name, Kind.LINEAR, Factorization.SVD, out, 64, in_size=(8, 1), out_size=(8, 1))
        for name, out in (("q", 64), ("k", 32), ("v", 32))
    ]
    points = [LayerPoint(8, 8)] * 3
    graphs = [synthetic_group(specs, points, form, grouped) for grouped in (False, True)]
    for graph in graphs:
        onnx.checker.check_model(graph, full_check=True)
    assert count(graphs[0], "MatMul") - count(graphs[1], "MatMul") == 2
    assert [d.dim_value for o in graphs[1].graph.output for d in o.type.tensor_type.shape.dim] == [
        1, 8, 64, 1, 8, 32, 1, 8, 32,
    ]  # fmt: skip
    assert_same(engine, graphs[0], graphs[1], example_input(specs[0]))


def test_a_synthetic_group_of_several_forms_is_refused() -> None:
    specs = [LayerSpec(name, Kind.LINEAR, Factorization.SVD, 64, 64) for name in "qk"]
    with pytest.raises(SpecError, match="q, k: not all factored at these points"):
        synthetic_group(specs, [LayerPoint(8, 8), LayerPoint(64, 8)], Form.FACTORED, True)
