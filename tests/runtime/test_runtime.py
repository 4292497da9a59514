from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import t3c
from conftest import Made, put_candidates
from t3c.artifact.folder import staged
from t3c.artifact.manifest import CONTENT
from t3c.artifact.norms import OwnNorms
from t3c.artifact.reader import Artifact
from t3c.certify.drift import relative_drift
from t3c.engines import ENGINES, open_engine
from t3c.engines.onnxruntime import unsigned_activations
from t3c.engines.torch import TorchSession
from t3c.errors import DataError, EngineError, SpecError
from t3c.evidence.audit import audit, over
from t3c.graph.assemble import assemble
from t3c.nn import at
from t3c.runtime.remarks import Code, Remark
from t3c.runtime.runtime import Runtime, load
from t3c.spec import Budget, Form, Latency


@pytest.fixture(scope="module")
def rt(made: Made) -> Runtime:
    return load(made.artifact)


def samples(made: Made, count: int = 24) -> np.ndarray:
    return made.digits.test[0][:count].numpy()


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_engines_run_the_same_profile_and_agree(made: Made, engine: str) -> None:
    """Each profile on each engine against torch: int8 throughout, so within rounding of codes."""
    runtime, x = load(made.artifact, engine), samples(made)
    for profile in runtime.chain:
        graph = runtime.graph(profile)
        reference = TorchSession(graph).run([x])[0]
        np.testing.assert_allclose(
            np.linalg.norm(runtime(x, profile=profile.name) - reference),
            0,
            atol=0.02 * np.linalg.norm(reference),
        )


def test_stored_weights_alone_are_the_torch_view(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Artifact, "norms", lambda artifact, profile: OwnNorms())
    artifact, x = Artifact(made.artifact), samples(made)
    for profile in artifact.manifest.chain:
        with torch.no_grad(), at(made.model, profile):
            wanted = made.model(torch.from_numpy(x)).numpy()
        for form in (Form.FACTORED, Form.DENSE):
            forms = dict.fromkeys(profile.points, form)
            got = TorchSession(assemble(artifact, profile, forms, ranges=None)).run([x])[0]
            worst = relative_drift(got, wanted).max()
            assert worst < (1e-3 if form is Form.FACTORED else 0.05)


def test_graphs_are_int8_qdq_that_onnx_accepts(rt: Runtime) -> None:
    for profile in rt.chain:
        graph = rt.graph(profile)
        onnx.checker.check_model(graph, full_check=True)
        assert graph.opset_import[0].version == 21
        kinds = {i.name: i.data_type for i in graph.graph.initializer}
        makers = {name: node for node in graph.graph.node for name in node.output}
        float_input = {"input"} if "stem" not in profile.points else set()
        products = [
            n
            for n in graph.graph.node
            if n.op_type in ("Conv", "MatMul") and n.input[0] not in float_input
        ]
        assert len(products) >= len(profile.points)
        for node in products:
            assert makers[node.input[0]].op_type == "DequantizeLinear"
            assert makers[node.input[1]].op_type == "DequantizeLinear"
            assert kinds[makers[node.input[1]].input[0]] == TensorProto.INT8


def test_budgets_choose_and_certificates_come_along(made: Made, rt: Runtime) -> None:
    x = samples(made, 1)
    fastest = rt.candidates[0].latency_ms()
    assert fastest is not None
    y = rt(x, budget=Budget(size_mb=rt.candidates[1].size_mb))
    assert rt.profile == rt.candidates[1].profile
    assert rt.certificate is not None
    assert rt.certificate.profile == rt.profile
    np.testing.assert_array_equal(y, rt(x, profile=rt.candidates[1].profile))
    rt(x)
    assert rt.profile == "max"
    answer = rt.answer(x, Budget(latency_ms=fastest / 100))
    assert answer.profile == rt.candidates[0].profile
    assert answer.warnings[0].code is Code.OVER_LIMITS


def test_certificates_hold_on_data_nobody_saw(made: Made, rt: Runtime) -> None:
    x = made.digits.test[0]
    with torch.no_grad():
        original = t3c.convert.state_of(made.model).original(x).numpy()
    for profile in rt.chain:
        drift = relative_drift(rt(x.numpy(), profile=profile.name), original)
        certificate = rt.certificates[profile.name]
        # 0.95 is promised on average over calibration sets; this is one, and 500 samples.
        assert (drift <= certificate.epsilon).mean() >= 0.88
        assert certificate.mean == pytest.approx(drift.mean(), rel=0.2)
    bounds = [rt.certificates[p.name].epsilon for p in rt.chain]
    assert bounds == sorted(bounds, reverse=True)


def test_batches_of_any_size(made: Made, rt: Runtime) -> None:
    x = samples(made, 7)
    together = rt(x)
    for size in range(1, 20):
        assert rt(np.zeros((size, 1, 32, 32))).shape == (size, 10)
    assert len(rt.session("max").compiled) <= 8
    alone = np.concatenate([rt(x[i : i + 1]) for i in range(7)])
    np.testing.assert_allclose(together, alone, rtol=1e-3, atol=1e-3)


def test_threads_get_their_own_answers(made: Made, rt: Runtime) -> None:
    x = samples(made, 8)
    names = [p.name for p in rt.chain]
    wanted = {(n, i): rt(x[i : i + 1], profile=n) for n in names for i in range(8)}

    def ask(job: tuple[str, int]) -> bool:
        name, index = job
        y = rt(x[index : index + 1], profile=name)
        return rt.profile == name and np.array_equal(y, wanted[name, index])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, [job for job in wanted for _ in range(5)]))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros((1, 1, 8, 8), np.float32), r"shape \(1, 1, 8, 8\) does not fit"),
        (np.zeros((1, 32, 32), np.float32), "does not fit"),
        (np.zeros((0, 1, 32, 32), np.float32), "empty batch"),
        (np.full((1, 1, 32, 32), np.nan, np.float32), "NaN"),
        (np.zeros((1, 1, 32, 32), complex), "dtype complex128"),
        (np.full((1, 1, 32, 32), "x"), "dtype <U1"),
        ((np.zeros((1, 1, 32, 32)),) * 2, "1 inputs are needed, got 2"),
        ({"other": np.zeros((1, 1, 32, 32))}, "inputs must be input"),
        ([[1.0], [1.0, 2.0]], "not an array"),
        (torch.zeros(1, 1, 32, 32, requires_grad=True), "not an array"),
        (np.full((1, 1, 32, 32), 1e300), "infinite"),
    ],
)
def test_bad_inputs(rt: Runtime, bad: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        rt(bad)


def test_unknown_engines_and_profiles(made: Made, rt: Runtime) -> None:
    with pytest.raises(EngineError, match="unknown engine 'abacus': there are onnxruntime, openvi"):
        load(made.artifact, "abacus")
    with pytest.raises(EngineError, match="threads must be from 1 to"):
        open_engine("openvino", 0)
    with pytest.raises(SpecError, match="no profile 'huge'"):
        rt(samples(made, 1), profile="huge")
    with pytest.raises(EngineError, match="threads must be from 1 to"):
        open_engine("onnxruntime", 10_000)
    with pytest.raises(SpecError, match=r"a budget is a t3c\.Budget, got float"):
        rt(samples(made, 1), 2.0)
    with pytest.raises(SpecError, match="not both"):
        rt(samples(made, 1), Budget(latency_ms=1), profile="max")


def test_a_device_that_was_not_calibrated_says_so(made: Made, copied: Path) -> None:
    other = load(made.artifact, "onnxruntime")
    assert not other.certificates
    answer = other.answer(samples(made, 1), Budget(latency_ms=1e6))
    assert answer.certificate is None
    codes = [warning.code for warning in answer.warnings]
    assert codes == [Code.TRANSFERRED_TABLE, Code.NOT_CERTIFIED]
    shutil.rmtree(copied / "devices")
    bare = load(copied)
    answer = bare.answer(samples(made, 1), Budget(latency_ms=1e6))
    assert answer.warnings[0] == Remark(Code.NOT_MEASURED, "tiny", names=("latency",))
    assert "latency not measured on this device" in str(answer.warnings[0])
    assert bare.note == Remark(Code.NO_TABLE)


def test_the_audit_finds_no_violation_and_would_find_one(made: Made) -> None:
    runtime = load(made.artifact)
    labelled = (samples(made, 50), made.digits.test[1][:50].numpy())
    found = audit(runtime, 200, rounds=20, data=labelled, busy=True)
    assert found.monotone_violations == 0
    assert set(found.monotone.values()) == {0}
    assert found.speed is not None
    assert found.accuracy.keys() == found.live.keys()
    assert found.over["p50"] == pytest.approx(found.budget_violations / found.reachable)
    put_candidates(runtime, runtime.candidates[::-1])
    broken = audit(runtime, 200, rounds=5, busy=True)
    assert broken.monotone_violations > 0
    assert broken.monotone["rank_and_bits"] > 0


def test_the_audit_counts_budgets_that_were_missed(made: Made) -> None:
    runtime = load(made.artifact)

    def timed(factor: float) -> dict[str, Latency]:
        """Times in the chain's order, so that the machine's mood decides nothing."""
        return {
            c.profile: Latency(factor * n, 1.1 * factor * n, 1.2 * factor * n, (n, n), 9)
            for n, c in enumerate(runtime.candidates, start=1)
        }

    live = timed(1.0)
    slower, faster = timed(100.0), timed(0.01)
    pairs = [Budget(latency_ms=float(ms)) for ms in np.geomspace(len(live), 500 * len(live), 20)]
    put_candidates(runtime, [replace(c, latency=slower[c.profile]) for c in runtime.candidates])
    assert over(runtime, pairs, live, "p50") == 0  # a table that is too careful misses nothing
    put_candidates(runtime, [replace(c, latency=faster[c.profile]) for c in runtime.candidates])
    tight = Budget(latency_ms=1.0001)  # only the smallest meets it; the table says all do
    assert over(runtime, [tight], live, "p50") == 1


def test_a_replaced_artifact_does_not_mix_with_the_loaded_one(made: Made, copied: Path) -> None:
    x = samples(made, 1)
    wanted = load(made.artifact)(x)
    runtime = load(copied)
    with staged(copied) as staging:
        shutil.copytree(made.artifact, staging, dirs_exist_ok=True)
        for name in CONTENT:
            (staging / name).write_bytes(b"something else")
    np.testing.assert_array_equal(runtime(x), wanted)


def test_the_torch_engine_keeps_to_its_threads(made: Made) -> None:
    before = torch.get_num_threads()
    load(made.artifact, "torch", threads=1)(samples(made, 1))
    assert torch.get_num_threads() == before


def test_the_reference_engine_refuses_what_it_does_not_know() -> None:
    node = helper.make_node("Loop", ["x"], ["y"])
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    graph = helper.make_graph([node], "g", [value], [value])
    with pytest.raises(EngineError, match="no operation Loop"):
        TorchSession(helper.make_model(graph))


def test_onnxruntime_counts_signed_activations_from_128(made: Made) -> None:
    """The grid stays the same: codes move by 128, and so does the zero they are counted from."""
    profile = made.exported.profiles.profiles[0]  # what passes between factors is signed
    artifact = Artifact(made.artifact)
    forms = {n: artifact.manifest.specs[n].forms(p)[0] for n, p in profile.points.items()}
    graph = assemble(artifact, profile, forms, artifact.ranges(profile.name), 7)
    before = {i.name: i for i in graph.graph.initializer}
    after = {i.name: i for i in unsigned_activations(graph).graph.initializer}
    zeros = [n.input[2] for n in graph.graph.node if n.op_type == "QuantizeLinear"]
    signed = [name for name in zeros if before[name].data_type == TensorProto.INT8]
    assert signed
    for name in signed:
        assert after[name].data_type == TensorProto.UINT8
        assert int(numpy_helper.to_array(after[name])) == 128
    untouched = set(before) - set(signed)
    assert all(before[name] == after[name] for name in untouched)
    x = samples(made, 4)
    wanted = TorchSession(graph).run([x])[0]
    moved = TorchSession(unsigned_activations(graph)).run([x])[0]
    np.testing.assert_allclose(moved, wanted, atol=1e-5)
