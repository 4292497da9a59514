"""Files for TensorRT: what is written runs, and each thing TensorRT would not take is found."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor, nn

from conftest import Made
from t3c.artifact.devices import choose_forms
from t3c.artifact.reader import Artifact
from t3c.convert import elasticize_, state_of
from t3c.device.machine import describe
from t3c.engines import open_engine
from t3c.engines.torch import TorchSession
from t3c.errors import EngineError
from t3c.exporter.allocate import Allocated
from t3c.exporter.content import pack, topology, write
from t3c.exporter.described import Described
from t3c.graph import tensorrt, tensorrt_rules
from t3c.graph.assemble import assemble, candidate_groups
from t3c.graph.tensorrt import problems, tensorrt_model, write_tensorrt
from t3c.quant.grid import activation_grid
from t3c.spec import Form, LayerPoint, Profile, ProfileChain

Array = np.ndarray
Pick = Callable[[Sequence[Any]], Any]


class Words(nn.Module):
    """A table, attention, layer norms: a transformer of one block."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 64)
        self.block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.head = nn.Linear(64, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.table(ids)))


@pytest.fixture(scope="module")
def digits_artifact(made: Made) -> tuple[Artifact, Array]:
    return Artifact(made.artifact), made.digits.test[0][:24].numpy()


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, Array]:
    torch.manual_seed(0)
    model, ids = Words().eval(), torch.randint(0, 100, (24, 12))
    elasticize_(model, ids[:2], calibration=[ids])
    plans = state_of(model).plan.layers
    ends = [{p.spec.name: LayerPoint(p.ranks[i], p.bits[-1]) for p in plans} for i in (0, -1)]
    chain = ProfileChain((Profile("tiny", ends[0]), Profile("max", ends[1])))
    allocated = Allocated.of(chain)
    packed = pack(Described(model, topology(model), "words"), allocated)
    artifact = write(tmp_path_factory.mktemp("words"), packed, allocated, ids)
    return artifact, ids.numpy()


@pytest.fixture(scope="module", params=["digits", "words"])
def case(request: pytest.FixtureRequest) -> tuple[Artifact, Array]:
    name = {"digits": "digits_artifact", "words": "words"}[request.param]
    found: tuple[Artifact, Array] = request.getfixturevalue(name)
    return found


@pytest.fixture(scope="module")
def good(digits_artifact: tuple[Artifact, Array]) -> ModelProto:
    """A graph of factored and of dense layers."""
    artifact = digits_artifact[0]
    return tensorrt_model(artifact, next(iter(artifact.manifest.chain)))


def literally(path: Path, x: Array) -> Array:
    """What a file computes as it stands, without fusions: in float, on the grids it names."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(path, options, ["CPUExecutionProvider"])
    output: Array = session.run(None, {session.get_inputs()[0].name: x})[0]
    return output


def distance(one: Array, other: Array) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def test_a_written_file_runs_and_computes_what_the_profile_does(
    case: tuple[Artifact, Array], tmp_path: Path
) -> None:
    artifact, x = case
    for profile in artifact.manifest.chain:
        path = tmp_path / f"{profile.name}.onnx"
        model = write_tensorrt(artifact, profile, path)
        assert onnx.load(path) == model
        assert problems(model) == []
        output = literally(path, x)
        assert distance(output, TorchSession(model).run([x])[0]) < 1e-2
        forms, ranges = (
            choose_forms((), artifact.manifest.specs, profile.points),
            artifact.ranges(profile.name),
        )
        usual, exact = (
            TorchSession(assemble(artifact, profile, forms, r)).run([x])[0] for r in (ranges, None)
        )
        # A tensor that is never negative is rounded twice as coarsely; others as before.
        rounding = distance(usual, exact)
        assert rounding > 1e-4
        assert distance(output, usual) < 4 * rounding
        assert distance(output, exact) < 3 * rounding


@pytest.mark.parametrize("form", [Form.FACTORED, Form.DENSE])
def test_both_forms_and_groups_are_taken_and_runs_in_int8(
    case: tuple[Artifact, Array], form: Form
) -> None:
    artifact, x = case
    engine = open_engine("onnxruntime", 1)
    groups = candidate_groups(artifact.graph().graph, artifact.entries)
    bits = describe(engine).weight_bits
    for profile in artifact.manifest.chain:
        forms = dict.fromkeys(profile.points, form)
        model = tensorrt_model(artifact, profile, forms, weight_bits=bits, grouped=groups)
        assert problems(model) == []
        assert distance(engine.compile(model).run([x])[0], TorchSession(model).run([x])[0]) < 2e-2


def test_grids_are_signed_and_a_table_is_float(
    digits_artifact: tuple[Artifact, Array], words: tuple[Artifact, Array]
) -> None:
    artifact = digits_artifact[0]
    profile = artifact.manifest.chain["max"]
    ranges, forms = artifact.ranges("max"), dict.fromkeys(profile.points, Form.DENSE)
    usual = assemble(artifact, profile, forms, ranges)
    unsigned = {name for name, (low, _) in ranges.items() if low >= 0}
    told = [line for line in problems(usual) if line.startswith("QuantizeLinear")]
    found = {line.split("'")[1].removesuffix("/codes") for line in told}
    assert {name.partition("/rounded/stride")[0] for name in found} == unsigned != set()
    model = tensorrt_model(artifact, profile, forms)
    before, after = (
        {i.name: numpy_helper.to_array(i) for i in m.graph.initializer} for m in (usual, model)
    )
    for name in ranges:
        wider = 255 / 127 if name in unsigned else 1.0
        assert after[f"{name}/scale"] == pytest.approx(before[f"{name}/scale"] * wider, rel=1e-6)
    artifact = words[0]
    model = tensorrt_model(artifact, artifact.manifest.chain["tiny"])
    (table,) = (i for i in model.graph.initializer if i.name.endswith("/table"))
    assert table.data_type == TensorProto.FLOAT
    ((codes, scale),) = artifact.stages("table", artifact.manifest.chain["tiny"].points["table"])
    np.testing.assert_array_equal(numpy_helper.to_array(table), codes * scale[:, None])


@given(st.floats(-1e6, 1e6, width=32), st.floats(0, 1e6, width=32))
def test_any_range_becomes_a_signed_grid_that_holds_it(low: float, width: float) -> None:
    high = low + width
    scale, zero = activation_grid(*tensorrt._signed({"x": (low, high)})["x"])
    assert zero.dtype == np.int8
    assert scale > 0
    assert scale * 127 * (1 + 1e-6) >= max(-low, high)


# Each changes one thing of a good model and returns what must be told of it, and the name in it.


def nodes(model: ModelProto, *kinds: str) -> list[NodeProto]:
    return [node for node in model.graph.node if node.op_type in kinds]


def constants(model: ModelProto) -> dict[str, TensorProto]:
    return {tensor.name: tensor for tensor in model.graph.initializer}


def weights(model: ModelProto) -> list[NodeProto]:
    return [n for n in nodes(model, "DequantizeLinear") if n.input[0] in constants(model)]


def products(model: ModelProto) -> list[NodeProto]:
    made = {node.output[0] for node in weights(model)}
    return [node for node in nodes(model, "Conv", "MatMul") if node.input[1] in made]


def put(model: ModelProto, name: str, value: Any) -> str:
    """Set or add a constant."""
    tensor = numpy_helper.from_array(np.asarray(value), name)
    if name in constants(model):
        constants(model)[name].CopyFrom(tensor)
    else:
        model.graph.initializer.append(tensor)
    return name


Told = tuple[str, str]


def unsigned(model: ModelProto, pick: Pick) -> Told:
    node = pick(nodes(model, "QuantizeLinear"))
    put(model, node.input[2], np.uint8(0))
    return node.name, "quantizes to UINT8, and only INT8 is taken"


def asymmetric(model: ModelProto, pick: Pick) -> Told:
    node = pick(nodes(model, "QuantizeLinear"))
    put(model, node.input[2], np.int8(pick([-128, -1, 1, 127])))
    return node.name, "its zero point '.*' is not 0"


def asymmetric_weight(model: ModelProto, pick: Pick) -> Told:
    node = pick(weights(model))
    zeros = np.zeros(constants(model)[node.input[1]].dims, np.int8)
    zeros[pick(range(len(zeros)))] = 1
    node.input.append(put(model, "zeros", zeros))
    return node.name, "its zero point 'zeros' is not 0"


def no_zero_point(model: ModelProto, pick: Pick) -> Told:
    node = pick(nodes(model, "QuantizeLinear"))
    del node.input[2]
    return node.name, "is unsigned"


def zero_point_computed(model: ModelProto, pick: Pick) -> Told:
    node = pick(nodes(model, "QuantizeLinear", "DequantizeLinear"))
    node.input[:] = [*node.input[:2], "input"]
    return node.name, "its zero point 'input' is no constant"


def no_scale(model: ModelProto, pick: Pick) -> Told:
    node = pick(nodes(model, "QuantizeLinear", "DequantizeLinear"))
    del node.input[1:]
    return node.name, "its scale is missing"


def scale_computed(model: ModelProto, pick: Pick) -> Told:
    node = pick(nodes(model, "QuantizeLinear", "DequantizeLinear"))
    node.input[1] = "input"
    return node.name, "its scale 'input' is no constant"


def scale_not_positive(model: ModelProto, pick: Pick) -> Told:
    node = pick(nodes(model, "QuantizeLinear", "DequantizeLinear"))
    scale = numpy_helper.to_array(constants(model)[node.input[1]]).copy()
    scale.flat[pick(range(scale.size))] = pick([0.0, -1.0, np.nan, np.inf])
    put(model, node.input[1], scale)
    return node.name, "its scale '.*' is not positive"


def scale_in_double(model: ModelProto, pick: Pick) -> Told:
    node = pick(weights(model))
    scale = numpy_helper.to_array(constants(model)[node.input[1]])
    put(model, node.input[1], scale.astype(np.float64))
    return node.name, "is not float32"


def several_scales(model: ModelProto, pick: Pick) -> Told:
    node = pick(nodes(model, "QuantizeLinear"))
    put(model, node.input[1], np.ones(3, np.float32))
    return node.name, "has several scales"


def blocks(model: ModelProto, pick: Pick) -> Told:
    node = pick(weights(model))
    node.attribute.append(helper.make_attribute("block_size", 32))
    return node.name, "has scales per block"


def weight_by_inputs(model: ModelProto, pick: Pick) -> Told:
    """The scales on the axis of the inputs, and as many as that has."""
    node = pick([w for w in weights(model) if constants(model)[w.input[0]].dims[1] > 1])
    axis = 1 - node.attribute[0].i
    node.attribute[0].i = axis
    put(model, node.input[1], np.ones(constants(model)[node.input[0]].dims[axis], np.float32))
    return node.name, rf"its scales lie on axis {axis}, the outputs of '.*' on {1 - axis}"


def too_few_scales(model: ModelProto, pick: Pick) -> Told:
    node = pick(weights(model))
    scale = numpy_helper.to_array(constants(model)[node.input[1]])
    put(model, node.input[1], scale[:-1])
    return node.name, "scales do not fit axis"


def weight_unsigned(model: ModelProto, pick: Pick) -> Told:
    node = pick(weights(model))
    put(model, node.input[0], np.zeros(constants(model)[node.input[0]].dims, np.uint8))
    return node.name, "its weight is UINT8"


def codes_unpaired(model: ModelProto, pick: Pick) -> Told:
    node = pick(nodes(model, "QuantizeLinear"))
    (reader,) = (n for n in model.graph.node if node.output[0] in n.input)
    for other in model.graph.node:
        other.input[:] = [node.output[0] if i == reader.output[0] else i for i in other.input]
    model.graph.node.remove(reader)
    return node.name, "without its DequantizeLinear"


def codes_unread(model: ModelProto, pick: Pick) -> Told:
    node = pick(nodes(model, "QuantizeLinear"))
    model.graph.node.append(
        helper.make_node("QuantizeLinear", list(node.input), ["spare"], "spare")
    )
    return "spare", "without its DequantizeLinear"


def codes_given_out(model: ModelProto, pick: Pick) -> Told:
    node = pick(nodes(model, "QuantizeLinear"))
    model.graph.output.append(
        helper.make_tensor_value_info(node.output[0], TensorProto.INT8, ["batch"])
    )
    return node.name, "without its DequantizeLinear"


def another_grid(model: ModelProto, pick: Pick) -> Told:
    node = pick(nodes(model, "QuantizeLinear"))
    (reader,) = (n for n in model.graph.node if node.output[0] in n.input)
    reader.input[1] = put(model, "other", np.float32(3.0))
    return node.name, f"its scale is not that of '{reader.name}'"


def no_codes(model: ModelProto, pick: Pick) -> Told:
    node = pick(nodes(model, "DequantizeLinear"))
    node.input[0] = "input"
    return node.name, "reads 'input', which is no QuantizeLinear and no constant"


def float_input(model: ModelProto, pick: Pick) -> Told:
    node = pick(products(model))
    node.input[0] = "input"
    return node.name, "its weight is int8 and its input 'input' is not"


def quantized_bias(model: ModelProto, pick: Pick) -> Told:
    node = pick([n for n in products(model) if n.op_type == "Conv"])
    outputs = constants(model)[weights(model)[0].input[1]].dims[0]
    codes = [put(model, "codes", np.zeros(outputs, np.int8)), put(model, "s", np.float32(1))]
    dequantized = helper.make_node("DequantizeLinear", codes, ["bias/float"])
    model.graph.node.insert(0, dequantized)
    node.input[:] = [*node.input[:2], "bias/float"]
    return node.name, "its bias 'bias/float' is not in float"


def int8_elsewhere(model: ModelProto, pick: Pick) -> Told:
    node = pick(weights(model))
    model.graph.node.append(helper.make_node("Neg", [node.input[0]], ["spare"]))
    return node.input[0], "INT8 outside of QuantizeLinear and DequantizeLinear"


def custom_node(model: ModelProto, pick: Pick) -> Told:
    node = pick(list(model.graph.node))
    node.domain = pick(["t3c", "com.microsoft"])
    return node.name, f"belongs to the custom domain '{node.domain}'"


def custom_import(model: ModelProto, pick: Pick) -> Told:
    model.opset_import.append(helper.make_opsetid("t3c", 1))
    return "t3c", "imports the custom domain"


def opset_too_new(model: ModelProto, pick: Pick) -> Told:
    model.opset_import[0].version = pick([8, 25, 28])
    return str(model.opset_import[0].version), "opset .* is not from 9 to 24"


def ir_too_new(model: ModelProto, pick: Pick) -> Told:
    model.ir_version = 13
    return "13", "IR version 13 is newer"


def function_inside(model: ModelProto, pick: Pick) -> Told:
    model.functions.add().name = "twice"
    return "twice", "defines the function"


def unknown_operator(model: ModelProto, pick: Pick) -> Told:
    node = pick([n for n in model.graph.node if not n.op_type.endswith("Linear")])
    node.op_type = pick(["Det", "QLinearConv", "ConvInteger", "DynamicQuantizeLinear", "Loop"])
    return node.name, "TensorRT has no such operator"


def free_axis(model: ModelProto, pick: Pick) -> Told:
    value = pick([*model.graph.input, *model.graph.output])
    axis = pick(range(len(value.type.tensor_type.shape.dim)))
    size = value.type.tensor_type.shape.dim[axis]
    size.Clear()
    if name := pick(["", "height"]):
        size.dim_param = name
    return value.name, f"axis {axis}.* has no fixed size"


def rank_unknown(model: ModelProto, pick: Pick) -> Told:
    value = pick([*model.graph.input, *model.graph.output])
    value.type.tensor_type.ClearField("shape")
    return value.name, "its rank is not known"


def unsigned_input(model: ModelProto, pick: Pick) -> Told:
    value = pick([*model.graph.input, *model.graph.output])
    value.type.tensor_type.elem_type = TensorProto.UINT8
    return value.name, "UINT8 is no type"


def outside(model: ModelProto, pick: Pick) -> Told:
    tensor = pick(list(model.graph.initializer))
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    return tensor.name, "lies outside of the file"


def sparse(model: ModelProto, pick: Pick) -> Told:
    model.graph.sparse_initializer.add().values.name = "few"
    return "few", "is sparse"


MUTATIONS = [
    unsigned, asymmetric, asymmetric_weight, no_zero_point, zero_point_computed, no_scale,
    scale_computed, scale_not_positive, scale_in_double, several_scales, blocks, weight_by_inputs,
    too_few_scales, weight_unsigned, codes_unpaired, codes_unread, codes_given_out, another_grid,
    no_codes, float_input, quantized_bias, int8_elsewhere, custom_node, custom_import,
    opset_too_new, ir_too_new, function_inside, unknown_operator, free_axis, rank_unknown,
    unsigned_input, outside, sparse,
]  # fmt: skip


@pytest.mark.parametrize("mutate", MUTATIONS)
@settings(max_examples=8)
@given(data=st.data())
def test_each_fault_is_told_and_named(
    good: ModelProto, mutate: Callable[[ModelProto, Pick], Told], data: st.DataObject
) -> None:
    model = ModelProto()
    model.CopyFrom(good)
    name, told = mutate(model, lambda options: data.draw(st.sampled_from(options)))
    lines = problems(model)
    assert any(name in line and re.search(told, line) for line in lines), (name, told, lines)
    assert all("\n" not in line for line in lines)


def alone(kind: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> list[str]:
    """What is told of a graph of one node."""
    names = ["y", "more"][:outputs]
    graph = helper.make_graph(
        [helper.make_node(kind, inputs, names, "it", **attributes)], "one",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4, 8, 8]),
            helper.make_tensor_value_info("axes", TensorProto.INT64, [1]),
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch"] * 4) for name in names],
        [
            numpy_helper.from_array(np.array([2]), "two"),
            numpy_helper.from_array(np.ones(8, np.float32), "ones"),
        ],
    )  # fmt: skip
    opset = [helper.make_opsetid("", 20)]
    return problems(helper.make_model(graph, opset_imports=opset, ir_version=9))


def test_limits_of_operators_are_kept() -> None:
    pool = {"kernel_shape": [2, 2]}
    assert alone("MaxPool", ["x"], **pool) == alone("ReduceSum", ["x", "two"]) == []
    assert alone("LayerNormalization", ["x", "ones"]) == []
    assert alone("AveragePool", ["x"], kernel_shape=[2]) == [
        "AveragePool 'it': pools over 2 or 3 axes alone are taken"
    ]
    assert alone("MaxPool", ["x"], dilations=[1, 2], **pool) == [
        "MaxPool 'it': its dilations are not 1"
    ]
    for kind, inputs, attributes in (
        ("MaxPool", ["x"], pool),
        ("LayerNormalization", ["x", "ones"], {}),
    ):
        assert alone(kind, inputs, 2, **attributes) == [f"{kind} 'it': has more than one output"]
    for kind in ("ReduceSum", "CumSum"):
        assert alone(kind, ["x", "axes"]) == [f"{kind} 'it': its axes 'axes' are no constant"]


@pytest.mark.parametrize(("turned", "outputs"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("axis", [0, 1])
def test_outputs_of_a_gemm_lie_where_its_weight_is_turned(
    turned: int, outputs: int, axis: int
) -> None:
    graph = helper.make_graph(
        [
            helper.make_node("QuantizeLinear", ["x", "one", "zero"], ["codes"]),
            helper.make_node("DequantizeLinear", ["codes", "one", "zero"], ["rounded"]),
            helper.make_node("DequantizeLinear", ["weight", "scales"], ["float"], axis=axis),
            helper.make_node("Gemm", ["rounded", "float"], ["y"], transB=turned),
        ],
        "gemm",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8])],
    )
    opset = [helper.make_opsetid("", 20)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=9)
    put(model, "weight", np.ones((8, 8), np.int8))
    put(model, "scales", np.ones(8, np.float32))
    put(model, "one", np.float32(1))
    put(model, "zero", np.int8(0))
    wrong = f"its scales lie on axis {axis}, the outputs of 'y' on {outputs}"
    assert problems(model) == ([] if axis == outputs else [f"DequantizeLinear 'float': {wrong}"])


def test_every_tensor_must_be_in_the_file_and_the_file_not_too_large(
    good: ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(len(good.graph.initializer)):
        model = ModelProto()
        model.CopyFrom(good)
        name, _ = outside(model, lambda options, at=index: options[at])
        assert f"initializer {name!r}: lies outside of the file" in problems(model)
    monkeypatch.setattr(tensorrt_rules, "LIMIT_BYTES", good.ByteSize())
    assert problems(good) == [f"model: {good.ByteSize()} bytes are more than one file may hold"]


def test_only_named_axes_may_vary(good: ModelProto) -> None:
    assert problems(good, dynamic=()) == [
        f"tensor {name!r}: axis 0 ('batch') has no fixed size" for name in ("input", "output")
    ]


def test_a_rank_that_cannot_be_inferred_is_told(good: ModelProto) -> None:
    model = ModelProto()
    model.CopyFrom(good)
    shape = helper.make_tensor_value_info("shape", TensorProto.INT64, ["batch"])
    model.graph.input.append(shape)
    model.graph.node.append(helper.make_node("Reshape", ["input", "shape"], ["spare"]))
    assert problems(model) == ["Reshape 'spare': the rank of its output is not known"]


@pytest.mark.parametrize("mutate", [unsigned, custom_node, free_axis, outside])
def test_nothing_is_written_of_what_fails(
    digits_artifact: tuple[Artifact, Array],
    good: ModelProto,
    mutate: Callable[[ModelProto, Pick], Told],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ModelProto()
    model.CopyFrom(good)
    mutate(model, lambda options: options[0])
    monkeypatch.setattr(tensorrt, "tensorrt_model", lambda *_, **__: model)
    artifact, path = digits_artifact[0], tmp_path / "m.onnx"
    profile = artifact.manifest.chain["max"]
    found = [*tensorrt._refusals(model), *problems(model)]
    with pytest.raises(EngineError) as refused:
        write_tensorrt(artifact, profile, path)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    assert str(refused.value) == f"{path}: not for TensorRT: {found[0]}{more}"
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"before")
    with pytest.raises(EngineError):
        write_tensorrt(artifact, profile, path)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"before"]


def test_what_onnx_refuses_comes_first(good: ModelProto) -> None:
    model = ModelProto()
    model.CopyFrom(good)
    model.graph.node[0].input[0] = "nowhere"
    (line,) = tensorrt._refusals(model)
    assert line.startswith("ONNX refuses it: ")
    assert "nowhere" in line or "Nodes in a graph must be topologically sorted" in line
    assert tensorrt._refusals(good) == []
