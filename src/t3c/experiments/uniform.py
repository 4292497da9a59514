"""Artifacts whose profiles are at even points: every layer at one share of its rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from t3c.artifact.folder import staged
from t3c.artifact.reader import Artifact
from t3c.control.profiles import names_for
from t3c.convert import ElasticConfig, elasticize_, state_of
from t3c.experiments.fidelity import uniform
from t3c.exporter import content
from t3c.exporter.allocate import Allocated
from t3c.nn.inputs import Inputs, evaluating, select
from t3c.spec import Profile, ProfileChain


def uniform_artifact(
    path: Path,
    model: nn.Module,
    statistics: Sequence[Inputs],
    calibration: Inputs,
    points: Sequence[tuple[float, int]],
    elastic: ElasticConfig,
) -> Artifact:
    """Make a model elastic and write it at (share of rank, bits) of each profile; not certified."""
    elasticize_(model, select(statistics[0], slice(0, 2)), elastic, calibration=statistics)
    plan = state_of(model).plan
    names = names_for(len(points))
    chain = ProfileChain(
        tuple(
            Profile(name, uniform(plan, share, bits).points)
            for name, (share, bits) in zip(names, points, strict=True)
        )
    )
    with evaluating(model), staged(path) as folder:
        content.write(
            folder, model, content.topology(model), Allocated.of(chain), calibration,
            name=path.stem, seed=0, image=None, classes=None,
        )  # fmt: skip
    return Artifact(path)
