"""Compiled graphs on disk: the same answers, and no damage reaches an engine or a caller."""

from __future__ import annotations

import errno
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from t3c.engines import cache as module
from t3c.engines import open_engine
from t3c.engines.cache import HEADER, CompileCache, Entry, default_folder
from t3c.engines.openvino import OpenVINO, Shapes
from t3c.errors import EngineError, SpecError
from t3c.graph.synthetic import example_input, synthetic_group, synthetic_layer
from t3c.spec import Factorization, Form, Kind, LayerPoint, LayerSpec

SPEC = LayerSpec("fc", Kind.LINEAR, Factorization.SVD, 48, 64, in_size=(8, 1), out_size=(8, 1))
CONV = LayerSpec(
    "conv", Kind.CONV2D, Factorization.SVD, 16, 16, (3, 3), padding=(1, 1), in_size=(6, 6),
    out_size=(6, 6),
)  # fmt: skip
TABLE = LayerSpec(
    "table", Kind.EMBEDDING, Factorization.SVD, 512, 64, in_size=(8, 1), out_size=(8, 1)
)
ENTRY = Entry("engine", "1.2", 2, (("hint", "latency"),), "ab" * 32, ((1, 3), (1,)))
PAYLOAD = bytes(range(70))

Damage = Callable[[Path], object]


def graph(spec: LayerSpec = SPEC, seed: int = 0) -> onnx.ModelProto:
    model = synthetic_layer(spec, LayerPoint(spec.full_rank, 8), Form.DENSE, seed)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return model


def batch(spec: LayerSpec = SPEC, size: int = 1) -> Any:
    return np.repeat(example_input(spec), size, axis=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Shapes]:
    """Every compilation that a cache did not save."""
    seen: list[Shapes] = []
    built = OpenVINO.build

    def counted(engine: OpenVINO, model: Any, shapes: Shapes) -> Any:
        seen.append(shapes)
        return built(engine, model, shapes)

    monkeypatch.setattr(OpenVINO, "build", counted)
    return seen


@pytest.fixture(autouse=True)
def warned() -> Iterator[Callable[[], list[str]]]:
    """The warnings since it was last asked; none may be left at the end."""
    found: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    def taken() -> list[str]:
        told = found.copy()
        found.clear()
        return told

    handler = Kept(logging.WARNING)
    module.log.addHandler(handler)
    yield taken
    module.log.removeHandler(handler)
    assert found == []


def answers(folder: Path | None, model: onnx.ModelProto, *inputs: Any) -> Any:
    """What a fresh engine with a cache in this folder says."""
    cache = CompileCache(folder) if folder else None
    return open_engine("openvino", 1, cache).compile(model).run(list(inputs))


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.compiled"))


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("spec", [SPEC, CONV, TABLE], ids=lambda spec: spec.name)
def test_the_same_bits_from_the_cache(spec: LayerSpec, folder: Path, builds: list[Shapes]) -> None:
    model, x = graph(spec), batch(spec, 2)
    plain = answers(None, model, x)
    builds.clear()
    assert same(answers(folder, model, x), plain)
    assert len(builds) == 1
    assert same(answers(folder, model, x), plain)
    assert len(builds) == 1
    assert folder.stat().st_mode & 0o777 == 0o700


def test_outputs_stay_in_order(folder: Path, builds: list[Shapes]) -> None:
    specs = [
        replace(SPEC, name=name, out_channels=out)
        for name, out in zip("qkv", (16, 48, 32), strict=True)
    ]
    points = [LayerPoint(spec.full_rank, 8) for spec in specs]
    model = synthetic_group(specs, points, Form.DENSE, grouped=False)
    plain = answers(None, model, batch())
    assert [y.shape[-1] for y in plain] == [16, 48, 32]
    for _ in range(2):
        assert same(answers(folder, model, batch()), plain)
    assert len(builds) == 2  # without the cache, and for it


def test_what_decides_the_compiled_graph_is_a_miss(
    folder: Path, builds: list[Shapes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def new() -> int:
        before = len(builds)
        answers(folder, graph(), batch())
        return len(builds) - before

    assert (new(), new()) == (1, 0)
    answers(folder, graph(seed=1), batch())
    assert len(builds) == 2
    open_engine("openvino", 2, CompileCache(folder)).compile(graph()).run([batch()])
    assert len(builds) == 3
    answers(folder, graph(), batch(size=2))
    assert len(builds) == 4
    monkeypatch.setattr(module, "cpu_identity", lambda: "another processor")
    assert (new(), new()) == (1, 0)
    monkeypatch.setattr("openvino.__version__", "9999.1.0")
    assert (new(), new()) == (1, 0)


def test_every_part_of_an_entry_is_in_its_key() -> None:
    changes: dict[str, Any] = {
        "engine": "other", "version": "1.3", "threads": 3, "config": (("hint", "none"),),
        "graph": "cd" * 32, "shapes": ((2, 3), (1,)),
    }  # fmt: skip
    assert set(changes) == {field.name for field in fields(Entry)}
    others = [replace(ENTRY, **{name: value}) for name, value in changes.items()]
    assert len({entry.key for entry in [ENTRY, *others]}) == 7
    assert replace(ENTRY).key == ENTRY.key


def test_more_shapes_than_are_kept(
    folder: Path, builds: list[Shapes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a request reads from a mapped file has to outlive the compiled graph it came from."""
    monkeypatch.setattr("t3c.engines.openvino.KEPT", 1)
    xs = [batch(TABLE, size) for size in (1, 2)]
    plain = open_engine("openvino", 1).compile(graph(TABLE))
    expected = [plain.run([x]) for x in xs]
    for _ in range(2):
        builds.clear()
        session = open_engine("openvino", 1, CompileCache(folder)).compile(graph(TABLE))
        for _ in range(2):
            assert all(same(session.run([x]), y) for x, y in zip(xs, expected, strict=True))
            gc.collect()
    assert builds == []


def test_free_axes_stay_free(folder: Path, builds: list[Shapes]) -> None:
    model = graph()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[1].dim_param = "length"
    plain = open_engine("openvino", 1).compile(model)
    expected = [plain.run([batch()[:, :length]]) for length in (8, 3)]
    builds.clear()
    for _ in range(2):
        session = open_engine("openvino", 1, CompileCache(folder)).compile(model)
        for length, y in zip((8, 3), expected, strict=True):
            assert same(session.run([batch()[:, :length]]), y)
    assert len(builds) == len(entries(folder)) == 1


def test_threads_share_a_cache(folder: Path) -> None:
    expected = answers(None, graph(), batch())
    caught: list[bool] = []

    def ask() -> None:
        caught.append(same(answers(folder, graph(), batch()), expected))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert caught == [True] * 4
    assert [path.name for path in folder.iterdir()] == [entries(folder)[0].name]


def test_a_graph_that_cannot_be_is_an_error(folder: Path) -> None:
    broken = graph()
    broken.graph.node[0].op_type = "NoSuchOperation"
    with pytest.raises(EngineError):
        answers(folder, broken, batch())
    assert not folder.exists()


@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_engines_that_have_none(engine: str, folder: Path) -> None:
    pytest.importorskip(engine)
    open_engine(engine, 1, CompileCache(folder)).compile(graph()).run([batch()])
    assert not folder.exists()


def flip(at: int) -> Damage:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))

    return damage


def into_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def into_link(path: Path) -> None:
    path.symlink_to(path.rename(path.parent.parent / "elsewhere"))


def into_another(path: Path) -> None:
    cache = CompileCache(path.parent)
    cache.store(ENTRY, PAYLOAD)
    cache.path(ENTRY).rename(path)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "empty": (lambda path: os.truncate(path, 0), "cut short"),
    "half a header": (lambda path: os.truncate(path, HEADER.size // 2), "cut short"),
    "no payload": (lambda path: os.truncate(path, HEADER.size), "cut short"),
    "half": (lambda path: os.truncate(path, path.stat().st_size // 2), "damaged"),
    "a byte less": (lambda path: os.truncate(path, path.stat().st_size - 1), "damaged"),
    "longer": (lambda path: os.truncate(path, path.stat().st_size + 1), "damaged"),
    "another magic": (flip(0), "damaged"),
    "another payload": (flip(-1), "damaged"),
    "another entry": (into_another, "damaged"),
    "folder": (into_folder, "not a file"),
    "link": (into_link, "is a link"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_noticed_and_mended(
    name: str, folder: Path, builds: list[Shapes], warned: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    damage, reason = DAMAGES[name]
    expected = answers(folder, graph(), batch())
    (path,) = entries(folder)
    damage(path)
    with monkeypatch.context() as patched:
        patched.setattr(OpenVINO, "restore", lambda *a: pytest.fail("the engine saw it"))
        builds.clear()
        assert same(answers(folder, graph(), batch()), expected)
    assert len(builds) == 1
    (warning,) = warned()
    assert str(path) in warning
    assert reason in warning
    assert same(answers(folder, graph(), batch()), expected)
    assert len(builds) == 1
    assert path.is_file()
    assert not path.is_symlink()


def test_every_byte_counts(folder: Path, warned: Callable[[], list[str]]) -> None:
    cache = CompileCache(folder)
    cache.store(ENTRY, PAYLOAD)
    path = cache.path(ENTRY)
    whole = path.read_bytes()
    loaded = cache.load(ENTRY)
    assert loaded is not None
    assert loaded.tobytes() == PAYLOAD
    assert len(whole) == HEADER.size + len(PAYLOAD)
    for at in range(len(whole)):
        flip(at)(path)
        assert cache.load(ENTRY) is None, f"byte {at} flipped"
        flip(at)(path)
    for size in (0, 1, 15, 16, 48, 80, 255, 256, 257, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert cache.load(ENTRY) is None, f"cut to {size}"
    path.write_bytes(whole)
    assert cache.load(ENTRY) is not None
    assert len(warned()) == 2  # each kind of damage of one file is told of once


def test_a_payload_the_engine_refuses(
    folder: Path, builds: list[Shapes], warned: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    stored = CompileCache.store
    with monkeypatch.context() as patched:
        patched.setattr(
            CompileCache, "store", lambda c, entry, payload: stored(c, entry, b"x" * 99)
        )
        expected = answers(folder, graph(), batch())
    builds.clear()
    assert same(answers(folder, graph(), batch()), expected)
    (warning,) = warned()
    assert str(entries(folder)[0]) in warning
    assert same(answers(folder, graph(), batch()), expected)
    assert len(builds) == 1


def test_a_graph_the_engine_cannot_export(
    folder: Path, warned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> None:
        raise RuntimeError("Exception from source.cpp:1\nno export of this")

    expected = answers(None, graph(), batch())
    monkeypatch.setattr("openvino.CompiledModel.export_model", refuse)
    assert same(answers(folder, graph(), batch()), expected)
    assert "no export of this" in warned()[0]
    assert not folder.exists()


def test_only_files_of_this_user_count(
    folder: Path, warned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CompileCache(folder)
    cache.store(ENTRY, PAYLOAD)
    whole, status = cache.path(ENTRY).read_bytes(), os.fstat
    with monkeypatch.context() as patched:

        def foreign(file: int) -> os.stat_result:
            found = list(status(file))
            found[4] += 1  # its owner
            return os.stat_result(found)

        patched.setattr(os, "fstat", foreign)
        assert cache.load(ENTRY) is None
    assert "another user" in warned()[0]
    folder.chmod(0o770)
    assert cache.load(ENTRY) is None
    cache.store(ENTRY, b"new")
    assert len(warned()) == 1
    folder.chmod(0o700)
    assert cache.path(ENTRY).read_bytes() == whole


def test_a_link_is_replaced_and_not_followed(
    folder: Path, tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    cache, outside = CompileCache(folder), tmp_path / "outside"
    cache.store(ENTRY, PAYLOAD)
    whole = cache.path(ENTRY).rename(outside).read_bytes()
    cache.path(ENTRY).symlink_to(outside)
    assert cache.load(ENTRY) is None
    cache.store(ENTRY, b"new")
    assert outside.read_bytes() == whole
    loaded = cache.load(ENTRY)
    assert loaded is not None
    assert loaded.tobytes() == b"new"
    assert len(warned()) == 1


def test_a_folder_that_is_a_file(folder: Path, warned: Callable[[], list[str]]) -> None:
    expected = answers(None, graph(), batch())
    folder.write_text("a file")
    started = open_engine("openvino", 1, CompileCache(folder))
    for seed in (0, 1):
        started.compile(graph(seed=seed)).run([batch()])
    (warning,) = warned()
    assert f"{folder}: is not a folder" in warning
    assert same(answers(folder / "deeper", graph(), batch()), expected)
    assert len(warned()) == 1
    assert folder.read_text() == "a file"


def test_a_folder_in_an_entrys_place_that_is_not_empty(
    folder: Path, warned: Callable[[], list[str]]
) -> None:
    cache = CompileCache(folder)
    (cache.path(ENTRY) / "inner").mkdir(parents=True)
    folder.chmod(0o700)
    cache.store(ENTRY, PAYLOAD)
    assert "cannot be written: Directory not empty" in warned()[0]
    assert (cache.path(ENTRY) / "inner").is_dir()


def test_a_full_disk(
    folder: Path, builds: list[Shapes], warned: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        started = open_engine("openvino", 1, CompileCache(folder))
        answer = started.compile(graph()).run([batch()])
        started.compile(graph(seed=1)).run([batch()])
    assert warned() == [
        f"compiled without the cache: {folder}: cannot be written: No space left on device"
    ]
    assert list(folder.iterdir()) == []
    builds.clear()
    assert same(answers(folder, graph(), batch()), answer)
    assert len(builds) == 1


CHILD = """
import os, signal, sys
from pathlib import Path
from t3c.engines.cache import CompileCache, Entry
entry = Entry("engine", "1.2", 2, (("hint", "latency"),), "ab" * 32, ((1, 3), (1,)))
cache = CompileCache(Path(sys.argv[1]))
if sys.argv[2] == "killed":
    os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
for index in range(60):
    cache.store(entry, bytes([index]) * 100_000)
"""


def child(folder: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(folder), how]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_two_processes_write_the_same_entry(folder: Path) -> None:
    cache, read = CompileCache(folder), 0
    children = [child(folder, "whole") for _ in range(2)]
    while any(process.poll() is None for process in children):
        blob = cache.load(ENTRY)  # a torn entry would be warned of, and that fails the test
        read += blob is not None
        assert blob is None or (blob == blob[0]).all()
    for process in children:
        assert process.communicate()[1] == ""
        assert process.returncode == 0
    assert read
    assert cache.load(ENTRY) is not None
    assert [path.name for path in folder.iterdir()] == [cache.path(ENTRY).name]


def test_a_process_killed_while_writing(folder: Path) -> None:
    process = child(folder, "killed")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    cache = CompileCache(folder)
    left = {path.suffix for path in folder.iterdir()}
    assert left == {".partial", ".lock"}
    assert cache.load(ENTRY) is None
    cache.store(ENTRY, PAYLOAD)
    assert cache.load(ENTRY) is not None
    assert [path.name for path in folder.iterdir()] == [cache.path(ENTRY).name]


def numbered(index: int) -> Entry:
    return replace(ENTRY, threads=index)


def use(cache: CompileCache, index: int, when: float) -> None:
    cache.store(numbered(index), PAYLOAD)
    os.utime(cache.path(numbered(index)), (when, when))


def test_the_least_recently_used_go(folder: Path) -> None:
    size = HEADER.size + len(PAYLOAD)
    cache = CompileCache(folder, most_bytes=3 * size)
    for index, when in enumerate((10.0, 30.0, 20.0)):
        use(cache, index, when)
    (folder / "someone else's.compiled").write_bytes(bytes(10 * size))
    assert cache.load(numbered(0)) is not None  # now the latest
    cache.store(numbered(3), PAYLOAD)
    assert [cache.path(numbered(i)).exists() for i in range(4)] == [True, True, False, True]
    CompileCache(folder, most_bytes=size).store(numbered(4), PAYLOAD)
    assert [cache.path(numbered(i)).exists() for i in range(5)] == [False] * 4 + [True]
    assert (folder / "someone else's.compiled").exists()


def test_what_is_too_large_is_not_kept_and_removes_nothing(folder: Path) -> None:
    cache = CompileCache(folder, most_bytes=HEADER.size + len(PAYLOAD))
    cache.store(ENTRY, PAYLOAD)
    cache.store(numbered(5), PAYLOAD + b"x")
    assert entries(folder) == [cache.path(ENTRY)]
    with pytest.raises(SpecError, match="most_bytes must be positive, got 0"):
        CompileCache(folder, most_bytes=0)


def test_others_may_remove_entries_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CompileCache(folder, most_bytes=HEADER.size + len(PAYLOAD))
    use(cache, 0, 10.0)
    unlink = Path.unlink

    def raced(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=True)
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", raced)
        cache.store(numbered(1), PAYLOAD)
    assert entries(folder) == [cache.path(numbered(1))]
    shutil.rmtree(folder)
    assert cache.load(ENTRY) is None
    cache.store(ENTRY, PAYLOAD)
    assert entries(folder) == [cache.path(ENTRY)]


def test_old_unfinished_files_go(folder: Path) -> None:
    cache = CompileCache(folder)
    cache.store(ENTRY, PAYLOAD)
    names = [f".{'0' * 64}.compiled.7.partial", f".{'1' * 64}.compiled.7.partial", ".x.7.partial"]
    for name, age in zip(names, (7200, 60, 7200), strict=True):
        (folder / name).write_bytes(PAYLOAD)
        os.utime(folder / name, (time.time() - age, time.time() - age))
    cache.store(numbered(1), PAYLOAD)
    assert [(folder / name).exists() for name in names] == [False, True, True]


def test_where_it_is_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("T3C_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_folder() == Path("/home/someone/.cache/t3c")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_folder() == Path("/home/someone/.cache/t3c")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_folder() == Path("/caches/t3c")
    monkeypatch.setenv("T3C_CACHE", "/chosen")
    assert default_folder() == Path("/chosen")
