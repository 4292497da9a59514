"""What `t3c compress` makes with its defaults, of the models that figures are published of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.base import HELD
from lab.figures import Figure
from t3c.artifact.reader import Artifact
from t3c.zoo.cifar10 import cifar10
from t3c.zoo.local import data_path

Row = dict[str, Any]
ORIGINALS = Path(__file__).parents[1] / "originals.py"
CIFAR_DATA = 8000  # images that the CIFAR-10 networks were trained on, for the door to split
SLOWER, DRIFT, OVER, DROP = 1.03, 1.05, 1.15, 0.01


@dataclass(frozen=True)
class Door:
    """A model and data for `t3c compress`, and at most what part of int8's p50 med may take."""

    arguments: Callable[[Path], Sequence[str]]
    minutes: int
    med: float | None


def _minilm(out: Path) -> Sequence[str]:
    return (
        "out/base/minilm",
        "--data",
        str(data_path("sst2/train.tsv")),
        "--test",
        str(data_path("sst2/dev.tsv")),
    )


def _resnet(out: Path) -> Sequence[str]:
    return str(data_path("resnet50-imagenet")), "--data", str(data_path("imagenet-val") / "train")


def _vit(out: Path) -> Sequence[str]:
    """Write the images as files: some that it was trained on, and to test those held back."""
    images, labels = cifar10("train")
    parts = {"data": slice(0, CIFAR_DATA), "test": slice(len(images) - HELD, None)}
    out.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        if not (out / f"cifar10-{name}.npz").exists():
            np.savez(out / f"cifar10-{name}.npz", x=images[part].numpy(), y=labels[part].numpy())
    files = [str(out / f"cifar10-{name}.npz") for name in parts]
    return f"{ORIGINALS}:cifar10_vit", "--data", files[0], "--test", files[1]


DOORS: dict[str, Door] = {
    "minilm": Door(_minilm, 15, 0.75),
    "resnet50": Door(_resnet, 30, 0.82),
    "cifar10-vit": Door(_vit, 10, None),
}


def door_rows(name: str, out: Path, say: Callable[[str], object]) -> list[Row]:
    """Return the table of an artifact, which is made where it is not there yet."""
    door, path = DOORS[name], out / f"{name}.t3c"
    if not path.exists():
        say(f"{name}: t3c compress, {door.minutes} minutes")
        out.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "t3c.cli", "compress", *door.arguments(out)]
        command += ["--minutes", str(door.minutes), "--out", str(path)]
        paths = [str(ORIGINALS.parent), os.environ.get("PYTHONPATH", "")]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ":".join(paths)})
    made = json.loads((out / f"{name}.t3c.work" / "bench.json").read_text())
    plain = next(v for v in made["variants"] if v["name"] in ("ptq8", "ptq8w"))
    over = Artifact(path).size_on_disk() / max(
        v["size_bytes"] for v in made["variants"] if v["name"].startswith("t3c-")
    )
    return [
        {
            "model": name, "variant": v["name"],
            "quality": v["accuracy"] if v["accuracy"] is not None else v["perplexity"],
            "below_full_ci95": " to ".join(f"{end:.4f}" for end in v["below_full_ci95"] or ()),
            "samples": v["samples"],
            "p50": v["latency_ms"]["p50"], "p90": v["latency_ms"]["p90"],
            "time": v["latency_ms"]["p50"] / plain["latency_ms"]["p50"],
            "size": v["size_bytes"] / plain["size_bytes"], "drift": v["drift"]["mean"],
            "over_largest": over,
        }
        for v in made["variants"]
    ]  # fmt: skip


def door_figures(name: str, rows: Sequence[Row]) -> list[Figure]:
    """Return the figures of a model's artifact."""
    named = {row["variant"]: row for row in rows}
    plain = next(row for key, row in named.items() if key.startswith("ptq8"))
    top, full = named["t3c-max"], named["full"]
    figures = [
        Figure(f"{name}_max_p50", top["time"], SLOWER),
        Figure(f"{name}_max_drift", top["drift"] / plain["drift"], DRIFT),
        Figure(f"{name}_over_largest", top["over_largest"], OVER),
    ]
    limit = DOORS[name].med
    if limit is not None:
        med = named.get("t3c-med", top)
        figures += [
            Figure(f"{name}_med_p50", med["time"], limit),
            Figure(f"{name}_med_below_full", full["quality"] - med["quality"], DROP),
        ]
    return figures
