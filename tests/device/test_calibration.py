from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conftest import Made, quick
from t3c.artifact.devices import DeviceTable, GroupTiming, LayerTiming, explain_forms
from t3c.artifact.merge import merge, pooled, read_table
from t3c.artifact.reader import Artifact
from t3c.cost.proxy import PROXIES
from t3c.device import calibrate as calibration
from t3c.device.calibrate import CalibrationConfig, about, calibrate
from t3c.device.execution import execution_of
from t3c.device.grid import mixtures
from t3c.device.journal import Journal
from t3c.device.predict import nearest, transfer_error, transferred
from t3c.device.starts import time_start
from t3c.device.timed import Timed
from t3c.device.transfer import calibrate_quickly
from t3c.engines import open_engine
from t3c.errors import ArtifactError, CorruptError, DisturbedError, SpecError
from t3c.graph.context import float_outputs
from t3c.measure.quiet import Conditions
from t3c.report.terminal import answered, summarize
from t3c.runtime.placed import disturbance
from t3c.runtime.remarks import Code
from t3c.runtime.runtime import load
from t3c.spec import Budget, Factorization, Form, Kind, Latency, LayerPoint, LayerSpec

SMALL = quick(4, grid=9)


@pytest.fixture(scope="module")
def artifact(made: Made) -> Artifact:
    return Artifact(made.artifact)


@pytest.fixture(scope="module")
def table(made: Made, artifact: Artifact) -> DeviceTable:
    """The artifact calibrated on another device than it was exported for."""
    known = made.exported.table.layers
    return calibrate(artifact, open_engine("onnxruntime", 1), SMALL, timings=known)


def test_a_table_holds_what_was_measured(artifact: Artifact, table: DeviceTable) -> None:
    names = [profile.name for profile in artifact.manifest.chain]
    assert list(table.profiles) == list(table.forms) == names
    assert table.measured
    assert (table.device.engine, table.device.threads) == ("onnxruntime", 1)
    assert set(table.proxies) == set(PROXIES)
    proxy = table.proxy
    assert proxy is not None
    drawn = len(table.grid) - len(names)
    assert drawn >= 3
    assert proxy.held_out == drawn // 3 == [row.held_out for row in table.grid].count(True)
    assert proxy.fitted == len(table.grid) - proxy.held_out
    works = [tuple(sorted(row.features.items())) for row in table.grid]
    assert len(set(works[len(names) :])) == drawn  # what is held out was not fitted
    assert not set(works[len(names) :]) & set(works[: len(names)])
    assert table.energy.startswith("unavailable: ") != bool(table.energy_mj)
    assert DeviceTable.model_validate_json(table.model_dump_json()) == table
    for name, forms in table.forms.items():
        points = artifact.manifest.chain[name].points
        assert all(form in artifact.manifest.specs[n].forms(points[n]) for n, form in forms.items())


def test_mixtures_are_new_stored_and_go_from_small_to_large(artifact: Artifact) -> None:
    found = mixtures(artifact, 12, seed=0)
    chain = list(artifact.manifest.chain)
    assert found == mixtures(artifact, 12, seed=0)
    seen = {tuple(p.points.values()) for p in [*chain, *found]}
    assert len(seen) == len(chain) + len(found)
    for profile in found:
        for name, point in profile.points.items():
            assert point in {p.points[name] for p in chain}
    ranks = [sum(p.rank for p in profile.points.values()) for profile in found]
    third = len(ranks) // 3
    assert np.mean(ranks[:third]) < np.mean(ranks[-third:])


@pytest.mark.parametrize(("repeats", "disturbed"), [(2, False), (1, True)])
def test_disturbed_sweeps_are_done_again_and_else_said(
    made: Made, artifact: Artifact, monkeypatch: pytest.MonkeyPatch, repeats: int, disturbed: bool
) -> None:
    titles: list[str] = []

    def task(
        run: object, title: str, executions: dict[Timed, object], *_: object
    ) -> dict[Timed, list[list[float]]]:
        titles.append(title)
        later = 1.1 if title.startswith("profiles again 2") else 2.0
        return {key: [[1.0] * 5, [later] * 5] for key in executions}

    monkeypatch.setattr(calibration, "REPEATS", repeats)
    monkeypatch.setattr(calibration, "WAIT_SECONDS", 0)
    monkeypatch.setattr(calibration._Run, "_task", task)
    engine = open_engine("openvino", 1)
    found = calibrate(artifact, engine, quick(3), timings=made.exported.table.layers)
    assert len(titles) == 3 * (1 + repeats)
    assert (found.spread >= 0.3) is disturbed
    told = disturbance(artifact.path, found.model_copy(update={"conditions": None}))
    assert (told is not None) is disturbed
    if told is not None:
        assert str(told) == (
            "what was measured here was disturbed (times went up by 33% for a while): "
            f"run t3c calibrate {artifact.path} when the machine is quiet"
        )


def test_a_disturbed_table_is_said_where_it_is_looked_at(made: Made, copied: Path) -> None:
    opened = Artifact(copied)
    (table,) = opened.devices()
    busy = Conditions(0.5, 1, True, "other processes used 0.50 of a core")
    opened.add_device(table.model_copy(update={"conditions": None}))
    assert not summarize(opened, False).disturbed
    opened.add_device(table.model_copy(update={"conditions": busy}))
    (told,) = summarize(opened, False).disturbed.values()
    assert told == (
        f"what was measured here was disturbed ({busy.reason}): "
        f"run t3c calibrate {copied} when the machine is quiet"
    )
    runtime = load(copied, threads=table.device.threads)
    budget = Budget(latency_ms=1e6)
    answer = runtime.answer(np.load(made.folder / "one.npy")[None], budget)
    assert Code.DISTURBED not in [warning.code for warning in answer.warnings]
    assert told in answered(runtime, answer, budget).warnings
    assert told not in answered(runtime, answer).warnings


@pytest.mark.usefixtures("briefly")
def test_a_stopped_calibration_goes_on_where_it_was(
    made: Made, artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine("openvino", 1)
    wanted = about(artifact, engine, SMALL)
    whole = calibration.sample
    calls = []

    def stopping(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*args, **kwargs)

    path = tmp_path / "x.journal"
    monkeypatch.setattr(calibration, "sample", stopping)
    with pytest.raises(KeyboardInterrupt):
        calibrate(artifact, engine, SMALL, journal=Journal(path, wanted))
    before = Journal(path, wanted)
    first = before.results.get("profiles, sweep 1 of 3")
    assert first is not None
    layers = [key for key in before.results if key.startswith("layer ")]
    assert layers
    table = calibrate(artifact, engine, SMALL, journal=Journal(path, wanted))
    after = Journal(path, wanted)
    assert after.results.get("profiles, sweep 1 of 3") == first  # not measured again
    assert all(after.results.get(key) == before.results.get(key) for key in layers)
    assert list(table.profiles) == [profile.name for profile in artifact.manifest.chain]
    timed = first[str(Timed(next(iter(table.profiles))))]
    assert next(iter(table.profiles.values())).samples > sum(map(len, timed))


def test_a_busy_machine_is_refused(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(quiet: object) -> None:
        raise DisturbedError("the machine is busy")

    monkeypatch.setattr(calibration, "settle", busy)
    with pytest.raises(DisturbedError, match="busy"):
        calibrate(artifact, open_engine("openvino", 1), CalibrationConfig(rounds=1, grid=0))


@pytest.mark.parametrize(("slower", "stay"), [(1.01, True), (1.5, False)])
def test_certified_forms_stay_unless_they_are_slower(
    copied: Path, monkeypatch: pytest.MonkeyPatch, slower: float, stay: bool
) -> None:
    """A layer table that says otherwise does not cost the certificates; whole profiles may."""
    artifact = Artifact(copied)
    before = load(copied)
    assert set(before.certificates) == {p.name for p in before.chain}
    flipped = [
        t.model_copy(update={"ms": dict(zip(t.ms, reversed(t.ms.values()), strict=True))})
        for t in before.table.layers
    ]

    def sampled(
        calls: dict[Timed, object], rounds: int, **_: object
    ) -> dict[Timed, list[list[float]]]:
        return {key: [[slower if key.certified else 1.0] * 5] for key in calls}

    monkeypatch.setattr(calibration, "sample", sampled)
    config = replace(SMALL, grid=0)
    artifact.add_device(calibrate(artifact, open_engine("openvino"), config, timings=flipped))
    after = load(copied)
    changed = {name for name, forms in after.forms.items() if forms != before.forms[name]}
    assert bool(changed) is not stay
    assert set(after.certificates) == {p.name for p in after.chain} - changed


def test_a_device_that_was_never_calibrated_is_served_by_transfer(
    made: Made, copied: Path, table: DeviceTable
) -> None:
    artifact = Artifact(copied)
    alone = load(copied, "onnxruntime", 1)
    assert alone.table is not None
    assert not alone.table.measured
    assert "its error there is not known" in str(alone.note)
    answer = alone.answer(made.digits.test[0][:1].numpy(), Budget(latency_ms=1e6))
    assert alone.note in answer.warnings
    assert alone.note.code is Code.TRANSFERRED_TABLE
    assert "proxy of" in str(alone.note)
    artifact.add_device(table)
    known = load(copied, "onnxruntime", 1)
    assert known.table == table
    assert not known.note
    third = load(copied, "openvino", 1)
    assert third.table is not None
    donor = nearest(artifact.devices(), third.device)
    assert donor is not None
    assert donor.device.engine == "openvino"
    error = transfer_error(donor, artifact.devices())
    assert third.table.error == error
    assert f"off by up to {error:.0%}" in str(third.note)
    assert third.candidates[0].guard >= error  # the error bar is kept free


def test_predictions_of_a_transfer_are_the_proxys(artifact: Artifact, table: DeviceTable) -> None:
    other = transferred(artifact, table, [table], table.device.model_copy(update={"threads": 64}))
    rows = table.grid[: len(table.profiles)]
    assert table.proxy is not None
    for row, (name, latency) in zip(rows, other.profiles.items(), strict=True):
        guess = sum(table.proxy.coefficients[k] * v for k, v in row.features.items())
        assert latency.p50 == pytest.approx(guess), name


@pytest.mark.usefixtures("briefly")
def test_three_points_need_a_donor_and_say_what_they_are(
    copied: Path, artifact: Artifact, table: DeviceTable
) -> None:
    engine = open_engine("onnxruntime", 2)
    quickly = calibrate_quickly(Artifact(copied), engine, replace(SMALL, rounds=6))
    assert not quickly.measured
    assert "proxy of" in quickly.source
    assert list(quickly.profiles) == [p.name for p in artifact.manifest.chain]
    assert quickly.error is not None
    assert len(quickly.profiles) - len(quickly.predicted) == min(3, len(quickly.profiles))
    Artifact(copied).add_device(table)
    with pytest.raises(SpecError, match="calibrated in full"):
        calibrate_quickly(Artifact(copied), open_engine("onnxruntime", 1), SMALL)
    for path in (copied / "devices").iterdir():
        path.unlink()
    with pytest.raises(SpecError, match="without --quick"):
        calibrate_quickly(Artifact(copied), engine, SMALL)


def test_tables_are_shared_and_merged(
    tmp_path: Path, artifact: Artifact, table: DeviceTable
) -> None:
    path = tmp_path / "table.json"
    path.write_text(table.model_dump_json())
    shared = read_table(artifact, path)
    assert shared == table
    slower = {
        n: Latency(t.p50 * 2, t.p90 * 2, t.p99 * 2, (t.ci95[0] * 2, t.ci95[1] * 2), t.samples)
        for n, t in table.profiles.items()
    }
    both = merge(table, table.model_copy(update={"profiles": slower}))
    for name, latency in both.profiles.items():
        mine = table.profiles[name]
        assert latency.samples == 2 * mine.samples
        assert mine.p50 < latency.p50 < 2 * mine.p50
        assert both.guard(name) >= 0.3  # the slower run is a third above the mean
    assert both.grid == table.grid
    assert merge(table, table) == table  # the same file twice is no new measurement
    guessed = table.model_copy(update={"source": "three points", "predicted": ("tiny",)})
    assert merge(table, guessed) == merge(guessed, table) == table
    other = table.device.model_copy(update={"threads": 7})
    with pytest.raises(SpecError, match="not of one device"):
        merge(table, table.model_copy(update={"device": other}))
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "content": "0" * 64}))
    with pytest.raises(CorruptError, match="measured on other content"):
        read_table(artifact, path)
    outside = {**raw["device"], "engine": "../../outside"}
    for wrong in ({"profiles": {"tiny": {"p50": -1}}}, {"device": outside}):
        path.write_text(json.dumps({**raw, **wrong}))
        with pytest.raises(CorruptError):
            read_table(artifact, path)


def test_pooling_is_a_weighted_mean_that_admits_what_it_hides() -> None:
    a, b = Latency(1.0, 1.2, 1.4, (0.9, 1.1), 100), Latency(2.0, 2.2, 2.4, (1.9, 2.1), 300)
    both = pooled(a, b)
    assert (both.p50, both.samples, both.ci95) == (1.75, 400, (0.9, 2.1))
    assert both.spread == pytest.approx(2 / 1.75 - 1)


def test_forms_have_reasons() -> None:
    spec = LayerSpec("fc", Kind.LINEAR, Factorization.SVD, 64, 64)
    conv = LayerSpec("dw", Kind.CONV2D, Factorization.SVD, 8, 8, (3, 3), groups=8)
    plain = LayerSpec("bits", Kind.LINEAR, Factorization.NONE, 64, 64)
    timings = (
        LayerTiming(layer="fc", rank=8, ms={Form.DENSE: 2.0, Form.FACTORED: 1.0}),
        LayerTiming(layer="fc", rank=32, ms={Form.DENSE: 2.0, Form.FACTORED: 3.0}),
    )

    def reason(layer: LayerSpec, rank: int) -> tuple[Form, str]:
        point = LayerPoint(rank, 8)
        choice = explain_forms(timings, {layer.name: layer}, {layer.name: point})[layer.name]
        return choice.form, choice.reason

    assert reason(spec, 8) == (Form.FACTORED, "factored 1.000 ms, dense 2.000 ms")
    assert reason(spec, 32) == (Form.DENSE, "factored 3.000 ms, dense 2.000 ms")
    assert reason(spec, 64) == (Form.DENSE, "full rank: stored dense")
    assert reason(spec, 16) == (Form.FACTORED, "not timed on this device")
    assert reason(conv, 4)[0] is Form.DENSE
    assert "in groups" in reason(conv, 4)[1]
    assert reason(plain, 64) == (Form.DENSE, "elastic in bits alone")


def test_groups_run_together_where_that_is_clearly_faster(table: DeviceTable) -> None:
    def grouped(together: float, ranks: tuple[int, int] = (8, 8)) -> int:
        timing = GroupTiming(
            layers=("q", "k"), ranks=ranks, form=Form.FACTORED, together_ms=together, apart_ms=1.0
        )
        forms = dict.fromkeys(("q", "k"), Form.FACTORED)
        points = dict.fromkeys(("q", "k"), LayerPoint(8, 8))
        return len(table.model_copy(update={"groups": (timing,)}).grouped(points, forms))

    assert (grouped(0.9), grouped(0.99), grouped(1.2), grouped(0.5, (8, 16))) == (1, 0, 0, 0)


def test_a_guard_is_the_spread_the_error_or_the_least(table: DeviceTable) -> None:
    name = next(iter(table.profiles))
    still = {name: replace(table.profiles[name], spread=0.0)}
    moving = {name: replace(table.profiles[name], spread=0.1)}
    assert table.model_copy(update={"profiles": still}).guard(name) == 0.02
    assert table.model_copy(update={"profiles": moving}).guard(name) == pytest.approx(0.1)
    guessed = {"profiles": moving, "error": 0.5, "predicted": (name,)}
    assert table.model_copy(update=guessed).guard(name) == 0.5
    assert table.model_copy(update={**guessed, "predicted": ()}).guard(name) == pytest.approx(0.1)


def test_layers_whose_output_stays_float_are_told(artifact: Artifact) -> None:
    """In a residual network: those before an addition, and the head."""
    found = float_outputs(artifact.graph().graph, artifact.manifest.specs)
    assert "head" in found
    assert {name for name in found if "conv2" in name}
    assert not {name for name in found if "conv1" in name}


def test_an_execution_runs_as_the_table_says(artifact: Artifact, table: DeviceTable) -> None:
    profile = artifact.manifest.chain.profiles[0]
    forms = dict.fromkeys(profile.points, Form.DENSE)
    dense = table.model_copy(update={"forms": {profile.name: forms}})
    assert execution_of(artifact, dense, profile).forms == forms
    for wrong in ({**forms, "other": Form.DENSE}, dict(list(forms.items())[1:])):
        broken = table.model_copy(update={"forms": {profile.name: wrong}})
        with pytest.raises(CorruptError, match="calibrate again"):
            execution_of(artifact, broken, profile)
    bare = table.model_copy(update={"forms": {}, "layers": ()})
    stored = {n: artifact.manifest.specs[n].forms(p)[0] for n, p in profile.points.items()}
    assert execution_of(artifact, bare, profile).forms == stored


def test_a_table_of_an_artifact_that_was_replaced_is_not_written(
    copied: Path, table: DeviceTable
) -> None:
    artifact = Artifact(copied)
    raw = json.loads((copied / "manifest.json").read_text())
    raw["model"]["name"] = "another"
    (copied / "manifest.json").write_text(json.dumps(raw))
    before = sorted((copied / "devices").iterdir())
    with pytest.raises(ArtifactError, match="replaced while it was measured"):
        artifact.add_device(table)
    assert sorted((copied / "devices").iterdir()) == before


def test_a_cold_start_that_fails_says_why(
    artifact: Artifact, table: DeviceTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = artifact.manifest.chain.profiles[0]
    execution = execution_of(artifact, table, profile)
    engine = open_engine("onnxruntime", 1)
    started = time_start(artifact, engine, execution, table.device.weight_bits)
    assert started.cold_ms is not None
    assert started.reason == ""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    failed = time_start(artifact, engine, execution, table.device.weight_bits)
    assert (failed.cold_ms, failed.reason) == (None, "no reason given")
    assert failed.activation_bytes == started.activation_bytes
