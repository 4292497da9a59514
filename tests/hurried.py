"""The door in seconds: what tests of it measure and train less of."""

from __future__ import annotations

import sys

import pytest

from conftest import counted, counted_profiles, supply_times
from t3c.compression import compare, elastic, pipeline, teach
from t3c.compression.plan import RunPlan
from t3c.device import calibrate as calibration


def hurried(patch: pytest.MonkeyPatch) -> None:
    """Times follow from the work, and little is measured or trained."""
    supply_times(patch)
    patch.setattr(calibration._Run, "measure", counted_profiles)
    patch.setattr(compare, "ROUNDS", 3)
    patch.setattr(elastic, "time_layer", lambda engine, spec, ranks: counted(None, [(spec, ranks)]))
    patch.setattr(pipeline, "AIMS", (0.2, 0.5))
    patch.setattr(pipeline, "CANDIDATES", 2)
    patch.setattr(sys.modules["t3c.compression.measure"], "ROUNDS", 3)
    patch.setattr(teach, "PROBE_STEPS", 1)
    patch.setattr(teach, "_step_seconds", lambda lesson: 2.0)
    patch.setattr(RunPlan, "left", lambda plan, spent: 60.0)
