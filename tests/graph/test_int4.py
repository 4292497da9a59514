"""Weights of 4 and 8 bits under float activations: every engine's product is the exact one."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from t3c.artifact.reader import Artifact
from t3c.convert import elasticize_, state_of
from t3c.device.execution import Execution
from t3c.engines import ENGINES, open_engine
from t3c.engines.onnxruntime import ONNXRuntime, packed_products
from t3c.engines.openvino import OpenVINO
from t3c.engines.protocol import Array
from t3c.engines.torch import TorchSession
from t3c.errors import SpecError
from t3c.exporter import content
from t3c.exporter.allocate import Allocated
from t3c.exporter.content import topology
from t3c.exporter.described import Described
from t3c.graph.assemble import assemble, candidate_groups
from t3c.graph.builder import Builder, Stage, execution_stages
from t3c.graph.int4 import fits_four_bits, four_bit_codes, four_bit_tensor, pack, products
from t3c.graph.synthetic import synthetic_layer
from t3c.quant.nested import integers as view
from t3c.spec import Factorization, Form, Kind, LayerPoint, LayerSpec, Profile, ProfileChain

SIZES = [(64, 48, 1), (37, 21, 1), (300, 5, 1), (5, 3, 1), (1, 4, 1), (96, 20, 3), (36, 16, 3)]
CASES = [(*size, bits) for size in SIZES for bits in (4, 8)] + [(37, 21, 1, 3), (37, 21, 1, 6)]
FLOAT = TensorProto.FLOAT


def random_stage(columns: int, rows: int, groups: int, bits: int, seed: int = 0) -> Stage:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
    scale = rng.uniform(0.5, 2, (rows, groups)).astype(np.float32)
    return view(codes, bits), scale[:, 0] if groups == 1 else scale


def real(stage: Stage) -> Array:
    """The float weight of a stage, column by column: (rows, columns)."""
    weight, scale = stage
    columns, groups = weight.shape[1], scale.reshape(len(scale), -1)
    of = np.arange(columns) * groups.shape[1] // columns
    return weight.astype(np.float64) * groups[:, of]


def linear(stages: list[Stage], bias: Array | None, rank: int = 3) -> onnx.ModelProto:
    """A linear layer of float activations, its input and output of a rank."""
    columns, rows = stages[0][0].shape[1], len(stages[-1][0])
    builder = Builder(None, "float")
    spec = LayerSpec("layer", Kind.LINEAR, Factorization.SVD, rows, columns)
    added = None if bias is None else builder.constant("bias", bias)
    builder.layer("layer", "linear", spec, stages, "x", added, "y")
    free = [None] * (rank - 1)
    return builder.model(
        [helper.make_tensor_value_info("x", FLOAT, [*free, columns])],
        [helper.make_tensor_value_info("y", FLOAT, [*free, rows])],
    )


def run(engine: str, model: onnx.ModelProto, x: Array) -> Array:
    return open_engine(engine, 1).compile(model).run([x])[0]


def assert_close(got: Array, wanted: Array, tolerance: float = 2e-4) -> None:
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max() <= tolerance * np.abs(wanted).max()


def noise(*shape: int) -> Array:
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 15), min_size=1, max_size=33))
def test_two_codes_fill_a_byte(values: list[int]) -> None:
    codes = np.array(values, dtype=np.uint8)
    packed = pack(codes)
    assert packed.tolist() == [sum(c << 4 * i for i, c in enumerate(values[at : at + 2]))
                               for at in range(0, len(values), 2)]  # fmt: skip
    read = numpy_helper.to_array(four_bit_tensor("codes", codes))
    np.testing.assert_array_equal(read.astype(np.uint8), codes)


@pytest.mark.parametrize("bits", range(2, 9))
def test_views_of_four_bits_and_fewer_fit_and_no_others(bits: int) -> None:
    integers = view(np.arange(256, dtype=np.uint8), bits)
    assert fits_four_bits(integers) == (bits <= 4)
    if bits <= 4:
        np.testing.assert_array_equal(2 * four_bit_codes(integers).astype(int) - 15, integers)


@pytest.mark.parametrize("wrong", [-128, -17, -2, 0, 2, 14, 17])
def test_one_integer_off_the_grid_takes_eight_bits(wrong: int) -> None:
    assert not fits_four_bits(np.array([15, -15, wrong], dtype=np.int8))


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize(("columns", "rows", "groups", "bits"), CASES)
def test_products_are_those_of_the_float_weight(
    engine: str, columns: int, rows: int, groups: int, bits: int
) -> None:
    stage, bias = random_stage(columns, rows, groups, bits), noise(rows)
    model = linear([stage], bias)
    onnx.checker.check_model(model, full_check=True)
    session = open_engine(engine, 1).compile(model)
    for positions in (1, 3):
        x = noise(1, positions, columns)
        assert_close(session.run([x])[0], x.astype(np.float64) @ real(stage).T + bias)


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("groups", [1, 2])
def test_factored_stages_multiply_one_after_the_other(engine: str, groups: int) -> None:
    stages = [random_stage(40, 24, groups, 4, seed=1), random_stage(24, 50, groups, 8, seed=2)]
    x = noise(2, 1, 40)
    wanted = x.astype(np.float64) @ real(stages[0]).T @ real(stages[1]).T
    assert_close(run(engine, linear(stages, None), x), wanted)


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("shape", [(3, 70), (2, 3, 70), (2, 2, 3, 70)])
def test_inputs_of_any_rank(engine: str, shape: tuple[int, ...]) -> None:
    stage = random_stage(70, 20, 1, 4)
    x = noise(*shape)
    x[..., :32] = 0  # a block of zeros
    x[..., 40] *= 1e3  # and one with an outlier
    wanted = x.astype(np.float64) @ real(stage).T
    assert_close(run(engine, linear([stage], None, rank=len(shape)), x), wanted)


@pytest.mark.parametrize(("bits", "kept"), [(4, "u4"), (8, "i8")])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("positions", [1, -1])  # -1: as many as are given
def test_openvino_keeps_the_weight_compressed(
    bits: int, kept: str, groups: int, positions: int
) -> None:
    engine = OpenVINO(1)
    raw = linear([random_stage(256, 256, groups, bits)], noise(256)).SerializeToString()
    model = engine.read(raw)
    model.reshape([1, positions, 256])
    compiled = engine.core.compile_model(model, "CPU", engine.config)
    nodes = compiled.get_runtime_model().get_ordered_ops()
    multiplied = [n for n in nodes if n.get_rt_info()["layerType"].astype(str) == "FullyConnected"]
    assert [n.input_value(1).get_element_type().get_type_name() for n in multiplied] == [kept]
    size, codes = len(compiled.export_model().getvalue()), 256 * 256 * bits // 8
    assert codes <= size <= codes + 4 * 256 * (groups + 2) + 6000


@pytest.mark.parametrize("bits", [4, 8])
def test_onnx_runtime_reads_packed_weights(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = linear([random_stage(256, 256, 1, bits)], None)
    given: list[bytes] = []
    start = ort.InferenceSession

    def spy(raw: bytes, *rest: object) -> ort.InferenceSession:
        given.append(raw)
        return start(raw, *rest)

    monkeypatch.setattr(ort, "InferenceSession", spy)
    ONNXRuntime(1).compile(model)
    kinds = [node.op_type for node in onnx.load_model_from_string(given[0]).graph.node]
    assert kinds.count("MatMulNBits") == 1
    assert not {"Transpose", "Constant"} & set(kinds)
    codes = 256 * 256 * bits // 8
    assert codes <= len(given[0]) <= codes + 256 * 20 + 6000
    assert codes <= model.ByteSize() <= codes + 256 * 4 + 2000


def test_onnx_runtime_shares_what_is_made_of_one_input() -> None:
    builder = Builder(None, "float")
    spec = LayerSpec("a", Kind.LINEAR, Factorization.NONE, 16, 64)
    stages = {name: random_stage(64, 16, 1, 4, seed) for seed, name in enumerate("ab")}
    for name, stage in stages.items():
        builder.layer(name, "linear", spec, [stage], "x", None, f"y{name}")
    model = builder.model(
        [helper.make_tensor_value_info("x", FLOAT, [None, 64])],
        [helper.make_tensor_value_info(f"y{name}", FLOAT, [None, 16]) for name in "ab"],
    )
    kinds = [node.op_type for node in packed_products(model).graph.node]
    assert [kinds.count(kind) for kind in ("MatMulNBits", "Round", "Shape")] == [2, 1, 1]
    x = noise(3, 64)
    got = ONNXRuntime(1).compile(model).run([x])
    for output, stage in zip(got, stages.values(), strict=True):
        assert_close(output, x.astype(np.float64) @ real(stage).T)


def test_only_the_whole_pattern_is_replaced() -> None:
    model = linear([random_stage(64, 16, 1, 4)], None)
    assert len(products(model.graph)) == 1
    read_twice = onnx.ModelProto()
    read_twice.CopyFrom(model)
    made = next(node for node in model.graph.node if node.op_type == "Mul").output[0]
    read_twice.graph.node.append(helper.make_node("Abs", [made], ["seen"]))
    other_middle = onnx.ModelProto()
    other_middle.CopyFrom(model)
    middle = next(t for t in other_middle.graph.initializer if t.name.endswith("weight_middle"))
    middle.CopyFrom(numpy_helper.from_array(np.float32(8), middle.name))
    for changed in (read_twice, other_middle):
        assert products(changed.graph) == []
        assert packed_products(changed) is changed
    spec = LayerSpec("a", Kind.LINEAR, Factorization.NONE, 16, 64)
    rounded = synthetic_layer(spec, LayerPoint(16, 4), Form.DENSE)
    assert packed_products(rounded) is rounded


@pytest.mark.parametrize("scale", [(16, 3), (8, 4), (16, 0)])
def test_groups_that_do_not_divide_a_weight_are_refused(scale: tuple[int, int]) -> None:
    stage = random_stage(64, 16, 1, 4)[0], np.ones(scale, dtype=np.float32)
    with pytest.raises(SpecError, match=r"scales of shape .* for a weight of shape \(16, 64\)"):
        linear([stage], None)


def test_convolutions_take_no_groups_of_scales() -> None:
    builder = Builder(None, "float")
    spec = LayerSpec("conv", Kind.CONV2D, Factorization.NONE, 4, 4, in_size=(8, 8))
    stage = np.ones((4, 4, 1, 1), dtype=np.int8), np.ones((4, 2), dtype=np.float32)
    with pytest.raises(SpecError, match="only linear layers and tables"):
        builder.layer("conv", "conv", spec, [stage], "x", None, "y")


def table(stage: Stage) -> onnx.ModelProto:
    """Rows of a table, of float activations."""
    rows, columns = stage[0].shape
    builder = Builder(None, "float")
    spec = LayerSpec("table", Kind.EMBEDDING, Factorization.NONE, rows, columns)
    builder.layer("table", "embedding", spec, [stage], "x", None, "y")
    return builder.model(
        [helper.make_tensor_value_info("x", TensorProto.INT64, [1, None])],
        [helper.make_tensor_value_info("y", FLOAT, [1, None, columns])],
    )


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize(
    ("columns", "groups", "bits", "stored"),
    [(12, 1, 4, 6), (12, 3, 4, 6), (12, 1, 8, 12), (12, 3, 8, 12), (9, 3, 4, 9)],
)
def test_rows_of_tables(engine: str, columns: int, groups: int, bits: int, stored: int) -> None:
    stage, ids = random_stage(columns, 10, groups, bits), np.array([[3, 9, 0]])
    model = table(stage)
    codes = next(t for t in model.graph.initializer if t.name == "table/table")
    assert len(codes.raw_data) == 10 * stored
    np.testing.assert_allclose(run(engine, model, ids), real(stage)[ids], rtol=1e-6)


def test_recomposed_stages_take_groups_of_scales() -> None:
    stages = [random_stage(40, 24, 2, 4, seed=1), random_stage(24, 50, 3, 8, seed=2)]
    ((dense, _),) = execution_stages(stages, Form.DENSE, 8, exact=True)
    assert_close(dense, real(stages[1]) @ real(stages[0]), 1e-6)


@pytest.mark.parametrize(("bits", "element"), [(4, TensorProto.UINT4), (8, TensorProto.INT8)])
def test_synthetic_layers_hold_the_bits_of_their_point(bits: int, element: int) -> None:
    spec = LayerSpec("a", Kind.LINEAR, Factorization.SVD, 64, 64)
    for rank, form in ((64, Form.DENSE), (8, Form.FACTORED)):
        graph = synthetic_layer(spec, LayerPoint(rank, bits), form, activations="float")
        stages = [p.bits for p in products(graph.graph)]
        assert stages == [bits] * (1 if form is Form.DENSE else 2)
        assert not any(node.op_type == "QuantizeLinear" for node in graph.graph.node)
    recomposed = synthetic_layer(spec, LayerPoint(8, bits), Form.DENSE, activations="float")
    assert [p.bits for p in products(recomposed.graph)] == [8]


class Network(nn.Module):
    """Two layers on one vector, one of them with a bias, and one on both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 32)
        self.last = nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.first(x), self.second(x)], dim=1).relu())


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A factored profile of 4 bits and one of full rank of 8."""
    torch.manual_seed(0)
    model, samples = Network().eval(), torch.randn(32, 64)
    elasticize_(model, samples[:2], calibration=[samples])
    plans = state_of(model).plan.layers
    corners = ((0, 4), (-1, 8))
    ends = [{p.spec.name: LayerPoint(p.ranks[at], bits) for p in plans} for at, bits in corners]
    chain = ProfileChain((Profile("tiny", ends[0]), Profile("max", ends[1])))
    allocated = Allocated.of(chain)
    described = Described(model, topology(model), "network")
    packed = content.pack(described, allocated)
    return content.write(tmp_path_factory.mktemp("network"), packed, allocated, samples)


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize(
    ("name", "cached", "bits"), [("tiny", False, 4), ("tiny", True, 8), ("max", False, 8)]
)
def test_profiles_equal_the_exact_reference(
    artifact: Artifact,
    engine: str,
    name: str,
    cached: bool,
    bits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("t3c.graph.assemble.cache_bytes", lambda: (1 << 30) * cached)
    profile, x = artifact.manifest.chain[name], noise(2, 64)
    forms = dict.fromkeys(profile.points, Form.FACTORED)
    reference = TorchSession(assemble(artifact, profile, forms, ranges=None)).run([x])[0]
    groups = candidate_groups(artifact.graph().graph, artifact.entries)
    assert groups == (("first", "second"),)
    for grouped in ((), groups):
        graph = assemble(artifact, profile, forms, {}, 7, grouped, "float")
        assert {p.bits for p in products(graph.graph)} == {bits}
        assert_close(run(engine, graph, x), reference)


def test_float_activations_are_asked_for(artifact: Artifact) -> None:
    profile = artifact.manifest.chain["tiny"]
    forms = dict.fromkeys(profile.points, Form.FACTORED)
    execution = Execution(profile, forms, artifact.ranges("tiny"))
    assert products(execution.graph(artifact, 8).graph) == []
