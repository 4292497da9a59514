"""Warm until steady: how many calls that takes is detected, not guessed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

FALLING = 0.9


def warm_up(
    call: Callable[[], object],
    *,
    window: int = 5,
    tolerance: float = 0.05,
    most: int = 200,
    seconds: float = 3.0,
    clock: Callable[[], float] = time.perf_counter,
) -> bool:
    """Call until two windows of calls in a row take the same time, and return True.

    After `most` calls or `seconds` return False. Two windows are always taken, unless the calls are
    so slow that `seconds` hold only a few.
    """
    times: list[float] = []
    begin = clock()
    while True:
        start = clock()
        call()
        end = clock()
        times.append(end - start)
        if len(times) % window == 0 and _steady(times, window, tolerance):
            return True
        # A slow first call says nothing about the next: it may have compiled or loaded.
        slow = len(times) > 1 and times[-1] > seconds / 4
        over = end - begin >= seconds and (slow or len(times) >= 2 * window)
        if over or len(times) >= most:
            return False


def _steady(times: Sequence[float], window: int, tolerance: float) -> bool:
    if len(times) < 2 * window:
        return False
    earlier, later = np.reshape(times[-2 * window :], (2, window))
    before, after = np.median(earlier), np.median(later)
    # A slow fall stays within the tolerance, but leaves nearly all later calls below earlier ones.
    falling = np.mean(later < earlier[:, None]) > FALLING
    return bool(abs(after - before) <= tolerance * before and not falling)
