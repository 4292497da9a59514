"""Certificates of narrowed artifacts: bounds that hold, and estimates that meet small cuts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from t3c.evidence.along import first_order
from t3c.evidence.drifts import arrays, program_reference
from t3c.evidence.original import Original, beside, to_original
from t3c.evidence.program import Executed, Program, executed
from t3c.evidence.served import answers, run_of
from t3c.evidence.worst_case import norms_of, worst_cases
from t3c.nn.inputs import call, select
from t3c.nn.view import at
from t3c.runtime.runtime import Runtime
from t3c.spec import ProfileChain
from widths import artifact_of, narrow_of

NAMES = ["bert", "own", "resnet", "llama"]
COUNT = 6


@cache
def certified(name: str) -> tuple[Runtime, Original, list[torch.Tensor]]:
    artifact = artifact_of(name)
    original = beside(artifact, to_original(narrow_of(name).model))
    pool = arrays(select(narrow_of(name).inputs, slice(0, COUNT)))
    return Runtime(artifact, "openvino"), original, [torch.from_numpy(value) for value in pool]


def between(runtime: Runtime, original: Original, name: str) -> Executed:
    bits = runtime.device.weight_bits
    return executed(runtime.artifact, original, runtime.executions[name], bits, torch.float64)


def in_float(one: Executed) -> Executed:
    """Return a profile whose activations are as good as not rounded."""
    fine = {n: replace(g, scale=1e-9, low=-1e3, high=1e3) for n, g in one.grids.items()}
    return replace(one, grids=fine)


@pytest.mark.parametrize("name", NAMES)
def test_no_sample_is_over_its_worst_case(name: str) -> None:
    runtime, original, x = certified(name)
    program = Program(runtime.artifact, torch.float64)
    given = [value.numpy() for value in x]
    truth = program_reference(runtime.artifact, original)(given)
    for profile in runtime.chain:
        one = between(runtime, original, profile.name)
        cases = worst_cases(program, one, norms_of(program, one), x)
        assert not any(case.stopped for case in cases)
        bounds = np.array([case.bound for case in cases])
        assert np.isfinite(bounds).all()
        drift = (program(one, x, 1.0) - program(one, x)).flatten(1).norm(dim=1).numpy()
        assert (drift <= bounds).all()
        served = answers(run_of(runtime.session(profile.name)), given)
        assert (np.linalg.norm((served - truth).reshape(COUNT, -1), axis=1) <= bounds).all()


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_the_program_is_the_narrowed_model(name: str) -> None:
    """In float, weights that are as wide as ever stand for the narrowed ones."""
    runtime, original, x = certified(name)
    program, narrow = Program(runtime.artifact, torch.float64), narrow_of(name)
    few = select(narrow.inputs, slice(0, COUNT))
    for profile in runtime.chain:
        one = between(runtime, original, profile.name)
        found = program(in_float(one), x, 1.0).numpy()
        with at(narrow.model, profile):
            wanted = call(narrow.model, few).numpy()
        off = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        # Executed weights are rounded to int8 again once a correction is added.
        assert off < 0.02


@pytest.mark.parametrize("name", NAMES)
def test_first_order_meets_the_drift_of_small_cuts(name: str) -> None:
    narrow = narrow_of(name)
    shares = sorted({share for plan in narrow.narrowed for share in plan.shares})
    cut = max(share for share in shares if share < 0.9)
    chain = ProfileChain((narrow.profile("cut", cut, 8), narrow.profile("max", 1.0, 8)))
    artifact = narrow.written(chain)
    original = beside(artifact, to_original(narrow.model))
    runtime, program = Runtime(artifact, "torch"), Program(artifact, torch.float64)
    x = certified(name)[2]
    one = in_float(between(runtime, original, "cut"))
    estimate = first_order(program, one, x).flatten(1).norm(dim=1)
    drift = (program(one, x, 1.0) - program(one, x)).flatten(1).norm(dim=1)
    assert float(drift.min()) > 0
    ratio = float(estimate.square().mean().sqrt() / drift.square().mean().sqrt())
    assert 0.75 < ratio < 1.35, ratio
