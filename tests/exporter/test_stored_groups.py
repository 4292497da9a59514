"""Artifacts whose weights have grids of groups: one file, read alike by all."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from t3c.artifact.folder import MANIFEST
from t3c.artifact.manifest import CONTENT, FACTORS
from t3c.artifact.reader import Artifact, sha256_file
from t3c.artifact.store import layer_bytes
from t3c.artifact.trim import trim
from t3c.convert import elasticize_, state_of
from t3c.engines import ENGINES, open_engine
from t3c.engines.torch import TorchSession
from t3c.errors import CorruptError
from t3c.exporter import content
from t3c.exporter.allocate import Allocated
from t3c.exporter.content import topology
from t3c.exporter.described import Described
from t3c.exporter.norms import normed_by, own_norms
from t3c.graph.assemble import assemble
from t3c.graph.int4 import products
from t3c.nn.view import at, elastic_weights, group_, grouped
from t3c.spec import Form, LayerPoint, Profile, ProfileChain

LEVELS = ((0, 3), (1, 4), (-1, 4), (-1, 8))  # index of a rank, and bits


class Network(nn.Module):
    """A table, two layers on one vector, and one that has no groups."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 128)
        self.first, self.second = nn.Linear(128, 96, bias=False), nn.Linear(128, 96)
        self.last = nn.Linear(192, 64)
        self.odd = nn.Linear(64, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.odd(self.last(torch.cat([self.first(x), self.second(x)], dim=-1).relu()))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Artifact]:
    torch.manual_seed(0)
    model, ids = Network().eval(), torch.randint(0, 40, (16, 3))
    elasticize_(model, ids[:2], calibration=[ids])
    plans = state_of(model).plan.layers
    chain = ProfileChain(
        tuple(
            Profile(f"level{index}", {
                p.spec.name: LayerPoint(p.ranks[min(rank, len(p.ranks) - 1)], bits) for p in plans
            })
            for index, (rank, bits) in enumerate(LEVELS)
        )
    )  # fmt: skip
    group_(model, True)
    norms = own_norms(model, normed_by(model, topology(model)), chain, ids)
    allocated = Allocated(Allocated.of(chain).menus, chain, {}, norms=norms)
    described = Described(model, topology(model), "network", weight_only=True)
    packed = content.pack(described, allocated)
    return model, content.write(tmp_path_factory.mktemp("network"), packed, allocated, ids)


def test_the_artifact_stores_what_the_model_has(made: tuple[nn.Module, Artifact]) -> None:
    model, artifact = made
    groups = {name: entry.group for name, entry in artifact.entries.items()}
    assert groups == {"table": 64, "first": 64, "second": 64, "last": 64, "odd": None}
    assert artifact.manifest.numerics.weight_scales == "groups"
    weights = elastic_weights(model)
    for profile, name in itertools.product(artifact.manifest.chain, groups):
        point = profile.points[name]
        wanted = [stage.detach().numpy() for stage in weights[name].quantized_stages(point)]
        for index, (codes, scale) in enumerate(artifact.stages(name, point)):
            columns = codes.shape[1]
            in_groups = groups[name] is not None and index == 0
            assert scale.shape == ((len(codes), columns // 64) if in_groups else (len(codes),))
            wide = np.repeat(scale.reshape(len(codes), -1), columns // scale[0].size, axis=1)
            np.testing.assert_allclose(codes * wide, wanted[index], rtol=1e-4, atol=1e-7)


def test_few_bits_are_a_prefix_of_many(made: tuple[nn.Module, Artifact], tmp_path: Path) -> None:
    """The codes of 4 bits are the top bits of those of 8, and stand alone in a trimmed file."""
    whole = made[1]
    part = trim(whole, ["level1", "level2"], tmp_path / "part.t3c")
    assert part.manifest.numerics.weight_scales == "groups"
    for name, entry in whole.entries.items():
        full = entry.menu[-1].rank
        (few, scale), (many, _) = (whole.stages(name, LayerPoint(full, q))[0] for q in (4, 8))
        magnitude = np.abs(many.astype(int))
        np.testing.assert_array_equal(np.abs(few), 2 * (magnitude >> 4) + 1)
        ((again, same),) = part.stages(name, LayerPoint(full, 4))
        np.testing.assert_array_equal(again, few)
        np.testing.assert_array_equal(same, scale)
        assert part.entries[name].group == entry.group
    for profile in part.manifest.chain:
        x = [np.array([[1, 7, 3]])]
        mine, theirs = (TorchSession(graph_of(a, profile)).run(x)[0] for a in (part, whole))
        np.testing.assert_array_equal(mine, theirs)


def test_bytes_count_the_groups(made: tuple[nn.Module, Artifact]) -> None:
    artifact = made[1]
    spec = artifact.entries["first"].spec
    point = LayerPoint(spec.full_rank, 4)
    wanted = 96 * 128 // 2 + 4 * 96 + 96 * 2
    assert layer_bytes(artifact.entries["first"], point) == wanted
    for profile in artifact.manifest.profiles:
        assert profile.size_bytes <= artifact.content_bytes()


def graph_of(artifact: Artifact, profile: Profile, **how: object) -> object:
    specs = artifact.manifest.specs
    forms = {name: specs[name].forms(point)[0] for name, point in profile.points.items()}
    return assemble(artifact, profile, forms, **({"ranges": {}} | how))


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("few", [True, False])
def test_engines_are_the_model(made: tuple[nn.Module, Artifact], engine: str, few: bool) -> None:
    model, artifact = made
    ids = torch.tensor([[1, 7, 3]])
    for profile in artifact.manifest.chain:
        norms = artifact.norms(profile.name)
        with at(model, profile), torch.no_grad():
            wanted = model(ids).numpy()
        reference = TorchSession(graph_of(artifact, profile, ranges=None)).run([ids.numpy()])[0]
        if not norms.gains and not norms.biases:
            np.testing.assert_allclose(reference, wanted, rtol=1e-3, atol=1e-4)
        graph = graph_of(artifact, profile, few=few)
        bits = {product.bits for product in products(graph.graph)}
        assert bits == ({4} if few and profile.name != "level3" else {8})
        got = open_engine(engine, 1).compile(graph).run([ids.numpy()])[0]
        assert np.abs(got - reference).max() <= 3e-4 * np.abs(reference).max()


def test_recomposed_layers_have_rows(made: tuple[nn.Module, Artifact]) -> None:
    artifact = made[1]
    profile, x = artifact.manifest.chain["level1"], [np.array([[1, 7, 3]])]
    forms = dict.fromkeys(profile.points, Form.DENSE)
    got = TorchSession(assemble(artifact, profile, forms, {})).run(x)[0]
    wanted = TorchSession(graph_of(artifact, profile, ranges=None)).run(x)[0]
    assert np.abs(got - wanted).max() <= 0.03 * np.abs(wanted).max()


def test_grids_are_given_back(made: tuple[nn.Module, Artifact]) -> None:
    weights = elastic_weights(made[0])
    before = {n: [g.detach().clone() for g in w.gains] for n, w in weights.items()}
    with grouped(made[0], False):
        assert {w.group for w in weights.values()} == {None}
        assert not torch.equal(weights["first"].dense_gains, before["first"][0])
    for name, weight in weights.items():
        assert (weight.group is None) == (name == "odd")
        for mine, kept in zip(weight.gains, before[name], strict=True):
            assert torch.equal(mine, kept)


def copied(artifact: Artifact, path: Path, change: Callable[[dict], None]) -> Path:
    """A copy of an artifact with other codes and the manifest's hash of them."""
    path.mkdir()
    for name in (*CONTENT, MANIFEST):
        (path / name).write_bytes((artifact.path / name).read_bytes())
    tensors = load_file(path / FACTORS)
    change(tensors)
    save_file(tensors, path / FACTORS)
    manifest = json.loads((path / MANIFEST).read_text())
    size = (path / FACTORS).stat().st_size
    manifest["files"][FACTORS] = {"sha256": sha256_file(path / FACTORS), "bytes": size}
    (path / MANIFEST).write_text(json.dumps(manifest))
    return path


BAD = {
    "fewer": np.ones((96, 1), np.uint8), "flat": np.ones(192, np.uint8),
    "short": np.ones((90, 2), np.uint8), "floats": np.ones((96, 2), np.float32),
    "zero": np.zeros((96, 2), np.uint8), "missing": None,
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_groups_that_were_tampered_with(
    made: tuple[nn.Module, Artifact], case: str, tmp_path: Path
) -> None:
    def change(tensors: dict) -> None:
        del tensors["first/dense/groups"]
        if BAD[case] is not None:
            tensors["first/dense/groups"] = BAD[case]

    bad = Artifact(copied(made[1], tmp_path / "bad.t3c", change))
    with pytest.raises(CorruptError, match=r"^first"):
        bad.stages("first", LayerPoint(96, 4))


@pytest.mark.parametrize(("layer", "group"), [("first", 48), ("first", 0), ("first", 128)])
def test_a_manifest_of_other_groups(
    made: tuple[nn.Module, Artifact], layer: str, group: int, tmp_path: Path
) -> None:
    path = copied(made[1], tmp_path / "bad.t3c", lambda tensors: None)
    manifest = json.loads((path / MANIFEST).read_text())
    next(e for e in manifest["layers"] if e["spec"]["name"] == layer)["group"] = group
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CorruptError, match="first: has no groups of"):
        Artifact(path)


def test_a_manifest_that_knows_no_groups_has_rows(
    made: tuple[nn.Module, Artifact], tmp_path: Path
) -> None:
    path = copied(made[1], tmp_path / "old.t3c", lambda tensors: None)
    manifest = json.loads((path / MANIFEST).read_text())
    for entry in manifest["layers"]:
        entry.pop("group", None)
    manifest["numerics"]["weight_scales"] = "per-row"
    (path / MANIFEST).write_text(json.dumps(manifest))
    ((_, scale),) = Artifact(path).stages("first", LayerPoint(96, 4))
    assert scale.shape == (96,)
