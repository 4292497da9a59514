"""A controller in the runtime: it may ask for less, never for what is over the limits."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import t3c
from conftest import Made, put_candidates, put_controller
from t3c.artifact.reader import Artifact
from t3c.cli import app
from t3c.control.policy import BUDGET_PATH, Policy, _shapes
from t3c.control.token import About
from t3c.errors import CorruptError
from t3c.evidence.audit import audit, broken_promises, draw_pairs
from t3c.runtime.remarks import Code
from t3c.runtime.runtime import Runtime
from t3c.runtime.select import Candidate, explain, select
from t3c.spec import Budget, Latency

Arrays = dict[str, np.ndarray]
Change = Callable[[Arrays, dict[str, Any]], object]
KNOTS = 41


def timid(artifact: Artifact) -> tuple[Policy, dict[str, Any]]:
    """A controller that wants profile i of n from the share (i + 1.5) / n of time and size on,
    where that profile takes (i + 1) / n: half the time it asks for one less than fits.

    The first layer's steps come sooner by what the brightness of the input says.
    """
    manifest = artifact.manifest
    profiles = list(manifest.chain)
    units = {layer.spec.name: layer.menu for layer in manifest.layers}
    first = next(name for name, menu in units.items() if len(menu) > 1)
    about = About(units, ("device",), (first,))
    arrays = {name: np.zeros(shape) for name, shape in _shapes(about, KNOTS, 1, 2).items()}
    arrays["reach"][:, 1:] = 1 / (KNOTS - 1)
    arrays["slope"] += 40.0
    arrays["summary"][:, 0], arrays["summary_std"] = -1.0, np.array([0.1, 1.0])
    wanted = []
    for name, menu in units.items():
        for point in menu[1:]:
            at = min(i for i, p in enumerate(profiles) if point <= p.points[name])
            wanted.append(40 * min((at + 1.5) / len(profiles), 1 - 1e-4))
    arrays["threshold"] = np.array(wanted)
    entry = {
        "units": [
            {"name": n, "points": [{"rank": p.rank, "bits": p.bits} for p in menu]}
            for n, menu in units.items()
        ],
        "devices": ["device"], "summarized": [first], "token": "tuple",
        "profiles": {
            p.name: {n: {"rank": x.rank, "bits": x.bits} for n, x in p.points.items()}
            for p in profiles
        },
        "shares": {
            p.name: [(i + 1) / len(profiles)] * 2 + [None] for i, p in enumerate(profiles)
        },
    }  # fmt: skip
    return Policy(about, **arrays), entry


def attach(source: Path, target: Path, change: Change = lambda arrays, entry: None) -> Path:
    """A copy of an artifact that carries the timid controller, changed, with all hashes right."""
    path = Path(shutil.copytree(source, target))
    artifact = Artifact(path)
    policy, entry = timid(artifact)
    arrays: Arrays = dict(policy.tensors())
    change(arrays, entry)
    dense = load_file(path / "dense.safetensors")
    mine = {f"controller/{name}": np.ascontiguousarray(a) for name, a in arrays.items()}
    save_file(dense | mine, path / "dense.safetensors")
    raw = (path / "dense.safetensors").read_bytes()
    manifest = json.loads((path / "manifest.json").read_bytes()) | {"controller": entry}
    manifest["files"]["dense.safetensors"] = {
        "sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw),
    }  # fmt: skip
    (path / "manifest.json").write_text(json.dumps(manifest))
    content = hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()
    for file in [path / "ledger.json", *(path / "devices").glob("*.json")]:
        file.write_text(file.read_text().replace(artifact.content, content))
    return path


@pytest.fixture(scope="module")
def controlled(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return attach(made.artifact, tmp_path_factory.mktemp("controlled") / "small.t3c")


@pytest.fixture(scope="module")
def runtime(controlled: Path) -> Runtime:
    return t3c.load(controlled)


def proposed(runtime: Runtime, budget: Budget) -> str:
    assert runtime.controller is not None
    return runtime.controller.propose(
        (budget.latency_ms, budget.size_mb, budget.energy_mj),
        [(c.latency_ms(budget.quantile), c.size_mb, c.energy_mj) for c in runtime.candidates],
    )


def between(runtime: Runtime, index: int, part: float) -> float:
    low, high = (runtime.candidates[i].size_mb for i in (index, index + 1))
    return low + part * (high - low)


def test_a_smaller_proposal_is_taken_and_explained(
    runtime: Runtime, made: Made, controlled: Path
) -> None:
    names = [profile.name for profile in runtime.chain]
    budget = Budget(size_mb=between(runtime, 2, 0.2))
    assert proposed(runtime, budget) == names[1]
    found = runtime.choose(budget)
    assert (found.profile, found.warnings) == (names[1], ())
    assert found.reason.code is Code.PROPOSED
    assert str(found.reason) == "the controller's proposal, which is within the limits"
    assert select(runtime.candidates, budget).profile == names[2]
    why = explain(runtime.candidates, budget, found.profile)
    told = {name: "; ".join(map(str, remarks)) for name, remarks in why.items()}
    assert told[names[0]] == f"within the limits, but {names[1]} is larger and drifts less"
    assert told[names[1]] == "chosen"
    assert (
        told[names[2]] == f"within the limits, but the controller asks for no more than {names[1]}"
    )
    assert told[names[3]].startswith("size ")
    answer = runtime.answer(made.digits.test[0][:1].numpy(), budget)
    assert answer.certificate == runtime.certificates[answer.profile]
    command = ["run", controlled, "--input", made.folder / "one.npy", "--explain", "--json"]
    done = CliRunner().invoke(app, [*map(str, command), "--size-mb", str(budget.size_mb)])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["reason"], said["reason_code"]) == (str(answer.reason), answer.reason.code)
    assert {row["profile"]: row["why"] for row in said["explain"]} == told


def test_a_proposal_that_is_no_smaller_changes_nothing(runtime: Runtime) -> None:
    names = [profile.name for profile in runtime.chain]
    budget = Budget(size_mb=between(runtime, 2, 0.8))
    assert proposed(runtime, budget) == names[2]
    assert runtime.choose(budget) == select(runtime.candidates, budget)
    assert runtime.choose(budget).profile == names[2]


def test_budgets_without_limits_do_not_ask(runtime: Runtime) -> None:
    def refuse(*_: object) -> str:
        raise AssertionError("asked")

    budget = Budget(drift=10.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(runtime.controller), "propose", refuse)
        assert runtime.choose(None).profile == list(runtime.chain)[-1].name
        assert runtime.choose(budget) == select(runtime.candidates, budget)
        with pytest.raises(AssertionError, match="asked"):
            runtime.choose(Budget(size_mb=1.0))


def test_limits_of_a_quantile(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is held against the quantile asked for, by the choice and by the controller."""
    slow = [
        Candidate(c.profile, Latency(i + 1.0, 2 * i + 2.0, 9 * i + 9.0, (1, 9), 9), c.size_mb, None,
                  c.drift)
        for i, c in enumerate(runtime.candidates)
    ]  # fmt: skip
    monkeypatch.setattr(runtime.chooser, "candidates", slow)
    names = [c.profile for c in slow]
    for quantile, scale in (("p50", 1.0), ("p90", 2.0), ("p99", 9.0)):
        for index in range(1, len(names) - 1):
            less = Budget(latency_ms=scale * (index + 1.3), quantile=quantile)
            more = Budget(latency_ms=scale * (index + 1.7), quantile=quantile)
            assert runtime.choose(less).profile == names[index - 1]
            assert runtime.choose(more).profile == names[index]


CHAIN = [
    Candidate("a", Latency(1.0, 1.0, 1.0, (1, 1), 9), 1.0, None, 0.4),
    Candidate("b", Latency(3.0, 3.0, 3.0, (3, 3), 9), 2.0, None, 0.3),
    Candidate("c", Latency(2.0, 2.0, 2.0, (2, 2), 9), 3.0, None, 0.2),
    Candidate("d", Latency(5.0, 5.0, 5.0, (5, 5), 9), 4.0, None, 0.1),
]


OWN, NEXT, LEAST = Code.PROPOSED, Code.ABOVE_PROPOSED, Code.LEAST_DRIFT


@pytest.mark.parametrize(
    ("limits", "proposal", "wanted", "reason"),
    [
        ({"latency_ms": 6.0}, "a", "a", OWN),
        ({"latency_ms": 6.0}, "c", "c", OWN),
        ({"latency_ms": 6.0}, "b", "c", NEXT),  # a limit of 2.5 would get c
        ({"latency_ms": 2.5}, "b", "c", LEAST),  # b is over the limit
        ({"latency_ms": 6.0, "size_mb": 2.5}, "b", "b", LEAST),  # no larger meets the limits
        ({"latency_ms": 2.5}, "d", "c", LEAST),  # d is over the limit
        ({"latency_ms": 0.5}, "d", "a", Code.NOTHING_FITS),
        ({"latency_ms": 6.0}, "other", "d", LEAST),
        ({"latency_ms": 6.0}, None, "d", LEAST),
        ({"drift": 0.35}, "d", "c", Code.FASTEST_WITHIN_CAP),
        ({}, "a", "d", Code.UNLIMITED),
    ],
)
def test_what_becomes_of_a_proposal(
    limits: dict[str, float], proposal: str | None, wanted: str, reason: Code
) -> None:
    found = select(CHAIN, Budget(**limits), proposal)
    assert found.profile == wanted
    assert found.reason.code is reason


QUANTILES = ("p50", "p90", "p99")


def measured(rng: np.random.Generator) -> list[Candidate]:
    """Candidates of which nothing is in order, not all is known, and much is alike."""

    def cost(known: float = 1.0) -> Any:
        return float(rng.integers(1, 6)) if rng.random() < known else None

    found = []
    for index in range(rng.integers(1, 7)):
        times = Latency(*sorted(cost() for _ in QUANTILES), (1, 9), 9)
        latency = times if rng.random() < 0.9 else None
        guard = float(rng.choice([0.0, 0.0, 0.3]))
        found.append(Candidate(str(index), latency, cost(), cost(0.8), cost(0.8), guard))
    return found


def loosened(rng: np.random.Generator) -> tuple[Budget, Budget]:
    """Two budgets with limits, the second nowhere tighter."""
    while True:
        low = rng.integers(1, 7, 3)
        high = low + rng.integers(0, 4, 3)
        first = [None if rng.random() < 0.3 else float(limit) for limit in low]
        second = [
            None if limit is None or rng.random() < 0.2 else float(more)
            for limit, more in zip(first, high, strict=True)
        ]
        strict, mild = sorted(rng.choice(QUANTILES, 2).tolist(), reverse=True)
        tight, loose = Budget(*first, quantile=strict), Budget(*second, quantile=mild)
        if loose.limited:
            assert tight <= loose
            return tight, loose


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_more_budget_is_never_less_whatever_is_measured_and_proposed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(20):
        chain, budgets = measured(rng), loosened(rng)
        proposals = sorted(rng.integers(0, len(chain), 2).tolist())
        small, large = (
            int(select(chain, budget, str(proposal)).profile)
            for budget, proposal in zip(budgets, proposals, strict=True)
        )
        assert small <= large
        if any(c.meets(budgets[0]) for c in chain):
            assert chain[small].meets(budgets[0])


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=80)
def test_more_budget_is_never_less_for_any_policy_and_input(runtime: Runtime, seed: int) -> None:
    """Random weights, random measurements, and the same input for both budgets."""
    rng = np.random.default_rng(seed)
    held = runtime.controller
    assert held is not None
    arrays = {}
    for name, array in held.policy.tensors().items():
        drawn = rng.normal(size=array.shape) * 10 ** rng.uniform(-1, 1)
        arrays[name] = np.abs(drawn) if name in BUDGET_PATH or "std" in name else drawn
    arrays["reach"] = rng.dirichlet(np.ones(KNOTS), 3)
    arrays["summary_std"] += 0.1
    arrays["slope"] += 20
    arrays["threshold"] = arrays["slope"] * rng.uniform(0, 1, arrays["slope"].shape)
    policy = Policy(held.policy.about, **arrays)
    names = list(held.profiles)
    chain = []
    for name in names:
        times = Latency(*np.sort(rng.uniform(1, 4, 3)).tolist(), (1, 9), 9)
        known = rng.random() < 0.8
        chain.append(Candidate(name, times if known else None, rng.uniform(1, 4), None, None))
    pictures = rng.normal(size=(1, 1, 8, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "chooser", runtime.chooser)
        put_controller(runtime, type(held)(policy, held.profiles, held.shares))
        put_candidates(runtime, chain)
        for _ in range(4):
            low = rng.uniform(0.5, 4.5, 2)
            high = low + rng.exponential(0.7, 2) * (rng.random(2) < 0.7)
            strict, mild = sorted(rng.choice(QUANTILES, 2), reverse=True)
            tight = Budget(*low.tolist(), quantile=str(strict))
            loose = Budget(*high.tolist(), quantile=str(mild))
            for seen in (None, pictures):
                small, large = (runtime.choose(b, seen).profile for b in (tight, loose))
                assert names.index(small) <= names.index(large)


def test_the_input_has_its_say(runtime: Runtime) -> None:
    """What is dark gets more from the same budget, and for each input more budget is no less."""
    assert runtime.controller is not None
    names = [profile.name for profile in runtime.chain]
    sizes = [between(runtime, i, part) for i in range(len(names) - 1) for part in (0.2, 0.5, 0.8)]
    policy, darkest_first = runtime.controller.policy, (-0.4, 0.0, 0.4)
    for brightness in darkest_first:
        picture = np.full((1, 1, 8, 8), brightness, np.float32)
        chosen = [names.index(runtime.choose(Budget(size_mb=s), picture).profile) for s in sizes]
        assert chosen == sorted(chosen)
        assert chosen[-1] > chosen[0]
    first, differed = policy.about.summarized[0], 0
    for size in np.linspace(0, 1, 21).tolist():
        picked = [
            policy.points(t3c.control.token.Token(size=size), None, np.array([brightness, 0.0]))
            for brightness in darkest_first
        ]
        assert picked[2][first] <= picked[1][first] <= picked[0][first]
        differed += picked[2][first] != picked[0][first]
        rest = [{u: p for u, p in points.items() if u != first} for points in picked]
        assert rest[0] == rest[1] == rest[2]
    assert differed >= 4


def test_an_audit_finds_nothing(runtime: Runtime, briefly: None) -> None:
    found = audit(runtime, 200, rounds=3, busy=True)
    assert (found.monotone_violations, found.ok) == (0, True)
    assert found.monotone == dict.fromkeys(found.monotone, 0)
    pairs = draw_pairs(runtime, 200, seed=1)
    assert not any(broken_promises(runtime, tight, loose) for tight, loose in pairs)
    reasons = [runtime.choose(budget).reason.code for budget, _ in pairs]
    assert 20 < sum(reason is Code.PROPOSED for reason in reasons) < 180


WITHOUT_TORCH = """
import sys, json
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "scipy"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import numpy as np, t3c
rt = t3c.load(sys.argv[1])
x = np.load(sys.argv[2])[None]
limits = json.loads(sys.argv[3])
found = [rt.choose(t3c.Budget(size_mb=limit), x) for limit in limits]
found = [[c.profile, c.reason.code] for c in found]
rt(x, budget=t3c.Budget(size_mb=limits[1]))
print(json.dumps(found + [rt.profile, "torch" in sys.modules]))
"""


def test_it_is_asked_without_torch(runtime: Runtime, made: Made, controlled: Path) -> None:
    one = made.folder / "one.npy"
    limits = [between(runtime, i, part) for i in (0, 1, 2) for part in (0.2, 0.8)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, controlled, one, json.dumps(limits)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    here = [runtime.choose(Budget(size_mb=limit), np.load(one)[None]) for limit in limits]
    wanted = [[choice.profile, choice.reason.code] for choice in here]
    assert any(reason == Code.PROPOSED for _, reason in wanted)
    assert json.loads(done.stdout) == [*wanted, here[1].profile, False]


def put(name: str, value: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda arrays, entry: arrays.update({name: value(arrays[name])})


def rename_unit(arrays: Arrays, entry: dict[str, Any]) -> None:
    entry["units"][1]["name"] = "other"


def unknown_in_a_profile(arrays: Arrays, entry: dict[str, Any]) -> None:
    points = next(iter(entry["profiles"].values()))
    points["other"] = {"rank": 1, "bits": 8}


def swapped(arrays: Arrays, entry: dict[str, Any]) -> None:
    low, *_, high = entry["profiles"]
    entry["profiles"][low], entry["profiles"][high] = (entry["profiles"][n] for n in (high, low))


TAMPERED: dict[str, tuple[Change, str]] = {
    "negative": (put("slope", lambda a: -a), "slope is on the path of the budget"),
    "shape": (put("lift", lambda a: a[1:]), "lift must have shape"),
    "nan": (put("threshold", lambda a: a * np.float32("nan")), "threshold is not finite"),
    "dtype": (put("slope", lambda a: a.astype(np.float64)), "slope must be float32, got float64"),
    "missing": (lambda arrays, entry: arrays.pop("reach"), "missing or unknown: reach"),
    "unknown": (lambda arrays, entry: arrays.update(x=arrays["reach"]), "missing or unknown: x"),
    "unit": (rename_unit, "does not have the controller's units"),
    "stranger": (unknown_in_a_profile, "does not have the controller's units"),
    "order": (swapped, "is not above profile"),
    "profile": (
        lambda arrays, entry: entry["profiles"].popitem(),
        "does not have the artifact's profiles",
    ),
    "summarized": (lambda arrays, entry: entry.update(summarized=["x"]), "summarized units are"),
    "seen": (lambda arrays, entry: entry.update(summarized=[]), "summary must have shape"),
    "token": (lambda arrays, entry: entry.update(token="x"), "controller.token"),
    "share": (
        lambda arrays, entry: entry["shares"].update({next(iter(entry["shares"])): [-1, 1, None]}),
        "negative or not finite",
    ),
    "shares": (lambda arrays, entry: entry["shares"].popitem(), "the shares of its profiles"),
    "key": (lambda arrays, entry: entry.update(more=1), "controller.more"),
    "chain": (lambda arrays, entry: entry["units"][1]["points"].reverse(), "the chain of unit"),
    "device": (lambda arrays, entry: entry.update(devices=[]), "needs devices"),
    "unit twice": (
        lambda arrays, entry: entry["units"].append(entry["units"][0]),
        "the controller's units repeat",
    ),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_controller_that_was_tampered_with_is_refused(
    what: str, made: Made, tmp_path: Path
) -> None:
    change, message = TAMPERED[what]
    path = attach(made.artifact, tmp_path / "broken.t3c", change)
    with pytest.raises(CorruptError, match=message) as found:
        t3c.load(path)
    assert "\n" not in str(found.value)
    assert str(path) in str(found.value)
