"""Reading manifest.json, strictly: what the types alone do not say is checked here."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

from t3c.artifact.manifest import (
    CONTENT,
    DTYPES,
    LARGEST_SAMPLE,
    TOKENIZER,
    ControllerEntry,
    Manifest,
)
from t3c.artifact.plain import parse, read_plain
from t3c.artifact.upgrade import upgraded
from t3c.errors import CorruptError, SpecError
from t3c.quant.groups import divides
from t3c.spec import MAX_BITS, MIN_BITS, LayerSpec, Profile, check_menu


def load_manifest(path: Path) -> tuple[Manifest, str]:
    """The manifest and the content hash of the artifact it stands for."""
    return parse_manifest(read_plain(path), path)


def parse_manifest(raw: bytes, path: Path) -> tuple[Manifest, str]:
    """The manifest that the bytes of a file are, and their hash; `path` is for its errors."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path}: not JSON: {error}") from error
    present = upgraded(data, path)
    try:
        whole = raw if present is data else json.dumps(present).encode()
    except RecursionError as error:
        raise CorruptError(f"{path}: not a manifest: {error}") from error
    manifest = parse(Manifest, whole, path)
    try:
        _check(manifest)
    except SpecError as error:
        raise CorruptError(f"{path}: {error}") from error
    return manifest, hashlib.sha256(raw).hexdigest()


def _check(manifest: Manifest) -> None:
    """Check what the types alone do not say."""
    if set(manifest.files) - {TOKENIZER} != set(CONTENT):
        raise SpecError(f"files must be {', '.join(CONTENT)}, and {TOKENIZER} if there is one")
    specs = manifest.specs
    if len(specs) != len(manifest.layers):
        raise SpecError("layer names repeat")
    for tensor in (*manifest.model.inputs, *manifest.model.outputs):
        if tensor.dtype not in DTYPES:
            raise SpecError(f"{tensor.name}: unknown dtype {tensor.dtype!r}")
    given = [(tensor.name, tensor.example or tensor.shape) for tensor in manifest.model.inputs]
    for name, shape in given + [(state.input, state.shape) for state in manifest.model.states]:
        sizes = [size for size in shape if isinstance(size, int)]
        if min(sizes, default=1) < 1 or math.prod(sizes) > LARGEST_SAMPLE:
            raise SpecError(f"{name}: a sample has 1 to {LARGEST_SAMPLE} numbers, got {shape}")
    unknown = {entry.layer for entry in manifest.model.normed} - set(specs)
    if unknown:
        raise SpecError(f"norms are for layers that there are not: {', '.join(sorted(unknown))}")
    for names in zip(*((e.layer, e.bias) for e in manifest.model.normed), strict=True):
        if len(set(names)) != len(names):
            raise SpecError("layers with norms of their own, or their biases, repeat")
    for layer in manifest.layers:
        check_menu(layer.menu)
        views = (layer.bits, layer.dense_bits)
        rising = all(sorted(set(v)) == list(v) for v in (layer.ranks, *views))
        if not rising or any(not 0 < rank < layer.spec.full_rank for rank in layer.ranks):
            raise SpecError(f"{layer.spec.name}: ranks and bits must rise, ranks below full rank")
        if any(not MIN_BITS <= q <= MAX_BITS for view in views for q in view):
            raise SpecError(f"{layer.spec.name}: bits must be in {MIN_BITS}..{MAX_BITS}")
        in_groups = manifest.numerics.weight_scales == "groups"
        if layer.group is not None and not (in_groups and divides(layer.group, layer.spec)):
            raise SpecError(f"{layer.spec.name}: has no groups of {layer.group} columns")
    if manifest.controller is not None:
        _check_controller(manifest.controller, [profile.name for profile in manifest.profiles])
    for profile in manifest.chain:
        if profile.points.keys() != specs.keys():
            raise SpecError(f"profile {profile.name!r} does not name every layer")
        for layer in manifest.layers:
            point = profile.points[layer.spec.name]
            if not layer.stores(point):
                raise SpecError(f"profile {profile.name!r}: {layer.spec.name}: {point} not stored")
        _check_units(profile, specs)


def _check_units(profile: Profile, specs: Mapping[str, LayerSpec]) -> None:
    """Raise unless the layers of a unit keep the same share of their channels."""
    shares: dict[str, tuple[str, Fraction]] = {}
    for name, spec in specs.items():
        if spec.narrows:
            share = Fraction(profile.points[name].rank, spec.full_rank)
            first, known = shares.setdefault(spec.unit, (name, share))
            if share != known:
                raise SpecError(
                    f"profile {profile.name!r}: {first} keeps {known} of its channels and {name} "
                    f"{share}: they are narrowed together"
                )


def _check_controller(controller: ControllerEntry, profiles: list[str]) -> None:
    if list(controller.profiles) != profiles:
        raise SpecError("the controller does not have the artifact's profiles")
    if controller.shares.keys() != controller.profiles.keys():
        raise SpecError("the controller does not have the shares of its profiles")
    if len({unit.name for unit in controller.units}) != len(controller.units):
        raise SpecError("the controller's units repeat")
