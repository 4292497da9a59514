"""Norms that profiles have for themselves: stored, read and executed as they were matched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from t3c.artifact.draft import Draft
from t3c.artifact.manifest import DENSE, NORMS, NormedEntry
from t3c.artifact.norms import pack_norms, read_norms
from t3c.artifact.reader import Artifact
from t3c.artifact.trim import trim
from t3c.artifact.writer import write_content
from t3c.convert import elasticize_, state_of
from t3c.errors import CorruptError, SpecError
from t3c.evidence.drifts import arrays
from t3c.exporter import content
from t3c.exporter.allocate import Allocated
from t3c.exporter.described import Described
from t3c.exporter.norms import normed_by, own_norms
from t3c.exporter.parity import STORED_TOLERANCE, difference
from t3c.nn.norms import match_norms, normed, output_moments
from t3c.nn.view import at, elastic_weights
from t3c.spec import LayerPoint, Profile, ProfileChain


class Net(nn.Module):
    """Convolutions with a norm and with a bias, a linear layer on tokens, a layer used twice, and
    one behind which something else than a bias is added."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.tokens = nn.Linear(32, 64)
        self.bare = nn.Linear(64, 64, bias=False)
        self.twice = nn.Linear(64, 64)
        self.placed = nn.Linear(64, 64, bias=False)
        self.position = nn.Parameter(torch.randn(1, 36, 64))
        self.head = nn.Linear(64, 10)
        with torch.no_grad():
            self.norm.running_mean.uniform_(-1, 1)
            self.norm.weight.uniform_(-2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.depthwise(torch.relu(self.norm(self.conv(x))))
        x = torch.nn.functional.gelu(self.tokens(x.flatten(2).transpose(1, 2)))
        x = torch.relu(self.twice(torch.relu(self.twice(self.bare(x)))))
        x = torch.relu(self.placed(x) + self.position)
        out: torch.Tensor = self.head(x.mean(1))
        return out


@pytest.fixture(scope="module")
def net() -> tuple[nn.Module, torch.Tensor, ProfileChain]:
    torch.manual_seed(0)
    model, samples = Net().eval(), torch.randn(80, 3, 6, 6)
    elasticize_(model, samples[:2], calibration=[samples])
    plans = state_of(model).plan.layers
    points = [
        {p.spec.name: LayerPoint(p.ranks[min(i, len(p.ranks) - 1)], p.bits[i]) for p in plans}
        for i in (0, 2)
    ]
    return model, samples, ProfileChain((Profile("tiny", points[0]), Profile("med", points[1])))


@pytest.fixture(scope="module")
def draft(net: tuple[nn.Module, torch.Tensor, ProfileChain]) -> tuple[Draft, Allocated]:
    model, samples, chain = net
    traced = content.topology(model)
    entries = normed_by(model, traced)
    names = {entry.layer for entry in entries}
    specs = {n: w.spec for n, w in elastic_weights(model).items() if n in names}
    wanted = output_moments(state_of(model).original, specs, samples)
    with at(model, chain["tiny"]):
        norms = {"tiny": match_norms(model, specs, samples, wanted)}
    allocated = replace(Allocated.of(chain), norms=norms)
    return content.pack(Described(model, traced, "net"), allocated), allocated


def test_layers_used_once_with_a_bias_have_norms(
    net: tuple[nn.Module, torch.Tensor, ProfileChain],
) -> None:
    found = {entry.layer for entry in normed_by(net[0], content.topology(net[0]))}
    assert found == {"conv", "tokens", "head"}


def test_what_is_stored_is_what_was_matched(
    net: tuple[nn.Module, torch.Tensor, ProfileChain], draft: tuple[Draft, Allocated]
) -> None:
    """A norm that is folded in changes no more than parity allows what is stored to."""
    model, samples, chain = net
    for profile in chain:
        session = content.float_session(draft[0], profile)
        (stored,) = session.run(arrays(samples))
        norms = draft[1].norms.get(profile.name, {})
        with torch.no_grad(), at(model, profile), normed(model, norms):
            wanted = model(samples).numpy()
        with torch.no_grad(), at(model, profile):
            without = model(samples).numpy()
        assert difference(stored, wanted) < STORED_TOLERANCE
        if norms:
            assert np.abs(stored - without).max() > 0.02 * np.abs(wanted).max()


def test_norms_follow_profiles_under_other_names_and_into_parts(
    net: tuple[nn.Module, torch.Tensor, ProfileChain],
    draft: tuple[Draft, Allocated],
    tmp_path: Path,
) -> None:
    packed, allocated = draft
    renamed = allocated.renamed({"tiny": "small", "med": "max"})
    folder = tmp_path / "whole"
    folder.mkdir()
    whole = content.write(folder, packed, renamed, net[1][:16])
    assert [n for n in whole.dense() if n.startswith(NORMS)] == [f"{NORMS}small"]
    part = trim(whole, ["max"], tmp_path / "part")
    assert not any(name.startswith(NORMS) for name in part.dense())
    other = trim(whole, ["small"], tmp_path / "other")
    np.testing.assert_array_equal(other.dense()[f"{NORMS}small"], packed.dense()[f"{NORMS}tiny"])
    profile = whole.manifest.chain["small"]
    for layer in profile.points:
        pairs = zip(whole.weights(profile, layer), other.weights(profile, layer), strict=True)
        for mine, theirs in pairs:
            np.testing.assert_array_equal(mine[1], theirs[1])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda n: n[:, :-1], "for 106 channels"),
        (lambda n: np.where(np.arange(n.shape[1]) == 3, -n, n).astype(n.dtype), "not positive"),
        (lambda n: np.full_like(n, np.nan), "not finite"),
        (lambda n: n.astype(np.float64), "float64"),
    ],
)
def test_norms_that_cannot_be_are_refused(
    draft: tuple[Draft, Allocated], tmp_path: Path, change: object, told: str
) -> None:
    packed = draft[0]
    assert callable(change)
    broken = packed.tensors | {f"{NORMS}tiny": change(packed.tensors[f"{NORMS}tiny"])}
    write_content(tmp_path, Draft(packed.manifest, packed.topology, packed.factors, broken))
    with pytest.raises(CorruptError, match=told) as error:
        Artifact(tmp_path).norms("tiny")
    assert DENSE in str(error.value)


def test_values_that_half_precision_does_not_hold_stay_whole() -> None:
    entries = (NormedEntry(layer="a", bias="a.bias"),)
    gains = {"a": np.array([1.0, 0.5], np.float32)}
    for value, kind in ((3.0, np.float16), (1e6, np.float32), (1e-7, np.float32)):
        packed = pack_norms(gains, {"a.bias": np.full(2, value, np.float32)}, entries)
        assert packed.dtype == kind


def test_norms_of_unknown_layers_are_refused(draft: tuple[Draft, Allocated]) -> None:
    manifest = draft[0].manifest
    without = manifest.model_copy(
        update={"model": manifest.model.model_copy(update={"normed": ()})}
    )
    with pytest.raises(SpecError, match="for 0 channels"):
        read_norms(draft[0].tensors[f"{NORMS}tiny"], without)


def test_own_norms_are_those_that_lessen_drift(
    net: tuple[nn.Module, torch.Tensor, ProfileChain],
) -> None:
    """Of too few samples nothing is known."""
    model, samples, chain = net
    entries = normed_by(model, content.topology(model))
    assert own_norms(model, entries, chain, samples[:12]) == {}
    assert own_norms(model, (), chain, samples) == {}
    found = own_norms(model, entries, chain, samples)
    assert "tiny" in found
    assert found["tiny"].keys() == {entry.layer for entry in entries}


def test_a_table_that_is_a_head_too_has_no_norms() -> None:
    """Its rows are looked up as well: a gain would change them."""
    model = Tied().eval()
    ids = torch.randint(0, 32, (40, 6))
    elasticize_(model, ids[:2], calibration=[ids])
    assert {e.layer for e in normed_by(model, content.topology(model))} == {"middle"}


class Tied(nn.Module):
    """A table of words that is the head's weight too, the head with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 64)
        self.middle = nn.Linear(64, 64)
        self.head = nn.Linear(64, 32)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.relu(self.middle(self.words(ids))))
        return out


@pytest.mark.parametrize("bias", ["nothing", "norms/tiny"])
def test_norms_in_the_place_of_what_is_not_there_are_refused(
    draft: tuple[Draft, Allocated], tmp_path: Path, bias: str
) -> None:
    packed = draft[0]
    normed = [e.model_copy(update={"bias": bias} if i == 0 else {})
              for i, e in enumerate(packed.manifest.model.normed)]  # fmt: skip
    model = packed.manifest.model.model_copy(update={"normed": tuple(normed)})
    manifest = packed.manifest.model_copy(update={"model": model})
    write_content(tmp_path, Draft(manifest, packed.topology, packed.factors, packed.tensors))
    with pytest.raises(CorruptError, match=f"no bias '{bias}'"):
        Artifact(tmp_path).norms("tiny")


class Forgetful(Draft):
    """An artifact of which another thread always asks for another profile in between."""

    _norms = property(lambda artifact: {}, lambda artifact, value: None)  # type: ignore[assignment]


def test_threads_may_ask_for_different_profiles(draft: tuple[Draft, Allocated]) -> None:
    packed = draft[0]
    artifact = Forgetful(packed.manifest, packed.topology, packed.factors, packed.tensors)
    assert artifact.norms("tiny").gains.keys() == packed.norms("tiny").gains.keys()
    assert not artifact.norms("med").gains
