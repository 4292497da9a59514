from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from conftest import Made, put_candidates
from t3c.artifact.ledger import ParityEntry
from t3c.artifact.manifest import KernelEntry
from t3c.artifact.reader import Artifact
from t3c.errors import EngineError
from t3c.graph.synthetic import synthetic_layer
from t3c.runtime.monitor import MonitorConfig
from t3c.runtime.rejected import Tile, rejected_tiles
from t3c.runtime.remarks import Code, Remark
from t3c.runtime.runtime import Runtime
from t3c.spec import Budget, Factorization, Form, Kind, LayerPoint, LayerSpec

Patch = pytest.MonkeyPatch
NAMES = ("tiny", "small", "med", "large", "max")
X = np.full((1, 1, 32, 32), 0.25, np.float32)
REASON = "no kernel for this tile"


@pytest.fixture
def rt(made: Made) -> Runtime:
    return Runtime(Artifact(made.artifact), "onnxruntime", 1)


def key(graph: onnx.ModelProto) -> bytes:
    raw: bytes = graph.SerializeToString(deterministic=True)
    return raw


def refuse(rt: Runtime, patch: Patch, tiles: Mapping[str, Sequence[str]]) -> list[str]:
    """Let the engine refuse profiles, and these of their layers alone; the profiles it was given.

    What it was given is told by the list that is returned: it grows.
    """
    graphs = {key(rt.graph(profile)): profile.name for profile in rt.chain}
    bad = {raw for raw, name in graphs.items() if name in tiles}
    specs = rt.artifact.manifest.specs
    for name, layers in tiles.items():
        points, forms = rt.chain[name].points, rt.forms[name]
        bad |= {key(synthetic_layer(specs[n], points[n], forms[n])) for n in layers}
    asked, compile_ = list[str](), rt.engine.compile

    def compiling(graph: onnx.ModelProto) -> Any:
        raw = key(graph)
        if raw in graphs:
            asked.append(graphs[raw])
        if raw in bad:
            raise EngineError(REASON)
        return compile_(graph)

    patch.setattr(rt.engine, "compile", compiling)
    return asked


def sized(rt: Runtime, profile: str) -> Budget:
    """The tightest budget that a profile meets."""
    return Budget(size_mb=next(c.size_mb for c in rt.placed.candidates if c.profile == profile))


@pytest.mark.parametrize(("name", "instead"), list(zip(NAMES[1:], NAMES, strict=False)))
def test_the_nearest_smaller_serves_and_the_tile_is_named(
    rt: Runtime, monkeypatch: Patch, name: str, instead: str
) -> None:
    layer, spec = next(iter(rt.artifact.manifest.specs.items()))
    point, form = rt.chain[name].points[layer], rt.forms[name][layer]
    asked = refuse(rt, monkeypatch, {name: [layer]})
    budget = sized(rt, name)
    assert rt.choose(budget).profile == name
    answer = rt.answer(X, budget)
    assert answer.profile == rt.profile == instead
    assert answer.reason == Remark(Code.STAND_IN, name, engine="onnxruntime")
    said = next(w for w in answer.warnings if w.code is Code.CANNOT_RUN)
    assert (said.profile, said.other, said.causes) == (name, instead, (rt.refused[name],))
    warning = str(said)
    assert warning.startswith(f"{name} cannot run on onnxruntime: {REASON}; {layer}: ")
    assert f"rank {point.rank} at {point.bits} bits, {form} " in warning
    for shape in spec.executed_shapes(point, form):
        assert "x".join(map(str, shape)) in warning
    assert warning.endswith(f"tile {spec.tile}: {REASON}")
    assert warning.count(REASON) == 2  # of the profile, and of that layer: no other is named
    np.testing.assert_array_equal(answer.output, rt(X, profile=instead))
    assert set(rt.refused) == {name}
    assert rt.stats()["fallback"] == {name: 1}
    # From now on it is not tried.
    again = rt.answer(X, budget)
    assert (again.profile, asked.count(name)) == (instead, 1)
    assert rt.choose(budget).profile == instead
    assert rt.stats()["fallback"] == {name: 1}


def test_where_none_is_smaller_the_nearest_larger_serves(rt: Runtime, monkeypatch: Patch) -> None:
    refuse(rt, monkeypatch, {"tiny": []})
    answer = rt.answer(X, sized(rt, "tiny"))
    assert answer.profile == "small"
    larger = next(w for w in answer.warnings if w.code is Code.LARGER_SERVES)
    assert (larger.profile, larger.other) == ("tiny", "small")
    assert str(larger).endswith("; small is larger, and may be over the limits")
    again = rt.answer(X, sized(rt, "tiny"))
    assert again.profile == "small"
    assert any(w.code is Code.OVER_LIMITS for w in again.warnings)


def test_a_profile_asked_for_by_name_has_no_stand_in(rt: Runtime, monkeypatch: Patch) -> None:
    refuse(rt, monkeypatch, {"med": ["head"]})
    with pytest.raises(EngineError, match=REASON):
        rt(X, profile="med")
    assert rt.answer(X, sized(rt, "med")).profile == "small"
    with pytest.raises(
        EngineError, match=rf"med does not run on onnxruntime: {REASON}; head: rank"
    ):
        rt(X, profile="med")
    assert rt.stats()["calls"] == {"small": 1}
    assert rt.pool.leased == {}


def test_the_largest_of_them_recover(rt: Runtime, monkeypatch: Patch) -> None:
    refuse(rt, monkeypatch, {name: [] for name in NAMES[2:]})
    answer = rt.answer(X)
    assert answer.profile == "small"
    told = [w.profile for w in answer.warnings if w.code is Code.CANNOT_RUN]
    assert told == ["max", "large", "med"]
    assert rt.stats()["fallback"] == {"max": 1, "large": 1, "med": 1}
    np.testing.assert_array_equal(answer.output, rt(X))
    assert rt.answer(X, sized(rt, "tiny")).profile == "tiny"
    assert [c.profile for c in rt.candidates] == ["tiny", "small"]


def test_where_all_are_refused_every_call_says_so(rt: Runtime, monkeypatch: Patch) -> None:
    refuse(rt, monkeypatch, {name: [] for name in NAMES})
    for ask in (rt, rt.choose, rt.hold):
        with pytest.raises(EngineError, match=f"onnxruntime runs none of its profiles: {REASON}"):
            ask(X) if ask is rt else ask(None)
    for name in NAMES:
        with pytest.raises(EngineError, match=f"{name} does not run on onnxruntime"):
            rt(X, profile=name)
    assert rt.stats()["calls"] == {}
    assert rt.pool.leased == {}


def test_a_session_that_fails_its_first_run_is_refused_like_one_that_does_not_compile(
    rt: Runtime, monkeypatch: Patch
) -> None:
    compile_, largest = rt.engine.compile, key(rt.graph(rt.chain["max"]))

    class Broken:
        def run(self, inputs: Sequence[Any]) -> list[Any]:
            raise EngineError(REASON)

    def compiling(graph: onnx.ModelProto) -> Any:
        return Broken() if key(graph) == largest else compile_(graph)

    monkeypatch.setattr(rt.engine, "compile", compiling)
    assert rt.answer(X).profile == "large"
    assert rt.refused == {"max": Remark(Code.ENGINE_FAILED, "max", causes=(REASON,))}


def test_a_call_that_fails_is_counted_and_the_next_one_is_answered(
    rt: Runtime, monkeypatch: Patch
) -> None:
    wanted, session = rt(X), rt.session("max")
    with monkeypatch.context() as patch:
        patch.setattr(session, "run", _raise)
        with pytest.raises(EngineError, match=REASON):
            rt(X)
    assert rt.stats()["errors"] == {"max": 1}
    assert not rt.refused
    np.testing.assert_array_equal(rt(X), wanted)
    assert rt.stats()["calls"] == {"max": 2}
    assert rt.pool.leased == {}


def _raise(*_: object) -> Any:
    raise EngineError(REASON)


def test_warming_up_leaves_out_what_does_not_run(rt: Runtime, monkeypatch: Patch) -> None:
    refuse(rt, monkeypatch, {"small": [], "max": []})
    rt.warm()
    assert set(rt.stats()["resident"]) == {"tiny", "med", "large"}
    assert set(rt.refused) == {"small", "max"}
    with pytest.raises(EngineError, match=REASON):
        rt.warm("max")


def test_threads_that_wait_for_a_refused_profile_are_all_answered(
    rt: Runtime, monkeypatch: Patch
) -> None:
    wanted = rt(X, profile="med")
    refuse(rt, monkeypatch, {"max": ["head"], "large": []})
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: rt.answer(X), range(40)))
    assert {answer.profile for answer in answers} == {"med"}
    for answer in answers:
        np.testing.assert_array_equal(answer.output, wanted)
    assert rt.stats()["calls"] == {"med": 41}
    assert set(rt.refused) == {"max", "large"}
    assert "head: rank" in str(rt.refused["max"])
    assert rt.pool.leased == {}


def test_a_stand_in_that_is_not_trusted_is_flagged(rt: Runtime, monkeypatch: Patch) -> None:
    refuse(rt, monkeypatch, {"max": []})
    rt.alarm.strike("large")
    answer = rt.answer(X)
    assert (answer.profile, answer.flagged) == ("large", True)
    assert sum(w.code is Code.UNTRUSTED for w in answer.warnings) == 1
    again = rt.answer(X)
    assert (again.profile, again.flagged) == ("large", True)
    assert sum(w.code is Code.UNTRUSTED for w in again.warnings) == 1


def test_a_stand_in_over_the_drift_cap_says_so(rt: Runtime, monkeypatch: Patch) -> None:
    for index, c in enumerate(candidates := list(rt.candidates)):
        candidates[index] = type(c)(
            c.profile, c.latency, c.size_mb, None, (0.5, 0.4, 0.3, 0.2, 0.1)[index]
        )
    put_candidates(rt, candidates)
    refuse(rt, monkeypatch, {"med": []})
    budget = Budget(drift=0.3, size_mb=sized(rt, "med").size_mb)
    answer = rt.answer(X, budget)
    assert answer.profile == "small"
    warning = Remark(Code.OVER_CAP, "small", value=0.4, limit=0.3)
    assert answer.warnings.count(warning) == 1
    assert rt.answer(X, budget).warnings.count(warning) == 1


def test_a_fallback_is_logged_with_its_tiles(
    rt: Runtime, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(rt, monkeypatch, {"max": ["head"]})
    with caplog.at_level(logging.WARNING, "t3c.runtime"):
        rt(X)
    [event] = [r.t3c for r in caplog.records if getattr(r, "t3c", {}).get("event") == "fallback"]  # type: ignore[attr-defined]
    assert (event["profile"], event["error"]) == ("max", f"EngineError: {REASON}")
    [rejected] = event["rejected"]
    assert rejected.startswith("head: rank 10 at 8 bits, dense 10x64, tile ")


def test_a_watched_session_that_does_not_compile_loses_no_request(
    made: Made, monkeypatch: Patch
) -> None:
    runtime = Runtime(Artifact(made.artifact), "openvino", 1, MonitorConfig())
    wanted = Runtime(Artifact(made.artifact), "openvino", 1)(X)
    compile_ = runtime.engine.compile

    def compiling(graph: onnx.ModelProto) -> Any:
        if len(graph.graph.output) > 1:
            raise EngineError(REASON)
        return compile_(graph)

    monkeypatch.setattr(runtime.engine, "compile", compiling)
    for _ in range(2):
        answer = runtime.answer(X)
        assert answer.profile == "max"
        np.testing.assert_array_equal(answer.output, wanted)
    assert "max" not in runtime.watches
    assert runtime.stats()["errors"] == {"max": 1}
    assert not runtime.refused


# -- what is known to fail before anything runs


def parity(rt: Runtime, profile: str, reason: str, **other: Any) -> ParityEntry:
    row = {
        "engine": "onnxruntime", "engine_version": "1", "weight_bits": rt.device.weight_bits,
        "profile": profile, "samples": 4, "stored": 0.0, "rounded": 0.9, "largest": 0.9,
        "reason": reason,
    }  # fmt: skip
    return ParityEntry.model_validate(row | other)


def test_a_profile_whose_outputs_were_not_torchs_does_not_serve(rt: Runtime, copied: Path) -> None:
    def opened(*rows: ParityEntry) -> Runtime:
        artifact = Artifact(copied)
        artifact.add_parity(rows)
        return Runtime(artifact, "onnxruntime", 1)

    bits = rt.device.weight_bits
    elsewhere = opened(
        parity(rt, "max", "far off", engine="openvino"),
        parity(rt, "max", "far off", weight_bits=bits - 1),
        parity(rt, "max", ""),
    )
    assert not elsewhere.refused
    assert elsewhere.answer(X).profile == "max"
    reason = "its outputs differ from torch's by 0.9"
    broken = opened(parity(rt, "max", reason), parity(rt, "small", reason))
    assert broken.refused == {
        name: Remark(Code.DIFFERS, name, causes=(reason,)) for name in ("max", "small")
    }
    assert [c.profile for c in broken.candidates] == ["tiny", "med", "large"]
    assert broken.answer(X).profile == "large"
    assert broken.answer(X, sized(rt, "small")).profile == "tiny"
    with pytest.raises(EngineError, match=f"max does not run on onnxruntime: {reason}"):
        broken(X, profile="max")
    broken.warm()
    assert set(broken.stats()["compiled"]) == {"tiny", "med", "large"}
    assert not opened(parity(rt, "max", ""), parity(rt, "small", "")).refused
    with pytest.raises(EngineError, match=f"onnxruntime runs none of its profiles: {reason}"):
        opened(*(parity(rt, name, reason) for name in NAMES))


@pytest.mark.parametrize(
    ("forms", "left"),
    [
        ((Form.DENSE, Form.FACTORED), lambda used: True),
        ((Form.DENSE,), lambda used: Form.FACTORED not in used),
    ],
)
def test_an_engine_without_a_form_serves_the_others(
    made: Made, monkeypatch: Patch, forms: tuple[Form, ...], left: Callable[[set[Form]], bool]
) -> None:
    artifact = Artifact(made.artifact)
    kernels = {"onnxruntime": KernelEntry(forms=forms), "openvino": KernelEntry(forms=())}
    manifest = artifact.manifest.model_copy(update={"kernels": kernels})
    monkeypatch.setattr(artifact, "manifest", manifest)
    runtime = Runtime(artifact, "onnxruntime", 1)
    serving = [name for name in NAMES if left(set(runtime.forms[name].values()))]
    assert 0 < len(serving) <= len(NAMES)
    assert [c.profile for c in runtime.candidates] == serving
    assert runtime.refused == {
        name: Remark(Code.NO_FORM, name, engine="onnxruntime", names=("factored",))
        for name in set(NAMES) - set(serving)
    }
    for name in NAMES:
        assert runtime.answer(X, sized(runtime, name)).profile in serving
    with pytest.raises(EngineError, match="openvino runs none of its profiles: openvino has no"):
        Runtime(artifact, "openvino", 1)


def test_a_tile_is_told_as_kernels_see_it(rt: Runtime, monkeypatch: Patch) -> None:
    spec = LayerSpec("fc", Kind.LINEAR, Factorization.SVD, 24, 40, in_size=(3, 1), out_size=(3, 1))
    told = Tile(spec, LayerPoint(8, 4), Form.FACTORED)
    assert str(told) == f"rank 8 at 4 bits, factored 8x40 and 24x8, tile {spec.tile}"
    dense = Tile(spec, LayerPoint(8, 4), Form.DENSE)
    assert str(dense) == f"rank 8 at 4 bits, dense 24x40, tile {spec.tile}"
    specs = rt.artifact.manifest.specs.values()
    assert rejected_tiles(rt.engine, specs, rt.executions["med"]) == ()
    monkeypatch.setattr(rt.engine, "compile", _raise)
    every = rejected_tiles(rt.engine, specs, rt.executions["med"])
    assert [one.tile.spec.name for one in every] == [spec.name for spec in specs]
