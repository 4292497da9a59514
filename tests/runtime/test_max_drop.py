"""Budgets by measured quality: what the ledger has of profiles, and what is chosen by it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from conftest import Made
from t3c.artifact.card import render_card
from t3c.artifact.ledger import QualityEntry
from t3c.artifact.reader import LEDGER, Artifact
from t3c.artifact.trim import trim
from t3c.certify.slices import digest, sample_keys
from t3c.cli import app, console
from t3c.engines import open_engine
from t3c.errors import CorruptError
from t3c.evidence.drifts import session_reference
from t3c.evidence.original import read_onnx
from t3c.evidence.quality import Judge, Scorer, measure_quality
from t3c.report.terminal import answered, summarize
from t3c.runtime.adapt import held_back
from t3c.runtime.remarks import Code, Remark
from t3c.runtime.runtime import load
from t3c.runtime.select import Candidate, explain, select
from t3c.runtime.signals import Asked
from t3c.spec import Budget, Latency, Metric

COUNT = 100


def candidate(
    name: str, ms: float, drift: float | None = None, drop: float | None = None
) -> Candidate:
    return Candidate(name, Latency(ms, ms, ms, (ms, ms), 9), ms, None, drift, drop=drop)


CHAIN = [
    candidate("tiny", 1.0, 0.4, 0.02),
    candidate("med", 2.0, 0.2, 0.004),
    candidate("max", 3.0, 0.05, -0.001),
]


def test_alone_it_asks_for_the_fastest_that_lost_no_more() -> None:
    for cap, profile in ((0.5, "tiny"), (0.02, "tiny"), (0.019, "med"), (0.004, "med"), (0, "max")):
        found = select(CHAIN, Budget(max_drop=cap))
        assert (found.profile, found.warnings) == (profile, ())
        assert found.reason == Remark(Code.FASTEST_WITHIN_DROP, limit=cap)


def test_where_none_is_within_it_the_largest_serves_with_a_warning() -> None:
    lossy = [replace(c, drop=0.1) for c in CHAIN]
    found = select(lossy, Budget(max_drop=0.005))
    assert found.profile == "max"
    assert found.warnings == (Remark(Code.OVER_DROP, "max", value=0.1, limit=0.005),)
    assert str(found.reason) == "nothing keeps max_drop"
    assert str(found.warnings[0]) == "max lost 0.1 where it was measured, over max_drop 0.005"


def test_where_nothing_is_known_the_largest_serves_with_a_warning() -> None:
    unknown = [replace(c, drop=None) for c in CHAIN]
    found = select(unknown, Budget(max_drop=0.5))
    assert (found.profile, found.warnings) == ("max", (Remark(Code.DROP_UNCONFIRMED, "max"),))
    known = [*unknown[:2], CHAIN[2]]
    assert select(known, Budget(max_drop=0.5)).profile == "max"


def test_with_a_drift_cap_the_fastest_within_both() -> None:
    assert select(CHAIN, Budget(drift=0.3, max_drop=0.5)).profile == "med"
    assert select(CHAIN, Budget(drift=0.5, max_drop=0.005)).profile == "med"
    found = select(CHAIN, Budget(drift=0.1, max_drop=0.005))
    assert found.profile == "max"
    assert str(found.reason) == (
        "the fastest with drift within 0.1 and a measured loss within 0.005"
    )
    nothing = select(CHAIN, Budget(drift=0.01, max_drop=0.005))
    assert str(nothing.reason) == "nothing keeps the drift cap and max_drop"
    assert [w.code for w in nothing.warnings] == [Code.OVER_CAP]


def test_beside_limits_it_warns_and_changes_nothing() -> None:
    for cap in (0.0, 0.005, 0.5):
        found = select(CHAIN, Budget(latency_ms=1.5, max_drop=cap))
        plain = select(CHAIN, Budget(latency_ms=1.5))
        assert (found.profile, found.reason) == (plain.profile, plain.reason)
        over = (Remark(Code.OVER_DROP, "tiny", value=0.02, limit=cap),)
        assert found.warnings == (() if cap == 0.5 else over)


def test_each_profile_is_explained() -> None:
    told = explain(CHAIN, Budget(max_drop=0.005), "med")
    assert {name: [w.code for w in why] for name, why in told.items()} == {
        "tiny": [Code.OVER_DROP], "med": [Code.CHOSEN], "max": [Code.OTHER_PREFERRED],
    }  # fmt: skip


known = st.none() | st.sampled_from((-0.01, 0.0, 0.001, 0.004, 0.02, 0.1))
speeds = st.sampled_from((1.0, 2.0, 3.0, 4.0))
profiles = st.tuples(speeds, known, known)


@given(
    st.lists(profiles, min_size=1, max_size=6), st.none() | st.sampled_from((0.001, 0.02, 0.2)),
    st.sampled_from((0.0, 0.002, 0.01, 0.05)), st.sampled_from((0.0, 0.003, 0.03, 0.2)),
)  # fmt: skip
@settings(max_examples=300)
def test_a_larger_cap_never_gives_a_slower_profile(
    rows: list[tuple[float, float | None, float | None]],
    drift: float | None,
    cap: float,
    more: float,
) -> None:
    """Whatever was measured: also where a larger profile is faster, or lost more."""
    chain = [
        replace(candidate(str(i), ms, None if far is None else abs(far), drop), size_mb=i + 1.0)
        for i, (ms, far, drop) in enumerate(rows)
    ]
    tight, loose = (
        next(c for c in chain if c.profile == select(chain, budget).profile)
        for budget in (Budget(drift=drift, max_drop=cap), Budget(drift=drift, max_drop=cap + more))
    )
    assert (loose.latency_ms() or 0) <= (tight.latency_ms() or 0)
    warned = bool(select(chain, Budget(drift=drift, max_drop=cap)).warnings)
    kept = tight.drop is not None and tight.drop <= cap
    kept = kept and (drift is None or (tight.drift is not None and tight.drift <= drift))
    assert warned is not kept


def test_what_is_smaller_and_slower_than_the_largest_does_not_serve_for_a_loss() -> None:
    """Else a cap that `small` keeps would be served more slowly than one that none keeps."""
    chain = [candidate("small", 5, drop=0.01), candidate("max", 2, drop=0.02)]
    for cap in (0.005, 0.01, 0.02):
        found = select(chain, Budget(max_drop=cap))
        assert found.profile == "max"
        assert [w.code for w in found.warnings] == [Code.OVER_DROP] * (cap < 0.02)


def test_load_does_not_break_a_cap_that_the_choice_keeps() -> None:
    """A choice that is over one cap is no leave to break the other."""
    chain = [
        candidate("tiny", 1, 0.4, 0.02),
        candidate("med", 2, 0.4, 0.001),
        candidate("max", 3, 0.3, 0.0),
    ]
    budget = Budget(drift=0.1, max_drop=0.005)
    choice = select(chain, budget)
    assert [w.code for w in choice.warnings] == [Code.OVER_CAP]
    assert held_back(choice, chain, budget, Asked(2, ("hot",))).profile == "med"


# -- the ledger


@pytest.fixture(scope="module")
def judged(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the artifact whose ledger has the quality of its profiles. Do not change it."""
    path = tmp_path_factory.mktemp("judged") / "copy.t3c"
    shutil.copytree(made.artifact, path)
    runtime = load(path)
    runtime.artifact.add_quality(measure_quality(runtime, scorer(made, Metric.ACCURACY)))
    return path


def scorer(made: Made, metric: Metric) -> Scorer:
    images, labels = (value[:COUNT].numpy() for value in made.digits.test)
    original = open_engine("openvino").compile(read_onnx(made.folder / "original.onnx"))
    judge = Judge(metric, 0.005, labels if metric is Metric.ACCURACY else None)
    return Scorer.of(judge, [images], session_reference(original))


def rows_of(path: Path) -> tuple[QualityEntry, ...]:
    ledger = Artifact(path).ledger()
    assert ledger is not None
    return ledger.quality


def test_quality_is_measured_by_the_labels_and_kept_by_profile_engine_and_forms(
    made: Made, judged: Path
) -> None:
    runtime = load(judged)
    images, labels = (value[:COUNT].numpy() for value in made.digits.test)
    rows = rows_of(judged)
    assert [row.profile for row in rows] == [profile.name for profile in runtime.chain]
    for row in rows:
        answers = runtime(images, profile=row.profile).argmax(axis=-1)
        assert row.value == pytest.approx((answers == labels).mean())
        assert row.drop == pytest.approx(row.original - row.value)
        assert row.ci95[0] < row.drop < row.ci95[1]
        assert (row.metric, row.samples) == (Metric.ACCURACY, COUNT)
        assert row.data == digest(sample_keys([images]))
        assert row.forms == runtime.certificates[row.profile].forms
    assert [c.drop for c in runtime.candidates] == [row.drop for row in rows]
    assert Artifact(judged).content == Artifact(made.artifact).content


def test_the_same_measured_again_takes_the_place_of_the_first(made: Made, copied: Path) -> None:
    runtime = load(copied)
    for metric in (Metric.ACCURACY, Metric.AGREEMENT):
        runtime.artifact.add_quality(measure_quality(runtime, scorer(made, metric)))
    rows = rows_of(copied)
    assert {row.metric for row in rows} == {Metric.AGREEMENT}
    assert {row.original for row in rows} == {1.0}
    assert len(rows) == len(runtime.chain)


def test_a_runtime_chooses_by_it(judged: Path, made: Made) -> None:
    runtime, x = load(judged), made.digits.test[0][:1].numpy()
    drops = {row.profile: row.drop for row in rows_of(judged)}
    for cap in sorted({max(0.0, drop) for drop in drops.values()}):
        answer = runtime.answer(x, Budget(max_drop=cap))
        assert drops[answer.profile] <= cap
        assert answer.reason.code is Code.FASTEST_WITHIN_DROP
        assert not any(w.code in (Code.OVER_DROP, Code.DROP_UNCONFIRMED) for w in answer.warnings)
    shown = answered(runtime, answer, Budget(max_drop=cap))
    assert {row.profile: row.drop for row in shown.explain} == drops


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_an_artifact_of_which_no_quality_is_known_here(
    made: Made, judged: Path, engine: str
) -> None:
    """One that was never judged, and one that was on another engine."""
    runtime = load(made.artifact if engine == "openvino" else judged, engine)
    assert {c.drop for c in runtime.candidates} == {None}
    answer = runtime.answer(made.digits.test[0][:1].numpy(), Budget(max_drop=0.5))
    assert answer.profile == "max"
    assert Code.DROP_UNCONFIRMED in [w.code for w in answer.warnings]


def test_a_ledger_from_before_loads(copied: Path) -> None:
    text = json.loads((copied / LEDGER).read_text())
    del text["quality"]
    (copied / LEDGER).write_text(json.dumps(text))
    assert rows_of(copied) == ()
    assert load(copied).candidates


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"drop": 0.9}, "its drop is not that of its figures"),
        ({"value": 1.5}, "accuracy is out of its range"),
        ({"value": -0.5}, "greater than or equal to 0"),
        ({"metric": "charm"}, "metric"),
        ({"metric": "perplexity"}, "perplexity is out of its range"),
        ({"ci95": [0.9, 0.95]}, "its drop is outside of its interval"),
        ({"ci95": [-1e999, 1e999]}, "quality.0.ci95"),
        ({"samples": 0}, "greater than or equal to 1"),
        ({"note": "trust me"}, "Extra inputs"),
    ],
)
def test_a_quality_that_was_changed_is_refused(
    judged: Path, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    copied = Path(shutil.copytree(judged, tmp_path / "copy.t3c"))
    text = json.loads((copied / LEDGER).read_text())
    text["quality"][0] |= change
    (copied / LEDGER).write_text(json.dumps(text))
    with pytest.raises(CorruptError, match=told):
        Artifact(copied).ledger()
    with pytest.raises(CorruptError, match=told):
        load(copied)


def test_perplexity_drops_by_its_growth() -> None:
    rows: dict[str, Any] = {
        "profile": "max", "engine": "openvino", "engine_version": "1", "forms": "f", "samples": 9,
        "data": "d", "metric": "perplexity", "value": 5.1, "original": 5.0, "ci95": (0.0, 0.1),
    }  # fmt: skip
    assert QualityEntry(**rows, drop=0.02).drop == 0.02
    with pytest.raises(ValueError, match="not that of its figures"):
        QualityEntry(**rows, drop=0.1)
    judge = Judge(Metric.PERPLEXITY, 0.02)
    assert judge.drop(judge.limit) == pytest.approx(0.02)
    assert np.isclose(judge.drop(np.log(5.1 / 5)), 0.02)


def test_a_part_of_an_artifact_keeps_the_quality_of_its_profiles(
    judged: Path, tmp_path: Path
) -> None:
    part = trim(Artifact(judged), ["tiny", "max"], tmp_path / "part.t3c")
    whole = {row.profile: row for row in rows_of(judged)}
    assert rows_of(part.path) == (whole["tiny"], whole["max"])
    assert load(part.path).candidates[0].drop == whole["tiny"].drop


def test_the_command_line_takes_and_shows_it(
    judged: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console.out_console, "width", 400)  # made at import; a column a device

    def told(*command: object) -> str:
        done = CliRunner().invoke(app, [*map(str, command)], env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
        return done.stdout

    largest = max(0.0, *(row.drop for row in rows_of(judged)))
    asked = ("run", judged, "--input", made.folder / "one.npy", "--max-drop")
    answer = json.loads(told(*asked, largest, "--explain", "--json"))
    assert answer["reason_code"] == "fastest_within_drop"
    assert [row["drop"] for row in answer["explain"]] == [row.drop for row in rows_of(judged)]
    assert f"a measured loss within {largest:g}" in told(*asked, largest, "--explain")
    shown = told("inspect", judged)
    assert all(f"accuracy {row.value:.4g}" in shown for row in rows_of(judged))


def test_it_is_shown(judged: Path, made: Made) -> None:
    rows = {row.profile: row for row in rows_of(judged)}
    card = render_card(Artifact(judged))
    assert "## Quality beside the original" in card
    assert all(f"| {name} | openvino | accuracy | {row.value:.4g} " in card
               for name, row in rows.items())  # fmt: skip
    assert "## Quality" not in render_card(Artifact(made.artifact))
    shown = summarize(Artifact(judged), verified=True).to_json()["profiles"]
    assert isinstance(shown, list)
    assert [QualityEntry.model_validate(row["quality"]) for row in shown] == list(rows.values())
    bare = summarize(Artifact(made.artifact), verified=True).to_json()["profiles"]
    assert isinstance(bare, list)
    assert {row["quality"] for row in bare} == {None}
