"""The whole path with the model on a second device; `test_devices.py` runs it in its own process.

`second_device.py` refuses what a GPU would. Where numbers are to be compared, they are those of the
same calls on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from test_door import hurried
from torch import Tensor, nn
from torch.nn import functional as F

import t3c
from conftest import quick
from second_device import SECOND, install
from t3c.convert import ElasticConfig, state_of
from t3c.convert.state import STATE
from t3c.evidence.certify import CertifyConfig
from t3c.evidence.estimates import EstimateConfig
from t3c.exporter import ExportConfig
from t3c.nn.inputs import Inputs, call, moved, select, tensors
from t3c.nn.view import at, sort_
from t3c.spec import Factorization, Goal, LayerPoint, Profile
from t3c.train import BlockConfig, Objective, TrainConfig
from t3c.train.targets import find_targets

install()


class Images(nn.Module):
    """A residual network of images (n, 3, 8, 8): a stem, two blocks, a head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(32) for _ in range(2)))
        self.hidden, self.head = nn.Linear(32, 48), nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = self.blocks(self.stem(x).relu()).mean(dim=(2, 3))
        answer: Tensor = self.head(self.hidden(features).relu())
        return answer


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.norm(self.conv(x))).relu()


class Texts(nn.Module):
    """A transformer of ids and masks (n, t) -> (n, 5)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(50, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Attending(width) for _ in range(2))
        self.head = nn.Linear(width, 5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.table(input_ids) + self.places(places)
        seen = attention_mask[:, None, None, :].bool()
        for block in self.blocks:
            x = block(x, seen)
        answer: Tensor = self.head(x.mean(dim=1))
        return answer


class Attending(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        into = self.first(x)
        parts = (layer(into) for layer in (self.query, self.key, self.value))
        split = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(*split, attn_mask=seen)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return out


def images(count: int) -> Inputs:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def texts(count: int) -> Inputs:
    ids = torch.randint(0, 50, (count, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[:, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def made(kind: type[nn.Module]) -> nn.Module:
    """A network with the weights it always has, on the CPU."""
    torch.manual_seed(0)
    model = kind().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model


def batches(data: Inputs, size: int = 16) -> list[tuple[Inputs, Tensor]]:
    """Batches with labels, on the CPU as loaders give them."""
    count = len(tensors(data)[0])
    labels = torch.arange(count) % 5
    return [(select(data, slice(i, i + size)), labels[i : i + size]) for i in range(0, count, size)]


def places(model: nn.Module) -> set[str]:
    """The kinds of device that a model's tensors are on, those of its original too."""
    both = [model, state_of(model).original] if STATE in model.__dict__ else [model]
    return {v.device.type for m in both for v in (*m.parameters(), *m.buffers())}


def smallest(model: nn.Module) -> Profile:
    plans = state_of(model).plan.layers
    return Profile("smallest", {p.spec.name: LayerPoint(p.ranks[0], 6) for p in plans})


@torch.no_grad()
def answers(model: nn.Module, data: Inputs, profile: Profile | None) -> Tensor:
    with at(model, profile):
        return call(model, data).cpu()


def test_the_device_refuses_what_a_gpu_refuses() -> None:
    here, there = torch.ones(3), torch.ones(3).to(SECOND)
    assert (there + torch.tensor(1.0)).cpu().tolist() == [2, 2, 2]
    assert there[torch.tensor([0, 2])].device.type == SECOND
    assert here.copy_(there).device.type == "cpu"
    assert there.sum().item() == 3
    refused: list[Callable[[], object]] = [
        lambda: here + there,
        lambda: here + there.sum(),
        lambda: here[there.long()],
        lambda: torch.stack([here.sum(), there.sum()]),
        lambda: here.add_(there),
        lambda: torch.rand(3, generator=torch.Generator(), device=SECOND),
        lambda: torch.empty_like(there).exponential_(generator=torch.Generator()),
        lambda: there.numpy(),
        lambda: np.asarray(there),
    ]
    for call_it in refused:
        with pytest.raises(RuntimeError, match=r"one device|generator|numpy"):
            call_it()


CONVERTED = [
    (Images, images, ElasticConfig(convolution=Factorization.TUCKER1, balance=0.2)),
    (Images, images, ElasticConfig(convolution=Factorization.TUCKER2)),
    (Images, images, ElasticConfig(convolution=Factorization.CP, include=("blocks.0.conv", "h*"))),
    (Texts, texts, ElasticConfig()),
]


@pytest.mark.parametrize(("kind", "samples", "config"), CONVERTED)
def test_conversion_is_what_it_is_on_the_cpu(
    kind: type[nn.Module], samples: Callable[[int], Inputs], config: ElasticConfig
) -> None:
    data = batches(samples(32))
    here, there = made(kind), made(kind).to(SECOND)
    for model in (here, there):
        t3c.smooth_(model, data, alpha=0.5)
        report = t3c.elasticize_(model, data[0][0], config, calibration=data)
        assert report.plan.layers
        t3c.settle_(model, data)
    assert places(there) == {SECOND}
    for profile in (None, smallest(here)):
        wanted = answers(here, data[0][0], profile)
        assert (answers(there, data[0][0], profile) - wanted).norm() < 1e-3 * wanted.norm()
    chosen = [find_targets(m, data[0][0], Goal()).profiles for m in (here, there)]
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("kind", [Images, Texts])
def test_training_is_what_it_is_on_the_cpu(kind: type[nn.Module], tmp_path: Path) -> None:
    data = batches(images(32) if kind is Images else texts(32))
    config = TrainConfig(
        steps=3, full="trained", masks=True, controller="gumbel",
        augmentations=("shift",) if kind is Images else ("drop_tokens",),
        objective=Objective(spectral=0.1, gap=0.1),
    )  # fmt: skip
    here, there = made(kind), made(kind).to(SECOND)
    histories = []
    for place, model in (("here", here), ("there", there)):
        t3c.elasticize_(model, data[0][0], ElasticConfig(balance=0.2))
        keep = t3c.Keep(tmp_path / place)
        histories.append(t3c.fit(model, data, config, validation=data, keep=keep))
    for name, values in histories[0].terms.items():
        assert histories[1].terms[name] == pytest.approx(values, rel=1e-2, abs=1e-3), name
    for step, found in histories[0].validation.items():
        assert histories[1].validation[step] == pytest.approx(found, rel=1e-2, abs=1e-2)
    assert places(there) == {SECOND}
    # Where it was trained says nothing of where it goes on.
    trained = {name: value.cpu() for name, value in there.named_parameters()}
    t3c.fit(here, data, config, keep=t3c.Keep(tmp_path / "there", resume=True))
    for name, value in here.named_parameters():
        assert torch.equal(value, trained[name]), name
    t3c.fit(there, data, config, keep=t3c.Keep(tmp_path / "here", resume=True))
    assert places(there) == {SECOND}


@pytest.mark.parametrize("kind", [Images, Texts])
def test_blocks_are_reconstructed(kind: type[nn.Module]) -> None:
    data = batches(images(32) if kind is Images else texts(32))
    model = made(kind).to(SECOND)
    t3c.elasticize_(model, data[0][0], ElasticConfig(spectral=kind is Texts))
    sort_(model)
    report = t3c.reconstruct(model, data, BlockConfig(steps=3, batch=8))
    assert any(row.after is not None for row in report.rows)
    assert places(model) == {SECOND}


@pytest.mark.usefixtures("briefly", "known_device")
def test_an_export_is_of_the_model_and_leaves_it_there(tmp_path: Path) -> None:
    data = batches(texts(60))
    model = made(Texts).to(SECOND)
    t3c.elasticize_(model, data[0][0], calibration=data)
    certificate = CertifyConfig(
        estimates=EstimateConfig(samples=2, path_samples=1), worst_case=True
    )
    # Samples on the device are as welcome as those that are not.
    given = [(moved(inputs, torch.device(SECOND)), labels) for inputs, labels in data]
    exported = t3c.export(
        model, tmp_path / "a.t3c", given,
        ExportConfig(threads=1, goal=Goal(profiles=2), timing=quick(5), certificate=certificate),
    )  # fmt: skip
    assert places(model) == {SECOND}
    t3c.write_original(model, tmp_path / "original.onnx")
    assert exported.ledger.entries
    inputs = {name: value[:8].numpy() for name, value in data[0][0].items()}
    found = t3c.load(exported.path, threads=1)(inputs)
    wanted = answers(model, select(data[0][0], slice(8)), None).numpy()
    assert np.linalg.norm(found - wanted) < 0.1 * np.linalg.norm(wanted)


@pytest.mark.usefixtures("briefly")
def test_compress_takes_a_module_that_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurried(monkeypatch)
    model = made(Images).to(SECOND)
    done = t3c.compress(
        model, [(images(400).to(SECOND), torch.arange(400).to(SECOND) % 5)],
        tmp_path / "a.t3c", minutes=2, threads=1, progress=False,
    )  # fmt: skip
    assert places(model) == {SECOND}
    assert done.result.variants[-1].name == "t3c-max"
    found = t3c.load(done.path, threads=1)(images(8).numpy())
    assert found.shape == (8, 5)
