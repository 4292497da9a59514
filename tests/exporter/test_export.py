from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from onnx import ModelProto
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import t3c
from conftest import LIGHT, Made, quick
from t3c.artifact.devices import LayerTiming
from t3c.artifact.graph import Traced
from t3c.artifact.ledger import ParityEntry
from t3c.artifact.reader import Artifact
from t3c.control.profiles import PruneCode, Pruned, names_for
from t3c.convert import elasticize_, state_of
from t3c.engines import ENGINES
from t3c.errors import ArtifactError, ConvertError, DataError, EngineError, SpecError
from t3c.evidence.original import to_original
from t3c.exporter import ExportConfig, export, time_points
from t3c.exporter.allocate import allocate
from t3c.exporter.content import topology
from t3c.exporter.export import split
from t3c.nn.inputs import evaluating
from t3c.spec import Form, Goal, ImageSpec, Latency, LayerPoint, LayerSpec

pytestmark = pytest.mark.usefixtures("briefly")
EXPORTER, TIMING = (sys.modules[f"t3c.exporter.{part}"] for part in ("export", "timing"))


@pytest.fixture(scope="module")
def traces(made: Made) -> tuple[Traced, ModelProto]:
    with evaluating(made.model):
        return topology(made.model), to_original(made.model)


@pytest.fixture
def traced(traces: tuple[Traced, ModelProto], monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that export the model that was made again: it is not traced again."""
    monkeypatch.setattr(EXPORTER.content, "topology", lambda model: copy.deepcopy(traces[0]))
    monkeypatch.setattr(EXPORTER, "to_original", lambda model: copy.deepcopy(traces[1]))


def test_every_profile_was_measured_and_certified(made: Made) -> None:
    exported = made.exported
    names = [p.name for p in exported.profiles]
    assert list(exported.table.profiles) == names
    assert [c.profile for c in exported.ledger.entries] == names
    assert all(p.stored < 1e-3 and p.rounded < 0.1 and p.ok for p in exported.parity)
    proxy = exported.table.proxy
    assert proxy is not None
    assert proxy.held_out >= 1
    assert exported.table.energy.startswith("unavailable: ") or exported.table.energy_mj
    p50 = [latency.p50 for latency in exported.table.profiles.values()]
    assert p50 == sorted(p50)
    assert min(p50) > 0
    assert all(str(p) for p in exported.pruned)


def test_the_ledger_says_how_far_each_engine_is_from_torch(made: Made) -> None:
    names = [profile.name for profile in made.exported.profiles]
    ledger = Artifact(made.artifact).ledger()
    assert ledger is not None
    assert ledger.parity == made.exported.parity
    for engine in ("openvino", "onnxruntime"):
        rows = [row for row in ledger.parity if row.engine == engine]
        assert [row.profile for row in rows] == names
        assert all(0 <= row.rounded < 0.03 and 0 <= row.largest < 0.1 for row in rows)
        assert len({row.stored for row in rows}) == len(names)


@pytest.mark.usefixtures("known_device", "traced")
def test_a_profile_that_is_not_as_torch_has_it_is_not_shipped(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [profile.name for profile in made.exported.profiles]
    bad = names[1:3]
    real = EXPORTER.engine_parity

    def compared(*arguments: object) -> list[ParityEntry]:
        rows = real(*arguments)
        return [r.model_copy(update={"reason": "far off"}) if r.profile in bad else r for r in rows]

    monkeypatch.setattr(EXPORTER, "engine_parity", compared)
    monkeypatch.setattr(EXPORTER, "other_engines", lambda runtime: ())
    config = ExportConfig(timing=quick(3), goal=Goal(worst_drift=2.0), certificate=LIGHT)
    found = export(made.model, tmp_path / "a.t3c", [made.digits.calibration], config)
    assert [profile.name for profile in found.profiles] == [n for n in names if n not in bad]
    assert [p.name for p in Artifact(tmp_path / "a.t3c").manifest.profiles] == [
        n for n in names if n not in bad
    ]
    failed = [p for p in found.pruned if p.code is PruneCode.INEXACT]
    assert failed == [Pruned(name, PruneCode.INEXACT, detail="far off") for name in bad]
    bad = names
    with pytest.raises(EngineError, match="no profile is as torch has it on openvino: far off"):
        export(made.model, tmp_path / "b.t3c", [made.digits.calibration], config)
    assert not (tmp_path / "b.t3c").exists()


@pytest.mark.usefixtures("known_device", "traced")
@pytest.mark.parametrize("fast", [Form.FACTORED, Form.DENSE])
def test_forms_are_the_faster_ones(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: Form
) -> None:
    """On devices where one form always wins, that one runs, and engines agree with torch on it."""

    def timed(
        engine: object,
        layers: Sequence[tuple[LayerSpec, tuple[int, ...]]],
        *args: object,
        **kwargs: object,
    ) -> tuple[LayerTiming, ...]:
        def ms(spec: LayerSpec, rank: int, form: Form) -> float:
            return (0.1 if form is fast else 5.0) + 0.01 * rank / spec.full_rank

        return tuple(
            LayerTiming(
                layer=spec.name,
                rank=rank,
                ms={
                    form: ms(spec, rank, form)
                    for form in Form
                    if form is Form.DENSE or rank < ranks[-1]
                },
            )
            for spec, ranks in layers
            for rank in ranks
        )

    monkeypatch.setattr(TIMING, "time_layers", timed)
    exported = export(
        made.model,
        tmp_path / "a.t3c",
        [made.digits.calibration[0][:120]],
        ExportConfig(goal=Goal(profiles=3, worst_drift=1.0), timing=quick(2), certificate=LIGHT),
    )
    assert all(p.rounded < 0.035 for p in exported.parity)
    runtime = t3c.load(tmp_path / "a.t3c")
    specs = runtime.artifact.manifest.specs
    low = [
        runtime.forms[p.name][n]
        for p in runtime.chain
        for n, point in p.points.items()
        if not specs[n].stored_dense(point)
    ]
    assert set(low) == {fast}


@pytest.mark.usefixtures("known_device", "traced")
@pytest.mark.parametrize("most", [1, 2, 7])
def test_any_number_of_profiles(made: Made, tmp_path: Path, most: int) -> None:
    config = ExportConfig(timing=quick(2), goal=Goal(most, worst_drift=5.0), certificate=LIGHT)
    exported = export(made.model, tmp_path / "a.t3c", [made.digits.calibration[0][:120]], config)
    names = [p.name for p in exported.profiles]
    assert tuple(names) == names_for(len(names))
    assert len(names) == most
    top = exported.profiles.top
    plan = state_of(made.model).plan
    assert dict(top.points) == {p.spec.name: LayerPoint(p.ranks[-1], 8) for p in plan.layers}
    assert len(exported.pruned) + len(names) <= 2 * most - 1


def test_slices_are_disjoint_and_seeded() -> None:
    x = torch.arange(120.0)[:, None]
    config = ExportConfig()
    parts = split(x, config)
    values = [set(part[:, 0].tolist()) for part in (parts.quantizer, parts.scaling, parts.scores)]
    assert sum(map(len, values)) == len(set.union(*values)) == 120
    assert torch.equal(split(x, config).scores, parts.scores)
    with pytest.raises(DataError, match=r"too few for delta=0\.05: at least 27 are needed"):
        split(x[:26], config)
    assert len(split(x[:27], config).scores) == 19


class Transformer(nn.Module):
    """A block of attention and MLP: linear layers over tokens, two inputs."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(x + y)
        mixed = torch.softmax(self.q(h) @ self.k(h).transpose(1, 2) / 8, -1) @ self.v(h)
        h = h + self.o(mixed)
        h = h + self.down(nn.functional.gelu(self.up(h)))
        logits: Tensor = self.head(h.mean(1))
        return logits


def test_linear_layers_over_tokens_and_several_inputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Transformer().eval()
    x, y = torch.randn(90, 12, 64), torch.randn(90, 12, 64)
    elasticize_(model, (x[:2], y[:2]))
    config = ExportConfig(
        goal=Goal(profiles=2, worst_drift=1.0),
        timing=quick(3),
        certificate=replace(LIGHT, delta=0.1),
    )
    export(model, tmp_path / "t.t3c", [((x, y), torch.zeros(90))], config)
    rt = t3c.load(tmp_path / "t.t3c")
    assert [entry.name for entry in rt.inputs] == ["input0", "input1"]
    original = state_of(model).original(x[:4], y[:4]).detach().numpy()
    a, b = x[:4].numpy(), y[:4].numpy()
    out = rt((a, b))
    assert np.linalg.norm(out - original) < 0.1 * np.linalg.norm(original)
    np.testing.assert_array_equal(out, rt({"input0": a, "input1": b}))


class Parts(nn.Module):
    """What networks are made of, in one: each a node the reference engine has to know."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.norm = nn.GroupNorm(4, 32)
        self.point = nn.Conv2d(32, 64, 1)
        self.deep = nn.Conv2d(64, 64, 3, stride=2, padding=2, dilation=2, groups=2)
        self.pool = nn.AvgPool2d(2)
        self.head = nn.Linear(64, 10)
        self.head.weight.data[3] = 0  # a row that was pruned

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        f = nn.functional
        x = f.relu6(self.norm(self.stem(x)))
        x = f.leaky_relu(self.point(x))
        a, b = f.hardswish(self.deep(x)).chunk(2, dim=1)
        x = self.pool(torch.cat([f.elu(a), f.softplus(b)], dim=1))
        return {"logits": self.head(f.adaptive_avg_pool2d(x, 1).flatten(1))}


class Named(nn.Module):
    """A network that takes its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, features: Tensor) -> Tensor:
        z: Tensor = self.layers(features)
        return z


def test_labels_in_mappings_are_not_traced(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Named(), torch.randn(60, 32)
    batches = [{"features": x, "labels": torch.zeros(60).long()}]
    elasticize_(model, batches[0], calibration=batches)
    config = ExportConfig(goal=Goal(profiles=2), timing=quick(1), certificate=LIGHT)
    export(model, tmp_path / "a.t3c", batches, config)
    assert [entry.name for entry in t3c.load(tmp_path / "a.t3c").inputs] == ["features"]


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime", "torch"])
def test_parts_of_networks_on_the_engine_they_were_exported_for(
    engine: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Parts().eval(), torch.randn(60, 3, 12, 20)
    elasticize_(model, x[:1])
    config = ExportConfig(
        engine=engine,
        threads=1,
        goal=Goal(profiles=3, worst_drift=1.0),
        timing=quick(3, grid=3),
        certificate=replace(LIGHT, delta=0.1),
    )
    exported = export(model, tmp_path / "p.t3c", DataLoader(TensorDataset(x), 16), config)
    assert all(p.rounded < 0.02 for p in exported.parity)
    rt = t3c.load(tmp_path / "p.t3c", engine, 1)
    assert len(rt.certificates) == len(exported.profiles)
    original = state_of(model).original(x[:4])["logits"].detach().numpy()
    others = [t3c.load(tmp_path / "p.t3c", name, 1)(x[:4].numpy()) for name in sorted(ENGINES)]
    for output in (rt(x[:4].numpy()), *others):
        assert np.linalg.norm(output - original) < 0.1 * np.linalg.norm(original)


def test_operations_the_reference_does_not_have_are_named_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 32, 2), nn.Conv2d(32, 32, 3), nn.Flatten())
    x = torch.randn(60, 3, 8, 8)
    elasticize_(model, x[:2])
    config = ExportConfig(timing=quick(1), certificate=LIGHT)
    with pytest.raises(ConvertError, match="the model uses ConvTranspose"):
        export(model, tmp_path / "a.t3c", [x], config)
    captured = capsys.readouterr()
    assert captured.err == "  0:00  tracing the model\n"
    assert captured.out == ""


@pytest.mark.usefixtures("traced")
def test_exports_that_cannot_be(made: Made, tmp_path: Path) -> None:
    path = tmp_path / "a.t3c"
    digits = made.digits
    with pytest.raises(ConvertError, match="not elastic"):
        export(nn.Linear(2, 2), path, [digits.calibration])
    with pytest.raises(DataError, match="empty"):
        export(made.model, path, [])
    bad = digits.calibration[0].clone()
    bad[3, 0, 0, 0] = float("inf")
    with pytest.raises(DataError, match="NaN or infinite"):
        export(made.model, path, [bad])
    with pytest.raises(EngineError, match="unknown engine"):
        export(made.model, path, [digits.calibration], ExportConfig(engine="abacus"))
    with pytest.raises(DataError, match="the example's are"):
        export(made.model, path, [digits.calibration[0][:, :, :8]])
    with pytest.raises(SpecError, match="3 classes for an output"):
        export(made.model, path, [digits.calibration], classes="abc")
    with pytest.raises(SpecError, match="pictures of 1x8x8"):
        export(made.model, path, [digits.calibration], image=ImageSpec(8, 8))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ArtifactError, match="cannot be written"):
        export(made.model, tmp_path / "file" / "a.t3c", [digits.calibration])
    assert not path.exists()


@pytest.mark.usefixtures("known_device", "traced")
def test_an_export_that_fails_leaves_the_artifact_that_was_there(
    made: Made, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Artifact(copied).content
    broken = copy.deepcopy(made.model)

    def explode(*_: object, **__: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(EXPORTER, "certify", explode)
    config = ExportConfig(timing=quick(2), certificate=LIGHT)
    with pytest.raises(RuntimeError, match="out of luck"):
        export(broken, copied, [made.digits.calibration], config)
    assert Artifact(copied).content == before
    assert [p.name for p in copied.parent.iterdir()] == [copied.name]


@pytest.mark.parametrize("faster", ["int8", "float"])
def test_activations_are_left_to_the_device(
    made: Made, monkeypatch: pytest.MonkeyPatch, faster: str
) -> None:
    asked: list[list[str]] = []

    def timed(sessions: dict[str, object], *_: object, **__: object) -> dict[str, Latency]:
        asked.append(list(sessions))
        ms = {name: 1.0 if name == faster else 2.0 for name in sessions}
        return {name: Latency(m, m, m, (m, m), 1) for name, m in ms.items()}

    for name in ("time_in_place", "time_layers"):
        monkeypatch.setattr(TIMING, name, lambda *_, **__: ())
    monkeypatch.setattr(TIMING, "time_sessions", timed)
    monkeypatch.setattr(TIMING, "paced", lambda calls, rounds: rounds)

    def chosen(activations: Any) -> str:
        return time_points(made.model, ExportConfig(activations=activations)).activations

    assert chosen("auto") == faster
    assert asked == [["int8", "float"]]
    other = "int8" if faster == "float" else "float"
    assert chosen(other) == other
    assert len(asked) == 1
    with pytest.raises(SpecError, match="'int8', 'float' or 'auto'"):
        ExportConfig(activations="int16")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("budgets", "message"),
    [((0.5, 0.4), "budgets must rise between 0 and 1"), ((0.5, 1.0), "budgets must rise"),
     ((0.5,), "3 profiles have 2 budgets, for all but the largest, got 1")],
)  # fmt: skip
def test_budgets_that_cannot_be(budgets: tuple[float, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ExportConfig(goal=Goal(profiles=3), budgets=budgets)


def test_profiles_are_those_that_budgets_ask_for(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many candidates the largest within each share of the largest one's time."""
    plans = state_of(made.model).plan.layers
    config = ExportConfig(goal=Goal(profiles=3), budgets=(0.35, 0.62))
    timed = time_points(made.model)
    goal = Goal(worst_drift=9.0, size_weight=0.5)
    found = allocate(made.model, made.digits.train[0][:8], plans, timed.layers, goal, count=9)
    names = [p.name for p in found.profiles]
    times = {name: 1.0 + index for index, name in enumerate(names)}
    calibrated = SimpleNamespace(
        profiles={n: SimpleNamespace(p50=t, ci95=(t, t)) for n, t in times.items()}
    )
    monkeypatch.setattr(EXPORTER.Bench, "calibrated", lambda *_, **__: calibrated)
    sizes = SimpleNamespace(size_bytes=times.__getitem__)
    chosen, pruned = EXPORTER.choose(
        found,
        SimpleNamespace(manifest=sizes),
        EXPORTER.Bench(None, timed, config, None),
    )
    largest = [max(n for n in names if times[n] <= b * len(names)) for b in (0.35, 0.62)]
    points = {p.name: p.points for p in found.profiles}
    kept = [points[name] for name in (*largest, names[-1])]
    assert [p.name for p in chosen.profiles] == ["tiny", "med", "max"]
    assert [dict(p.points) for p in chosen.profiles] == [dict(p) for p in kept]
    assert len(pruned) == len(names) - 3
