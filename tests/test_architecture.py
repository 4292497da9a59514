"""The folders are the architecture: directions of imports, public names, what importing costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import t3c

SOURCE = Path(t3c.__file__).parent

# A line may import from the lines above it, and parts of a line from their own part alone.
LINES = [
    {"errors", "version"},
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
        "certify_artifact", "elasticize_", "export", "fit", "load", "plan_conversion",
        "reconstruct", "settle_", "smooth_", "trim", "write_original",
    ]  # fmt: skip
    assert all(getattr(t3c, name) is not None for name in t3c.__all__)


def test_importing_starts_nothing() -> None:
    code = (
        "import sys, threading, warnings; before = list(warnings.filters); import t3c;"
        "heavy = {'torch', 'openvino', 'onnxruntime', 'onnx', 'transformers'} & set(sys.modules);"
        "assert not heavy, heavy; assert threading.active_count() == 1;"
        "assert warnings.filters == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
