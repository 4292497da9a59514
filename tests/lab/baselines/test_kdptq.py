"""Distillation after quantization: nearer to the original."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tiny
import torch

from lab.baselines import kdptq as module
from lab.baselines.kdptq import kdptq
from lab.baselines.qat8 import prepare_qat
from t3c.evidence.int8 import bytes_on_disk


@pytest.fixture(scope="module", autouse=True)
def _plain_kernels() -> Iterator[None]:
    with tiny.plain_kernels():
        yield


def test_it_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    settled = tiny.recorded(monkeypatch, module)
    images = tiny.images(32, 7)
    task = tiny.task(steps=60, inputs=images)
    assert task.training is not None
    with tiny.unchanged(task.training.model):
        made = kdptq(task, learning_rate=3e-4)
    rows = images
    plain = prepare_qat(task.training.model, task.samples)
    with torch.no_grad():
        wanted = tiny.network().eval()(rows)
        before, after = ((model(rows) - wanted).norm() for model in (plain, settled[0]))
        trained = settled[0](tiny.images(16, 4)).numpy()
    assert after < 0.8 * before
    assert (made.name, made.steps) == ("kdptq", 60)
    assert made.size_bytes == bytes_on_disk(made.model)
    assert len(tiny.codes(made.model)) == 4
    assert np.linalg.norm(tiny.answers(made) - trained) < 0.02 * np.linalg.norm(trained)


def test_two_runs_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    settled = tiny.recorded(monkeypatch, module, convert=False)
    for _ in range(2):
        kdptq(tiny.task(steps=2))
    one, other = (model.state_dict() for model in settled)
    assert all(torch.equal(one[name], other[name]) for name in one)
