"""Whether values have moved: their size from a stream, and a test that watches one forever."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from t3c.errors import DataError, SpecError

POWERS = (0.15, 0.35, 0.6)  # of the bets: from gross shifts that show at once to moderate ones
FROZEN = 1e-3  # how likely a frozen reference may be too far from what it was drawn from
SMALLEST, LARGEST, RATIO = 1e-8, 1e8, 1.04  # of the bins that absolute values are counted in
BINS = math.ceil(math.log(LARGEST / SMALLEST) / math.log(RATIO))


class Detector:
    """A sequential test of whether scores still come from where the reference came from.

    Each score is ranked among the reference and all scores since; equal ones are put in a random
    order. While scores are exchangeable these ranks, as p-values, are independent and uniform
    (Vovk et al., 2003). A bet `e = a p^(a-1)` then has mean 1, so each Shiryaev-Roberts sum
    `M = (M + 1) e` grows by one a sample on average, and so does the mean of those of several
    fixed `a`: `M - t` is a martingale. The alarm is raised at `M >= 1 / rate`, then M starts anew
    at 0. Hence, by optional stopping, samples to a false alarm are at least `1 / rate` on average,
    false alarms in any T samples are at most `rate * T` on average, and the chance of one among
    them is at most `rate * T`.

    Scores that rise are bet on; those that fall too, where `two_sided`. Scores since an alarm join
    the reference like others, as leaving them out would depend on the data: a shift that lasts is
    reported again and again until it has become what is usual.

    The reference grows to `most` scores, a number fixed beforehand. From then on p-values are of
    the frozen reference, each raised by how far the reference may be from its distribution
    (Dvoretzky-Kiefer-Wolfowitz, at 99.9% confidence): with that confidence they are no smaller
    than uniform ones whatever came before, and the bounds above go on to hold for independent
    scores.
    """

    def __init__(
        self,
        reference: Sequence[float] | npt.NDArray[np.float64],
        *,
        rate: float = 1e-4,
        two_sided: bool = False,
        most: int = 10_000,
        seed: int = 0,
    ) -> None:
        if not 0 < rate < 1:
            raise SpecError(f"rate must be between 0 and 1, got {rate}")
        self._ranked = sorted(float(score) for score in reference)
        if len(self._ranked) < 2 or not np.isfinite(self._ranked).all():
            raise DataError("a reference is at least 2 finite scores")
        self.rate = rate
        self.most = max(most, len(self._ranked))
        self._margin = math.sqrt(math.log(2 / FROZEN) / (2 * self.most))
        self._random = np.random.default_rng(seed)
        self._two_sided = two_sided
        self.restart()

    def restart(self) -> None:
        """Forget the evidence, not the reference."""
        bets = len(POWERS) * (2 if self._two_sided else 1)
        self._sums = [0.0] * bets
        self._runs = [0.0] * bets  # products since the likeliest change: CUSUM
        self._since = [0] * bets
        self._found = 0.0, 0

    @property
    def evidence(self) -> float:
        """M of the last score: an alarm if at least `1 / rate`."""
        return self._found[0]

    @property
    def since(self) -> int:
        """Scores since the likeliest change, up to the last score."""
        return self._found[1]

    def step(self, score: float) -> bool:
        """Take one score; True if it raises the alarm. Not a number is above all numbers."""
        score = math.inf if math.isnan(score) else score
        if self.evidence >= 1 / self.rate:
            self.restart()
        high, low = self.p_values(score)
        bets = [a * high ** (a - 1) for a in POWERS]
        if self._two_sided:
            bets += [a * low ** (a - 1) for a in POWERS]
        for index, bet in enumerate(bets):
            self._sums[index] = (self._sums[index] + 1) * bet
            begun = self._runs[index] > 1
            self._since[index] = self._since[index] + 1 if begun else 1
            self._runs[index] = (self._runs[index] if begun else 1.0) * bet
        best = max(range(len(bets)), key=self._sums.__getitem__)
        self._found = sum(self._sums) / len(bets), self._since[best]
        return self.evidence >= 1 / self.rate

    def p_values(self, score: float) -> tuple[float, float]:
        """How rare a score this high is, and one this low; the score then joins the reference."""
        ranked, count = self._ranked, len(self._ranked)
        left, right = bisect_left(ranked, score), bisect_right(ranked, score)
        if count >= self.most:
            high, low = (count - left) / count, right / count
            return min(1.0, high + self._margin), min(1.0, low + self._margin)
        place = min(max(self._random.random(), 1e-9), 1 - 1e-9)
        high = (count - right + place * (right - left + 1)) / (count + 1)
        ranked.insert(right, score)
        return high, 1 - high


class Activations:
    """Root mean square, largest and quantiles of absolute values, in bounded memory.

    Quantiles are within 2% of the exact ones, from 1e-8 to 1e8; anything smaller counts as 0.
    """

    def __init__(self) -> None:
        self.count = 0
        self.largest = 0.0
        self._squares = 0.0
        self._bins = np.zeros(BINS + 2, dtype=np.int64)  # the first is of zeros

    def add(self, values: npt.ArrayLike) -> None:
        """Count the values of an array of any shape."""
        sizes = np.abs(np.asarray(values, dtype=np.float64).reshape(-1))
        if not np.isfinite(sizes).all():
            raise DataError("activations hold NaN or infinite values")
        if not sizes.size:
            return
        self.count += sizes.size
        self.largest = max(self.largest, float(sizes.max()))
        self._squares += float(sizes @ sizes)
        place = np.log(np.clip(sizes, SMALLEST, LARGEST) / SMALLEST) / math.log(RATIO)
        index = np.where(sizes < SMALLEST, 0, 1 + place.astype(np.int64))
        self._bins += np.bincount(index, minlength=len(self._bins))

    @property
    def rms(self) -> float:
        return math.sqrt(self._squares / self._some())

    def quantile(self, q: float) -> float:
        """The smallest size that a share `q` of all values does not exceed, to 2%."""
        if not 0 <= q <= 1:
            raise SpecError(f"a quantile is of a share from 0 to 1, got {q}")
        rank = max(1, math.ceil(q * self._some() - 1e-9))
        index = int(np.searchsorted(np.cumsum(self._bins), rank))
        middle = SMALLEST * RATIO ** (index - 0.5)
        return min(self.largest, middle) if index else 0.0

    def _some(self) -> int:
        if not self.count:
            raise DataError("no activations were added")
        return self.count
