"""What is packed once: as large as its files, and narrowed to what packing less would make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from t3c.artifact.draft import Draft
from t3c.artifact.manifest import CONTENT, FACTORS
from t3c.artifact.reader import Artifact
from t3c.artifact.writer import header_bytes, write_content
from t3c.convert import elasticize_, state_of
from t3c.errors import SpecError
from t3c.exporter import content
from t3c.exporter.allocate import Allocated
from t3c.exporter.described import Described
from t3c.spec import ImageSpec, LayerPoint, Profile, ProfileChain

Network = tuple[nn.Module, torch.Tensor]


@pytest.fixture(scope="module")
def network() -> Network:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 64)
    model, samples = (
        nn.Sequential(*layers, nn.GELU(), nn.Linear(64, 48)).eval(),
        torch.randn(40, 3, 4, 4),
    )
    elasticize_(model, samples[:2], calibration=[samples])
    return model, samples


@pytest.fixture(scope="module", params=[False, True], ids=["int8", "weights only"])
def described(network: Network, request: pytest.FixtureRequest) -> Described:
    model, _ = network
    traced = content.topology(model)
    return Described(model, traced, "net", tokenizer=b"{}", weight_only=request.param)


def allocated(model: nn.Module, levels: Sequence[int]) -> Allocated:
    """Profiles with every layer at a rank of its own, of few bits at the lowest."""
    plans = state_of(model).plan.layers
    chain = [
        {
            p.spec.name: LayerPoint(p.ranks[min(level, len(p.ranks) - 1)], p.bits[min(level, 1)])
            for p in plans
        }
        for level in levels
    ]
    profiles = [Profile(f"level{n}", points) for n, points in zip(levels, chain, strict=True)]
    return Allocated.of(ProfileChain(tuple(profiles)))


def files(artifact: Artifact) -> dict[str, bytes]:
    return {name: (artifact.path / name).read_bytes() for name in (*CONTENT, "manifest.json")}


def test_what_is_narrowed_is_what_packing_less_makes(
    network: Network, described: Described, tmp_path: Path
) -> None:
    model, samples = network
    every, fewer = allocated(model, range(5)), allocated(model, (1, 3))
    every = replace(every, menus=fewer.menus)
    written = []
    for name, packed in (
        ("all", content.pack(described, every)),
        ("few", content.pack(described, fewer)),
    ):
        folder = tmp_path / name
        folder.mkdir()
        written.append(files(content.write(folder, packed, fewer, samples)))
    assert written[0] == written[1]


def test_a_draft_is_read_and_sized_as_the_files_it_becomes(
    network: Network, described: Described, tmp_path: Path
) -> None:
    model, samples = network
    draft = content.ranged(content.pack(described, allocated(model, (0, 2, 4))), samples[:8])
    write_content(tmp_path, draft)
    artifact = Artifact(tmp_path)
    assert draft.manifest.profiles == artifact.manifest.profiles
    sizes = [{n: f.bytes for n, f in a.manifest.files.items()} for a in (draft, artifact)]
    assert sizes[0] == sizes[1]
    assert header_bytes(tmp_path / FACTORS) == sizes[0][FACTORS] - sum(
        codes.nbytes for codes in draft.factors.values()
    )
    for profile in draft.manifest.chain:
        assert draft.ranges(profile.name) == artifact.ranges(profile.name)
        for layer, point in profile.points.items():
            pairs = zip(draft.stages(layer, point), artifact.stages(layer, point), strict=True)
            for mine, stored in pairs:
                np.testing.assert_array_equal(mine[0], stored[0])
                np.testing.assert_array_equal(mine[1], stored[1])
    assert isinstance(draft, Draft)
    assert draft.ledger() is None
    assert draft.devices() == []


def test_what_does_not_fit_the_model_is_refused(described: Described) -> None:
    with pytest.raises(SpecError, match="3 classes for an output"):
        replace(described, classes=("a", "b", "c"))
    with pytest.raises(SpecError, match="pictures of 3x8x8"):
        replace(described, image=ImageSpec(8, 8, mean=(0.0,) * 3, std=(1.0,) * 3))
