"""What a runtime counts, and the events that it logs."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Mapping

import numpy as np

from t3c.errors import SpecError
from t3c.runtime.remarks import Remark

log = logging.getLogger("t3c.runtime")

REMEMBERED = 4096  # warnings
NAMES = ("calls", "swaps", "compiled", "evicted", "fallback", "shift", "errors")
WARNINGS = frozenset({"fallback", "shift", "warning", "errors"})


class Counters:
    """Counts by name and label, and events as lines of JSON.

    >>> counters = Counters()
    >>> counters.add("calls", "low")
    >>> counters.snapshot()["calls"]
    {'low': 1}
    """

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {name: {} for name in NAMES}
        self._lock = threading.Lock()

    def add(self, name: str, label: str = "", by: int = 1) -> None:
        """Count, in a fraction of a microsecond: a lock and two lookups."""
        try:
            counts = self._counts[name]
        except KeyError:
            known = ", ".join(NAMES)
            raise SpecError(f"nothing is counted as {name!r}: it is one of {known}") from None
        with self._lock:
            counts[label] = counts.get(label, 0) + by

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Counts by name and label at one moment; every name is there."""
        with self._lock:
            return {name: dict(counts) for name, counts in self._counts.items()}

    def event(self, name: str, /, **fields: object) -> None:
        """Log an event: one line of JSON, and the same as a dict in the record's `t3c`.

        At WARNING for the names in WARNINGS, else at INFO; costs nothing more where that is off.
        """
        if "event" in fields:
            raise SpecError(f"{name}: `event` is the name of an event, not a field of it")
        level = logging.WARNING if name in WARNINGS else logging.INFO
        if not log.isEnabledFor(level):
            return
        plain = _plain({"event": name, **fields})
        log.log(level, json.dumps(plain, sort_keys=True), extra={"t3c": plain}, stacklevel=2)


class Notices:
    """The swaps and warnings of a runtime's answers, logged; each warning once."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._known: set[Remark] = set()
        self.serving: str | None = None
        self.heard: tuple[Remark, ...] = ()  # of the last answer that had warnings

    def swap(self, profile: str, why: Remark) -> None:
        """Take that a profile serves now."""
        before, self.serving = self.serving, profile
        if before is not None:
            self._counters.add("swaps", profile)
            self._counters.event("swap", before=before, after=profile, why=why)

    def warn(self, profile: str, warnings: tuple[Remark, ...]) -> None:
        """Take the warnings of an answer."""
        self.heard = warnings
        for warning in warnings:
            if warning in self._known:
                continue
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known.add(warning)
            fields = {"profile": profile, "code": warning.code, "message": warning}
            self._counters.event("warning", **fields)


def _plain(value: object) -> object:
    """A value as JSON has it; what JSON has not, as text."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return [_plain(item) for item in sorted(value, key=str)]
    return str(value)
