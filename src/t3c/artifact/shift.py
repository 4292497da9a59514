"""What calibrated activations look like: the part of a ledger that a monitor compares with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field, PositiveFloat, model_validator

from t3c.artifact.plain import Record
from t3c.errors import DataError, SpecError

LEAST_FIT = 8  # samples that a centre and a scale can be made of
LEAST_SCALE = 1e-3  # of a feature that hardly moves: rounding is no shift
WINSOR = 5.0  # scales from the centre, beyond which a sample tells no more of how features covary
LEAST_SHRINKAGE = 0.05
HUGE = 1e9

Floats = npt.NDArray[np.float64]
Some = Annotated[tuple[float, ...], Field(min_length=2)]
Names = Annotated[tuple[str, ...], Field(min_length=1)]


class ShiftModel(Record):
    """What calibrated activations look like, of T tensors by F = 2T features of each sample.

    Features are the log RMS of every tensor, then of every tensor the root of the share of its
    values whose size is above its threshold, the 99th percentile. `layers` names the layer that
    reads each tensor. `distances` and `levels` are the scores of samples not used in the fit.
    """

    tensors: Names
    layers: Names
    thresholds: tuple[PositiveFloat, ...]
    centre: Some
    scale: tuple[PositiveFloat, ...]
    whitening: tuple[tuple[float, ...], ...]
    distances: Some
    levels: Some

    @model_validator(mode="after")
    def _consistent(self) -> ShiftModel:
        count = len(self.tensors)
        if len(set(self.tensors)) != count:
            raise SpecError("monitored tensors repeat")
        if not len(self.layers) == len(self.thresholds) == count:
            raise SpecError(f"{count} tensors need as many layers and thresholds")
        rows = [self.centre, self.scale, *self.whitening]
        if len(self.whitening) != 2 * count or any(len(row) != 2 * count for row in rows):
            raise SpecError(f"{count} tensors have {2 * count} features: centre, scale, whitening")
        if len(self.distances) != len(self.levels):
            raise SpecError("each reference sample has a distance and a level")
        return self

    @classmethod
    def fit(
        cls,
        fitted: npt.ArrayLike,
        reference: npt.ArrayLike,
        *,
        tensors: Sequence[str],
        layers: Sequence[str],
        thresholds: Mapping[str, float],
    ) -> ShiftModel:
        """A model from the features (m, F) of some samples and (n, F) of others to compare with.

        The two are disjoint; neither should have been used to make what is monitored. Centre and
        scale are robust. The covariance in their units is shrunk towards none, by F / (F + m).
        """
        known, kept = (np.asarray(f, dtype=np.float64) for f in (fitted, reference))
        size = 2 * len(tensors)
        for given, least in ((known, LEAST_FIT), (kept, 2)):
            if given.ndim != 2 or given.shape[1] != size or len(given) < least:
                raise DataError(
                    f"features of shape {given.shape} are not at least {least} rows of {size}"
                )
            if not np.isfinite(given).all():
                raise DataError("calibration features hold NaN or infinite values")
        centre, scale = _centre_and_scale(known)
        # Scores of the reference are made as later ones are, from what is stored.
        centre, scale = (np.array(_short(values)) for values in (centre, scale))
        whitening = np.array([_short(row) for row in _whitening((known - centre) / scale)])
        distances, levels = _scores((kept - centre) / scale, whitening)
        return cls(
            tensors=tuple(tensors), layers=tuple(layers),
            thresholds=tuple(float(thresholds[name]) for name in tensors),
            centre=_short(centre), scale=_short(scale),
            whitening=tuple(_short(row) for row in whitening),
            distances=_short(distances), levels=_short(levels),
        )  # fmt: skip

    @cached_property
    def _arrays(self) -> tuple[Floats, Floats, Floats]:
        return np.array(self.centre), np.array(self.scale), np.array(self.whitening)

    def scores(self, features: npt.ArrayLike) -> tuple[Floats, Floats]:
        """Return distance and level of samples (n, F), both (n,); infinite if one is not finite.

        The distance is from the calibrated centre, about 1 where samples are usual. The level is
        the mean feature in calibrated units, with its sign: a common rise or fall shows in it long
        before it shows in the distance.
        """
        given = self.checked(features)
        finite = np.asarray(np.isfinite(given).all(axis=1))
        distances, levels = _scores(self._units(given), self._arrays[2])
        return np.where(finite, distances, np.inf), np.where(finite, levels, np.inf)

    def blame(self, features: npt.ArrayLike) -> list[tuple[str, float]]:
        """Layers by how far the mean of samples (k, F) is from calibration, in its units."""
        found: dict[str, float] = {}
        deviations = np.abs(self._mean_units(self.checked(features))).reshape(2, -1).max(axis=0)
        for layer, deviation in zip(self.layers, deviations.tolist(), strict=True):
            found[layer] = max(found.get(layer, 0.0), deviation)
        return sorted(found.items(), key=lambda item: -item[1])

    def describe(self, layer: str, features: npt.ArrayLike) -> str:
        """In words, what has moved most of a layer's input, over samples (k, F)."""
        given = self.checked(features)
        tensors, size = [i for i, name in enumerate(self.layers) if name == layer], len(self.layers)
        own = [*tensors, *(size + index for index in tensors)]
        units = np.abs(self._mean_units(given))
        worst = max(own, key=units.__getitem__)
        if not np.isfinite(units[worst]):
            return f"layer {layer} (values that are not finite)"
        mean = given[:, worst].mean()
        if worst < size:
            ratio = float(np.exp(np.clip(mean - self.centre[worst], -99, 99)))
            return f"layer {layer} (RMS {ratio:.3g}x its calibrated value)"
        shares = [float(np.mean(given[:, worst] ** 2)), self.centre[worst] ** 2]
        return "layer {} ({:.2%} of values above its threshold, calibrated {:.2%})".format(
            layer, *shares
        )

    def checked(self, features: npt.ArrayLike) -> Floats:
        """Features as an array (n, F), or one clear error."""
        given = np.asarray(features, dtype=np.float64)
        if given.ndim != 2 or given.shape[1] != len(self.centre) or not len(given):
            raise DataError(
                f"features of shape {given.shape} are not rows of {len(self.centre)} features"
            )
        return given

    def _mean_units(self, given: Floats) -> Floats:
        """The mean (F,) of samples (k, F) in calibrated units; infinite where one is not finite."""
        return np.where(np.isfinite(given).all(axis=0), self._units(given).mean(axis=0), np.inf)

    def _units(self, given: Floats) -> Floats:
        """Features (n, F) in calibrated units, 0 where not a number and never too large to sum."""
        centre, scale, _ = self._arrays
        bounded = np.clip(np.where(np.isnan(given), centre, given), -HUGE, HUGE)
        return np.asarray((bounded - centre) / scale)


def _short(values: Floats) -> tuple[float, ...]:
    """Values to seven digits, as many as the engines compute with: half the bytes of all."""
    return tuple(float(f"{value:.7g}") for value in values.tolist())


def _centre_and_scale(features: Floats) -> tuple[Floats, Floats]:
    """Median and spread (F,) of features (m, F): by deviations from the median, as outliers are."""
    centre = np.median(features, axis=0)
    away = np.abs(features - centre)
    # Of a feature that most samples share the value of, the median deviation is 0.
    scale = np.maximum(1.4826 * np.median(away, axis=0), 0.5 * away.mean(axis=0))
    return centre, np.maximum(scale, LEAST_SCALE)


def _whitening(units: Floats) -> Floats:
    """The inverse root (F, F) of the shrunk covariance of features (m, F) in units of scale."""
    covariance = np.cov(np.clip(units, -WINSOR, WINSOR), rowvar=False)
    rows, size = units.shape
    shrinkage = max(LEAST_SHRINKAGE, size / (size + rows))
    shrunk = (1 - shrinkage) * covariance + shrinkage * np.eye(size)
    values, vectors = np.linalg.eigh(shrunk)
    return np.asarray(vectors / np.sqrt(values) @ vectors.T)


def _scores(units: Floats, whitening: Floats) -> tuple[Floats, Floats]:
    """Distances and levels (n,) of features (n, F) in units of scale."""
    distances = np.sqrt(np.mean((units @ whitening) ** 2, axis=1))
    found = [np.array(_short(values)) for values in (distances, units.mean(axis=1))]
    return found[0], found[1]
