"""Artifacts of earlier schema versions: one that version 1 wrote is kept here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t3c.artifact.folder import MANIFEST
from t3c.artifact.reader import Artifact
from t3c.artifact.trim import trim
from t3c.artifact.upgrade import SCHEMA_VERSION, upgraded
from t3c.errors import ArtifactError, VersionError
from t3c.runtime.runtime import load

HERE = Path(__file__).parent
SAID = json.loads((HERE / "version1.json").read_text())


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HERE / "version1.t3c", tmp_path / "old.t3c"))


def manifest(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    return found


def test_an_artifact_of_version_1_answers_as_it_did(old: Path) -> None:
    assert manifest(old)["schema_version"] == 1
    before = (old / MANIFEST).read_bytes()
    runtime = load(old, "onnxruntime")
    x = np.array(SAID["input"], np.float32)
    for name, wanted in SAID["outputs"].items():
        np.testing.assert_allclose(runtime(x, profile=name), wanted, rtol=1e-3, atol=2e-3)
    assert (old / MANIFEST).read_bytes() == before
    assert runtime.artifact.manifest.schema_version == SCHEMA_VERSION
    assert runtime.artifact.ledger() is not None  # its evidence is still of this content
    assert runtime.artifact.devices()


def test_trimming_to_all_profiles_writes_it_in_the_present_version(old: Path) -> None:
    first = Artifact(old)
    names = [profile.name for profile in first.manifest.chain]
    again = trim(first, names, old)
    assert manifest(old)["schema_version"] == SCHEMA_VERSION
    assert again.manifest.chain == first.manifest.chain
    assert again.manifest.layers[0].dense_bits == (5, 8)
    assert again.manifest.layers[0].bits == (4,)
    x = np.array(SAID["input"], np.float32)
    for name, wanted in SAID["outputs"].items():
        mine = load(old, "onnxruntime")(x, profile=name)
        np.testing.assert_allclose(mine, wanted, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1, "2", True, None, 1.0])
def test_a_version_no_step_leads_from_is_refused(old: Path, version: object) -> None:
    data = {**manifest(old), "schema_version": version}
    (old / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(VersionError, match="schema_version"):
        Artifact(old)


WORDS = ["layers", "profiles", "spec", "ranks", "points", "kernel", "bits"]
nested = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(WORDS), inner),
)


@given(st.dictionaries(st.sampled_from(WORDS), nested))
def test_what_only_says_it_is_version_1_gets_one_error(given: dict[str, Any]) -> None:
    try:
        data = upgraded({**given, "schema_version": 1}, Path("m"))
    except ArtifactError as error:
        said = str(error)
        assert said.startswith("m: not a manifest of version 1")
    else:
        assert data["schema_version"] == SCHEMA_VERSION
