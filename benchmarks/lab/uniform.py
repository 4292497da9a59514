"""Artifacts whose profiles are at even points: every layer at one share of its rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from lab.fidelity import uniform
from t3c.artifact.folder import staged
from t3c.artifact.graph import Axes
from t3c.artifact.reader import Artifact
from t3c.control.profiles import names_for
from t3c.convert import ElasticConfig, elasticize_, state_of
from t3c.exporter import content
from t3c.exporter.allocate import Allocated
from t3c.exporter.described import Described
from t3c.exporter.norms import normed_by, own_norms
from t3c.nn.inputs import Inputs, evaluating, select
from t3c.nn.view import group_
from t3c.spec import Profile, ProfileChain


def uniform_artifact(
    path: Path,
    model: nn.Module,
    statistics: Sequence[Inputs],
    calibration: Inputs,
    points: Sequence[tuple[float, int]],
    elastic: ElasticConfig,
    *,
    axes: Axes | None = None,
    weight_only: bool = False,
    on_layer: Callable[[int, int, str], object] | None = None,
) -> Artifact:
    """Make a model elastic and write it at (share of rank, bits) of each profile; not certified.

    Factors suit the `statistics`; without any they are those of plain SVD.
    """
    example = select(calibration, slice(0, 2))
    elasticize_(model, example, elastic, calibration=statistics or None, on_layer=on_layer)
    plan = state_of(model).plan
    names = names_for(len(points))
    chain = ProfileChain(
        tuple(
            Profile(name, uniform(plan, share, bits).points)
            for name, (share, bits) in zip(names, points, strict=True)
        )
    )
    group_(model, weight_only)
    with evaluating(model), staged(path) as folder:
        traced = content.topology(model, axes)
        norms = own_norms(model, normed_by(model, traced), chain, calibration)
        allocated = replace(Allocated.of(chain), norms=norms)
        described = Described(model, traced, path.stem, weight_only=weight_only)
        content.write(folder, content.pack(described, allocated), allocated, calibration)
    return Artifact(path)
