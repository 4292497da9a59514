"""The aligned form: k of the input's channels as they are, the others by way of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from t3c.artifact.devices import DeviceTable, LayerTiming, explain_forms
from t3c.artifact.draft import Draft
from t3c.artifact.manifest import DENSE
from t3c.artifact.reader import Artifact
from t3c.artifact.trim import trim
from t3c.convert import ElasticConfig, elasticize_, state_of
from t3c.cost.work import layer_work, stage_work
from t3c.device import measured
from t3c.device.execution import Execution, execution_of
from t3c.device.machine import describe
from t3c.device.measured import time_group, time_layer
from t3c.engines import ENGINES, open_engine
from t3c.engines.torch import TorchSession
from t3c.errors import CorruptError, SpecError
from t3c.evidence.original import beside, to_original
from t3c.evidence.program import Program, executed
from t3c.evidence.worst_case import norms_of, worst_cases
from t3c.exporter import content
from t3c.exporter.allocate import Allocated
from t3c.exporter.content import COUNTED
from t3c.exporter.described import Described
from t3c.graph import aligning
from t3c.graph.aligning import aligned_stages, choose_columns, execution, kept_columns
from t3c.graph.assemble import assemble
from t3c.graph.builder import Stage, dequantized, quantize_rows
from t3c.graph.synthetic import synthetic_group, synthetic_layer
from t3c.quant.ranges import Spread
from t3c.spec import Factorization, Form, Kind, LayerPoint, LayerSpec, Profile, ProfileChain

LINEAR = LayerSpec(
    "fc", Kind.LINEAR, Factorization.SVD, 64, 48, in_size=(5, 1), out_size=(5, 1), runs=2
)
POINT = LayerPoint(16, 8)
X = np.random.default_rng(1).normal(size=(6, 48)).astype(np.float32)


class Net(nn.Module):
    """Two layers on one input, one of them without a bias, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 64), nn.Linear(48, 64, bias=False)
        self.twice, self.head = nn.Linear(64, 64), nn.Linear(64, 40)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x)) + torch.tanh(self.second(x))
        out: Tensor = self.head(torch.relu(self.twice(torch.relu(self.twice(x)))))
        return out


class Written:
    """An artifact of Net, with what it takes to write it again."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model, self.samples = Net().eval(), torch.randn(64, 48)
        config = ElasticConfig(store_ratio=1.0, rank_fractions=(1 / 4, 1 / 2))
        elasticize_(self.model, self.samples[:2], config, calibration=[self.samples])
        plans = state_of(self.model).plan.layers
        ends = [
            {p.spec.name: LayerPoint(p.ranks[rank], p.bits[bits]) for p in plans}
            for rank, bits in ((0, 0), (1, -1), (-1, -1))
        ]
        chain = tuple(Profile(n, e) for n, e in zip(("tiny", "mid", "max"), ends, strict=True))
        self.allocated = Allocated.of(ProfileChain(chain))
        self.traced = content.topology(self.model)
        self.artifact = self.write(folder)

    def write(self, folder: Path, packed: Draft | None = None) -> Artifact:
        folder.mkdir(exist_ok=True)
        return content.write(folder, packed or self.pack(), self.allocated, self.samples)

    def pack(self) -> Draft:
        return content.pack(Described(self.model, self.traced, "net"), self.allocated)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("aligned") / "net.t3c")


def graph(artifact: Artifact, profile: str, form: Form, bits: int = 8) -> onnx.ModelProto:
    """The int8 graph of a profile with every layer in one form."""
    found = artifact.manifest.chain[profile]
    forms = dict.fromkeys(found.points, form)
    return assemble(artifact, found, forms, artifact.ranges(profile), bits)


def relative(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    return float(np.linalg.norm(found[0] - wanted[0]) / np.linalg.norm(wanted[0]))


def count(model: onnx.ModelProto, kind: str) -> int:
    return sum(node.op_type == kind for node in model.graph.node)


def factors(m: int, k: int, n: int, seed: int) -> tuple[list[Stage], np.ndarray]:
    """Stored int8 factors of a random weight (m, n) of rank k, and that weight."""
    rng = np.random.default_rng(seed)
    u, s, v = np.linalg.svd(rng.normal(size=(m, n)), full_matrices=False)
    reduce, expand = np.sqrt(s[:k])[:, None] * v[:k], u[:, :k] * np.sqrt(s[:k])
    stages = [quantize_rows(w.astype(np.float32)) for w in (reduce, expand)]
    return stages, expand @ reduce


# What an artifact holds of it


def test_an_artifact_knows_how_to_align_its_linear_layers(net: Written) -> None:
    artifact, dense = net.artifact, net.artifact.dense()
    for name, entry in artifact.entries.items():
        assert entry.spec.aligned == entry.ranks != ()
        for rank in entry.ranks:
            assert dense[f"aligned/{name}/{rank}"].dtype == np.int32
            assert len(kept_columns(dense, entry.spec, rank)) == rank
    for profile in ("tiny", "mid"):
        for name, point in artifact.manifest.chain[profile].points.items():
            spec = artifact.entries[name].spec
            assert spec.forms(point) == (Form.FACTORED, Form.DENSE, Form.ALIGNED)
    top = artifact.manifest.chain["max"].points
    assert all(artifact.entries[n].spec.forms(p) == (Form.DENSE,) for n, p in top.items())


def test_a_part_keeps_the_columns_it_needs(net: Written, tmp_path: Path) -> None:
    part = trim(net.artifact, ["tiny"], tmp_path / "part.t3c")
    kept = {name for name in part.dense() if name.startswith("aligned/")}
    points = part.manifest.chain["tiny"].points
    assert kept == {f"aligned/{name}/{point.rank}" for name, point in points.items()}
    assert all(entry.spec.aligned == entry.ranks for entry in part.manifest.layers)
    whole, mine = (graph(one, "tiny", Form.ALIGNED) for one in (net.artifact, part))
    np.testing.assert_array_equal(TorchSession(mine).run([X])[0], TorchSession(whole).run([X])[0])


def test_float_graphs_of_both_forms_are_the_same(net: Written) -> None:
    for name in ("tiny", "mid"):
        profile = net.artifact.manifest.chain[name]
        factored, aligned = (
            TorchSession(assemble(net.artifact, profile, dict.fromkeys(profile.points, form), None))
            for form in (Form.FACTORED, Form.ALIGNED)
        )
        assert relative(aligned.run([X]), factored.run([X])) < 1e-5


def test_ranges_are_those_of_the_float_graph_in_aligned_form(net: Written) -> None:
    profile = net.artifact.manifest.chain["mid"]
    session = TorchSession(
        assemble(net.artifact, profile, dict.fromkeys(profile.points, Form.ALIGNED), None)
    )
    seen: dict[str, Spread] = {}

    def watch(name: str, value: Tensor) -> None:
        seen[name] = Spread()
        seen[name].widen(value)
        seen[name].add(value[:COUNTED])

    session.observe([net.samples.numpy()], watch)
    inner = {n: spread.fitted() for n, spread in seen.items() if n.endswith("/aligned")}
    assert len(inner) == 5  # one for each use: a layer that is used twice has two
    stored = net.artifact.ranges("mid")
    for name, limits in inner.items():
        assert stored[name] == pytest.approx(limits, rel=1e-4, abs=1e-5)
    assert not any(name.endswith("/aligned") for name in net.artifact.ranges("max"))


def test_what_is_written_takes_the_columns_of_what_was_packed(
    net: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> str:
        raise AssertionError

    packed = net.pack()
    monkeypatch.setattr(aligning, "choose_columns", refuse)
    again = net.write(tmp_path / "again.t3c", packed)
    assert (again.path / DENSE).read_bytes() == (net.artifact.path / DENSE).read_bytes()
    assert again.manifest.specs == net.artifact.manifest.specs


def test_a_layer_that_cannot_be_aligned_says_why(
    net: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aligning, "WORST_CONDITION", 1.0)
    artifact = net.write(tmp_path / "refused.t3c")
    spec = artifact.manifest.specs["first"]
    assert spec.aligned == ()
    assert not any(name.startswith("aligned/") for name in artifact.dense())
    assert not any(name.endswith("/aligned") for name in artifact.manifest.model.quantized)
    point = artifact.manifest.chain["mid"].points["first"]
    assert spec.forms(point) == (Form.FACTORED, Form.DENSE)
    ms = {Form.FACTORED: 2.0, Form.DENSE: 3.0, Form.ALIGNED: 1.0}
    timing = LayerTiming(layer="first", rank=point.rank, ms=ms)
    choice = explain_forms((timing,), {"first": spec}, {"first": point})["first"]
    assert choice.form is Form.FACTORED
    assert choice.reason == (
        "factored 2.000 ms, dense 3.000 ms; not aligned: "
        "no block of its factors has a condition below 1"
    )


# What engines make of it


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("profile", ["tiny", "mid"])
def test_engines_agree_with_the_reference(net: Written, engine: str, profile: str) -> None:
    opened = open_engine(engine, 1)
    made = graph(net.artifact, profile, Form.ALIGNED, describe(opened).weight_bits)
    onnx.checker.check_model(made, full_check=True)
    assert count(made, "Gather") == count(made, "Split") == 5
    assert relative(opened.compile(made).run([X]), TorchSession(made).run([X])) < 1e-2


def test_int8_costs_about_what_it_costs_the_factored_form(net: Written) -> None:
    profile = net.artifact.manifest.chain["mid"]
    exact = TorchSession(
        assemble(net.artifact, profile, dict.fromkeys(profile.points, Form.FACTORED), None)
    ).run([X])
    factored, aligned = (
        relative(TorchSession(graph(net.artifact, "mid", form)).run([X]), exact)
        for form in (Form.FACTORED, Form.ALIGNED)
    )
    assert 0 < factored < 0.05
    assert aligned < 3 * factored


def test_aligned_layers_are_not_grouped(net: Written) -> None:
    profile = net.artifact.manifest.chain["mid"]
    ranges, group = net.artifact.ranges("mid"), [("first", "second")]
    for forms in (
        dict.fromkeys(profile.points, Form.ALIGNED),
        dict.fromkeys(profile.points, Form.FACTORED) | {"second": Form.ALIGNED},
    ):
        alone, wanted = (
            assemble(net.artifact, profile, forms, ranges, grouped=g) for g in ((), group)
        )
        assert wanted == alone


def test_what_is_not_there_or_not_columns_is_refused(net: Written) -> None:
    spec, rank = net.artifact.entries["first"].spec, net.artifact.entries["first"].ranks[-1]
    stored = net.artifact.stages("first", LayerPoint(rank, 8))
    good = np.arange(rank, dtype=np.int32)
    with pytest.raises(
        CorruptError, match=f"first: the artifact has no aligned form of rank {rank}"
    ):
        execution({}, spec, stored, Form.ALIGNED, 8)
    for bad in (good[:-1], good[::-1], good - 1, good + 48, np.zeros_like(good), good[:, None]):
        with pytest.raises(CorruptError, match=f"not {rank} of 48 columns"):
            execution({f"aligned/first/{rank}": bad}, spec, stored, Form.ALIGNED, 8)
    codes, scale = stored[0]
    codes[:, 1] = codes[:, 0]
    with pytest.raises(CorruptError, match="not independent"):
        execution(
            {f"aligned/first/{rank}": good}, spec, [(codes, scale), stored[1]], Form.ALIGNED, 8
        )


# What certificates make of it


def test_certificates_are_of_the_aligned_weights(net: Written) -> None:
    artifact, original = net.artifact, beside(net.artifact, to_original(net.model))
    profile = artifact.manifest.chain["mid"]
    forms = dict.fromkeys(profile.points, Form.ALIGNED)
    execution = Execution(profile, forms, artifact.ranges("mid"))
    one = executed(artifact, original, execution, 8, torch.float64)
    program, x = Program(artifact, torch.float64), [torch.from_numpy(X).double()]
    served = TorchSession(graph(artifact, "mid", Form.ALIGNED)).run([X])
    assert relative([program(one, x, 1.0).numpy()], served) < 5e-3
    cases = worst_cases(program, one, norms_of(program, one), x)
    drift = (program(one, x, 1.0) - program(one, x)).norm(dim=1).numpy()
    assert (drift <= [case.bound for case in cases]).all()
    factored = replace(execution, forms=dict.fromkeys(forms, Form.FACTORED))
    other = executed(artifact, original, factored, 8, torch.float64)
    gap = one.layers["first"].change - other.layers["first"].change
    assert 0 < float(gap.norm()) < 0.05 * float(one.layers["first"].weight.norm())


# Rounding


@settings(max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([(40, 8, 24), (24, 16, 40), (96, 48, 96)]))
def test_rounding_one_makes_up_for_the_other(seed: int, size: tuple[int, int, int]) -> None:
    stored, weight = factors(*size, seed)
    kept = choose_columns([stored], weight)
    assert not isinstance(kept, str)
    exact = aligned_stages(stored, kept, exact=True)
    assert exact is not None
    plain = [quantize_rows(stage[0].astype(np.float32)) for stage in exact]
    for bits, largest in ((8, 127), (7, 63)):
        stages = aligned_stages(stored, kept, bits)
        assert stages is not None
        assert max(int(np.abs(codes.astype(int)).max()) for codes, _ in stages) == largest
        if bits == 8:
            made, simple = (
                np.linalg.norm(
                    np.linalg.multi_dot(aligning.Execution(s, kept).weights[::-1]) - weight
                )
                for s in (stages, plain)
            )
            own = np.linalg.norm(dequantized(stored[1]) @ dequantized(stored[0]) - weight)
            assert made <= 2 * own
            assert made < (0.9 if size[0] == 96 else 1.0) * simple


def test_factors_that_int8_would_hurt_are_refused() -> None:
    stored, weight = factors(24, 12, 36, 3)
    codes, scale = stored[0]
    # Two rows that differ by little: the kept block cancels, rest is large, its rounding shows.
    close = codes.astype(np.float32)
    close[1] = close[0] + np.random.default_rng(0).choice([-1, 0, 1], close.shape[1])
    nearly = [(np.clip(close, -127, 127).astype(np.int8), np.ones_like(scale)), stored[1]]
    found = dequantized(nearly[1]) @ dequantized(nearly[0])
    wanted = found * (1 + 1e-4 * np.random.default_rng(1).normal(size=found.shape))
    reason = choose_columns([nearly], wanted)
    assert isinstance(reason, str)
    assert reason.startswith("int8 would be off by")
    nearly[0][0][1] = nearly[0][0][0]
    assert str(choose_columns([nearly], weight)).startswith("no block of its factors")


# What it costs, and when it is taken


def test_work_is_that_of_the_formula() -> None:
    (m, n), k, positions = (64, 48), 16, 5
    work = layer_work(LINEAR, POINT, Form.ALIGNED)
    assert work.flops == 2 * 2 * positions * k * (m + n - k)
    assert work.launches == 2 * 3
    gather, rest, expand = stage_work(LINEAR, POINT, Form.ALIGNED)
    assert (gather.flops, gather.moved_bytes) == (0, 2 * (2 * n + k) * positions)
    assert rest.moved_bytes == 2 * (k * (n - k) + n * positions)
    assert expand.last
    assert not gather.last
    assert not rest.last
    for rank in range(1, LINEAR.full_rank):
        aligned, factored, dense = (
            layer_work(LINEAR, LayerPoint(rank, 8), form).flops
            for form in (Form.ALIGNED, Form.FACTORED, Form.DENSE)
        )
        assert aligned < min(factored, dense)
    assert layer_work(LINEAR, LayerPoint(48, 8), Form.ALIGNED).launches == 2


def test_only_linear_layers_are_aligned() -> None:
    conv = replace(LINEAR, kind=Kind.CONV2D)
    plain = replace(LINEAR, factorization=Factorization.NONE)
    assert LINEAR.alignable(47)
    assert not any(LINEAR.alignable(rank) for rank in (0, 48))
    assert not any(spec.alignable(8) for spec in (conv, plain, replace(LINEAR, groups=2)))
    with pytest.raises(SpecError, match="fc: no aligned form at the ranks"):
        replace(conv, aligned=(8,))
    assert conv.executed_shapes(POINT, Form.ALIGNED) != LINEAR.executed_shapes(POINT, Form.ALIGNED)


def test_the_fastest_form_there_is_is_taken() -> None:
    aligned = replace(LINEAR, aligned=(16,))
    for times, spec, wanted in (
        ((3.0, 2.0, 1.0), aligned, Form.ALIGNED),
        ((3.0, 2.0, 1.0), LINEAR, Form.DENSE),
        ((1.0, 1.0, 1.0), aligned, Form.FACTORED),
        ((1.0, 2.0, 3.0), aligned, Form.FACTORED),
    ):
        ms = dict(zip((Form.FACTORED, Form.DENSE, Form.ALIGNED), times, strict=True))
        timing = LayerTiming(layer="fc", rank=16, ms=ms)
        assert explain_forms((timing,), {"fc": spec}, {"fc": POINT})["fc"].form is wanted


def test_a_table_of_forms_the_artifact_has_not_is_refused(net: Written) -> None:
    chain = net.artifact.manifest.chain
    aligned = dict.fromkeys(chain["max"].points, Form.ALIGNED)
    engine = open_engine("torch", 1)
    table = DeviceTable(
        content=net.artifact.content, device=describe(engine), profiles={},
        forms={"mid": aligned, "max": aligned},
    )  # fmt: skip
    execution = execution_of(net.artifact, table, chain["mid"])
    assert (
        relative(
            engine.compile(execution.graph(net.artifact, 8)).run([X]),
            engine.compile(graph(net.artifact, "mid", Form.ALIGNED)).run([X]),
        )
        == 0
    )
    with pytest.raises(CorruptError, match="in forms its layers do not have"):
        execution_of(net.artifact, table, chain["max"])


@pytest.mark.usefixtures("briefly")
def test_layers_are_timed_in_it() -> None:
    engine = open_engine("onnxruntime", 1)
    low, full = time_layer(engine, LINEAR, (16, 48))
    assert low.ms.keys() == set(Form) - {Form.NARROW}
    assert full.ms.keys() == {Form.DENSE}
    assert Form.ALIGNED not in time_layer(engine, replace(LINEAR, kind=Kind.CONV2D), (16,))[0].ms
    group = time_group(engine, [LINEAR, replace(LINEAR, name="other")], (16, 16), Form.ALIGNED)
    assert group.apart_ms == group.together_ms > 0
    assert not group.worth


def test_what_is_timed_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = synthetic_layer(LINEAR, POINT, Form.ALIGNED)
    onnx.checker.check_model(made, full_check=True)
    assert [count(made, kind) for kind in ("Gather", "Split", "MatMul")] == [1, 1, 2]
    with pytest.raises(SpecError, match="not all aligned"):
        synthetic_group([LINEAR], [POINT], Form.ALIGNED, True)
    calls: list[LayerSpec] = []

    def timed(engine: object, spec: LayerSpec, *_: object, **__: object) -> list[LayerTiming]:
        calls.append(spec)
        return [LayerTiming(layer=spec.name, rank=16, ms={Form.DENSE: 1.0})]

    monkeypatch.setattr(measured, "time_layer", timed)
    other = replace(LINEAR, name="other", aligned=(16,))
    measured.time_layers(open_engine("torch", 1), [(LINEAR, (16,)), (other, (16,))])
    assert calls == [LINEAR]
