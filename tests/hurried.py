"""A door that takes moments: for tests of what goes through it."""

from __future__ import annotations

from importlib import import_module

import pytest

from conftest import counted, counted_profiles, supply_times
from t3c.compression import compare, elastic, improve, teach
from t3c.compression.plan import RunPlan
from t3c.device import calibrate as calibration


def hurried(patch: pytest.MonkeyPatch) -> None:
    """Times follow from the work, and little is measured or trained."""
    supply_times(patch)
    patch.setattr(calibration._Run, "measure", counted_profiles)
    patch.setattr(compare, "ROUNDS", 3)
    patch.setattr(elastic, "time_layer", lambda engine, spec, ranks: counted(None, [(spec, ranks)]))
    patch.setattr(improve, "AIMS", (0.2, 0.5))
    patch.setattr(improve, "CANDIDATES", 2)
    patch.setattr(import_module("t3c.compression.measure"), "ROUNDS", 3)  # a function, too
    patch.setattr(teach, "PROBE_STEPS", 1)
    patch.setattr(teach, "WAYS", teach.WAYS[:3])  # so that each has a few steps
    patch.setattr(teach, "_step_seconds", lambda lesson: 0.6)
    patch.setattr(RunPlan, "left", lambda plan, spent: 60.0)
