from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from conftest import Made
from lab.load import (
    Outcome,
    Phase,
    arrivals,
    bodies,
    hold,
    offer,
    share_within,
    summary,
)
from serving import Running


def test_arrivals_are_random_at_the_rates_asked_for_and_the_same_for_a_seed() -> None:
    phases = [Phase(50, 10), Phase(50, 100)]
    due = arrivals(phases, seed=1)
    assert due == sorted(due) == arrivals(phases, seed=1)
    assert due != arrivals(phases, seed=2)
    early = sum(at < 50 for at in due)
    assert early == pytest.approx(500, rel=0.2)
    assert len(due) - early == pytest.approx(5000, rel=0.05)
    gaps = np.diff([at for at in due if at > 50])
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # as those of a Poisson process are


def test_a_refusal_a_late_and_a_lost_request_are_misses() -> None:
    found = [
        Outcome(0, 5, 200, "max", 2, 2), Outcome(0, 15, 200, "tiny", 1, 2),
        Outcome(0, 1, 429, None, 0, 2), Outcome(0, 1, 0, None, 0, 2),
    ]  # fmt: skip
    assert share_within(found, 10) == 0.25
    told = summary(found, 10)
    assert (told["late"], told["refused"], told["lost"], told["offered"]) == (1, 1, 1, 4)
    assert told["accuracy"] == 0.75  # of what was answered
    assert summary([], 10)["p50"] is None


def test_the_highest_rate_that_holds_is_found() -> None:
    assert hold(lambda rate: 1.0 if rate <= 70 else 0.5, 10, 100, steps=12) == pytest.approx(
        70, abs=0.1
    )


def test_requests_are_sent_when_they_are_due_and_count_from_then(
    served: Running, made: Made
) -> None:
    model = served.service.version.model
    images, labels = (part.numpy() for part in made.digits.test)
    requests = bodies(model.inputs[0].name, model.outputs[0].name, images[:9], labels[:9], 4)
    assert [len(body.labels) for body in requests] == [4, 4]
    due = [0.0, 0.0, 0.3]
    start = time.perf_counter()
    found = asyncio.run(offer(f"{served.url}/v2/models/{model.name}/infer", requests, due))
    assert time.perf_counter() - start >= 0.5
    assert [o.status for o in found] == [200] * 3
    top = served.service.version.runtime.chain.top.name
    wanted = served.service.version.runtime(images[:8], profile=top).argmax(axis=1)
    right = (wanted == labels[:8]).reshape(2, 4).sum(axis=1).tolist()
    assert [o.right for o in found] == [*right, right[0]]
    lost = asyncio.run(offer("http://127.0.0.1:9/infer", requests, [0.0]))
    assert lost[0].status == 0
