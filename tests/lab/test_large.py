"""A decoder from export to decoding, each profile beside what NNCF makes; small here."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import large
from lab.large import ARTIFACT, Writing, compress_large, decode_large, export_large
from lab.zoo.language import load_decoder
from t3c.artifact.reader import Artifact

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random decoder in Hugging Face's form."""
    path = tmp_path_factory.mktemp("decoder")
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=256, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_from_export_to_decoding(folder: Path, tmp_path: Path) -> None:
    told: list[str] = []
    exported = export_large(str(folder), tmp_path, told.append, lambda *_: None)
    artifact = Artifact(tmp_path / ARTIFACT)
    wanted = sum(p.numel() for p in load_decoder(str(folder)).model.parameters())
    assert exported["parameters"] == wanted
    assert [profile.name for profile in artifact.manifest.chain] == [
        "tiny", "small", "med", "large", "max",
    ]  # fmt: skip
    assert {p.bits for p in artifact.manifest.chain["large"].points.values()} == {6}
    assert artifact.weight_only
    compressed = compress_large(str(folder), tmp_path, told.append)
    assert compressed["sizes"]["int4"] < compressed["sizes"]["int8"]
    found = decode_large(tmp_path, Writing(prompt=8, tokens=3, rounds=2), told.append, quiet)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == [
        "t3c-tiny", "t3c-small", "t3c-med", "t3c-large", "t3c-max", "int8", "int4",
    ]  # fmt: skip
    sizes = [rows[name]["size_mb"] for name in list(rows)[:5]]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert rows["int8"]["speed_to_int8"] == rows["int4"]["speed_to_int4"] == 1.0
    assert all(row["p50"] <= row["p90"] and row["first_ms"] > 0 for row in rows.values())
    assert all(result["peak_gb"] > 0 for result in (exported, compressed, found))


def quiet(*_: object) -> None:
    """Nothing is shown."""


def test_shares_of_rank_are_those_offered() -> None:
    offered = large.ELASTIC.rank_fractions
    assert {share for share, _ in large.POINTS} == {*offered, 1.0}
