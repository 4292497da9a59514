"""A part of an artifact: the bytes that some of its profiles need, and what is known of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from t3c.artifact.card import write_card
from t3c.artifact.draft import Draft, drafted
from t3c.artifact.folder import staged
from t3c.artifact.manifest import (
    NORMS,
    PIVOTS,
    RANGES,
    ControllerEntry,
    LayerEntry,
    Manifest,
    layer_entry,
    pivots_name,
)
from t3c.artifact.reader import Artifact
from t3c.artifact.store import Tensors
from t3c.artifact.writer import write_content
from t3c.errors import SpecError
from t3c.spec import ProfileChain
from t3c.version import __version__


def trim(artifact: Artifact, profiles: Sequence[str], path: str | Path) -> Artifact:
    """Write the artifact with these profiles alone.

    Their weights, ranges and answers are the same to the last bit, so what was measured and
    certified of them stays with them: bounds that hold for all profiles at once hold for some.
    """
    chain = _kept(artifact.manifest, profiles)
    names = [profile.name for profile in chain]
    manifest = artifact.manifest
    layers, factors, dense = part_of(artifact, chain)
    ranges, quantized = _ranges(artifact, names)
    update = {
        "t3c_version": __version__, "trimmed_from": artifact.content, "layers": layers,
        "profiles": drafted(chain), "controller": _controller(manifest.controller, names),
        "model": manifest.model.model_copy(update={"quantized": quantized}),
    }  # fmt: skip
    graph = artifact.graph().SerializeToString()
    draft = Draft(
        manifest.model_copy(update=update), graph, factors, dense | ranges, artifact.tokenizer
    )
    with staged(Path(path)) as folder:
        write_content(folder, draft)
        part = Artifact(folder)
        for table in artifact.devices():
            part.add_device(table.of_profiles(names, part.content))
        if (ledger := artifact.ledger()) is not None:
            part.put_ledger(ledger.of_profiles(names, part.content))
        write_card(part)
    return Artifact(path)


def part_of(
    artifact: Artifact, chain: ProfileChain
) -> tuple[tuple[LayerEntry, ...], Tensors, Tensors]:
    """Return the layers, codes and other tensors that profiles need, all but their ranges.

    A profile may have another name than in the artifact: it is found by its points.
    """
    layers = tuple(_layer(entry, chain) for entry in artifact.manifest.layers)
    factors: Tensors = {}
    for entry in layers:
        factors |= artifact.trimmed_layer(entry)
    pivots = {pivots_name(e.spec.name, rank) for e in layers for rank in e.ranks}
    everything = artifact.dense()
    dense = {
        name: value
        for name, value in everything.items()
        if not name.startswith((RANGES, PIVOTS, NORMS)) or name in pivots
    }
    for profile in chain:
        mine = next(p.name for p in artifact.manifest.chain if p.points == profile.points)
        if f"{NORMS}{mine}" in everything:
            dense[f"{NORMS}{profile.name}"] = everything[f"{NORMS}{mine}"]
    return layers, factors, dense


def _kept(manifest: Manifest, names: Sequence[str]) -> ProfileChain:
    """The named profiles, in the order of the chain."""
    if not names:
        raise SpecError("name at least one profile to keep")
    wanted = {manifest.chain[name].name for name in names}
    return ProfileChain(tuple(profile for profile in manifest.chain if profile.name in wanted))


def _layer(entry: LayerEntry, chain: ProfileChain) -> LayerEntry:
    points = [profile.points[entry.spec.name] for profile in chain]
    ranks = {point.rank for point in points}
    spec = replace(
        entry.spec,
        aligned=tuple(rank for rank in entry.spec.aligned if rank in ranks),
        unaligned=tuple(pair for pair in entry.spec.unaligned if pair[0] in ranks),
    )
    return layer_entry(
        spec, entry.menu, points, folded_norm=entry.layout.folded_norm, group=entry.group
    )


def _ranges(artifact: Artifact, names: Sequence[str]) -> tuple[Tensors, tuple[str, ...]]:
    """Return the ranges of profiles, and the tensors that have one in some of them."""
    known = set().union(*(artifact.ranges(name) for name in names))
    rows = [i for i, tensor in enumerate(artifact.manifest.model.quantized) if tensor in known]
    everything = {} if artifact.weight_only else artifact.dense()
    ranges = {RANGES + n: everything[RANGES + n][rows] for n in names if everything}
    return ranges, tuple(artifact.manifest.model.quantized[i] for i in rows)


def _controller(entry: ControllerEntry | None, names: Sequence[str]) -> ControllerEntry | None:
    if entry is None:
        return None
    update = {
        "profiles": {name: entry.profiles[name] for name in names},
        "shares": {name: entry.shares[name] for name in names},
    }
    return entry.model_copy(update=update)
