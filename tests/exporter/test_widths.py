"""Artifacts of narrowed models: what is stored, read, executed, trimmed and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from t3c.artifact.folder import MANIFEST
from t3c.artifact.manifest import FACTORS, NORMS
from t3c.artifact.reader import Artifact, sha256_file
from t3c.artifact.trim import trim
from t3c.artifact.upgrade import SCHEMA_VERSION
from t3c.cli import app
from t3c.device.execution import Execution
from t3c.engines import open_engine
from t3c.engines.protocol import Array
from t3c.engines.torch import TorchSession
from t3c.errors import CorruptError
from t3c.evidence.drifts import arrays
from t3c.evidence.served import answers, run_of
from t3c.exporter import content
from t3c.exporter.allocate import Allocated
from t3c.exporter.described import Described
from t3c.exporter.norms import normed_by, own_norms
from t3c.exporter.parity import (
    ENGINE_TOLERANCE,
    ROUNDING_SHARE,
    STORED_TOLERANCE,
    difference,
    model_outputs,
)
from t3c.nn.inputs import select
from t3c.nn.norms import OutputNorms, normed
from t3c.nn.view import at
from t3c.spec import Factorization, Form, LayerPoint, Profile, ProfileChain
from widths import BUILD, POINTS, Narrow, artifact_of, narrow_model, narrow_of, plain, transformers

FEW = 16  # samples that engines are compared on


def execution(artifact: Artifact, name: str) -> Execution:
    profile, specs = artifact.manifest.chain[name], artifact.manifest.specs
    forms = {layer: specs[layer].forms(point)[0] for layer, point in profile.points.items()}
    return Execution(profile, forms, artifact.ranges(name))


def graph_of(artifact: Artifact, name: str) -> Any:
    return execution(artifact, name).graph(artifact, 8)


def stored(artifact: Artifact, name: str, given: list[Array]) -> Array:
    return answers(run_of(content.float_session(artifact, artifact.manifest.chain[name])), given, 8)


@pytest.mark.parametrize("name", BUILD)
def test_what_is_stored_is_what_the_model_computes(name: str) -> None:
    narrow, artifact = narrow_of(name), artifact_of(name)
    forms = set()
    for profile in artifact.manifest.chain:
        with at(narrow.model, profile):
            wanted = model_outputs(narrow.model, narrow.inputs)
        assert difference(stored(artifact, profile.name, arrays(narrow.inputs)), wanted) < 1e-4
        forms |= set(execution(artifact, profile.name).forms.values())
    assert forms == {Form.NARROW, Form.DENSE}
    corrected = [e for e in artifact.entries.values() if e.spec.correction and e.ranks]
    assert corrected


@cache
def answered(name: str, profile: str, engine: str) -> Array:
    given = arrays(select(narrow_of(name).inputs, slice(0, FEW)))
    artifact = artifact_of(name)
    if engine == "float":
        return stored(artifact, profile, given)
    graph = graph_of(artifact, profile)
    session = TorchSession(graph) if engine == "torch" else open_engine(engine, 1).compile(graph)
    return answers(run_of(session), given)


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("name", BUILD)
def test_engines_agree_with_the_reference(name: str, engine: str) -> None:
    pytest.importorskip(engine)
    for profile, _, _ in POINTS:
        reference = answered(name, profile, "torch")
        rounding = difference(reference, answered(name, profile, "float"))
        assert rounding < 0.1
        rounded = difference(answered(name, profile, engine), reference)
        assert rounded <= max(ENGINE_TOLERANCE, ROUNDING_SHARE * rounding)


def test_narrowed_graphs_multiply_by_fewer_weights() -> None:
    """Executed weights are as large as the kept channels, and nothing of full size is left."""
    for name in BUILD:
        artifact = artifact_of(name)
        sizes = []
        for profile in artifact.manifest.chain:
            graph = graph_of(artifact, profile.name).graph
            shapes = {i.name: tuple(i.dims) for i in graph.initializer}
            total = 0
            for layer, point in profile.points.items():
                spec = artifact.entries[layer].spec
                if not spec.narrows:
                    continue
                sized = int(np.prod(spec.corner(point.rank)))
                uses = [s for n, s in shapes.items() if n.startswith(layer) and len(s) > 1]
                assert not uses or int(np.prod(uses[0])) == sized
                total += sized
            sizes.append(total)
        assert sizes[0] < sizes[1] < sizes[2]


def wide_bert() -> Narrow:
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=1024, max_position_embeddings=16, num_labels=4,
    )  # fmt: skip
    torch.manual_seed(0)
    inputs = {"input_ids": torch.randint(0, 40, (32, 8))}
    return narrow_model(transformers.BertForSequenceClassification(config).eval(), inputs)


def test_all_profiles_take_little_more_than_the_largest() -> None:
    """Two widths below full: each has corrections of its own."""
    narrow = wide_bert()
    shares = (("a", 0.5, 4), ("b", 0.5, 6), ("c", 0.75, 6), ("d", 0.75, 8), ("e", 1.0, 8))
    chain = ProfileChain(tuple(narrow.profile(*point) for point in shares))
    artifact = narrow.written(chain)
    largest = trim(artifact, ["e"], artifact.path / "largest.t3c")
    assert artifact.content_bytes() <= 1.15 * largest.content_bytes()
    alone = [trim(artifact, [n], artifact.path / f"{n}.t3c").content_bytes() for n, _, _ in shares]
    assert alone == sorted(set(alone))
    assert alone[0] < 0.5 * alone[-1]
    for profile, size in zip(chain, alone, strict=True):
        assert size <= artifact.manifest.size_bytes(profile.name) <= 1.1 * size


@pytest.mark.parametrize("name", ["bert", "resnet", "own"])
def test_parts_answer_to_the_last_bit(name: str, tmp_path: Path) -> None:
    whole = artifact_of(name)
    given = arrays(select(narrow_of(name).inputs, slice(0, 4)))
    for kept in (["tiny"], ["med"], ["max"], ["tiny", "max"]):
        part = trim(whole, kept, tmp_path / "-".join(kept))
        for profile in kept:
            for layer, point in part.manifest.chain[profile].points.items():
                pairs = zip(part.stages(layer, point), whole.stages(layer, point), strict=True)
                for mine, theirs in pairs:
                    np.testing.assert_array_equal(mine[0], theirs[0])
                    np.testing.assert_array_equal(mine[1], theirs[1])
            (mine,), (theirs,) = (
                TorchSession(graph_of(one, profile)).run(given)[:1] for one in (part, whole)
            )
            np.testing.assert_array_equal(mine, theirs)
    only = [n for n in load_file(tmp_path / "max" / FACTORS) if "correction" in n]
    assert only == []


Manifest = dict[str, Any]


def rewritten(artifact: Artifact, folder: Path, change: Callable[[Manifest], object]) -> Path:
    """Copy an artifact with another manifest."""
    folder.mkdir()
    for path in artifact.path.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_layers_of_a_unit_that_disagree_are_refused(tmp_path: Path) -> None:
    artifact = artifact_of("own")
    tiny, med = (artifact.manifest.chain[name].points["up"] for name in ("tiny", "med"))
    assert tiny.rank < med.rank

    def widen(manifest: Manifest) -> None:
        manifest["profiles"][0]["points"]["up"]["rank"] = med.rank

    folder = rewritten(artifact, tmp_path / "broken", widen)
    with pytest.raises(CorruptError) as error:
        Artifact(folder)
    told = str(error.value)
    assert "\n" not in told
    assert "profile 'tiny'" in told
    assert "gate keeps 1/2 of its channels and up 3/4: they are narrowed together" in told


def test_a_unit_is_what_narrowed_layers_have(tmp_path: Path) -> None:
    changes: list[Callable[[Manifest], object]] = [
        lambda spec: spec.pop("unit"),
        lambda spec: spec.update(correction=1000),
        lambda spec: spec.update(correction=-1),
        lambda spec: spec.update(factorization="rows"),  # with a correction
        lambda spec: spec.update(factorization="svd"),
        lambda spec: spec.update(factorization="corner"),  # with other outputs than inputs
    ]
    for index, change in enumerate(changes):

        def broken(manifest: Manifest, change: Callable[[Manifest], object] = change) -> None:
            change(next(e["spec"] for e in manifest["layers"] if e["spec"]["name"] == "down"))

        folder = rewritten(artifact_of("own"), tmp_path / str(index), broken)
        with pytest.raises(CorruptError, match="down"):
            Artifact(folder)


def tampered(artifact: Artifact, folder: Path, tensors: dict[str, Any]) -> Artifact:
    """Copy an artifact with other codes, whose hash is in the manifest: only reading finds out."""

    def resealed(manifest: Manifest) -> None:
        save_file(tensors, folder / FACTORS)
        size = (folder / FACTORS).stat().st_size
        manifest["files"][FACTORS] = {"sha256": sha256_file(folder / FACTORS), "bytes": size}

    return Artifact(rewritten(artifact, folder, resealed))


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("0/block0", lambda v: v[:, :-8]),
        ("1/block0", lambda v: v[:4]),
        ("1/block0", lambda v: v.astype(np.int16)),
        ("0/block0", None),
        ("0/scale6", lambda v: v[:-1]),
        ("1/scale6", lambda v: -v),
        ("1/scale6", lambda v: v * np.float32(np.nan)),
        ("1/scale6", None),
        ("0/scale6", lambda v: v * np.float32(1e36)),
    ],
)
def test_a_broken_correction_is_refused(tmp_path: Path, part: str, change: Any) -> None:
    artifact = artifact_of("own")
    tiny = artifact.manifest.chain["tiny"]
    name = f"down/correction{tiny.points['down'].rank}/{part}"
    tensors = load_file(artifact.path / FACTORS)
    assert name in tensors
    if change is None:
        del tensors[name]
    else:
        tensors[name] = np.ascontiguousarray(change(tensors[name]))
    broken = tampered(artifact, tmp_path / "broken", tensors)
    with pytest.raises(CorruptError) as error:
        graph_of(broken, "tiny")
    assert "\n" not in str(error.value)
    graph_of(broken, "max")  # full width reads no correction
    graph_of(broken, "med")


def test_a_correction_is_part_of_what_is_answered(tmp_path: Path) -> None:
    """Codes that are allowed, but others, change the answers: corrections are really read."""
    artifact, narrow = artifact_of("own"), narrow_of("own")
    tensors = load_file(artifact.path / FACTORS)
    for name in tensors:
        if "/correction" in name and "scale" in name:
            tensors[name] = tensors[name] * np.float32(1e-6)
    without = tampered(artifact, tmp_path / "without", tensors)
    given = arrays(narrow.inputs)
    assert difference(stored(without, "tiny", given), stored(artifact, "tiny", given)) > 3e-3
    np.testing.assert_array_equal(stored(without, "max", given), stored(artifact, "max", given))


def narrow_norms(narrow: Narrow) -> dict[str, OutputNorms]:
    entries = normed_by(narrow.model, content.topology(narrow.model))
    return own_norms(narrow.model, entries, narrow.chain, narrow.inputs)


@pytest.mark.parametrize("name", ["own", "resnet", "bert"])
def test_own_norms_go_with_widths(name: str, tmp_path: Path) -> None:
    narrow = narrow_of(name)
    norms = narrow_norms(narrow)
    assert "tiny" in norms
    narrowed = {plan.spec.name: plan.spec.factorization for plan in narrow.narrowed}
    kinds = {narrowed[layer] for layer in norms["tiny"] if layer in narrowed}
    assert {Factorization.ROWS, Factorization.COLUMNS} <= kinds
    artifact = narrow.written(norms=norms)
    given = arrays(narrow.inputs)
    for profile in artifact.manifest.chain:
        mine = norms.get(profile.name, {})
        with at(narrow.model, profile):
            shared = model_outputs(narrow.model, narrow.inputs)
            with normed(narrow.model, mine):
                wanted = model_outputs(narrow.model, narrow.inputs)
        found = stored(artifact, profile.name, given)
        assert difference(found, wanted) < STORED_TOLERANCE
        if mine:
            assert difference(found, wanted) < 0.2 * difference(shared, wanted)
    part = trim(artifact, ["tiny"], tmp_path / "part")
    assert f"{NORMS}tiny" in part.dense()
    np.testing.assert_array_equal(stored(part, "tiny", given), stored(artifact, "tiny", given))


def test_gains_are_applied_once(tmp_path: Path) -> None:
    """Large ones, on layers with a correction, without one, and at full width."""
    narrow = narrow_of("own")
    entries = normed_by(narrow.model, content.topology(narrow.model))
    norms = own_norms(narrow.model, entries, narrow.chain, narrow.inputs)["tiny"]
    large = {layer: replace(n, gain=torch.full_like(n.gain, 1.7)) for layer, n in norms.items()}
    artifact = narrow.written(norms={"tiny": large, "med": large, "max": large})
    for profile in artifact.manifest.chain:
        with at(narrow.model, profile), normed(narrow.model, large):
            wanted = model_outputs(narrow.model, narrow.inputs)
        found = stored(artifact, profile.name, arrays(narrow.inputs))
        assert difference(found, wanted) < STORED_TOLERANCE


def test_a_manifest_of_version_4_still_reads(tmp_path: Path) -> None:
    """It has no layers with units, and no field for them."""
    narrow = narrow_model(*plain("own"), widths=())
    assert not narrow.narrowed
    points = [
        {p.spec.name: LayerPoint(p.ranks[i], 8) for p in narrow.plans} for i in (0, -1)
    ]  # fmt: skip
    chain = ProfileChain((Profile("tiny", points[0]), Profile("max", points[1])))
    artifact = narrow.written(chain)

    def older(manifest: Manifest) -> None:
        manifest["schema_version"] = 4
        for entry in manifest["layers"]:
            assert entry["spec"].pop("unit") == ""
            assert entry["spec"].pop("correction") == 0

    old = Artifact(rewritten(artifact, tmp_path / "old", older))
    assert old.manifest.schema_version == SCHEMA_VERSION
    assert old.manifest.layers == artifact.manifest.layers
    given = arrays(narrow.inputs)
    for profile in chain:
        np.testing.assert_array_equal(
            stored(old, profile.name, given), stored(artifact, profile.name, given)
        )


def test_inspect_tells_widths() -> None:
    artifact = artifact_of("own")
    result = CliRunner().invoke(app, ["inspect", str(artifact.path), "--verify", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["schema_version"] == SCHEMA_VERSION
    widths = {p["name"]: p["points"]["gate"] for p in told["profiles"]}
    assert widths == {"tiny": [64, 5], "med": [96, 6], "max": [128, 8]}
    result = CliRunner().invoke(app, ["inspect", str(artifact.path)])
    assert result.exit_code == 0
    assert "tiny" in result.output


@pytest.mark.parametrize("name", ["llama", "own"])
def test_widths_of_weights_alone(name: str, tmp_path: Path) -> None:
    """Activations that stay float: engines compute what is stored, but for their int4."""
    narrow = narrow_of(name)
    allocated = Allocated.of(narrow.chain)
    traced = content.topology(narrow.model)
    described = Described(narrow.model, traced, "narrow", weight_only=True)
    packed = content.pack(described, allocated)
    artifact = content.write(tmp_path, packed, allocated, select(narrow.inputs, slice(0, 8)))
    given = arrays(select(narrow.inputs, slice(0, 8)))
    for profile in artifact.manifest.chain:
        with at(narrow.model, profile):
            wanted = model_outputs(narrow.model, select(narrow.inputs, slice(0, 8)))
        assert difference(stored(artifact, profile.name, given), wanted) < 1e-4
        reference = answers(run_of(TorchSession(graph_of(artifact, profile.name))), given)
        assert difference(reference, wanted) < ENGINE_TOLERANCE
        session = open_engine("openvino", 1).compile(graph_of(artifact, profile.name))
        assert difference(answers(run_of(session), given), reference) < ENGINE_TOLERANCE


def test_profiles_may_skip_widths_and_mix_bits() -> None:
    """Profiles at other widths than the plan's lowest, each unit at one of its own."""
    narrow = narrow_of("own")
    mixed, specs = {}, {plan.spec.name: plan for plan in narrow.plans}
    for place, (layer, plan) in enumerate(specs.items()):
        share = 0.75 if plan.spec.unit == "down" else 0.5
        mixed[layer] = plan.point_at(share if plan.spec.narrows else 1.0, (4, 8, 5)[place % 3])
    chain = ProfileChain((Profile("mixed", mixed), narrow.profile("max", 1.0, 8)))
    artifact = narrow.written(chain)
    with at(narrow.model, chain["mixed"]):
        wanted = model_outputs(narrow.model, narrow.inputs)
    assert difference(stored(artifact, "mixed", arrays(narrow.inputs)), wanted) < 1e-4


def test_a_missing_width_is_refused(tmp_path: Path) -> None:
    def forget(manifest: Manifest) -> None:
        entry = next(e for e in manifest["layers"] if e["spec"]["name"] == "up")
        entry["ranks"] = entry["ranks"][1:]

    with pytest.raises(CorruptError, match=r"tiny.*up.*not stored"):
        Artifact(rewritten(artifact_of("own"), tmp_path / "broken", forget))
