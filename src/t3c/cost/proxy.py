"""What a device takes as a non-negative combination of counted work (paper B.5, E.3, F.5)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from t3c.cost.work import stage_work
from t3c.errors import MissingExtraError, SpecError
from t3c.spec import Form, Kind, LayerSpec, Profile

CONSTANT, POINTWISE, FLOAT = "constant", " pointwise", " to float"
KINDS = (*Kind, *(f"{kind}{POINTWISE}" for kind in (Kind.CONV1D, Kind.CONV2D)))
TYPES = tuple(f"{kind}{end}" for kind in KINDS for end in ("", FLOAT))
FEATURES = (CONSTANT, *(f"{name}.{unit}" for name in TYPES for unit in ("gflop", "mb", "launch")))
# What each proxy may use: the hybrid everything, the other two one kind of work, to compare with.
PROXIES: dict[str, tuple[str, ...]] = {
    "hybrid": FEATURES,
    "flops": (CONSTANT, *(name for name in FEATURES if name.endswith(".gflop"))),
    "bytes": (CONSTANT, *(name for name in FEATURES if name.endswith(".mb"))),
}
LARGEST = 1e30  # coefficient, feature or time: their products are still numbers
STIFFNESS = 0.1  # how hard a re-fit on few points holds the parts of a proxy together

Row = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Proxy:
    """cost = coefficients . FEATURES, and how well it did on profiles held out of the fit.

    `mape` is the mean absolute error relative to what was measured, `constant_mape` that of the
    one number that does best on the profiles of the fit.
    """

    coefficients: Mapping[str, float]
    fitted: int
    held_out: int = 0
    r2: float | None = None
    mape: float | None = None
    constant_mape: float | None = None

    def __post_init__(self) -> None:
        if not all(0 <= value <= LARGEST for value in self.coefficients.values()):
            raise SpecError(f"the coefficients of a proxy are from 0 to {LARGEST:g}")

    def predict(self, row: Row) -> float:
        return float(row @ self.vector)

    @property
    def vector(self) -> Row:
        return np.array([self.coefficients.get(name, 0.0) for name in FEATURES])


def features(
    specs: Mapping[str, LayerSpec],
    profile: Profile,
    forms: Mapping[str, Form],
    to_float: Collection[str] = (),
) -> Row:
    """The FEATURES of a profile: a constant, and work summed by type.

    The type of a kernel is the kind of its layer, whether it is a convolution of single points,
    and whether its output is rounded to 8 bits again: engines have other kernels for each. That of
    the last one of a layer `to_float` is not.
    """
    total = dict.fromkeys(FEATURES, 0.0)
    total[CONSTANT] = 1.0
    for name, point in profile.points.items():
        for work in stage_work(specs[name], point, forms[name]):
            floats = work.last and name in to_float
            kind = f"{specs[name].kind}{POINTWISE * work.pointwise}{FLOAT * floats}"
            total[f"{kind}.gflop"] += work.flops / 1e9
            total[f"{kind}.mb"] += work.moved_bytes / 1e6
            total[f"{kind}.launch"] += work.launches
    return np.array([total[name] for name in FEATURES])


def fit_proxy(
    rows: Sequence[Row], measured: Sequence[float], use: Collection[str] = FEATURES
) -> Proxy:
    """Fit by non-negative least squares on relative error, with the features in `use` alone."""
    x, y = _table(rows, measured)
    x = x * np.array([name in use for name in FEATURES])
    return Proxy(_named(_solve(x / y[:, None], np.ones_like(y))), len(rows))


def judge(
    proxy: Proxy, rows: Sequence[Row], measured: Sequence[float], fitted: Sequence[float] = ()
) -> Proxy:
    """The proxy with its errors on profiles held out of the fit.

    `fitted` are the measurements of the fit, from which the constant to compare with is taken.
    """
    if not rows:
        return proxy
    x, truth = _table(rows, measured)
    guess = x @ proxy.vector
    spread = float(((truth - truth.mean()) ** 2).sum())
    constant = best_constant(fitted) if len(fitted) else None
    return replace(
        proxy,
        held_out=len(rows),
        r2=1 - float(((truth - guess) ** 2).sum()) / spread if spread > 0 else None,
        mape=mape(guess, truth),
        constant_mape=None if constant is None else mape(np.full_like(truth, constant), truth),
    )


def refit(proxy: Proxy, rows: Sequence[Row], measured: Sequence[float]) -> Proxy:
    """A proxy of one device for another, from a few profiles measured there.

    Its constant, its compute and its memory and launches are each scaled, and held together so
    that few points cannot tear them apart.
    """
    x, y = _table(rows, measured)
    weighted = x * proxy.vector
    parts = np.stack([weighted[:, chosen].sum(axis=1) for chosen in _parts()], axis=1)
    whole = parts.sum(axis=1, keepdims=True)
    if not whole.min() > 0:
        raise SpecError("a proxy that predicts no cost cannot be fitted to another device")
    scale = float(_solve(whole / y[:, None], np.ones_like(y))[0])
    stiff = STIFFNESS * np.sqrt(len(y)) * np.eye(parts.shape[1])
    factors = scale * _solve(
        np.concatenate([parts * scale / y[:, None], stiff]),
        np.concatenate([np.ones_like(y), stiff.sum(axis=1)]),
    )
    vector = proxy.vector.copy()
    for factor, chosen in zip(factors, _parts(), strict=True):
        vector[chosen] *= factor
    return Proxy(_named(vector), len(rows))


def best_constant(measured: Sequence[float]) -> float:
    """The number of least mean absolute relative error: the median weighted by 1 / value."""
    values = np.sort(np.asarray(measured, dtype=np.float64))
    share = np.cumsum(1 / values)
    return float(values[int(np.searchsorted(share, share[-1] / 2))])


def mape(guess: npt.NDArray[np.float64], truth: npt.NDArray[np.float64]) -> float:
    """The mean absolute error relative to the truth."""
    return float(np.mean(np.abs(guess - truth) / truth))


def _parts() -> list[npt.NDArray[np.bool_]]:
    """The features in three parts: the constant, compute, and the rest."""
    constant = np.array([name == CONSTANT for name in FEATURES])
    compute = np.array([name.endswith(".gflop") for name in FEATURES])
    return [constant, compute, ~(constant | compute)]


def _table(rows: Sequence[Row], measured: Sequence[float]) -> tuple[Row, Row]:
    if not len(rows) or len(rows) != len(measured):
        raise SpecError(f"a proxy needs measured profiles, got {len(rows)} and {len(measured)}")
    x, y = np.stack(rows), np.asarray(measured, dtype=np.float64)
    if not (np.isfinite(x).all() and np.isfinite(y).all() and (y > 0).all()):
        raise SpecError("a proxy needs finite work and positive measurements")
    return x, y


def solver() -> Callable[[Row, Row], tuple[Row, float]]:
    """SciPy's non-negative least squares, or what to install."""
    try:
        from scipy.optimize import nnls
    except ImportError as missing:
        raise MissingExtraError("scipy", "calibrate") from missing
    return nnls


def _solve(x: Row, y: Row) -> Row:
    """Non-negative least squares, the columns brought to one size first."""
    width = np.maximum(np.abs(x).max(axis=0), 1e-12)
    solution, _ = solver()(x / width, y)
    return np.asarray(solution / width)


def _named(vector: Row) -> dict[str, float]:
    return dict(zip(FEATURES, vector.tolist(), strict=True))
