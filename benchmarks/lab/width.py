"""Width against rank: what it drifts at equal work, and what it takes in whole networks.

Drift is of MiniLM-L6's pooled embedding, untrained, on sentences that nothing was fitted to, by the
int8 artifact as it is loaded. Times are of whole networks in turns, where random weights do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lab.fidelity import uniform, work
from lab.uniform import uniform_artifact
from lab.zoo.minilm import MiniLMEmbedding, sst2_sentences
from t3c.artifact.reader import Artifact
from t3c.certify.drift import relative_drift
from t3c.compression.data import Data
from t3c.compression.elastic import POSITIONS, STATISTICS, config_for, smooth_inputs
from t3c.compression.source import Classifier
from t3c.convert import ElasticConfig, order_units_, plan_conversion
from t3c.convert.config import Role
from t3c.device.execution import Execution
from t3c.device.measured import runners
from t3c.engines import Session
from t3c.engines.openvino import OpenVINO
from t3c.factor.width import compensation
from t3c.measure.latency import interleave, paced
from t3c.nn.inputs import Inputs, batches_of, call
from t3c.nn.observe import observe_moments
from t3c.nn.units import find_units
from t3c.spec import Factorization, Kind, LayerSpec

FITTED, JUDGED, RANGED = 1300, 1000, 128  # sentences: 1,000 in between judge
SHARES = (0.75, 0.6)
# Of full width, and of rank by equal work: two around each share, between which is interpolated.
WIDTHS = (0.58, 0.62, 0.75)
RANKS = (176, 192, 224, 232)
WIDE = 384  # features of MiniLM
NO_RANKS = 0.001  # of full rank: a cap under which no layer has any
ROUNDS = 60

Row = dict[str, Any]
Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Sentences:
    """Sentences that statistics are of, and those that judge."""

    fitted: Data
    judged: Data

    @classmethod
    def read(cls) -> Sentences:
        """Return those of SST-2's training file."""
        inputs, _ = sst2_sentences("train", count=FITTED + JUDGED)
        every = Data(inputs)
        fitted = torch.cat([torch.arange(300), torch.arange(1300, FITTED + JUDGED)])
        return cls(every.at(fitted), every.at(slice(300, 1300)))

    @property
    def deployed(self) -> list[Inputs]:
        """Return sentences with all of their padding, as engines read them."""
        return list(batches_of(self.fitted.at(slice(0, STATISTICS)).inputs, 32))

    @property
    def statistics(self) -> list[Inputs]:
        return self.fitted.statistics(FITTED, POSITIONS, 32)


def drift_rows(say: Callable[[str], object]) -> tuple[list[Row], float]:
    """Return drifts at shares of the feed-forward layers' work, and the artifact with widths over
    its largest profile, in bytes."""
    sentences, engine = Sentences.read(), OpenVINO(2)
    rows: list[Row] = []
    with torch.no_grad():
        wanted = _answers(MiniLMEmbedding().eval(), sentences.judged)
    over = 0.0
    for way in ("width", "rank", "heads"):
        say(f"MiniLM by {way}: an artifact of 8 bits")
        model = MiniLMEmbedding().eval()
        smooth_inputs(model, sentences.deployed)
        config, points = _narrowing(model, sentences, way)
        with tempfile.TemporaryDirectory() as folder:
            artifact = uniform_artifact(
                Path(folder) / "minilm.t3c", model, sentences.statistics,
                sentences.fitted.at(slice(0, RANGED)).inputs, [*((p, 8) for p in points), (1.0, 8)],
                config,
            )  # fmt: skip
            rows += _judged(artifact, engine, sentences.judged, wanted, way)
            if way == "width":
                largest = artifact.manifest.chain.top.name
                over = artifact.size_on_disk() / artifact.manifest.size_bytes(largest)
    say("MiniLM by width: exact compensation in float")
    rows += _exact(sentences, wanted)
    return rows, over


def drift_at(rows: Sequence[Row], way: str, share: float) -> float:
    """Return the drift at a share of work, between the two that were measured around it."""
    mine = sorted((row["work"], row["drift"]) for row in rows if row["by"] == way)
    return float(np.interp(share, [w for w, _ in mine], [d for _, d in mine]))


def _narrowing(
    model: nn.Module, sentences: Sentences, way: str
) -> tuple[ElasticConfig, tuple[float, ...]]:
    """Return what makes feed-forward layers alone elastic, or heads, and at which points."""
    only: dict[str, Any] = {"bits": (8,), "rank_fractions": ()}
    if way == "rank":
        fractions = tuple(rank / WIDE for rank in RANKS)
        only = {"bits": (8,), "rank_fractions": fractions, "rank_caps": {Role.PROJECTION: NO_RANKS}}
        return config_for({}, **only), fractions
    example = sentences.fitted.at(slice(0, 2)).inputs
    groups = order_units_(model, example, sentences.statistics).groups
    heads = way == "heads"
    taken = tuple(group for group in groups if (group.members[-1].columns > 1) is heads)
    return config_for({}, widths=taken, **only), (7 / 12, 9 / 12) if heads else WIDTHS


def _judged(
    artifact: Artifact, engine: OpenVINO, judged: Data, wanted: Floats, way: str
) -> list[Row]:
    rows, whole = [], 0.0
    for profile in reversed(list(artifact.manifest.chain)):
        specs, points = artifact.manifest.specs, profile.points
        forms = {name: specs[name].forms(point)[0] for name, point in points.items()}
        session = engine.compile(
            Execution(profile, forms, artifact.ranges(profile.name)).graph(artifact, 8)
        )
        answers = np.concatenate(
            [session.run(judged.at(slice(i, i + 50)).arrays())[0] for i in range(0, JUDGED, 50)]
        )
        moved = [n for n, spec in specs.items() if _elastic(spec, way)]
        flops = sum(_flops(specs[n], points[n].rank) for n in moved)
        whole = whole or flops
        drift = float(relative_drift(answers, wanted).mean())
        rows.append({"by": way, "work": flops / whole, "drift": drift, "samples": JUDGED})
    return rows


def _elastic(spec: LayerSpec, way: str) -> bool:
    return spec.narrows if way != "rank" else spec.factorization is Factorization.SVD


def _flops(spec: LayerSpec, rank: int) -> int:
    shapes = spec.stage_shapes(rank)[:1] if spec.narrows else spec.stage_shapes(rank)
    if rank >= spec.full_rank:
        shapes = (spec.dense_shape,)
    return sum(int(np.prod(shape)) for shape in shapes)


@torch.no_grad()
def _answers(model: nn.Module, data: Data) -> Floats:
    parts = [call(model, data.at(slice(i, i + 50)).inputs) for i in range(0, len(data), 50)]
    return np.asarray(torch.cat(parts).numpy())


def _exact(sentences: Sentences, wanted: Floats) -> list[Row]:
    """Return the drift in float with exact compensation: a copy of the second matrix a width."""
    model = MiniLMEmbedding().eval()
    example = sentences.fitted.at(slice(0, 2)).inputs
    groups = order_units_(model, example, sentences.statistics).groups
    names = [group.name for group in groups if group.members[-1].columns == 1]
    kept = {name: _weight(model, name).clone() for name in names}
    specs = {n: LayerSpec(n, Kind.LINEAR, Factorization.NONE, *w.shape) for n, w in kept.items()}
    moments = observe_moments(model, specs, sentences.statistics)
    rows = []
    for share in SHARES:
        for name in names:
            count = round(share * kept[name].shape[1])
            weight = _weight(model, name)
            with torch.no_grad():
                change = compensation(kept[name], moments[name], count).float()
                weight.zero_()
                weight[:, :count] = kept[name][:, :count] + change
        drift = float(relative_drift(_answers(model, sentences.judged), wanted).mean())
        rows.append({"by": "exact, float", "work": share, "drift": drift, "samples": JUDGED})
    return rows


def _weight(model: nn.Module, name: str) -> Tensor:
    weight = model.get_submodule(name).weight
    assert isinstance(weight, Tensor)
    return weight


def time_rows(say: Callable[[str], object]) -> list[Row]:
    """Return what whole networks take by width, relative to rank at equal work."""
    return [row for name in NETWORKS for row in _times(name, *NETWORKS[name](), say)]


def _times(name: str, model: nn.Module, example: Inputs, say: Callable[[str], object]) -> list[Row]:
    """Return rows at half and three quarters of the channels: widths, and ranks around them."""
    groups, _ = find_units(model, example)
    channels = tuple(group for group in groups if group.members[-1].columns == 1)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    config = config_for({}, widths=channels, rank_fractions=(), bits=(8,))
    plan = plan_conversion(model, example, config)
    flops = {share: work(plan, uniform(plan, share, 8)).flops for share in (0.5, 0.75, 1.0)}
    ranks = _ranks(model, example)
    engine, rows = OpenVINO(2), []
    for share in (0.75, 0.5):
        say(f"{name}: {share:g} of the channels, and ranks of equal work")
        around = _around(ranks, flops[share])
        sessions: dict[str, Session] = {}
        with tempfile.TemporaryDirectory() as folder:
            for way, settings, points in (
                ("width", config, (share, 1.0)),
                ("rank", _rank_config(around), (*around, 1.0)),
            ):
                fresh, _ = NETWORKS[name]()
                fresh.load_state_dict(state)
                artifact = uniform_artifact(
                    Path(folder) / f"{way}.t3c", fresh, [], example, [(p, 8) for p in points],
                    settings,
                )  # fmt: skip
                sessions |= _sessions(artifact, engine, way)
        inputs = [np.asarray(value[:1]) for value in _arrays(example)]
        calls = runners(sessions, inputs)
        times = interleave(calls, paced(calls, ROUNDS))
        low, high = (ranks[one] for one in around)
        p50 = np.interp(flops[share], (low, high), [times[f"rank {i}"].p50 for i in (0, 1)])
        mine = times["width 0"]
        rows.append(
            {"network": name, "share": share, "work": flops[share] / flops[1.0],
             "full": times["width 1"].p50, "width": mine.p50, "width_p90": mine.p90,
             "rank": float(p50), "width_to_rank": mine.p50 / float(p50)}
        )  # fmt: skip
    return rows


def _arrays(example: Inputs) -> list[Floats]:
    values = example.values() if isinstance(example, dict) else [example]
    return [np.asarray(value) for value in values]


def _sessions(artifact: Artifact, engine: OpenVINO, way: str) -> dict[str, Session]:
    found: dict[str, Session] = {}
    for index, profile in enumerate(artifact.manifest.chain):
        specs = artifact.manifest.specs
        forms = {name: specs[name].forms(point)[0] for name, point in profile.points.items()}
        graph = Execution(profile, forms, artifact.ranges(profile.name)).graph(artifact, 8)
        found[f"{way} {index}"] = engine.compile(graph)
    return found


def _ranks(model: nn.Module, example: Inputs) -> dict[float, int]:
    """Return the work of the network by share of rank."""
    shares = tuple(i / 48 for i in range(4, 44))
    found = {}
    for share in shares:
        plan = plan_conversion(model, example, _rank_config((share,)))
        found[share] = work(plan, uniform(plan, share, 8)).flops
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _rank_config(shares: Sequence[float]) -> ElasticConfig:
    """Return what gives feed-forward layers, or convolutions, these ranks, and no others any."""
    caps = dict.fromkeys((Role.PROJECTION, Role.EMBEDDING, Role.DEPTHWISE), NO_RANKS)
    return config_for({}, rank_fractions=tuple(shares), bits=(8,), rank_caps=caps, store_ratio=1.0)


def _around(ranks: dict[float, int], flops: int) -> tuple[float, float]:
    """Return the two shares of rank whose work is next below and above."""
    low = max((s for s in ranks if ranks[s] <= flops), key=lambda s: ranks[s])
    high = min((s for s in ranks if ranks[s] > flops), key=lambda s: ranks[s])
    return (low, high) if low < high else (high, low)


def _pictures(kind: str) -> tuple[nn.Module, Inputs]:
    """Return a classifier of transformers' default size with random weights."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")()
    model: nn.Module = getattr(transformers, f"{kind}ForImageClassification")(config)
    return Classifier(model).eval(), torch.randn(2, 3, 224, 224)


def _minilm() -> tuple[nn.Module, Inputs]:
    ids = torch.randint(1000, 20000, (2, 128), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return MiniLMEmbedding().eval(), inputs


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "MiniLM-L6": _minilm,
    "ViT-B/16": partial(_pictures, "ViT"),
    "ResNet-50": partial(_pictures, "ResNet"),
}  # fmt: skip
