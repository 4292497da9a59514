"""A device's latency as a non-negative combination of counted work (paper B.5, E.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from t3c.cost.work import layer_work
from t3c.errors import MissingExtraError, SpecError
from t3c.spec import Form, Kind, LayerSpec, Profile

FEATURES = ("constant", *(f"{kind}.{unit}" for kind in Kind for unit in ("gflop", "mb", "launch")))


@dataclass(frozen=True)
class Proxy:
    """latency_ms = coefficients . FEATURES, and how well it did on profiles held out of the fit."""

    coefficients: Mapping[str, float]
    r2: float | None
    mape: float | None
    constant_mape: float | None
    fitted: int
    held_out: int

    def predict(self, features: npt.NDArray[np.float64]) -> float:
        return float(features @ np.array([self.coefficients.get(name, 0.0) for name in FEATURES]))


def features(
    specs: Mapping[str, LayerSpec], profile: Profile, forms: Mapping[str, Form]
) -> npt.NDArray[np.float64]:
    """The FEATURES of a profile: a constant, and work summed by layer kind."""
    total = dict.fromkeys(FEATURES, 0.0)
    total["constant"] = 1.0
    for name, point in profile.points.items():
        work = layer_work(specs[name], point, forms[name])
        kind = specs[name].kind
        total[f"{kind}.gflop"] += work.flops / 1e9
        total[f"{kind}.mb"] += work.moved_bytes / 1e6
        total[f"{kind}.launch"] += work.launches
    return np.array([total[name] for name in FEATURES])


def fit_proxy(
    rows: Sequence[npt.NDArray[np.float64]],
    latencies_ms: Sequence[float],
    held_rows: Sequence[npt.NDArray[np.float64]] = (),
    held_latencies_ms: Sequence[float] = (),
) -> Proxy:
    """Fit by non-negative least squares on relative error; judge on the profiles held out."""
    try:
        from scipy.optimize import nnls
    except ImportError as missing:
        raise MissingExtraError("scipy", "train") from missing
    if not rows:
        raise SpecError("a latency proxy needs at least one measured profile")
    x, y = np.stack(rows), np.asarray(latencies_ms, dtype=np.float64)
    width = np.maximum(x.max(axis=0), 1e-12)
    solution, _ = nnls((x / width) / y[:, None], np.ones_like(y))
    coefficients = dict(zip(FEATURES, (solution / width).tolist(), strict=True))
    proxy = Proxy(coefficients, None, None, None, len(rows), len(held_rows))
    if not held_rows:
        return proxy
    truth = np.asarray(held_latencies_ms, dtype=np.float64)
    guess = np.array([proxy.predict(row) for row in held_rows])
    spread = float(((truth - truth.mean()) ** 2).sum())
    return Proxy(
        coefficients,
        r2=1 - float(((truth - guess) ** 2).sum()) / spread if spread > 0 else None,
        mape=float(np.mean(np.abs(guess - truth) / truth)),
        constant_mape=float(np.mean(np.abs(y.mean() - truth) / truth)),
        fitted=len(rows),
        held_out=len(held_rows),
    )
