"""The examples: short, on public names alone, and each runs on a small model."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import t3c
from folders import make_pictures, make_stories, make_texts
from hurried import hurried
from t3c.runtime.tokens import Tokenizer

transformers = pytest.importorskip("transformers")
pytest.importorskip("nncf")
EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))
ALLOWED = {"t3c", "numpy", "torch", "transformers", "sys"}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_is_one_for_each_kind_of_model() -> None:
    assert [path.stem for path in FILES] == ["decoder", "module", "text", "vision"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_is_short_and_on_public_names(path: Path) -> None:
    code = path.read_text()
    assert len(code.splitlines()) <= 40
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            assert {name.name.split(".")[0] for name in node.names} <= ALLOWED
            assert "." not in "".join(name.name for name in node.names if "t3c" in name.name)
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.module.split(".")[0] in ALLOWED - {"t3c"}
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "t3c":
            assert node.attr in t3c.__all__


def run(make: Callable[[Path], tuple[Path, Path]], name: str, folder: Path, **more: object) -> Path:
    model, data = make(folder)
    out = folder / "made.t3c"
    example(name).main(str(model), str(data), str(out), minutes=2, **more)
    assert out.with_suffix(".html").is_file()
    return out


def test_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hurried(monkeypatch)
    model = t3c.load(run(make_pictures, "vision", tmp_path)).artifact.manifest.model
    assert model.classes == ("dark", "light")
    assert model.image is not None
    assert "off the original, and promises" in capsys.readouterr().out


def test_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hurried(monkeypatch)
    artifact = t3c.load(run(make_texts, "text", tmp_path, length=12)).artifact
    assert artifact.manifest.model.classes == ("bad", "good")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert Tokenizer.of(artifact).encode("w3 w7 nobody") == words("w3 w7 nobody")["input_ids"]
    assert capsys.readouterr().out.count(" answers ") == 3


def test_running_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hurried(monkeypatch)
    rt = t3c.load(run(make_stories, "decoder", tmp_path, length=8, prompt="w14 w15"))
    assert rt.artifact.manifest.model.text == t3c.TextSpec(1, (2,))
    assert rt.inputs[0].shape == (None, "sequence")
    assert capsys.readouterr().out.splitlines()[-1].startswith("<s> w14 w15 ")


def test_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hurried(monkeypatch)
    example("module").main(str(tmp_path / "made.t3c"), minutes=2)
    assert capsys.readouterr().out.count(" answers ") == 3
