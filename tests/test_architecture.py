"""The folders are the architecture: directions of imports, public names, what importing costs."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import typer

import t3c
import t3c.cli
from conftest import Made

SOURCE = Path(t3c.__file__).parent

# A line may import from the lines above it, and parts of a line from their own part alone.
LINES = [
    {"errors", "progress", "silence", "version"},
    {"files"},
    {"spec"},
    {"measure"},
    {"factor", "quant", "cost"},
    {"nn"},
    {"convert"},
    {"certify", "control"},
    {"train"},
    {"artifact"},
    {"graph"},
    {"engines"},
    {"device"},
    {"runtime"},
    {"serve"},
    {"evidence"},
    {"report"},
    {"exporter"},
    {"compression"},
    {"zoo"},
    {"cli"},
]
HEIGHT = {part: height for height, line in enumerate(LINES) for part in line}


def imports() -> list[tuple[str, str, str]]:
    """(file, importing part, imported part) for every import of t3c in the source."""
    found = []
    for path in SOURCE.rglob("*.py"):
        relative = path.relative_to(SOURCE)
        part = relative.parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
                if node.module == "t3c":
                    names = [f"t3c.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            found += [
                (str(relative), part, name.split(".")[1])
                for name in names
                if name.startswith("t3c.")
            ]
    return found


def test_every_part_has_its_line() -> None:
    parts = {p.name.removesuffix(".py") for p in SOURCE.iterdir() if not p.name.startswith("_")}
    assert parts == set(HEIGHT) | {"py.typed"}


def test_imports_go_down() -> None:
    assert len(imports()) > 100
    upward = [
        f"{file}: {part} imports {other}"
        for file, part, other in imports()
        if part != other and HEIGHT[other] >= HEIGHT[part]
    ]
    assert not upward


def test_runtime_never_needs_training() -> None:
    allowed = {
        "errors", "version", "files", "spec", "measure", "factor", "quant", "cost", "control",
        "artifact", "graph", "engines", "device", "runtime",
    }  # fmt: skip
    used = {other for _, part, other in imports() if part == "runtime"}
    assert used <= allowed


def test_public_names() -> None:
    assert sorted(t3c.__all__) == [
        "BlockConfig", "Budget", "Certificate", "CertifyConfig", "ElasticConfig", "ExportConfig",
        "Goal", "ImageSpec", "Keep", "LayerPoint", "MonitorConfig", "Objective", "Pressure",
        "Profile", "Request", "Runtime", "T3CError", "TextSpec", "TrainConfig", "__version__",
        "certify_artifact", "compress", "elasticize_", "export", "fit", "load", "order_units_",
        "plan_conversion", "reconstruct", "settle_", "smooth_", "trim", "write_original",
    ]  # fmt: skip
    assert all(getattr(t3c, name) is not None for name in t3c.__all__)


HEAVY = {
    "PIL", "fastapi", "numpy", "onnx", "onnxruntime", "openvino", "pydantic", "rich.console",
    "safetensors", "scipy", "torch", "transformers", "yaml",
}  # fmt: skip
HELP = "import sys; sys.argv = ['t3c', '--help']; from t3c.cli import main; main()"


def imported(code: str, *arguments: object) -> set[str]:
    """Return the modules that a process of its own has imported after some code."""
    told = f"import atexit, sys; atexit.register(lambda: print('|', *sys.modules)); {code}"
    command = [sys.executable, "-c", told, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("|")[2].split())


def test_importing_starts_nothing() -> None:
    code = (
        "import threading, warnings; before = list(warnings.filters); import t3c;"
        "assert threading.active_count() == 1; assert warnings.filters == before"
    )
    assert not HEAVY & imported(code)


def test_help_imports_no_command() -> None:
    modules = imported(HELP)
    assert not HEAVY & modules
    ours = {name for name in modules if name.startswith("t3c.")}
    assert ours == {"t3c.cli", "t3c.cli.app", "t3c.errors", "t3c.version"}


def test_commands_are_listed_by_what_they_say_of_themselves() -> None:
    """Their lines stand in the table, so that a list of them imports none."""
    for module, name, line in sys.modules["t3c.cli.app"].COMMANDS.values():
        command = getattr(importlib.import_module(module), name)
        said = command.info.help if isinstance(command, typer.Typer) else command.__doc__
        assert said.splitlines()[0] == line


def test_loading_measures_nothing(made: Made) -> None:
    """Neither calibration nor what it is fitted by is imported to load an artifact and run it."""
    code = (
        "import numpy, t3c; runtime = t3c.load(sys.argv[1]);"
        "runtime(numpy.load(sys.argv[2])[None], budget=t3c.Budget(size_mb=1000))"
    )
    modules = imported(code, made.artifact, made.folder / "one.npy")
    assert "t3c.device.predict" in modules
    measuring = {
        "calibrate", "grid", "in_place", "journal", "measured", "starts", "timed", "transfer",
    }  # fmt: skip
    assert not {f"t3c.device.{name}" for name in measuring} & modules
    allowed = {"processor", "quiet", "shift"}
    measure = {name for name in modules if name.startswith("t3c.measure.")}
    assert measure <= {f"t3c.measure.{name}" for name in allowed}
    assert not {"PIL", "scipy", "torch"} & modules
