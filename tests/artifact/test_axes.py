"""Axes that are free under a name, from the trace to every engine."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

import t3c
from conftest import LIGHT, quick, supply_times
from t3c.artifact.graph import to_onnx
from t3c.artifact.manifest import TensorEntry
from t3c.convert import elasticize_, state_of
from t3c.device.execution import example_inputs
from t3c.engines import ENGINES, open_engine
from t3c.engines.openvino import OpenVINO
from t3c.errors import ConvertError, DataError, SpecError
from t3c.exporter import ExportConfig, Exported, export
from t3c.graph.assemble import assemble
from t3c.nn.inputs import call, select
from t3c.nn.view import at
from t3c.runtime.runtime import Runtime
from t3c.spec import Goal

transformers = pytest.importorskip("transformers")
LENGTHS = (3, 7, 16)
SEQUENCE = {1: "sequence"}
# ONNX Runtime rounds what it multiplies by stored weights a little, in any graph.
TOLERANCE = {"torch": 1e-5, "openvino": 1e-5, "onnxruntime": 2e-3}


@dataclass(frozen=True)
class Free:
    """A model, its artifact with a free sequence, and what was exported."""

    model: nn.Module
    path: Path
    exported: Exported

    def samples(self, length: int, batch: int = 2) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(0, 100, (batch, length), generator=generator)
        if list(state_of(self.model).example) == ["input_ids"]:
            return {"input_ids": ids}
        mask = torch.ones_like(ids)
        mask[0, length // 2 + 1 :] = 0
        return {"input_ids": ids, "attention_mask": mask}

    def wanted(self, inputs: dict[str, Tensor]) -> Any:
        """What the stored weights of the smallest profile are to give."""
        with torch.no_grad(), at(self.model, self.exported.profiles["tiny"]):
            return call(self.model, inputs).numpy()

    def graph(self, runtime: Runtime) -> onnx.ModelProto:
        """The smallest profile, nothing rounded but its weights."""
        profile = runtime.chain["tiny"]
        return assemble(runtime.artifact, profile, runtime.forms["tiny"], ranges=None)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).eval()


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=128, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module", params=[bert, llama])
def free(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Free:
    torch.manual_seed(0)
    model = request.param()
    samples = {"input_ids": torch.randint(0, 100, (60, 9))}
    if request.param is bert:
        samples["attention_mask"] = torch.ones(60, 9, dtype=torch.long)
    elasticize_(model, select(samples, slice(0, 2)), calibration=[samples])
    path = tmp_path_factory.mktemp("free") / "m.t3c"
    wanted = ExportConfig(
        goal=Goal(profiles=2, worst_drift=1.0),
        timing=quick(3),
        certificate=replace(LIGHT, delta=0.1),
    )
    with pytest.MonkeyPatch.context() as patch:
        supply_times(patch)
        if request.param is llama:  # its second trace takes long
            patch.setattr(sys.modules["t3c.exporter.export"], "to_original", _refuse)
        exported = export(model, path, [samples], wanted, axes=dict.fromkeys(samples, SEQUENCE))
    return Free(model, path, exported)


def _refuse(*_: object, **__: object) -> onnx.ModelProto:
    raise DataError("not asked for")


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_every_length_is_what_torch_gives(free: Free, engine: str) -> None:
    runtime = t3c.load(free.path, engine, 1)
    session = runtime.engine.compile(free.graph(runtime))
    for length in LENGTHS:
        inputs = free.samples(length)
        arrays = {name: value.numpy() for name, value in inputs.items()}
        got, wanted = session.run(list(arrays.values()))[0], free.wanted(inputs)
        assert np.linalg.norm(got - wanted) < TOLERANCE[engine] * np.linalg.norm(wanted)
        # With activations rounded as well, at a length that their ranges were not seen at.
        served = runtime(arrays, profile="tiny")
        assert np.linalg.norm(served - wanted) < 0.1 * np.linalg.norm(wanted)


def test_openvino_compiles_once_what_agrees_with_fixed_lengths(free: Free) -> None:
    runtime, engine = t3c.load(free.path, "openvino", 1), OpenVINO(1)
    for graph in (free.graph(runtime), runtime.graph(runtime.chain["tiny"])):
        session = engine.compile(graph)
        for length in LENGTHS:
            given = [value.numpy() for value in free.samples(length).values()]
            fixed = engine.compile_read(engine.read(graph.SerializeToString())).run(given)[0]
            np.testing.assert_allclose(session.run(given)[0], fixed, atol=1e-6)
        assert len(session.compiled) == 1
    session.run([value.numpy() for value in free.samples(4, batch=1).values()])
    assert len(session.compiled) == 2


def test_the_manifest_names_the_axis_and_keeps_its_example(free: Free) -> None:
    runtime = t3c.load(free.path, "torch", 1)
    assert {entry.shape for entry in runtime.inputs} == {(None, "sequence")}
    assert {entry.example for entry in runtime.inputs} == {(1, 9)}
    assert {value.shape for value in example_inputs(runtime.artifact)} == {(1, 9)}
    assert "(batch, sequence)" in (free.path / "README.md").read_text()


def test_a_free_axis_has_one_size_in_a_call(free: Free) -> None:
    runtime = t3c.load(free.path, "torch", 1)
    names = [entry.name for entry in runtime.inputs]
    if len(names) > 1:
        uneven = {name: np.ones((2, 4 + i), np.int64) for i, name in enumerate(names)}
        with pytest.raises(DataError, match="sequence is 4 in input 'input_ids' and 5 in 'att"):
            runtime(uneven)
    with pytest.raises(DataError, match="'input_ids': empty axis"):
        runtime({name: np.ones((2, 0), np.int64) for name in names})
    with pytest.raises(DataError, match=r"\(2, 4, 1\) does not fit \(batch, sequence\)"):
        runtime({name: np.ones((2, 4, 1), np.int64) for name in names})


def test_estimates_are_made_of_free_graphs(free: Free) -> None:
    (certification,) = free.exported.ledger.certifications
    told = {entry.unavailable for entry in certification.entries}
    if "attention_mask" in state_of(free.model).example:
        assert told == {"worst_case: not asked for"}
        assert all(entry.first_order is not None for entry in certification.entries)
    else:
        assert told == {"not asked for"}


class Folded(nn.Module):
    """Takes its sequence for eight."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], 8, 2).sum(dim=1)


def test_an_axis_that_cannot_be_free_is_refused() -> None:
    with pytest.raises(ConvertError, match="sequence of 'input' cannot be free"):
        to_onnx(Folded(), torch.randn(2, 8, 2), axes={"input": SEQUENCE})


@pytest.mark.parametrize(
    ("axes", "why"),
    [
        ({"ids": SEQUENCE}, "input 'ids': there are input"),
        ({"input": {0: "batch"}}, "axis 0 of 'input' is not one of 1 to 2"),
        ({"input": {3: "sequence"}}, "axis 3 of 'input' is not one of 1 to 2"),
        ({"input": {1: "batch"}}, "cannot be called 'batch'"),
        ({"input": {1: "a length"}}, "cannot be called 'a length'"),
    ],
)
def test_axes_that_cannot_be(axes: dict[str, dict[int, str]], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        to_onnx(nn.Identity(), torch.randn(2, 8, 2), axes=axes)


class Counting(nn.Identity):
    """Has a state of the name it is told."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.called = name

    def states(self, batch: int, length: int) -> dict[str, Tensor]:
        return {self.called: torch.zeros(batch, length)}


def test_states_need_a_free_axis_and_a_name() -> None:
    x = torch.randn(2, 8, 2)
    with pytest.raises(ConvertError, match="name the axis, for example"):
        to_onnx(Counting("past_count"), x)
    with pytest.raises(ConvertError, match="'count': names of states begin with 'past_'"):
        to_onnx(Counting("count"), x, axes={"input": SEQUENCE})


@pytest.mark.parametrize("example", [(1, 9, 3), (1, 9), (1, 0, 4)])
def test_an_example_that_does_not_fit_is_refused(example: tuple[int, ...]) -> None:
    TensorEntry(name="x", dtype="float32", shape=(None, "sequence", 4), example=(1, 9, 4))
    with pytest.raises(ValidationError, match="does not fit its shape"):
        TensorEntry(name="x", dtype="float32", shape=(None, "sequence", 4), example=example)


def test_engines_without_named_axes_are_as_before() -> None:
    model = to_onnx(nn.Linear(4, 3), torch.randn(2, 4))
    session = open_engine("openvino", 1).compile(model)
    for batch in (1, 2):
        session.run([np.ones((batch, 4), np.float32)])
    assert set(session.compiled) == {((1, 4),), ((2, 4),)}
