from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from pydantic import ValidationError

from conftest import Made
from t3c.artifact.shift import ShiftModel
from t3c.engines import ENGINES, open_engine
from t3c.engines.torch import TorchSession
from t3c.errors import DataError, SpecError
from t3c.graph.assemble import quantized_inputs
from t3c.graph.synthetic import synthetic_layer
from t3c.graph.watching import WATCHED, features, monitored_tensors, watched
from t3c.measure.shift import Activations
from t3c.runtime.monitor import Monitor, Shift
from t3c.runtime.runtime import Runtime, load
from t3c.spec import Factorization, Form, Kind, LayerPoint, LayerSpec

TENSORS = 8
NAMES = [f"t{index}" for index in range(TENSORS)]
LAYERS = [f"stages.{index}" for index in range(TENSORS)]


def usual(rng: np.random.Generator, count: int, gain: np.ndarray | float = 1.0) -> np.ndarray:
    """Features of samples of different loudness, with heavy tails; tensors times a gain."""
    loud = 0.2 * rng.standard_t(5, size=(count, 1))
    logs = loud + 0.1 * rng.standard_t(5, size=(count, TENSORS)) + np.arange(TENSORS)
    shares = 0.01 * np.exp(2 * (logs - np.arange(TENSORS)))
    factor = np.broadcast_to(gain, TENSORS)
    return np.concatenate([logs + np.log(factor), np.sqrt(shares * factor**2)], axis=1)


def fitted(rng: np.random.Generator, fit: int = 64, reference: int = 100) -> ShiftModel:
    return ShiftModel.fit(
        usual(rng, fit), usual(rng, reference),
        tensors=NAMES, layers=LAYERS, thresholds=dict.fromkeys(NAMES, 1.0),
    )  # fmt: skip


def exposed(model: onnx.ModelProto, tensors: list[str]) -> onnx.ModelProto:
    """Return a copy of an engine graph whose last outputs are these float tensors."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for name in tensors:
        output = f"exposed/{name}"
        copy.graph.node.append(helper.make_node("Identity", [name], [output]))
        copy.graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, None))
    return copy


def found(monitor: Monitor, rows: np.ndarray) -> tuple[Shift, int]:
    """The first shift, and after how many samples."""
    for count, row in enumerate(rows, 1):
        event = monitor.observe(row[None])
        if event:
            return event, count
    raise AssertionError("no shift was found")


def test_false_alarms_are_as_rare_as_promised() -> None:
    rng, rate, length = np.random.default_rng(0), 1e-3, 500
    counts = []
    for seed in range(100):
        monitor = Monitor(fitted(rng, fit=50, reference=50), rate=rate, seed=seed)
        batches = np.split(usual(rng, length), 100)
        counts.append(sum(monitor.observe(batch) is not None for batch in batches) / length)
    assert np.mean(counts) <= rate + 3 * np.std(counts) / np.sqrt(len(counts))


@pytest.mark.parametrize("before", [0, 3_000])
def test_a_moderate_gain_of_all_tensors_is_found(before: int) -> None:
    delays = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        monitor = Monitor(fitted(rng), seed=seed)
        if before:
            monitor.observe(usual(rng, before))
        delays.append(found(monitor, usual(rng, 300, gain=1.5))[1])
    assert np.quantile(delays, 0.9) <= 60


@pytest.mark.parametrize("gain", [0.4, 1.8])
def test_the_layer_that_moved_is_named(gain: float) -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        monitor = Monitor(fitted(rng), seed=seed)
        assert monitor.observe(usual(rng, 200)) is None
        factor = np.ones(TENSORS)
        factor[5] = gain
        event, count = found(monitor, usual(rng, 100, factor))
        assert count <= 40
        assert event.layers[0][0] == "stages.5"
        assert event.layers[0][1] > 1.4 * event.layers[1][1]
        assert event.seen == 200 + count
        assert abs(event.since - count) <= 15
        assert event.evidence >= 1e4


def test_the_message_is_one_line_that_tells_what_moved() -> None:
    rng = np.random.default_rng(0)
    model = fitted(rng)
    monitor = Monitor(model)
    event = monitor.observe(usual(rng, 100, gain=np.where(np.arange(TENSORS) == 2, 2.0, 1.0)))
    assert event is not None
    assert re.match(
        r"activations have moved since about \d+ samples: layer stages\.2 "
        r"\((RMS [\d.]+x its calibrated value|[\d.]+% of values above its threshold, calibrated "
        r"[\d.]+%)\), layer ",
        event.message,
    )
    still = np.tile(model.centre, (5, 1))
    louder, sparser = still.copy(), still.copy()
    louder[:, 2] += np.log(1.4)
    sparser[:, TENSORS + 2] = 0.5
    assert model.describe("stages.2", louder) == "layer stages.2 (RMS 1.4x its calibrated value)"
    assert "(25.00% of values above its threshold, calib" in model.describe("stages.2", sparser)


def test_values_that_are_not_finite_are_the_most_extreme() -> None:
    rng = np.random.default_rng(0)
    model = fitted(rng)
    rows = usual(rng, 20)
    rows[:10, 3] = np.nan
    rows[10:, 3] = np.inf
    assert np.isinf(model.scores(rows)[0]).all()
    event, count = found(Monitor(model), rows)
    assert count <= 10
    assert event.layers[0] == ("stages.3", np.inf)
    assert "layer stages.3 (values that are not finite)" in event.message


def test_batches_and_single_samples_are_the_same_stream() -> None:
    rng = np.random.default_rng(1)
    model = fitted(rng)
    rows = np.concatenate([usual(rng, 100), usual(rng, 60, gain=1.6)])
    one, many = Monitor(model), Monitor(model)
    events = [one.observe(row[None]) for row in rows]
    assert many.observe(rows) == next(event for event in events if event)
    assert one.evidence == many.evidence


def test_threads_take_turns() -> None:
    rng = np.random.default_rng(2)
    monitor = Monitor(fitted(rng))
    batches = np.split(usual(rng, 800), 100)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(monitor.observe, batches))
    assert monitor.seen == 800
    assert 0 <= monitor.evidence < 1


def test_a_model_survives_json_and_scores_the_same() -> None:
    rng = np.random.default_rng(3)
    model = fitted(rng)
    rows = usual(rng, 10)
    before = model.scores(rows)[0]
    again = ShiftModel.model_validate_json(model.model_dump_json())
    assert again == model
    np.testing.assert_array_equal(again.scores(rows)[0], before)


def test_usual_samples_are_about_one_away_and_constant_features_do_no_harm() -> None:
    rng = np.random.default_rng(4)
    assert 0.5 < np.median(fitted(rng).scores(usual(rng, 200))[0]) < 2
    rows = usual(rng, 200)
    rows[:, 9] = 0
    still = ShiftModel.fit(
        rows[:60], rows[60:120], tensors=NAMES, layers=LAYERS, thresholds=dict.fromkeys(NAMES, 1.0)
    )
    assert 0.5 < np.median(still.scores(rows[120:])[0]) < 2


@pytest.mark.parametrize(
    "change",
    [
        {"layers": ("a",)},
        {"centre": (0.0,) * 3},
        {"scale": (0.0,) * 2 * TENSORS},
        {"centre": (float("nan"),) * 2 * TENSORS},
        {"distances": (1.0,), "levels": (1.0,)},
        {"levels": (1.0, 2.0)},
        {"tensors": ("t0",) * TENSORS},
    ],
)
def test_a_model_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    good = fitted(np.random.default_rng(5)).model_dump()
    with pytest.raises(ValidationError):
        ShiftModel(**(good | change))


def test_data_that_cannot_be_is_refused() -> None:
    rng = np.random.default_rng(6)
    model = fitted(rng)
    with pytest.raises(DataError, match="not rows of 16 features"):
        Monitor(model).observe(np.zeros((3, 5)))
    with pytest.raises(SpecError, match="window must be positive"):
        Monitor(model, window=0)
    with pytest.raises(DataError, match="not at least 8 rows of 16"):
        fitted(rng, fit=4)
    with pytest.raises(DataError, match="two columns a tensor"):
        features(np.zeros((2, 3)))


# -- watched graphs


@pytest.fixture(scope="module")
def rt(made: Made) -> Runtime:
    return load(made.artifact)


def measured(graph: onnx.ModelProto, names: list[str], x: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors themselves, as torch computes them."""
    values: dict[str, np.ndarray] = {}

    def watch(name: str, value: object) -> None:
        if name in names:
            values[name] = np.asarray(value)

    TorchSession(graph).observe([x], watch)
    return values


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_a_watched_graph_answers_as_before_and_tells_the_truth(
    made: Made, rt: Runtime, engine: str
) -> None:
    x = made.digits.test[0][:12].numpy()
    graph = rt.graph(rt.chain["max"])
    topology = rt.artifact.graph().graph
    names = [name for name, _ in monitored_tensors(topology, rt.artifact.manifest.specs, ["input"])]
    values = measured(graph, names, x)
    thresholds = {}
    for name, value in values.items():
        seen = Activations()
        seen.add(value)
        thresholds[name] = seen.quantile(0.95)
    compiled = open_engine(engine, 1)
    plain = compiled.compile(graph).run([x])
    model = watched(graph, names, thresholds)
    onnx.checker.check_model(model, full_check=True)
    assert [o.name for o in model.graph.output][-1] == WATCHED
    session = compiled.compile(model)
    *outputs, raw = session.run([x])
    scale = np.abs(plain[0]).max()
    np.testing.assert_allclose(outputs[0], plain[0], atol=0.02 * scale)
    flat = [values[name].reshape(len(x), -1).astype(np.float64) for name in names]
    squares = np.stack([np.mean(v**2, axis=1) for v in flat], axis=1)
    above = [np.abs(v) > thresholds[n] for n, v in zip(names, flat, strict=True)]
    shares = np.stack([np.mean(a, axis=1) for a in above], axis=1)
    exact = engine == "torch"
    np.testing.assert_allclose(raw[:, : len(names)], squares, rtol=1e-5 if exact else 0.05)
    np.testing.assert_allclose(raw[:, len(names) :], shares, atol=1e-6 if exact else 0.05)
    alone = np.concatenate([session.run([one[None]])[-1] for one in x[:3]])
    np.testing.assert_allclose(features(alone), features(raw[:3]), atol=0.05)
    *_, last = compiled.compile(exposed(graph, names)).run([x])
    assert last.shape == values[names[-1]].shape
    assert np.linalg.norm(last - values[names[-1]]) < 0.05 * np.linalg.norm(last)


def test_features_are_logs_and_roots() -> None:
    made = features([[4.0, 0.0, 0.25, 0.0], [np.nan, 1.0, 0.0, 1.0]])
    np.testing.assert_allclose(made[0], [np.log(2), np.log(1e-12), 0.5, 0])
    assert np.isnan(made[1, 0])
    np.testing.assert_allclose(made[1, 1:], [0, 0, 1])


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_samples_times_positions_are_told_apart(engine: str) -> None:
    """Where a layer reads (samples * positions, channels), features are still of samples."""
    nodes = [
        helper.make_node("Reshape", ["x", "rows"], ["flat"]),
        helper.make_node("Relu", ["flat"], ["y"]),
    ]
    rows = helper.make_tensor("rows", TensorProto.INT64, [2], [-1, 4])
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 3, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 4])], [rows],
    )  # fmt: skip
    opset = [helper.make_opsetid("", 21)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=10)
    x = np.random.default_rng(0).normal(size=(5, 3, 4)).astype(np.float32)
    raw = open_engine(engine, 1).compile(watched(model, ["flat"], {"flat": 1.0})).run([x])[-1]
    wanted = [np.mean(x**2, axis=(1, 2)), np.mean(np.abs(x) > 1, axis=(1, 2))]
    np.testing.assert_allclose(raw, np.stack(wanted, axis=1), rtol=1e-5)


def test_a_shift_of_the_input_is_found_on_the_engine(made: Made, rt: Runtime) -> None:
    """From pictures to the name of a layer: first thresholds, then features, then a monitor."""
    graph = rt.graph(rt.chain["max"])
    pairs = monitored_tensors(
        rt.artifact.graph().graph, rt.artifact.manifest.specs, ["input"], most=4
    )
    names = [name for name, _ in pairs]
    pictures = made.digits.test[0].numpy()
    calibration, rest = pictures[:150], pictures[150:300]
    seen = {name: Activations() for name in names}
    outputs = rt.engine.compile(exposed(graph, names)).run([calibration[:50]])
    for name, value in zip(names, outputs[-len(names) :], strict=True):
        seen[name].add(value)
    thresholds = {name: activations.quantile(0.99) for name, activations in seen.items()}
    session = rt.engine.compile(watched(graph, names, thresholds))
    rows = features(session.run([calibration])[-1])
    model = ShiftModel.fit(
        rows[:75], rows[75:],
        tensors=names, layers=[layer for _, layer in pairs], thresholds=thresholds,
    )  # fmt: skip
    monitor = Monitor(model)
    assert monitor.observe(features(session.run([rest])[-1])) is None
    noise = np.random.default_rng(0).normal(0, 0.5, rest.shape).astype(np.float32)
    event = monitor.observe(features(session.run([rest[:40] + noise[:40]])[-1]))
    assert event is not None
    assert event.since <= 20
    assert {name for name, _ in event.layers} <= {layer for _, layer in pairs}


def test_monitored_tensors_are_spread_over_depth(rt: Runtime) -> None:
    topology, specs = rt.artifact.graph().graph, rt.artifact.manifest.specs
    every = monitored_tensors(topology, specs, ["input"], most=1_000)
    assert {name for name, _ in every} == set(quantized_inputs(topology, specs))
    assert all(layer in specs for _, layer in every)
    few = monitored_tensors(topology, specs, ["input"], most=3)
    assert (few[0], few[-1], len(few)) == (every[0], every[-1], 3)
    assert every.index(few[1]) in (len(every) // 2, (len(every) - 1) // 2)
    assert monitored_tensors(topology, specs, ["input"], most=1) == every[:1]


def test_what_cannot_be_watched_is_refused() -> None:
    spec = LayerSpec("fc", Kind.LINEAR, Factorization.SVD, 8, 8, in_size=(3, 1), out_size=(3, 1))
    graph = synthetic_layer(spec, LayerPoint(4, 8), Form.FACTORED)
    x = np.ones((4, 3, 8), dtype=np.float32)
    raw = TorchSession(watched(graph, ["x"], {"x": 0.5})).run([x])[-1]
    np.testing.assert_allclose(raw, np.ones((4, 2)))
    with pytest.raises(SpecError, match="no tensor 'z' to watch"):
        watched(graph, ["z"], {"z": 1.0})
    with pytest.raises(SpecError, match="no threshold for 'x'"):
        watched(graph, ["x"], {})
    with pytest.raises(SpecError, match="no tensor to watch"):
        watched(graph, [], {})
