from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from conftest import Made
from t3c.artifact.manifest import FACTORS
from t3c.artifact.reader import Artifact
from t3c.artifact.trim import trim
from t3c.errors import ArtifactError, SpecError
from t3c.runtime.runtime import load


def parts_of(artifact: Artifact) -> list[list[str]]:
    names = [profile.name for profile in artifact.manifest.chain]
    counts = range(1, len(names))
    return [list(part) for n in counts for part in itertools.combinations(names, n)]


def test_every_part_has_the_same_weights_and_answers(made: Made, tmp_path: Path) -> None:
    whole = Artifact(made.artifact)
    for index, names in enumerate(parts_of(whole)):
        part = trim(whole, names, tmp_path / f"{index}.t3c")
        assert [p.name for p in part.manifest.chain] == names
        for profile in part.manifest.chain:
            assert profile == whole.manifest.chain[profile.name]
            assert part.ranges(profile.name) == whole.ranges(profile.name)
            for layer, point in profile.points.items():
                mine, theirs = part.stages(layer, point), whole.stages(layer, point)
                for (a, scale_a), (b, scale_b) in zip(mine, theirs, strict=True):
                    np.testing.assert_array_equal(a, b)
                    np.testing.assert_array_equal(scale_a, scale_b)


def test_a_part_takes_the_bytes_its_largest_profile_needs(made: Made, tmp_path: Path) -> None:
    whole = Artifact(made.artifact)
    for profile in whole.manifest.profiles:
        part = trim(whole, [profile.name], tmp_path / f"{profile.name}.t3c")
        size = part.content_bytes()
        assert size <= profile.size_bytes
        assert part.manifest.size_bytes(profile.name) == size  # alone, it needs all there is
        # What it may do without is names of tensors and profiles, no weights.
        others = whole.manifest.files[FACTORS].bytes - part.manifest.files[FACTORS].bytes
        assert others >= 0
        assert whole.content_bytes() - others >= size


def test_what_is_known_of_a_profile_stays_with_it(made: Made, tmp_path: Path) -> None:
    whole = load(made.artifact)
    part = load(trim(whole.artifact, ["max", "tiny"], tmp_path / "part.t3c").path)
    assert part.artifact.manifest.trimmed_from == whole.artifact.content
    assert part.certificates == {n: whole.certificates[n] for n in ("tiny", "max")}
    by_name = {c.profile: c for c in whole.candidates}
    assert part.candidates[0].latency == by_name["tiny"].latency
    x = made.digits.test[0][:3].numpy()
    for name in ("tiny", "max"):
        np.testing.assert_array_equal(part(x, profile=name), whole(x, profile=name))
    again = trim(part.artifact, ["tiny"], tmp_path / "again.t3c")
    assert again.manifest.trimmed_from == part.artifact.content


def test_what_cannot_be_trimmed_is_refused_and_nothing_is_written(
    made: Made, tmp_path: Path
) -> None:
    whole = Artifact(made.artifact)
    for names in ([], ["tiny", "huge"]):
        with pytest.raises(SpecError, match="profile"):
            trim(whole, names, tmp_path / "none.t3c")
    (tmp_path / "mine").mkdir()
    with pytest.raises(ArtifactError, match="not an artifact"):
        trim(whole, ["tiny"], tmp_path / "mine")
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_an_artifact_may_be_trimmed_in_its_place(copied: Path) -> None:
    before = Artifact(copied).content_bytes()
    trim(Artifact(copied), ["tiny"], copied)
    assert Artifact(copied).content_bytes() < before
    assert [p.name for p in Artifact(copied).manifest.chain] == ["tiny"]
