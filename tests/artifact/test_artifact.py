from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from conftest import Made, quick
from t3c import files
from t3c.artifact.folder import MANIFEST, recover, staged
from t3c.artifact.manifest import CONTENT, DENSE, FACTORS, GRAPH, NORMS, layer_entry
from t3c.artifact.reader import Artifact
from t3c.artifact.store import (
    StageCodes,
    layer_bytes,
    pack_layer,
    read_layer,
    stage_names,
    trim_layer,
)
from t3c.artifact.writer import header_bytes
from t3c.errors import ArtifactError, CorruptError, T3CError, VersionError
from t3c.exporter import ExportConfig, export
from t3c.files import write_atomic
from t3c.nn import elastic_weights
from t3c.quant.nested import encode, integers, unit_scale
from t3c.spec import CORRECTION_BITS, WIDTHS, Factorization, Kind, LayerPoint, LayerSpec


def edit(path: Path, change: Callable[[dict], None]) -> None:
    data = json.loads((path / MANIFEST).read_text())
    change(data)
    (path / MANIFEST).write_text(json.dumps(data))


def test_stored_weights_are_those_of_the_model(made: Made) -> None:
    """Whatever a profile uses comes back to the last bit, batch norm folded into its rows."""
    artifact = Artifact(made.artifact)
    layers = elastic_weights(made.model)
    for profile in artifact.manifest.chain:
        for name, point in profile.points.items():
            stored = [
                w * s.reshape(-1, *[1] * (w.ndim - 1)) for w, s in artifact.stages(name, point)
            ]
            wanted = [stage.detach().numpy() for stage in layers[name].quantized_stages(point)]
            for mine, theirs in zip(stored[:-1], wanted[:-1], strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)
            rows = len(wanted[-1])
            mine, theirs = (np.abs(w[-1]).reshape(rows, -1) for w in (stored, wanted))
            factor = mine.sum(1, keepdims=True) / theirs.sum(1, keepdims=True)
            np.testing.assert_allclose(mine, theirs * factor, rtol=1e-4, atol=1e-7)


@given(
    out=st.integers(1, 30),
    into=st.integers(1, 30),
    bits=st.integers(2, 8),
    tucker=st.booleans(),
    data=st.data(),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_prefix_of_ranks_and_bits_is_read_from_one_file(
    tmp_path: Path, out: int, into: int, bits: int, tucker: bool, data: st.DataObject
) -> None:
    kind = Factorization.TUCKER2 if tucker else Factorization.SVD
    spec = LayerSpec("x", Kind.CONV2D, kind, out, into, (3, 3) if tucker else (1, 1), tile=3)
    ranks = tuple(sorted(data.draw(st.sets(st.integers(1, spec.full_rank), min_size=1))))
    below = [LayerPoint(rank, bits) for rank in ranks if rank < spec.full_rank]
    entry = layer_entry(spec, [LayerPoint(1, 8)], below)
    assume(entry.ranks)
    ranks = entry.ranks
    rng = np.random.default_rng(0)
    stages = []
    for shape in spec.stage_shapes(ranks[-1]):
        weight = rng.normal(size=shape).astype(np.float32)
        grid = (np.abs(weight).reshape(len(weight), -1).max(1) / 127).astype(np.float32)
        stages.append(StageCodes(weight, grid, {bits: grid * np.float32(3)}))
    named = dict(zip(stage_names(spec, ranks[-1]), stages, strict=True))
    save_file(pack_layer(entry, None, named), str(tmp_path / "x"))
    file = safe_open(str(tmp_path / "x"), framework="numpy")
    for rank in ranks:
        point = LayerPoint(rank, bits)
        read = read_layer(file, entry, point)
        for (codes, scale), stage, shape in zip(read, stages, spec.stage_shapes(rank), strict=True):
            corner = stage.weight[: shape[0], : shape[1]]
            wanted = integers(encode(corner, stage.grid[: shape[0]]), bits)
            np.testing.assert_array_equal(codes, wanted)
            np.testing.assert_array_equal(scale, unit_scale(stage.views[bits], bits)[: shape[0]])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(data=st.data(), bits=st.integers(2, 8), kind=st.sampled_from(sorted(WIDTHS)))
def test_every_width_is_a_prefix_of_the_same_codes(
    tmp_path: Path, data: st.DataObject, bits: int, kind: Factorization
) -> None:
    """The full weight is stored once; a width adds its correction alone, and trimming keeps it."""
    out = data.draw(st.integers(2, 12))
    into = out if kind is Factorization.CORNER else data.draw(st.integers(2, 12))
    kernel = data.draw(st.sampled_from([(1, 1), (3, 3)]))
    cut = kind is not Factorization.ROWS
    spec = LayerSpec(
        "x", Kind.CONV2D, kind, out, into, kernel, padding=(kernel[0] // 2,) * 2, unit="u",
        correction=2 if cut else 0,
    )  # fmt: skip
    widths = sorted(data.draw(st.sets(st.integers(1, spec.full_rank), min_size=1, max_size=4)))
    points = [LayerPoint(width, bits) for width in widths]
    entry, rng = layer_entry(spec, points, points), np.random.default_rng(0)

    def codes(shape: tuple[int, ...], view: int) -> StageCodes:
        weight = rng.normal(size=shape).astype(np.float32)
        grid = (np.abs(weight).reshape(len(weight), -1).max(1) / 127).astype(np.float32)
        return StageCodes(weight, grid, {view: grid * np.float32(3)})

    dense, stages = codes(spec.dense_shape, bits), dict[str, StageCodes]()
    for width in entry.ranks:
        shapes = spec.stage_shapes(width)[1:]
        parts = zip(stage_names(spec, width)[1:], shapes, strict=True)
        stages |= {name: codes(shape, CORRECTION_BITS) for name, shape in parts}
    tensors = pack_layer(entry, dense, stages)
    save_file(tensors, str(tmp_path / "w"))
    file = safe_open(str(tmp_path / "w"), framework="numpy")
    assert sum(v.size for n, v in tensors.items() if "dense/block" in n) <= bits * (
        -(-np.prod(spec.corner(widths[-1])) // 8) + len(widths)
    )
    for point in points:
        wanted = [dense, *(stages[n] for n in stage_names(spec, point.rank)[1:])]
        views = [bits, *[CORRECTION_BITS] * (len(wanted) - 1)]
        least = [LayerPoint(width, bits) for width in widths if width <= point.rank]
        smaller = layer_entry(spec, points, least)
        save_file(trim_layer(file, entry, smaller), str(tmp_path / "s"))
        for source, known in (
            (file, entry),
            (safe_open(str(tmp_path / "s"), framework="numpy"), smaller),
        ):
            read = read_layer(source, known, point)
            shapes = spec.stage_shapes(point.rank)
            for (got, scale), stage, shape, view in zip(read, wanted, shapes, views, strict=True):
                corner = stage.weight[: shape[0], : shape[1]]
                integer = integers(encode(corner, stage.grid[: shape[0]]), view)
                np.testing.assert_array_equal(got, integer)
                np.testing.assert_array_equal(
                    scale, unit_scale(stage.views[view], view)[: shape[0]]
                )
        assert layer_bytes(entry, point) >= sum(
            c.size * v / 8 for (c, _), v in zip(read, views, strict=True)
        )


def test_bytes_on_disk(made: Made) -> None:
    """The whole artifact stays within 1.4 times its largest profile; sizes count real bytes."""
    artifact = Artifact(made.artifact)
    content = sum((made.artifact / name).stat().st_size for name in (*CONTENT, MANIFEST))
    largest = artifact.manifest.profiles[-1].size_bytes
    assert largest < content <= 1.4 * largest
    sizes = [p.size_bytes for p in artifact.manifest.profiles]
    assert sizes == sorted(sizes)
    shared = sum((made.artifact / name).stat().st_size for name in (GRAPH, DENSE, MANIFEST))
    shared += header_bytes(made.artifact / FACTORS)
    norms = {n: v.nbytes for n, v in artifact.dense().items() if n.startswith(NORMS)}
    assert norms
    shared -= sum(norms.values())
    for profile in artifact.manifest.profiles:
        mine = sum(layer_bytes(e, profile.points[n]) for n, e in artifact.entries.items())
        assert profile.size_bytes == shared + norms.get(f"{NORMS}{profile.name}", 0) + mine
        assert mine < (made.artifact / FACTORS).stat().st_size


def test_the_card_names_every_profile_and_its_guarantee(made: Made) -> None:
    card = (made.artifact / "README.md").read_text()
    for certificate in made.exported.ledger.entries:
        assert f"| {certificate.profile} | {certificate.mean:.4f} |" in card
        assert f"{certificate.epsilon:.4f}" in card
    assert "exchangeable" in card
    assert "on openvino" in card


@pytest.mark.parametrize("name", CONTENT)
def test_a_flipped_bit_is_refused(
    copied: Path, name: str, flip: Callable[[Path, int], None]
) -> None:
    for at in (0, 100, -1):
        flip(copied / name, at)
        with pytest.raises(CorruptError, match=f"{name}: its hash is not the manifest's"):
            Artifact(copied)
        flip(copied / name, at)
    Artifact(copied)


@pytest.mark.parametrize("name", CONTENT)
def test_a_truncated_or_missing_file_is_refused(copied: Path, name: str) -> None:
    raw = (copied / name).read_bytes()
    (copied / name).write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CorruptError, match="the manifest says"):
        Artifact(copied, verify=False)
    (copied / name).unlink()
    with pytest.raises(CorruptError, match="missing"):
        Artifact(copied)
    elsewhere = copied.parent / "elsewhere"
    elsewhere.write_bytes(raw)
    (copied / name).symlink_to(elsewhere)
    with pytest.raises(CorruptError, match="not a plain file"):
        Artifact(copied)


def test_broken_manifests(copied: Path) -> None:
    good = (copied / MANIFEST).read_bytes()

    def broken(change: Callable[[dict], None], error: type[T3CError], match: str) -> None:
        (copied / MANIFEST).write_bytes(good)
        edit(copied, change)
        with pytest.raises(error, match=match):
            Artifact(copied)

    broken(lambda m: m.update(schema_version=99), VersionError, "schema_version 99")
    broken(lambda m: m.pop("schema_version"), VersionError, "schema_version None")
    broken(lambda m: m.update(surprise=1), CorruptError, "surprise")
    broken(lambda m: m["files"].update({"../x": m["files"][GRAPH]}), CorruptError, "files must be")
    broken(lambda m: m["profiles"].reverse(), CorruptError, "does not stand below")
    broken(lambda m: m.update(schema_version=True), VersionError, "schema_version True")
    broken(lambda m: m["layers"][0]["spec"].update(groups=0), CorruptError, "must be positive")
    broken(lambda m: m["layers"][0]["spec"].update(tile=-8), CorruptError, "must be positive")
    broken(lambda m: m["layers"][0].update(menu=[]), CorruptError, "at least one point")
    broken(lambda m: m["layers"][0].update(bits=[8, 4]), CorruptError, "must rise")
    broken(lambda m: m["profiles"][0].update(size_bytes=-1), CorruptError, "size_bytes")
    broken(lambda m: m["model"]["inputs"][0].update(dtype="zzz"), CorruptError, "unknown dtype")
    broken(lambda m: m["layers"][1]["bits"].clear(), CorruptError, "not stored")
    broken(lambda m: m["layers"][0]["spec"].update(kind="rnn"), CorruptError, "layers.0.spec.kind")
    broken(
        lambda m: m["profiles"][0]["points"]["head"].update(bits=1), CorruptError, "bits must be"
    )
    (copied / MANIFEST).write_bytes(good[:-20])
    with pytest.raises(CorruptError, match="not JSON"):
        Artifact(copied)
    (copied / MANIFEST).write_text("[]")
    with pytest.raises(VersionError):
        Artifact(copied)
    (copied / MANIFEST).unlink()
    with pytest.raises(CorruptError, match="not an artifact"):
        Artifact(copied)
    with pytest.raises(ArtifactError, match="no such artifact"):
        Artifact(copied / "nowhere")


def test_evidence_of_other_content_is_refused(copied: Path) -> None:
    edit(copied, lambda m: m["model"].update(name="renamed"))
    artifact = Artifact(copied)
    with pytest.raises(CorruptError, match="belongs to other content"):
        artifact.ledger()
    with pytest.raises(CorruptError, match="belongs to other content"):
        artifact.devices()


def test_links_out_of_the_folder_are_refused(copied: Path) -> None:
    for name in (MANIFEST, "ledger.json"):
        (copied / name).rename(copied.parent / name)
        (copied / name).symlink_to(copied.parent / name)
        with pytest.raises(CorruptError, match="not a plain file"):
            Artifact(copied).ledger()
        (copied / name).unlink()
        (copied.parent / name).rename(copied / name)
    (copied / "devices").rename(copied.parent / "devices")
    (copied / "devices").symlink_to(copied.parent / "devices")
    with pytest.raises(CorruptError, match="not a plain folder"):
        Artifact(copied).devices()


def test_a_linked_artifact_is_written_through_its_link(tmp_path: Path) -> None:
    final, link = tmp_path / "a.t3c", tmp_path / "b.t3c"
    link.symlink_to(final)
    for text in ("old", "new"):
        with staged(link) as staging:
            fill(staging, text)
        assert (final / MANIFEST).read_text() == text
        assert link.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.t3c", "b.t3c"]


def test_the_only_whole_copy_is_never_swept(tmp_path: Path) -> None:
    final = tmp_path / "a.t3c"
    with staged(final) as staging:
        fill(staging, "old")
    final.rename(files.beside(final, "previous"))
    final.mkdir()
    with pytest.raises(ArtifactError, match="is not an artifact"), staged(final):
        pass
    assert (files.beside(final, "previous") / MANIFEST).read_text() == "old"


def fill(path: Path, text: str) -> None:
    (path / MANIFEST).write_text(text)


def test_a_failed_write_leaves_the_old_folder_whole(tmp_path: Path) -> None:
    final = tmp_path / "a.t3c"
    with staged(final) as staging:
        fill(staging, "old")

    def fail(error: Exception) -> None:
        with staged(final) as staging:
            fill(staging, "new")
            raise error

    with pytest.raises(ZeroDivisionError):
        fail(ZeroDivisionError())
    with pytest.raises(OSError, match="unrelated"):
        fail(OSError(28, "unrelated"))
    assert (final / MANIFEST).read_text() == "old"
    with staged(final) as staging:
        fill(staging, "new")
    assert (final / MANIFEST).read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.t3c"]


def test_a_crash_between_the_renames_is_recovered(tmp_path: Path) -> None:
    final = tmp_path / "a.t3c"
    with staged(final) as staging:
        fill(staging, "old")
    final.rename(files.beside(final, "previous"))
    recover(final)
    assert (final / MANIFEST).read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.t3c"]


def test_file_systems_that_cannot_swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_swap", lambda a, b: False)
    final = tmp_path / "a.t3c"
    for text in ("old", "new"):
        with staged(final) as staging:
            fill(staging, text)
        assert (final / MANIFEST).read_text() == text
        assert [p.name for p in tmp_path.iterdir()] == ["a.t3c"]


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    final = tmp_path / "thesis"
    final.mkdir()
    (final / "chapter1.tex").write_text("years of work")
    with pytest.raises(ArtifactError, match="is not an artifact"), staged(final):
        pass
    assert (final / "chapter1.tex").read_text() == "years of work"


WRITER = """
import sys, time
from pathlib import Path
from t3c.artifact.folder import staged
with staged(Path(sys.argv[1])) as staging:
    (staging / "manifest.json").write_text("new")
    print("writing", flush=True)
    time.sleep(60)
"""


def test_two_writers_and_a_killed_one(tmp_path: Path) -> None:
    final = tmp_path / "a.t3c"
    with staged(final) as staging:
        fill(staging, "old")
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(final)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "writing"
    with pytest.raises(ArtifactError, match="another process is writing it"), staged(final):
        pass
    assert (final / MANIFEST).read_text() == "old"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert (final / MANIFEST).read_text() == "old"
    with staged(final) as staging:
        fill(staging, "newer")
    assert (final / MANIFEST).read_text() == "newer"
    assert not list(tmp_path.glob("*.partial")) + list(tmp_path.glob(".*.partial"))


def test_a_full_disk(made: Made, tmp_path: Path) -> None:
    """On a file system too small for it, one clear error, and what was there stays."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs the right to mount a small file system")
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        final = small / "a.t3c"
        with staged(final) as staging:
            fill(staging, "old")
        with pytest.raises(ArtifactError, match=r"cannot be written: .*No space left"):
            export(made.model, final, [made.digits.calibration], ExportConfig(timing=quick(1)))
        with pytest.raises(ArtifactError, match="No space left"):
            write_atomic(final / "ledger.json", b"x" * 100_000)
        assert (final / MANIFEST).read_text() == "old"
        assert not (final / "ledger.json").exists()
    finally:
        time.sleep(0.1)
        subprocess.run(["umount", "-l", str(small)], check=True)
