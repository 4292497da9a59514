"""Artifacts that are broken on purpose are refused in our own words, and reach for nothing."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from lab.fuzz import Guard, load_all, open_manifest
from lab.mutations import (
    Content,
    mutate,
    mutate_graph,
    mutate_json,
    mutate_tensors,
    mutation_of,
    read_folder,
    sealed,
    write_folder,
)
from t3c.artifact.folder import MANIFEST
from t3c.artifact.manifest import DENSE, FACTORS, GRAPH
from t3c.artifact.manifest_file import parse_manifest
from t3c.artifact.reader import LEDGER, Artifact
from t3c.artifact.upgrade import upgraded
from t3c.cost.proxy import Proxy
from t3c.engines import open_engine
from t3c.errors import CorruptError, SpecError, T3CError, VersionError
from t3c.spec import Factorization, Kind, LayerPoint, LayerSpec

OLD = Path(__file__).parent / "version1.t3c"
BASE = read_folder(OLD)
EVIDENCE = [name for name in BASE if name == LEDGER or name.startswith("devices/")]
seeds = st.integers(0, 2**32)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "case.t3c"


@pytest.fixture(scope="module")
def guard(place: Path) -> Iterator[Guard]:
    watching = Guard(place.parent)
    yield watching
    watching.stop()


def opened(content: Content, place: Path, engine: str | None = None) -> str:
    shutil.rmtree(place, ignore_errors=True)
    write_folder(content, place)
    return load_all(place, open_engine(engine, 1) if engine else None)


@settings(max_examples=400)
@given(seeds)
def test_a_manifest_that_was_edited_is_read_or_refused(seed: int) -> None:
    try:
        open_manifest(mutate_json(BASE[MANIFEST], Random(seed)))
    except T3CError:
        return


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)


@settings(max_examples=150)
@given(st.data(), json_values)
def test_any_value_may_stand_anywhere_in_a_manifest(data: st.DataObject, value: Any) -> None:
    manifest = json.loads(BASE[MANIFEST])
    manifest["schema_version"] = data.draw(st.sampled_from([1, 2, 3, 4]))
    holder: Any = manifest
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(holder[key], dict | list) or not holder[key] or data.draw(st.booleans()):
            break
        holder = holder[key]
    holder[key] = value
    try:
        open_manifest(json.dumps(manifest).encode())
    except T3CError:
        return


@settings(max_examples=40)
@given(seeds, st.sampled_from([GRAPH, FACTORS, DENSE, *EVIDENCE]))
def test_a_file_that_was_edited_is_read_or_refused(place: Path, seed: int, name: str) -> None:
    opened(sealed({**BASE, name: mutation_of(name)(BASE[name], Random(seed))}), place)


def test_edits_are_sealed_and_reach_what_reads_them(place: Path) -> None:
    assert opened(BASE, place, "onnxruntime") == "loaded"
    assert opened(sealed(BASE), place, "onnxruntime") == "loaded"
    body = BASE[FACTORS][:-1] + bytes([BASE[FACTORS][-1] ^ 1])
    assert opened({**BASE, FACTORS: body}, place) == "CorruptError"  # its hash
    assert opened(sealed({**BASE, FACTORS: body}), place) == "loaded"
    kinds = {mutation_of(name) for name in BASE}
    assert {mutate_graph, mutate_tensors, mutate_json} <= kinds
    assert mutate(BASE, Random(5)) == mutate(BASE, Random(5)) != BASE


def test_nothing_outside_is_opened_and_nothing_is_run(place: Path, guard: Guard) -> None:
    engine = open_engine("onnxruntime", 1)
    write_folder(BASE, place)
    load_all(place, engine)  # what is imported late is imported now
    for seed in range(25):
        shutil.rmtree(place)
        write_folder(mutate(BASE, Random(seed)), place)
        guard.start()
        load_all(place, engine if seed % 5 == 0 else None)
        assert guard.stop() == []


def test_the_guard_sees_what_it_is_for(guard: Guard, tmp_path: Path) -> None:
    (tmp_path / "secret").touch()
    guard.start()
    (tmp_path / "secret").read_bytes()
    exec(compile("1", "artifact", "exec"))
    sys.audit("subprocess.Popen", "true")
    told = " ".join(guard.stop())
    assert "secret" in told
    assert "code of artifact" in told
    assert "subprocess.Popen" in told


def edited(change: Callable[[onnx.ModelProto], object]) -> Content:
    model = onnx.load_model_from_string(BASE[GRAPH])
    change(model)
    return sealed({**BASE, GRAPH: model.SerializeToString()})


def external(model: onnx.ModelProto) -> TensorProto:
    tensor: TensorProto = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../etc/passwd")
    return tensor


def add(model: onnx.ModelProto, *args: Any, **given: Any) -> None:
    model.graph.node.insert(0, helper.make_node(*args, **given))


def named(model: onnx.ModelProto, attribute: str, value: bytes) -> None:
    (found,) = [a for a in model.graph.node[2].attribute if a.name == attribute]
    found.s = value


BODY = helper.make_graph([], "body", [], [])
GRAPHS: dict[str, tuple[Callable[[onnx.ModelProto], object], str]] = {
    "external constant": (external, "outside of the graph"),
    "external in a node": (
        lambda m: add(m, "Constant", [], ["x"], value=external(m)), "outside of the graph",
    ),
    "body": (lambda m: add(m, "If", ["input"], ["x"], then_branch=BODY), "graph of its own"),
    "other domain": (lambda m: add(m, "Relu", ["input"], ["x"], domain="com.x"), "not of ONNX"),
    "unknown operation": (lambda m: add(m, "Nothing", ["input"], ["x"]), "No Op registered"),
    "loose end": (lambda m: add(m, "Relu", ["nobody"], ["x"]), "nobody"),
    "cycle": (lambda m: add(m, "Relu", ["x"], ["x"]), "x"),
    "no output": (lambda m: add(m, "Relu", ["input"], []), "no output"),
    "huge constant": (lambda m: m.graph.initializer[0].dims.append(2**40), "does not hold"),
    "negative sizes": (lambda m: m.graph.initializer[0].dims.append(-1), "no constant of numbers"),
    "short constant": (
        lambda m: setattr(m.graph.initializer[0], "raw_data", b"\0" * 7), "multiple",
    ),
    "unknown layer": (lambda m: named(m, "layer", b"nobody"), "unknown layer 'nobody'"),
    "unknown kind": (lambda m: named(m, "kind", b"linear"), "cannot be used as 'linear'"),
    "layer that is no text": (lambda m: named(m, "layer", b"\xff"), "decode"),
    "no input": (lambda m: m.graph.node[2].ClearField("input"), "an elastic layer has"),
    "opset": (lambda m: setattr(m.opset_import[0], "version", 9), "opset 21"),
    "function": (
        lambda m: m.functions.append(helper.make_function("x", "f", [], [], [], [])), "functions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_is_checked_before_an_engine_sees_it(name: str, place: Path) -> None:
    change, reason = GRAPHS[name]
    opened(edited(change), place)
    with pytest.raises(CorruptError, match=reason):
        Artifact(place).graph()


def test_text_that_is_no_text_is_refused(place: Path) -> None:
    assert opened(sealed({**BASE, GRAPH: BASE[GRAPH].replace(b"relu_1", b"rel\xff_1")}), place) == (
        "CorruptError"
    )


def manifest_with(change: Callable[[Any], object]) -> bytes:
    data = json.loads(BASE[MANIFEST])
    change(data)
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["layers"][0]["spec"].update(tile=0),
        lambda m: m["layers"][0]["spec"].update(runs=10**400),
        lambda m: m["layers"][0]["spec"].update(in_size=[2**40, 6]),
        lambda m: m["layers"][0]["menu"][-1].update(rank=10**400),
        lambda m: m["profiles"][0].update(size_bytes=10**400),
        lambda m: m["model"]["inputs"][0].update(shape=[None, 1, 2**20, 2**20]),
        lambda m: m["model"]["inputs"][0].update(shape=[None, 1, -6, 6]),
    ],
)
def test_numbers_that_cannot_be_are_refused(change: Callable[[Any], object]) -> None:
    with pytest.raises(CorruptError):
        parse_manifest(manifest_with(change), Path(MANIFEST))


def test_a_version_that_is_anything_is_told_in_a_line() -> None:
    nested: Any = 0
    for _ in range(900):
        nested = [nested]
    with pytest.raises(VersionError) as told:
        upgraded({"schema_version": nested}, Path("x"))
    assert len(str(told.value)) < 300
    with pytest.raises(VersionError) as told:
        upgraded({"schema_version": "9" * 10**6}, Path("x"))
    assert len(str(told.value)) < 300


def tensors_with(name: str, change: Callable[[Any], object]) -> Content:
    raw = BASE[name]
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return sealed({**BASE, name: len(text).to_bytes(8, "little") + text + raw[8 + size :]})


def test_tensors_of_other_types_and_shapes_are_refused(place: Path) -> None:
    def flat(header: Any) -> None:
        entry = header["2/dense/block0"]
        entry["shape"] = [entry["shape"][0] * entry["shape"][1]]

    def signed(header: Any) -> None:
        header["2/dense/block0"]["dtype"] = "I8"

    def other(header: Any) -> None:
        header["plain.0.bias"].update(dtype="BF16", shape=[32])

    for name, change in ((FACTORS, flat), (FACTORS, signed), (DENSE, other)):
        assert opened(tensors_with(name, change), place) == "CorruptError"


def test_layers_and_proxies_are_of_possible_sizes() -> None:
    with pytest.raises(SpecError, match="axes"):
        LayerSpec("x", Kind.CONV1D, Factorization.NONE, 8, 8)
    with pytest.raises(SpecError, match="groups"):
        LayerSpec("x", Kind.CONV2D, Factorization.TUCKER2, 8, 8, (3, 3), groups=2)
    with pytest.raises(SpecError, match="at most"):
        LayerPoint(2**31, 8)
    for coefficient in (-1.0, 1e300, float("nan")):
        with pytest.raises(SpecError, match="coefficients"):
            Proxy({"constant": coefficient}, 3)
