"""Bits that pay in time: stories15M writing with weights of 4 bits, beside NNCF's int4.

All on OpenVINO by the same session class, in turns; weights alone are compressed everywhere.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import openvino as ov

from lab.decoding import time_writing
from lab.perplexity import token_losses
from lab.shipped import read_for_nncf
from lab.uniform import uniform_artifact
from lab.variants import Row, Watch
from t3c.artifact.devices import few_pay
from t3c.artifact.reader import Artifact
from t3c.compression.decoder import Decoder
from t3c.convert import ElasticConfig
from t3c.device.execution import Execution
from t3c.engines import Session
from t3c.engines.openvino import OpenVINO
from t3c.engines.protocol import Array
from t3c.evidence.int8 import bytes_on_disk, nncf_library, quiet
from t3c.evidence.original import write_original
from t3c.exporter import ExportConfig, time_points
from t3c.spec import Form, Profile
from t3c.zoo.text import stories15m, stories_tokens

AXES = {"input_ids": {1: "sequence"}}
# Of full rank, in 4 and 8 bits: tiny and max.
POINTS, ELASTIC = ((1.0, 4), (1.0, 8)), ElasticConfig(bits=(4, 8), rank_fractions=())
GROUP = 64  # inputs that share a scale in NNCF's 4 bits, or fewer where that does not divide
SMALLEST = 32  # group that divides all its layers
BESIDE = "nncf int4"


@dataclass(frozen=True)
class Compared:
    """A prompt of so many tokens, so many more written, how often; texts read for perplexity."""

    prompt: int = 32
    tokens: int = 32
    rounds: int = 20
    texts: int = 32
    length: int = 128
    threads: int = 1


@dataclass(frozen=True)
class Way:
    """A compressed model that writes, its bytes, and how it came to be."""

    session: Session
    size: int
    note: str


def group_rows(
    how: Compared | None = None, watch: Watch = lambda what, done, total: None
) -> list[Row]:
    """Return a row for each way to compress stories15M: tokens a second, bytes, perplexity.

    `ratio` is of tokens a second to NNCF's int4 as it comes; `tiny` runs as layers timed in the
    network say, and once each way beside.
    """
    how, engine = how or Compared(), OpenVINO((how or Compared()).threads)
    with tempfile.TemporaryDirectory() as folder:
        ways = _ours(Path(folder), engine, watch) | _nncf(Path(folder), engine)
    prompt = stories_tokens("valid", 1, how.prompt).numpy()
    sessions = {name: way.session for name, way in ways.items()}
    times, _ = time_writing(sessions, prompt, how.tokens, how.rounds, watch)
    texts = stories_tokens("valid", how.texts, how.length).numpy()
    return [
        {
            "name": name, "tokens_per_second": 1e3 / times[name].p50, "p50": times[name].p50,
            "p90": times[name].p90, "ratio": times[BESIDE].p50 / times[name].p50,
            "bytes": way.size, "perplexity": _perplexity(way.session, texts), "note": way.note,
        }
        for name, way in ways.items()
    ]  # fmt: skip


def _ours(folder: Path, engine: OpenVINO, watch: Watch) -> dict[str, Way]:
    """Return both profiles, that of 4 bits in kernels of its own and as bytes."""
    model, ids = Decoder(stories15m()), stories_tokens("train", 2, 32)
    artifact = uniform_artifact(
        folder / "stories15m.t3c", model, [], {"input_ids": ids}, POINTS, ELASTIC,
        axes=AXES, weight_only=True,
    )  # fmt: skip
    write_original(model, folder / "original.onnx", axes=AXES)
    config = ExportConfig(engine=engine.name, threads=engine.threads, activations="float")
    few = few_pay(time_points(model, config, axes=AXES, watch=watch).layers)

    def way(name: str, few: bool | None, note: str) -> Way:
        profile = artifact.manifest.chain[name]
        session = engine.compile(_graph(artifact, profile, few))
        return Way(session, artifact.manifest.size_bytes(name), note)

    chosen = f"timed in place: {'4-bit' if few else '8-bit'} kernels"
    return {
        "t3c 4 bits": way("tiny", few, chosen),
        "t3c 4 bits, 4-bit kernels": way("tiny", True, ""),
        "t3c 4 bits, as bytes": way("tiny", False, ""),
        "t3c 8 bits": way("max", few, ""),
    }


def _graph(artifact: Artifact, profile: Profile, few: bool | None) -> onnx.ModelProto:
    execution = Execution(profile, dict.fromkeys(profile.points, Form.DENSE), {}, few=few)
    return execution.graph(artifact, 8)


def _nncf(folder: Path, engine: OpenVINO) -> dict[str, Way]:
    """Return weights compressed by NNCF, whose head and table stay in 8 bits unless told."""
    nncf = nncf_library()
    modes, original = nncf.CompressWeightsMode, (folder / "original.onnx").read_bytes()
    fewer = nncf.AdvancedCompressionParameters(
        group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST
    )
    ways: Mapping[str, Callable[[ov.Model], ov.Model]] = {
        "nncf int8": lambda m: nncf.compress_weights(m, mode=modes.INT8_SYM),
        BESIDE: lambda m: nncf.compress_weights(
            m, mode=modes.INT4_SYM, ratio=1.0, group_size=GROUP, advanced_parameters=fewer
        ),
        f"nncf int4, all layers, groups of {SMALLEST}": lambda m: nncf.compress_weights(
            m, mode=modes.INT4_SYM, ratio=1.0, group_size=SMALLEST, all_layers=True
        ),
        "nncf int4, all layers, rows": lambda m: nncf.compress_weights(
            m, mode=modes.INT4_SYM, ratio=1.0, group_size=-1, all_layers=True
        ),
    }
    found = {}
    for name, compress in ways.items():
        with quiet():
            model = compress(read_for_nncf(original, engine))
        found[name] = Way(engine.compile_read(model), bytes_on_disk(model), "")
    return found


def _perplexity(session: Session, texts: Array) -> float:
    """Return the perplexity of texts (n, length), each read by itself."""
    losses = [token_losses(session.run([text[None]])[0], text[None]) for text in texts]
    return math.exp(float(np.mean(losses)))
