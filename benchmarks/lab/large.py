"""A decoder at full size on this machine: exported, compressed by others, loaded, decoding.

Each stage is a process of its own, so that what it takes of memory is its own too. Weights are
random where a model comes from its configuration alone: neither time nor memory depends on them.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch

from lab.baselines.finetune import to_openvino
from lab.decoding import time_writing
from lab.uniform import uniform_artifact
from lab.variants import MB, Row, Watch
from lab.zoo.language import load_decoder
from t3c.artifact.reader import Artifact
from t3c.convert import ElasticConfig
from t3c.engines import Session
from t3c.engines.openvino import OpenVINO
from t3c.evidence.int8 import bytes_on_disk, nncf_library, quiet
from t3c.measure.memory import peak_rss
from t3c.runtime.runtime import Runtime

ARTIFACT = "model.t3c"
# Shares of full rank and bits of tiny, small, med, large and max.
POINTS = ((0.125, 4), (0.1875, 4), (1.0, 4), (1.0, 6), (1.0, 8))
ELASTIC = ElasticConfig(bits=(4, 6, 8), rank_fractions=(0.125, 0.1875))
LENGTH = 16  # tokens of the example
GROUP = 128  # inputs that share a scale in 4 bits
Say = Callable[[str], object]


@dataclass(frozen=True)
class Writing:
    """How decoding is measured: a prompt of so many tokens, so many more, and how often."""

    prompt: int = 64
    tokens: int = 16
    rounds: int = 5


def export_large(name: str, folder: Path, say: Say, watch: Watch) -> Row:
    """The model elastic, in five profiles of even points; weights alone are compressed."""
    say(f"loading {name}")
    loaded = load_decoder(name)
    say("making it elastic and packing it")
    ids = torch.randint(3, 1000, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    artifact = uniform_artifact(
        folder / ARTIFACT, loaded.model, [], {"input_ids": ids}, POINTS, ELASTIC,
        axes={"input_ids": {1: "sequence"}}, weight_only=True,
        on_layer=lambda done, total, layer: watch(f"factors of {layer}", done, total),
    )  # fmt: skip
    return {"parameters": artifact.manifest.model.parameters, **_memory()}


def compress_large(name: str, folder: Path, say: Say) -> Row:
    """The same weights by NNCF, in 8 bits and in 4: what people use instead."""
    nncf = nncf_library()
    modes = nncf.CompressWeightsMode
    settings: Mapping[str, dict[str, Any]] = {
        "int8": {"mode": modes.INT8_SYM},
        "int4": {"mode": modes.INT4_SYM, "ratio": 1.0, "group_size": GROUP},
    }
    sizes = {}
    say(f"loading {name}")
    graph = to_openvino(load_decoder(name).model, torch.ones(1, LENGTH, dtype=torch.int64))
    gc.collect()
    for kind, how in settings.items():
        say(f"compressing to {kind}")
        with quiet():
            model = nncf.compress_weights(graph.clone(), **how)
        ov.save_model(model, folder / f"{kind}.xml", compress_to_fp16=False)
        sizes[kind] = bytes_on_disk(model)
        del model
    return {"sizes": sizes, **_memory()}


def decode_large(folder: Path, how: Writing, say: Say, watch: Watch) -> Row:
    """Each profile writing in turns with what NNCF made, the profiles loaded one after the other.

    Ratios are of one set of turns; the rows of NNCF's are of the last, the largest profile's.
    """
    engine = OpenVINO(len(os.sched_getaffinity(0)))
    others = {kind: folder / f"{kind}.xml" for kind in ("int8", "int4")}
    sessions: dict[str, Session] = {
        kind: engine.compile_read(engine.core.read_model(path)) for kind, path in others.items()
    }
    sizes = {kind: sum(file.stat().st_size for file in folder.glob(f"{kind}.*")) for kind in others}
    prompt = np.random.default_rng(0).integers(3, 1000, (1, how.prompt))
    rows: list[Row] = []
    artifact = Artifact(folder / ARTIFACT)
    for profile in artifact.manifest.chain:
        name = f"t3c-{profile.name}"
        say(f"{name}: compiling")
        runtime = Runtime(artifact, "openvino", engine.threads)
        sizes[name] = artifact.manifest.size_bytes(profile.name)
        turns = {name: runtime.session(profile.name), **sessions}
        say(f"{name}: {how.tokens} tokens behind {how.prompt}, {how.rounds} times in turns")
        times, first = time_writing(turns, prompt, how.tokens, how.rounds, watch)
        rows = [row for row in rows if row["name"] not in others] + [
            {
                "name": one, "tokens_per_second": 1e3 / times[one].p50, "p50": times[one].p50,
                "p90": times[one].p90, "first_ms": first[one].p50, "size_mb": sizes[one] / MB,
                "speed_to_int8": times["int8"].p50 / times[one].p50,
                "speed_to_int4": times["int4"].p50 / times[one].p50,
            }
            for one in turns
        ]  # fmt: skip
        del runtime, turns
        gc.collect()
    return {"rows": rows, **_memory()}


def _memory() -> Row:
    peak = peak_rss()
    return {"peak_gb": None if peak is None else peak / 1e9}
