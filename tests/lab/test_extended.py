"""The measurements of the paper's appendix F against figures worked out by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from conftest import Made, put_candidates, put_controller
from lab import diagnostics
from lab.diagnostics import audit_rows, device_rows, energy_rows, violation_rows
from lab.extended import (
    allocation_blocks,
    allocation_rows,
    blocks_of,
    certificate_rows,
    drift_rows,
    proxy_rows,
    seed_rows,
)
from t3c.artifact.devices import Device, DeviceTable, GridRow
from t3c.cost.proxy import Proxy
from t3c.errors import DataError, EngineError, SpecError
from t3c.measure.energy import Unavailable
from t3c.runtime.runtime import Runtime, load
from t3c.spec import Budget, Certificate, Factorization, Form, Kind, Latency, LayerSpec

QUARTERS = np.array([0.1, 0.2, 0.3, 0.4])


@pytest.fixture
def runtime(made: Made) -> Iterator[Runtime]:
    with load(made.artifact, cache=False) as opened:
        put_controller(opened, None)
        yield opened


def names_of(runtime: Runtime) -> list[str]:
    return [profile.name for profile in runtime.chain]


def certified(runtime: Runtime, estimates: Mapping[str, float | None], epsilon: float) -> None:
    runtime.certificates = {
        name: Certificate(
            name, "openvino", "", delta=0.1, samples=99, mean=0.1, p95=0.2, epsilon=epsilon,
            first_order=estimate, spectral=7.0,
        )
        for name, estimate in estimates.items()
    }  # fmt: skip


def steady(p50: float, p90: float | None = None) -> Latency:
    p90 = p50 if p90 is None else p90
    return Latency(p50, p90, p90, (p50, p50), 10)


def test_certificates_beside_what_was_seen(runtime: Runtime) -> None:
    names = names_of(runtime)[:3]
    certified(runtime, dict(zip(names, (1.0, 2.0, 4.0), strict=True)), epsilon=0.35)
    drifts = {name: scale * QUARTERS for name, scale in zip(names[::-1], (3, 2, 1), strict=True)}
    rows = certificate_rows(runtime, drifts)
    assert [row["name"] for row in rows] == names  # as in the chain, not as given
    assert rows[0] == {
        "name": names[0],
        "epsilon": 0.35,
        "coverage": 0.75,
        # Beta(90, 10) of 4: 1 or fewer are covered with 0.5%, 2 or fewer with 5.6%, 4 with 66%.
        "coverage_low": 0.5,
        "coverage_high": 1.0,
        "mean_drift": pytest.approx(0.25),
        "p95_drift": pytest.approx(0.385),
        "first_order": 1.0,
        "spectral": 7.0,
        # Of (1, 2, 4) with (1, 2, 3): 3 / sqrt(14/3 * 2).
        "pearson": pytest.approx(3 / math.sqrt(28 / 3)),
        "spearman": pytest.approx(1.0),
    }
    assert [row["coverage"] for row in rows] == [0.75, 0.25, 0.25]
    assert {row["pearson"] for row in rows} == {rows[0]["pearson"]}


def test_two_profiles_do_not_correlate_and_one_may_have_no_certificate(runtime: Runtime) -> None:
    names = names_of(runtime)[:4]
    certified(runtime, dict(zip(names, (1.0, 2.0, None), strict=False)), epsilon=0.35)
    rows = certificate_rows(runtime, dict.fromkeys(names, QUARTERS))
    assert all(row["pearson"] is row["spearman"] is None for row in rows)
    assert rows[2]["epsilon"] == 0.35
    assert rows[2]["first_order"] is None
    nothing = ("epsilon", "coverage", "coverage_low", "coverage_high", "first_order", "spectral")
    assert all(rows[3][key] is None for key in nothing)
    assert rows[3]["mean_drift"] == pytest.approx(0.25)
    assert rows[3].keys() == rows[0].keys()


@pytest.mark.parametrize("drifts", [np.array([]), np.ones((2, 2)), np.array([0.1, np.nan])])
def test_drifts_that_cannot_be(runtime: Runtime, drifts: np.ndarray) -> None:
    for rows in (certificate_rows, drift_rows):
        with pytest.raises(DataError, match=r"drifts must be \(n,\) and finite"):
            rows(runtime, {names_of(runtime)[0]: drifts})
        with pytest.raises(SpecError, match="no profile 'other'"):
            rows(runtime, {"other": QUARTERS})


def test_a_scatter_is_an_even_sample(runtime: Runtime) -> None:
    name, bare = names_of(runtime)[:2]
    certified(runtime, {name: None}, epsilon=0.55)
    many = np.random.default_rng(0).permutation(10) / 10
    rows = drift_rows(runtime, {bare: QUARTERS, name: many}, per_profile=5)
    expected = [(name, 0.55, value) for value in (0.1, 0.3, 0.5, 0.7, 0.9)]
    expected += [(bare, None, value) for value in QUARTERS]
    assert [(row["name"], row["epsilon"], row["observed"]) for row in rows] == expected
    with pytest.raises(DataError, match="per_profile must be at least 1"):
        drift_rows(runtime, {}, per_profile=0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=80), st.integers(1, 30), st.floats(0, 1))
def test_as_many_of_a_scatter_are_over_a_bound(
    values: list[float], count: int, bound: float
) -> None:
    drifts = np.array(values)
    chain = SimpleNamespace(name="p")
    runtime: Any = SimpleNamespace(chain=_Chain([chain]), certificates={})
    seen = np.array([row["observed"] for row in drift_rows(runtime, {"p": drifts}, count)])
    assert len(seen) == min(count, len(drifts))
    assert set(seen) <= set(drifts)
    assert abs(np.mean(seen > bound) - np.mean(drifts > bound)) < 1 / len(seen) + 1e-12


class _Chain(list[Any]):
    def __getitem__(self, name: Any) -> Any:
        return next(profile for profile in self if profile.name == name)


def test_allocation_is_what_is_executed(runtime: Runtime) -> None:
    artifact = runtime.artifact
    rows = allocation_rows(artifact, runtime.forms)
    assert rows == allocation_rows(artifact)  # its only device is this one
    layers = [row["layer"] for row in rows if row["profile"] == runtime.chain.top.name]
    assert layers == [
        "blocks.0.conv1", "blocks.0.conv2", "blocks.1.conv1", "blocks.1.conv2",
        "blocks.1.shortcut.0", "blocks.2.conv1", "blocks.2.conv2", "blocks.2.shortcut.0", "head",
    ]  # fmt: skip
    blocks = [row["block"] for row in rows[: len(layers)]]
    assert blocks == [*["early"] * 3, *["mid"] * 3, *["late"] * 2, "head"]
    assert len(rows) == len(layers) * len(runtime.chain)
    below = 0
    for row in rows:
        spec = artifact.manifest.specs[row["layer"]]
        point = runtime.chain[row["profile"]].points[row["layer"]]
        assert (row["bits"], row["kind"]) == (point.bits, spec.kind)
        if runtime.forms[row["profile"]][row["layer"]] is Form.DENSE:
            assert row["rank"] == 1
        else:
            assert row["rank"] == point.rank / spec.full_rank < 1
            below += 1
    assert below
    dense = {p.name: dict.fromkeys(p.points, Form.DENSE) for p in runtime.chain}
    assert {row["rank"] for row in allocation_rows(artifact, dense)} == {1.0}


def test_blocks_weigh_layers_by_parameters(runtime: Runtime) -> None:
    found = {(row["profile"], row["block"]): row for row in allocation_blocks(runtime.artifact)}
    assert len(found) == 4 * len(runtime.chain)
    of = {(row["profile"], row["layer"]): row for row in allocation_rows(runtime.artifact)}
    # blocks.2.conv2 is 64 x 64 x 3 x 3, blocks.2.shortcut.0 is 64 x 32.
    large, small = 64 * 64 * 9, 64 * 32
    for name in names_of(runtime):
        conv, shortcut = (of[name, f"blocks.2.{layer}"] for layer in ("conv2", "shortcut.0"))
        for key in ("rank", "bits"):
            mean = (large * conv[key] + small * shortcut[key]) / (large + small)
            assert found[name, "late"][key] == pytest.approx(mean)
            assert found[name, "head"][key] == of[name, "head"][key]
    assert len({row["bits"] for row in found.values()}) > 3


def graph_of(uses: Sequence[tuple[str, str, Kind]]) -> Any:
    """An artifact of which only the topology is known: (layer, used as, kind)."""
    specs = {n: LayerSpec(n, kind, Factorization.SVD, 8, 8) for n, _, kind in reversed(uses)}
    nodes = [
        helper.make_node("E", [], [f"y{i}"], f"node{i}", domain="t3c", layer=name, kind=use)
        for i, (name, use, _) in enumerate(uses)
    ]
    nodes.insert(1, helper.make_node("Relu", ["y0"], ["z"], "relu"))
    graph = SimpleNamespace(graph=SimpleNamespace(node=nodes))
    return SimpleNamespace(manifest=SimpleNamespace(specs=specs), graph=lambda: graph)


def test_the_head_may_be_an_embedding_and_may_be_missing() -> None:
    linear = [(name, "linear", Kind.LINEAR) for name in "abcd"]
    tied = [("words", "embedding", Kind.EMBEDDING), *linear, ("words", "linear", Kind.EMBEDDING)]
    found = {"words": "head", "a": "early", "b": "early", "c": "mid", "d": "late"}
    assert blocks_of(graph_of(tied)) == found
    assert list(blocks_of(graph_of(tied))) == list(found)  # in order of execution
    convolutions = [(name, "conv", Kind.CONV2D) for name in "abc"]
    assert blocks_of(graph_of(convolutions)) == {"a": "early", "b": "mid", "c": "late"}
    assert blocks_of(graph_of(linear[:1])) == {"a": "head"}


def table_of(rows: Sequence[tuple[float, float, float, bool]]) -> DeviceTable:
    """A device on which (gflop, mb, ms, held out) were measured."""
    device = Device(cpu="x", engine="openvino", engine_version="1", threads=1, weight_bits=8)
    grid = tuple(
        GridRow(features={"linear.gflop": g, "linear.mb": m}, ms=ms, held_out=held)
        for g, m, ms, held in rows
    )
    return DeviceTable(content="c", device=device, profiles={}, grid=grid)


def test_proxies_of_one_device_on_others() -> None:
    def device(*times: float, held: Sequence[bool] = (False,) * 3) -> DeviceTable:
        measured = zip(times, (1.0, 2.0, 3.0), held, strict=True)
        return table_of([(1.0, mb, ms, out) for ms, mb, out in measured])

    tables = {
        "home": device(2.0, 4.0, 6.0),
        "slower": device(14.0, 28.0, 42.0),
        "other": device(1.0, 2.0, 6.0),
        "held": device(1.0, 2.0, 6.0, held=(False, False, True)),
        "blank": table_of([]),
    }
    rows = proxy_rows(tables)
    found = {(row["proxy"], row["device"]): row["mape"] for row in rows}
    assert len(rows) == len(found) == 3 * len(tables)
    for proxy in ("bytes", "hybrid"):  # 2 ms a megabyte
        assert found[proxy, "home"] == pytest.approx(0, abs=1e-9)
        assert found[proxy, "slower"] == pytest.approx(0, abs=1e-9)
        # Half of home's, by two of three profiles: 1, 2 and 3 ms against 1, 2 and 6.
        assert found[proxy, "other"] == pytest.approx(0.5 / 3)
        assert found[proxy, "held"] == pytest.approx(0.5)
        assert found[proxy, "blank"] is None
    # All profiles are one number of operations; its least squares of relative error is 132/49 ms.
    truth = np.array([2.0, 4.0, 6.0])
    assert found["flops", "home"] == pytest.approx(np.mean(np.abs(132 / 49 / truth - 1)))
    # Elsewhere scaled to the median of the ratios, which is the middle profile: 28, 28 and 28 ms.
    assert found["flops", "slower"] == pytest.approx((1 + 0 + 1 / 3) / 3)


def test_proxies_need_a_measured_device() -> None:
    with pytest.raises(DataError, match="got none"):
        proxy_rows({})
    with pytest.raises(DataError, match="blank: no grid was measured"):
        proxy_rows({"blank": table_of([]), "other": table_of([(1, 1, 1, False)])})


def test_seeds_are_summed_up() -> None:
    def one(accuracy: float | None, p50: float, p90: float) -> dict[str, float | None]:
        return {"accuracy": accuracy, "p50": p50, "p90": p90}

    first, second, third = seed_rows(
        [
            {"t3c": one(0.8, 1.0, 1.5), "ptq8": one(0.7, 2.0, 2.5)},
            {"t3c": one(0.9, 2.0, 3.0), "unlabelled": one(None, 1.0, 1.0)},
            {"t3c": one(1.0, 3.0, 6.0), "unlabelled": one(None, 3.0, 4.0)},
        ]
    )
    assert first == {
        "name": "t3c", "seeds": 3, "accuracy": pytest.approx(0.9),
        "accuracy_sem": pytest.approx(0.1 / math.sqrt(3)), "p50": 2.0,
        "p50_sem": pytest.approx(1 / math.sqrt(3)), "tail_gap": pytest.approx(1.5),
    }  # fmt: skip
    assert (second["name"], second["seeds"], second["p50"]) == ("ptq8", 1, 2.0)
    assert second["accuracy_sem"] is second["p50_sem"] is None
    assert third["accuracy"] is third["accuracy_sem"] is None
    assert (third["p50"], third["p50_sem"]) == (2.0, pytest.approx(1.0))
    assert seed_rows([]) == []


class Served:
    """A runtime's answers, and a clock that knows how long they take."""

    def __init__(self, slow: Budget, every: int) -> None:
        self.now, self.slow, self.every = 0.0, slow, every
        self.calls: Counter[Budget] = Counter()
        self.inputs: list[np.ndarray] = []

    def answer(self, inputs: np.ndarray, budget: Budget, *, profile: None) -> Any:
        self.inputs.append(inputs)
        late = budget == self.slow and self.calls[budget] // 2 % self.every == 0
        self.calls[budget] += 1
        assert budget.latency_ms is not None
        self.now += budget.latency_ms * (1.01 if late else 0.99) / 1e3
        return SimpleNamespace(output=inputs)


def test_calls_over_their_budget_are_counted(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, briefly: None
) -> None:
    name, other = names_of(runtime)[:2]
    assert runtime.table is not None
    latencies = {name: steady(0.4, 0.5), other: steady(0.8, 0.9)}
    put_candidates(
        runtime, [replace(c, latency=latencies.get(c.profile)) for c in runtime.candidates]
    )
    runtime.table = runtime.table.model_copy(
        update={"profiles": latencies, "proxies": {"hybrid": Proxy({"constant": 0.5}, 3)}}
    )
    budgets = [Budget(0.4 * 1.1), Budget(0.5, quantile="p90")]
    budgets += [Budget(0.8 * 1.1), Budget(0.9, quantile="p90")]
    served = Served(slow=budgets[1], every=5)
    monkeypatch.setattr(runtime, "answer", served.answer)
    samples = np.random.default_rng(0).normal(size=(3, *runtime.inputs[0].shape[1:]))
    rows = violation_rows(runtime, samples.astype(np.float32), runs=20, clock=lambda: served.now)
    # A call to warm up, then pairs of which the second is timed: one in five of these is slow.
    assert served.calls == dict.fromkeys(budgets, 41)
    told = [(row["profile"], row["budget_ms"], row["runs"], row["over"]) for row in rows]
    limits = [budget.latency_ms for budget in budgets]
    assert told == list(
        zip((name, name, other, other), limits, (20,) * 4, (0, 4, 0, 0), strict=True)
    )
    expected = [0.1 / 0.4, 0.1 / 0.4, 0.3 / 0.8, 0.3 / 0.8]
    assert [row["mape"] for row in rows] == pytest.approx(expected)
    assert {one.shape for one in served.inputs} == {(1, *samples.shape[1:])}
    assert len({one.tobytes() for one in served.inputs}) == 3


def test_budgets_of_ones_own(runtime: Runtime, briefly: None) -> None:
    name = names_of(runtime)[0]
    samples = np.zeros((1, *runtime.inputs[0].shape[1:]), dtype=np.float32)
    mine = {name: [Budget(1e-6), Budget(1e6)]}
    never, always = violation_rows(runtime, samples, 3, mine)
    assert (never["over"], always["over"]) == (3, 0)
    assert never["mape"] == pytest.approx(0, abs=1e-6)  # its times are made of its work
    assert runtime.table is not None
    runtime.table = runtime.table.model_copy(update={"predicted": (name,)})
    assert violation_rows(runtime, samples, 1, mine)[0]["mape"] is None
    with pytest.raises(SpecError, match="only a budget that limits latency"):
        violation_rows(runtime, samples, 1, {name: [Budget(size_mb=1)]})
    with pytest.raises(SpecError, match="runs must be at least 1"):
        violation_rows(runtime, samples, 0)
    put_candidates(runtime, [replace(c, latency=None) for c in runtime.candidates])
    with pytest.raises(DataError, match="no latency is known on"):
        violation_rows(runtime, samples, 1)


@pytest.fixture
def three(runtime: Runtime) -> list[str]:
    """Three profiles that take 10, 20 and 15 ms, and 1, 2 and 3 MB."""
    taken = zip(runtime.candidates[:3], (10, 20, 15), strict=True)
    three = [
        replace(c, latency=steady(ms), size_mb=float(index), guard=0.0)
        for index, (c, ms) in enumerate(taken, start=1)
    ]
    put_candidates(runtime, three)
    return [candidate.profile for candidate in runtime.candidates]


def test_an_audit_counts_what_pairs_break(
    runtime: Runtime, three: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small, middle, large = three
    pairs = [
        (Budget(10), Budget(10.001)),  # small twice
        (Budget(10), Budget(15)),  # small, large
        (Budget(size_mb=1), Budget(size_mb=2)),  # small, middle
        (Budget(size_mb=2), Budget(size_mb=3)),  # middle, large, which is faster
        (Budget(20, size_mb=2), Budget(20, size_mb=2)),  # middle twice
    ]
    monkeypatch.setattr(diagnostics, "draw_pairs", lambda runtime, count, seed: pairs)
    bytes_of = dict(zip(three, (1_000_000, 2_000_000, 3_000_000), strict=True))
    manifest = SimpleNamespace(size_bytes=bytes_of.__getitem__)
    monkeypatch.setattr(runtime, "artifact", SimpleNamespace(manifest=manifest))

    def audited(rights: Sequence[int] | None, live: Sequence[float]) -> tuple[Any, ...]:
        right = None
        if rights is not None:
            right = {n: np.arange(100) < count for n, count in zip(three, rights, strict=True)}
        times = {name: steady(ms) for name, ms in zip(three, live, strict=True)}
        (row,) = audit_rows(runtime, right, len(pairs), live=times)
        assert (row.pop("method"), row.pop("checked")) == ("t3c", 5)
        return tuple(row.values())

    calm = (10, 20, 15)
    assert audited(None, calm) == (None, 1, 0)
    assert audited((100, 100, 100), calm) == (0, 1, 0)
    # 90 of 100 after 100: -0.1 and 1.96 * 0.03. 97 after 100: -0.03 and 1.96 * 0.017, which may
    # be chance.
    assert audited((100, 90, 90), calm) == (2, 1, 0)
    assert audited((100, 97, 100), calm) == (0, 1, 0)
    assert audited((100, 100, 90), calm) == (2, 1, 0)
    # The middle one is over 20 ms, which the small one keeps; nothing keeps 10 ms.
    assert audited(None, (11, 21, 15)) == (None, 1, 1)
    # Now the large one would keep 10 ms, twice, and the middle one still misses its 20.
    assert audited(None, (11, 21, 9)) == (None, 1, 3)
    with pytest.raises(DataError, match=f"not known of {middle}, {large}"):
        audit_rows(runtime, {small: np.ones(3, dtype=bool)}, 5, live={})


def test_an_artifact_as_it_is_breaks_nothing(runtime: Runtime, briefly: None) -> None:
    assert runtime.table is not None
    right = {name: np.ones(10, dtype=bool) for name in names_of(runtime)}
    (row,) = audit_rows(runtime, right, 300, live=runtime.table.profiles)
    assert row == {
        "method": "t3c", "checked": 300, "accuracy_violations": 0, "latency_violations": 0,
        "budget_violations": 0,
    }  # fmt: skip
    (row,) = audit_rows(runtime, right, 2, rounds=2)  # live times are measured
    assert row["checked"] == 2
    with pytest.raises(SpecError, match="at least 1 pair"):
        audit_rows(runtime, right, 0)


def test_devices_beside_one_another(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, briefly: None
) -> None:
    names = names_of(runtime)
    usual, together = Runtime.session, []

    def session(self: Runtime, profile: str) -> Any:
        if (self.engine.name, profile) == ("onnxruntime", names[1]):
            raise EngineError("no such kernel")
        return usual(self, profile)

    def timed(sessions: Mapping[str, Any], inputs: list[np.ndarray], rounds: int) -> Any:
        together.append((list(sessions), rounds))
        return {name: steady(index + 1, index + 2) for index, name in enumerate(sessions)}

    monkeypatch.setattr(Runtime, "session", session)
    monkeypatch.setattr(diagnostics, "time_sessions", timed)
    devices = (("openvino", 1), ("onnxruntime", 1), ("nosuch", 1))
    rows = device_rows(runtime.artifact, devices, rounds=7)
    assert together == [(names, 7), ([n for n in names if n != names[1]], 7)]
    parts = {device: list(part) for device, part in groupby(rows, lambda row: row["device"])}
    assert list(parts) == ["openvino-1t", "onnxruntime-1t", "nosuch-1t"]
    assert all([row["profile"] for row in part] == names for part in parts.values())
    whole = [(i + 1, i + 2) for i in range(len(names))]
    assert [(row["p50"], row["p90"]) for row in parts["openvino-1t"]] == whole
    lacking = [whole[0], (None, None), *whole[1:-1]]
    assert [(row["p50"], row["p90"]) for row in parts["onnxruntime-1t"]] == lacking
    assert {(row["p50"], row["p90"]) for row in parts["nosuch-1t"]} == {(None, None)}


def test_a_device_is_timed(runtime: Runtime, briefly: None) -> None:
    rows = device_rows(runtime.artifact, [("openvino", 1)], rounds=3)
    assert all(0 < row["p50"] <= row["p90"] for row in rows)
    assert len(rows) == len(runtime.chain)


class Meter:
    """Counts what sessions say they use."""

    name = "meter"

    def __init__(self) -> None:
        self.used = 0.0

    def joules(self) -> float:
        return self.used


def test_energy_by_profile(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, briefly: None
) -> None:
    meter, names, calls = Meter(), names_of(runtime), Counter[str]()

    def session(profile: str) -> Any:
        def run(inputs: list[np.ndarray]) -> list[np.ndarray]:
            meter.used += (names.index(profile) + 1) / 1e3
            calls[profile] += 1
            return inputs

        return SimpleNamespace(run=run)

    monkeypatch.setattr(runtime, "session", session)
    monkeypatch.setattr(
        diagnostics, "time_sessions", lambda found, inputs, runs: {n: steady(3.0) for n in found}
    )
    one = np.zeros((1, *runtime.inputs[0].shape[1:]), dtype=np.float32)
    rows, reason = energy_rows(runtime, one, 12, meter=meter, seconds=1e-6)
    assert reason == ""
    assert rows == [
        {"profile": name, "runs": 12, "p50": 3.0, "energy_mj": pytest.approx(index)}
        for index, name in enumerate(names, start=1)
    ]
    assert calls == dict.fromkeys(names, 12)
    monkeypatch.setattr(diagnostics, "idle_watts", lambda meter, seconds: 1e12)
    rows, _ = energy_rows(runtime, one, 2, meter=meter, seconds=1e-6)
    assert {row["energy_mj"] for row in rows} == {0.0}  # what is used when idle is not theirs


def test_no_meter_is_told(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "find_meter", lambda: Unavailable("no counter here"))
    assert energy_rows(runtime, None) == ([], "no counter here")
