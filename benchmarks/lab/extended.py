"""What is read off an artifact and what was measured of it: certificates, allocation, proxies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from t3c.artifact.devices import DeviceTable, GridRow, choose_forms
from t3c.artifact.manifest import ELASTIC_DOMAIN, elastic_kind, elastic_layer
from t3c.artifact.reader import Artifact
from t3c.certify.conformal import coverage
from t3c.certify.coverage import agreement, expected_coverage
from t3c.certify.drift import Array
from t3c.cost.proxy import PROXIES, Proxy, mape
from t3c.device.execution import execution_of
from t3c.device.grid import with_grid
from t3c.device.predict import vector_of
from t3c.errors import DataError
from t3c.runtime.runtime import Runtime
from t3c.spec import Certificate, Form

BLOCKS, HEAD = ("early", "mid", "late"), "head"
Row = dict[str, Any]
Forms = Mapping[str, Mapping[str, Form]]  # by profile and layer


def certificate_rows(runtime: Runtime, drifts: Mapping[str, Array]) -> list[Row]:
    """Certificates beside the relative drifts (n,) of test samples, by profile (paper F.3).

    `coverage_low` to `coverage_high` is where coverage was expected, with 95% probability, before
    it was seen. Bounds hold for all profiles at once, so that one profile may lie above the range,
    and only one below it is a finding. The correlations are over profiles, of `first_order` with
    the mean drift seen here, and so the same in every row.
    """
    _check_drifts(runtime, drifts)
    names = [profile.name for profile in runtime.chain if profile.name in drifts]
    certificates = {name: runtime.certificates.get(name) for name in names}
    pairs = [
        (found.first_order, float(drifts[name].mean()))
        for name, found in certificates.items()
        if found is not None and found.first_order is not None
    ]
    agreed = agreement([estimate for estimate, _ in pairs], [seen for _, seen in pairs])
    return [
        {
            "name": name,
            **_covered(certificates[name], drifts[name]),
            "mean_drift": float(drifts[name].mean()),
            "p95_drift": float(np.quantile(drifts[name], 0.95)),
            "first_order": getattr(certificates[name], "first_order", None),
            "spectral": getattr(certificates[name], "spectral", None),
            "pearson": agreed.pearson,
            "spearman": agreed.spearman,
        }
        for name in names
    ]


def _covered(certificate: Certificate | None, drifts: Array) -> Row:
    """The bound, how many drifts (n,) it covers, and how many it was to cover."""
    if certificate is None:
        return dict.fromkeys(("epsilon", "coverage", "coverage_low", "coverage_high"))
    low, high = expected_coverage(len(drifts), certificate.samples, certificate.delta)
    return {
        "epsilon": certificate.epsilon, "coverage": coverage(drifts, certificate.epsilon),
        "coverage_low": low, "coverage_high": high,
    }  # fmt: skip


def drift_rows(runtime: Runtime, drifts: Mapping[str, Array], per_profile: int = 200) -> list[Row]:
    """Drifts (n,) of each profile beside its bound, for a scatter: all, or every n-th by size.

    Taken evenly from the sorted drifts, as many of them as of all lie over the bound.
    """
    if per_profile < 1:
        raise DataError(f"per_profile must be at least 1, got {per_profile}")
    _check_drifts(runtime, drifts)
    rows = []
    for profile in runtime.chain:
        if profile.name not in drifts:
            continue
        certificate = runtime.certificates.get(profile.name)
        ranked = np.sort(drifts[profile.name])
        count = min(per_profile, len(ranked))
        # The middle of each of `count` equal parts.
        middles = (2 * np.arange(count) + 1) * len(ranked) // (2 * count)
        for value in ranked[middles]:
            epsilon = None if certificate is None else certificate.epsilon
            rows.append({"name": profile.name, "epsilon": epsilon, "observed": float(value)})
    return rows


def _check_drifts(runtime: Runtime, drifts: Mapping[str, Array]) -> None:
    for name, values in drifts.items():
        runtime.chain[name]  # an unknown name is an error
        if values.ndim != 1 or not values.size or not np.isfinite(values).all():
            raise DataError(f"{name}: drifts must be (n,) and finite, got shape {values.shape}")


def allocation_rows(artifact: Artifact, forms: Forms | None = None) -> list[Row]:
    """The rank and bits of every layer at every profile, in order of execution (paper F.7).

    `rank` is a share of the full rank, as executed: 1 for a layer that runs dense, whatever rank
    is stored. How layers run depends on the device: `forms` are a runtime's, by default those of
    the first device of the artifact.
    """
    return [row for row, _ in _allocated(artifact, forms)]


def allocation_blocks(artifact: Artifact, forms: Forms | None = None) -> list[Row]:
    """Means of rank and bits over the layers of a block, weighted by their dense parameters."""
    parts: dict[tuple[str, str], list[tuple[Row, int]]] = {}
    for row, weight in _allocated(artifact, forms):
        parts.setdefault((row["profile"], row["block"]), []).append((row, weight))
    found = []
    for profile in artifact.manifest.chain:
        for block in (*BLOCKS, HEAD):
            if part := parts.get((profile.name, block)):
                weights = [weight for _, weight in part]
                means = {
                    key: float(np.average([row[key] for row, _ in part], weights=weights))
                    for key in ("rank", "bits")
                }
                found.append({"profile": profile.name, "block": block, **means})
    return found


def _allocated(artifact: Artifact, forms: Forms | None) -> Iterator[tuple[Row, int]]:
    """Rows of `allocation_rows`, each with the dense parameters of its layer."""
    executed = _default_forms(artifact) if forms is None else forms
    specs, blocks = artifact.manifest.specs, blocks_of(artifact)
    for profile in artifact.manifest.chain:
        for layer, block in blocks.items():
            spec, point = specs[layer], profile.points[layer]
            dense = executed[profile.name][layer] is Form.DENSE
            yield (
                {
                    "profile": profile.name, "layer": layer, "block": block,
                    "kind": str(spec.kind), "rank": 1.0 if dense else point.rank / spec.full_rank,
                    "bits": point.bits,
                },
                math.prod(spec.dense_shape),
            )  # fmt: skip


def blocks_of(artifact: Artifact) -> dict[str, str]:
    """The block of each elastic layer, in order of execution: thirds of all but the head.

    The head is the last layer that is used as a linear one.
    """
    specs = artifact.manifest.specs
    uses = [node for node in artifact.graph().graph.node if node.domain == ELASTIC_DOMAIN]
    named = [(elastic_layer(node), node) for node in uses]
    linear = [name for name, node in named if elastic_kind(node, specs[name]) == "linear"]
    order = dict.fromkeys(name for name, _ in named)
    body = [name for name in order if name not in linear[-1:]]
    third = {name: BLOCKS[3 * index // len(body)] for index, name in enumerate(body)}
    return {name: third.get(name, HEAD) for name in order}


def _default_forms(artifact: Artifact) -> Forms:
    table = next(iter(artifact.devices()), None)
    if table is not None:
        return {p.name: execution_of(artifact, table, p).forms for p in artifact.manifest.chain}
    specs = artifact.manifest.specs
    return {p.name: choose_forms((), specs, p.points) for p in artifact.manifest.chain}


def proxy_rows(tables: Mapping[str, DeviceTable]) -> list[Row]:
    """Proxies fitted to the first device, and their errors there and elsewhere (paper F.5).

    On another device the first one's predictions are multiplied by one number, the median of
    measured over predicted times. Errors are of the profiles that are held out of both fits, where
    some are; of a device of which no grid was measured they are None.
    """
    if not tables:
        raise DataError("proxies are fitted to measured devices, got none")
    first = next(iter(tables))
    if not tables[first].grid:
        raise DataError(f"{first}: no grid was measured, so no proxy can be fitted: calibrate it")
    fitted = with_grid(tables[first], tables[first].grid).proxies
    return [
        {"proxy": name, "device": device, "mape": _error(fitted[name], table, device == first)}
        for name in PROXIES
        for device, table in tables.items()
    ]


def _error(proxy: Proxy, table: DeviceTable, at_home: bool) -> float | None:
    if not table.grid:
        return None
    held = [row for row in table.grid if row.held_out] or list(table.grid)
    known = [row for row in table.grid if not row.held_out] or list(table.grid)
    scale = 1.0
    if not at_home:
        guess, truth = _predicted(proxy, known)
        if not guess.min() > 0:
            return None
        scale = float(np.median(truth / guess))
    guess, truth = _predicted(proxy, held)
    return mape(scale * guess, truth)


def _predicted(proxy: Proxy, rows: Sequence[GridRow]) -> tuple[Array, Array]:
    """What the proxy says of profiles (k,), and what was measured of them (k,)."""
    guess = np.array([proxy.predict(vector_of(row)) for row in rows])
    return guess, np.array([row.ms for row in rows])


def seed_rows(results: Sequence[Mapping[str, Mapping[str, float | None]]]) -> list[Row]:
    """Accuracy and p50 over seeds, mean and its standard error, and mean p90 - p50 (paper F.2).

    Each result is of one seed: by name, its `accuracy`, `p50` and `p90`. The standard error of one
    seed, and what some seed has no value of, are None.
    """
    rows = []
    for name in dict.fromkeys(name for result in results for name in result):
        seeds = [result[name] for result in results if name in result]
        accuracy, accuracy_sem = _mean([seed["accuracy"] for seed in seeds])
        p50, p50_sem = _mean([seed["p50"] for seed in seeds])
        p90, _ = _mean([seed["p90"] for seed in seeds])
        rows.append(
            {
                "name": name, "seeds": len(seeds), "accuracy": accuracy,
                "accuracy_sem": accuracy_sem, "p50": p50, "p50_sem": p50_sem,
                "tail_gap": None if p90 is None or p50 is None else p90 - p50,
            }
        )  # fmt: skip
    return rows


def _mean(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """The mean and its standard error."""
    known = np.array([value for value in values if value is not None])
    if len(known) < len(values):
        return None, None
    error = float(known.std(ddof=1) / np.sqrt(len(known))) if len(known) > 1 else None
    return float(known.mean()), error
