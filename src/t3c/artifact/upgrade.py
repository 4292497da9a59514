"""Manifests of earlier schema versions, as the present one has them.

Each step is from one version to the next, on plain JSON: what it does not understand it leaves to
the check that follows. The file on disk stays as it is, and so does the hash of the content.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from t3c.errors import CorruptError, VersionError

SCHEMA_VERSION = 5


def upgraded(data: Any, path: Path) -> dict[str, Any]:
    """The manifest `data` in the present schema; refused if no step leads there."""
    version = data.get("schema_version") if isinstance(data, dict) else None
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        known = ", ".join(map(str, range(1, SCHEMA_VERSION + 1)))
        raise VersionError(
            f"{path}: schema_version {reprlib.repr(version)} is not one this t3c reads "
            f"(it reads {known}): use a t3c that wrote it, or export again"
        )
    try:
        for step in range(version, SCHEMA_VERSION):
            data = {**STEPS[step](data), "schema_version": step + 1}
    except (AttributeError, KeyError, TypeError, ZeroDivisionError) as error:
        raise CorruptError(f"{path}: not a manifest of version {version}: {error!r}") from error
    present: dict[str, Any] = data
    return present


def _from_1(data: dict[str, Any]) -> dict[str, Any]:
    """Version 2 tells the views of dense and of factored weights apart, and has layouts."""
    return {**data, "layers": [_layer_from_1(layer, data["profiles"]) for layer in data["layers"]]}


def _layer_from_1(layer: dict[str, Any], profiles: list[Any]) -> dict[str, Any]:
    spec, ranks = layer["spec"], layer["ranks"]
    taken = [profile["points"][spec["name"]]["rank"] for profile in profiles]
    kept_dense = any(rank not in ranks for rank in taken)
    order = "OI"
    if spec["kind"].startswith("conv"):
        order = "OIHW" if len(spec["kernel"]) == 2 else "OIL"
    return {
        **layer,
        "bits": layer["bits"] if ranks else [],
        "dense_bits": layer["bits"] if kept_dense else [],
        "layout": {"order": order, "paddings": [-rank % spec["tile"] for rank in ranks]},
    }


def _from_2(data: dict[str, Any]) -> dict[str, Any]:
    """Version 3 has activations with zero points, and says so in `numerics`."""
    return data


def _from_3(data: dict[str, Any]) -> dict[str, Any]:
    """Version 4 has norms that a profile has for itself; earlier ones share all they have."""
    return data


def _from_4(data: dict[str, Any]) -> dict[str, Any]:
    """Version 5 has layers that are narrowed in width; earlier ones have none."""
    return data


STEPS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {
    1: _from_1, 2: _from_2, 3: _from_3, 4: _from_4
}  # fmt: skip
