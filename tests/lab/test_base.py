"""Training from nothing: the same weights whether it is stopped or not, and never what is held."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lab import base
from lab.base import BaseRecipe, Phase, accuracy, load_base, train_base
from lab.zoo.bases import NETWORKS, SENTENCES, base_file, base_network, made_by
from lab.zoo.small_vit import SmallViT
from lab.zoo.wide_cnn import WideCnn, whiten_
from t3c.errors import DataError, SpecError, T3CError, TrainError
from t3c.train.checkpoint import alone

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "base").glob("*.yaml"))
COUNT, HELD, BATCH = 40, 8, 8
STEPS = (COUNT - HELD) // BATCH


def tiny_cnn(images: Tensor) -> nn.Module:
    model = WideCnn((4, 6, 4))
    whiten_(model, images)
    return model


def tiny_vit(images: Tensor) -> nn.Module:
    return SmallViT(width=16, depth=1, heads=2)


class Watching(nn.Module):
    """A linear network that notes the reds it is trained on and those it is only asked about."""

    kept: int | None = None

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.head = nn.Linear(3, 10)
        self.made_of = images[:, 0, 0, 0]
        self.trained: list[Tensor] = []
        self.asked: list[Tensor] = []
        self.phases: list[tuple[bool, int, int | None]] = []

    def forward(self, images: Tensor) -> Tensor:
        (self.trained if self.training else self.asked).append(images[:, 0].mean((1, 2)))
        self.phases.append((self.training, images.shape[-1], self.kept))
        logits: Tensor = self.head(images.mean((2, 3)) / COUNT)
        return logits


def textured(part: str) -> tuple[Tensor, Tensor]:
    assert part == "train", "the test images are not looked at"
    generator = torch.Generator().manual_seed(0)
    return torch.randn(COUNT, 3, 32, 32, generator=generator), torch.arange(COUNT) % 10


def coloured(part: str) -> tuple[Tensor, Tensor]:
    """Images of one colour each, the i-th of red i: flipped, rolled or shrunk they are the same."""
    assert part == "train", "the test images are not looked at"
    reds = torch.arange(COUNT).float()
    colours = torch.stack([reds, reds % 7, reds % 3], 1)
    return colours[:, :, None, None].expand(-1, -1, 32, 32).clone(), torch.arange(COUNT) % 10


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "HELD", HELD)
    monkeypatch.setattr(base, "cifar10", textured)
    for name, make in (("tiny-cnn", tiny_cnn), ("tiny-vit", tiny_vit), ("watching", Watching)):
        monkeypatch.setitem(NETWORKS, name, make)  # type: ignore[arg-type]


def recipe_of(network: str) -> BaseRecipe:
    """Three epochs, of which the first differs from the last."""
    if network == "tiny-vit":
        return BaseRecipe(network, (Phase(2, kept=6), Phase(1)), "adamw", BATCH, 1e-2)
    return BaseRecipe(
        network, (Phase(1, side=24), Phase(2)), "sgd", BATCH, learning_rate=0.05, bias_rate=4.0
    )


def train(recipe: BaseRecipe, folder: Path, stop: int | None = None) -> tuple[Path, list[str]]:
    """The weights' file and what was said; interrupted after so many steps, if told to."""
    heard: list[str] = []
    done = 0

    def watch(text: str, step: int, steps: int) -> None:
        nonlocal done
        assert (step, steps) == (done % STEPS + 1, STEPS)
        done += 1
        if done == stop:
            raise KeyboardInterrupt

    return train_base(recipe, folder, say=heard.append, watch=watch), heard


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Watching]:
    """The networks that are made to be trained from here on, on images of one colour."""
    made: list[Watching] = []

    def make(images: Tensor) -> nn.Module:
        network = Watching(images)
        if len(images) == COUNT - HELD:
            made.append(network)
        return network

    monkeypatch.setitem(NETWORKS, "watching", make)  # type: ignore[arg-type]
    monkeypatch.setattr(base, "cifar10", coloured)
    return made


def refusal(kind: type[T3CError], action: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("network", ["tiny-cnn", "tiny-vit"])
def test_stopped_and_gone_on_is_the_same_bit_for_bit(tmp_path: Path, network: str) -> None:
    recipe = recipe_of(network)
    whole, heard = train(recipe, tmp_path / "whole")
    assert [text.partition(":")[0] for text in heard] == [f"epoch {n} of 3" for n in (1, 2, 3)]
    assert f"on {HELD} samples held back" in heard[0]
    for stop in (STEPS + 1, STEPS):  # in the second epoch, and again at its last step
        with pytest.raises(KeyboardInterrupt):
            train(recipe, tmp_path / "stopped", stop)
        torch.manual_seed(stop)  # what another process would have drawn
    path, heard = train(recipe, tmp_path / "stopped")
    assert heard[0] == "going on after epoch 1 of 3"
    assert [text.partition(":")[0] for text in heard[1:]] == ["epoch 2 of 3", "epoch 3 of 3"]
    assert path.read_bytes() == whole.read_bytes()
    # And not because nothing happens: it is not what it was after an epoch, or before.
    start = NETWORKS[network](textured("train")[0]).state_dict()
    moved = [n for n, t in load_file(path).items() if not torch.equal(t, start[n])]
    assert len(moved) > len(start) // 2


def test_half_precision_is_taken_where_the_processor_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, seen = replace(recipe_of("tiny-cnn"), precision="auto"), list[torch.dtype]()
    convolve = nn.Conv2d._conv_forward

    def noted(self: nn.Conv2d, x: Tensor, *weights: Tensor) -> Tensor:
        found = convolve(self, x, *weights)
        if self.training:
            seen.append(found.dtype)
        return found

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", noted)
    made = {}
    for has, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has=has: has)
        seen.clear()
        path, _ = train(recipe, tmp_path / str(has))
        assert set(seen) == {dtype}
        made[has] = load_file(path)
    assert all(t.dtype == made[False][name].dtype for name, t in made[True].items())
    plain, _ = train(recipe_of("tiny-cnn"), tmp_path / "plain")
    assert all(torch.equal(t, made[False][name]) for name, t in load_file(plain).items())
    assert not all(torch.equal(t, made[False][name]) for name, t in made[True].items())


def test_stopped_before_the_first_epoch_is_over(tmp_path: Path) -> None:
    recipe = recipe_of("tiny-cnn")
    whole, _ = train(recipe, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "stopped", 2)
    path, heard = train(recipe, tmp_path / "stopped")
    assert heard[0].startswith("epoch 1 of 3")
    assert path.read_bytes() == whole.read_bytes()


def test_stopped_after_the_last_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of("tiny-cnn")
    whole, _ = train(recipe, tmp_path)
    kept = whole.read_bytes()
    whole.unlink()
    monkeypatch.setattr(base, "_epoch", lambda *_: pytest.fail("trained"))
    path, heard = train(recipe, tmp_path)
    assert heard == ["going on after epoch 3 of 3"]
    assert path.read_bytes() == kept


def test_a_broken_checkpoint_is_passed_over(tmp_path: Path) -> None:
    recipe = recipe_of("tiny-cnn")
    whole, _ = train(recipe, tmp_path / "whole")
    path, _ = train(recipe, tmp_path / "broken")
    path.unlink()
    last = tmp_path / "broken" / recipe.key / "checkpoints" / "step-00000003" / "model.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    path, heard = train(recipe, tmp_path / "broken")
    assert heard[0].startswith("step-00000003 is passed over")
    assert heard[1] == "going on after epoch 2 of 3"
    assert path.read_bytes() == whole.read_bytes()


def test_what_is_trained_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of("tiny-cnn")
    path, _ = train(recipe, tmp_path)
    before = path.read_bytes()
    monkeypatch.setattr(base, "cifar10", lambda part: pytest.fail("read"))
    again, heard = train(recipe, tmp_path)
    assert again == path == base_file("tiny-cnn", tmp_path)
    assert heard == [f"tiny-cnn is trained: {path}"]
    assert path.read_bytes() == before


def test_every_setting_is_in_the_key(tmp_path: Path) -> None:
    recipe = recipe_of("tiny-cnn")
    others = {
        "network": "tiny-vit", "phases": (*recipe.phases, Phase(1)), "optimizer": "adamw",
        "batch": 4, "learning_rate": 0.06, "momentum": 0.8, "weight_decay": 0.0, "bias_rate": 2.0,
        "label_smoothing": 0.0, "rise": 0.1, "final": 0.1, "cooldown": 1, "seed": 1,
        "precision": "auto",
    }  # fmt: skip
    assert set(others) == set(BaseRecipe.__dataclass_fields__)
    changed = [replace(recipe, **{name: value}) for name, value in others.items()]  # type: ignore[arg-type]
    changed += [replace(recipe, phases=(Phase(1, side=24), Phase(2, kept=3)))]
    changed += [replace(recipe, phases=(Phase(1, side=23), Phase(2)))]
    keys = {r.key for r in [recipe, *changed]}
    assert len(keys) == len(changed) + 1
    assert recipe.key == recipe_of("tiny-cnn").key
    assert recipe.key.startswith("tiny-cnn-")


def test_a_changed_recipe_trains_anew(tmp_path: Path) -> None:
    recipe = recipe_of("tiny-cnn")
    path, _ = train(recipe, tmp_path)
    before = path.read_bytes()
    assert made_by(path) == recipe.key
    other = replace(recipe, seed=1)
    with pytest.raises(KeyboardInterrupt):
        train(other, tmp_path, stop=STEPS + 1)
    assert path.read_bytes() == before  # the old ones stay until the new ones are there
    path, heard = train(other, tmp_path)
    assert heard[0] == "going on after epoch 1 of 3"
    assert made_by(path) == other.key
    weights = load_file(path)
    path, _ = train(recipe, tmp_path)
    assert path.read_bytes() == before
    assert any(not torch.equal(weights[name], value) for name, value in load_file(path).items())


def test_weights_come_back_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, heard = train(recipe_of("tiny-cnn"), tmp_path)
    monkeypatch.setenv("T3C_BASE", str(tmp_path))
    assert base_file("tiny-cnn") == path
    model = base_network("tiny-cnn")
    assert not model.training
    assert all(p.requires_grad for p in model.parameters())
    saved = load_file(path)
    assert set(saved) == set(model.state_dict())
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    images, labels = textured("train")
    found = accuracy(model, (images[-HELD:], labels[-HELD:]))
    assert f"accuracy {found:.4f} on" in heard[-1]


def test_accuracy_is_the_share_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "EVALUATED", 3)
    logits = torch.eye(4)[torch.tensor([0, 1, 2, 3, 0, 1, 2])]
    labels = torch.tensor([0, 1, 2, 3, 1, 2, 3])
    assert accuracy(nn.Identity(), (logits, labels)) == pytest.approx(4 / 7)


def test_what_is_held_back_is_never_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = watched(monkeypatch)
    recipe = replace(recipe_of("watching"), phases=(Phase(1, side=24), Phase(2, kept=3)))
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path, stop=STEPS + 2)
    train(recipe, tmp_path)
    kept, held = list(range(COUNT - HELD)), list(range(COUNT - HELD, COUNT))
    for network in made:
        assert network.made_of.tolist() == kept  # nor is the stem made of it
    batches = [*made[0].trained[:STEPS], *made[1].trained]
    epochs = torch.cat(batches).round().int().view(3, -1)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == kept  # each of the others once an epoch
    assert epochs[0].tolist() != epochs[1].tolist()
    asked = torch.cat([*made[0].asked, *made[1].asked]).view(3, -1)
    assert all(epoch.tolist() == held for epoch in asked)


def test_phases_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = watched(monkeypatch)
    phases = (Phase(1, side=24, kept=5), Phase(1, kept=3), Phase(1))
    train(replace(recipe_of("watching"), phases=phases), tmp_path)
    asked = (False, 32, None)  # it is checked on whole images
    expected = [
        *[(True, 24, 5)] * STEPS, asked, *[(True, 32, 3)] * STEPS, asked,
        *[(True, 32, None)] * STEPS, asked,
    ]  # fmt: skip
    assert made[0].phases == expected


def test_the_rate_rises_and_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = watched(monkeypatch)
    rates: list[list[float]] = []
    whole = torch.optim.SGD.step

    def step(optimizer: torch.optim.SGD, *given: object) -> object:
        rates.append([group["lr"] for group in optimizer.param_groups])
        return whole(optimizer, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    recipe = replace(recipe_of("watching"), rise=0.25, final=0.1, learning_rate=0.4)
    train(recipe, tmp_path)
    assert len(made[0].trained) == len(rates) == 12
    up = [0.2, 0.2 + 0.8 / 3, 0.2 + 1.6 / 3]
    down = [1 - 0.9 * n / 9 for n in range(9)]
    assert [r[0] for r in rates] == pytest.approx([0.4 * share for share in (*up, *down)])


def test_it_cools_down_to_nothing() -> None:
    plain = replace(recipe_of("tiny-cnn"), phases=(Phase(4),), rise=0.25, final=0.1)
    longer = replace(plain, phases=(Phase(6),), cooldown=2)
    for epoch in (0.0, 0.5, 1.0, 2.5, 3.99):  # what came before is as it was
        assert base.rate_share(epoch, longer) == base.rate_share(epoch, plain)
    assert base.rate_share(4.0, longer) == pytest.approx(0.1)
    assert base.rate_share(5.0, longer) == pytest.approx(0.05)
    assert base.rate_share(6.0, longer) == 0
    with pytest.raises(SpecError, match="cooldown"):
        replace(plain, cooldown=4)


def test_biases_of_norms_take_more_and_decay_alike() -> None:
    recipe = recipe_of("tiny-cnn")
    model = tiny_cnn(textured("train")[0])
    groups = base._optimizer(model, recipe).param_groups
    norms = {id(m.bias) for m in model.modules() if isinstance(m, nn.BatchNorm2d)}
    assert {id(p) for p in groups[0]["params"]} == norms
    assert groups[0]["lr"] == pytest.approx(4 * recipe.learning_rate)
    for group in groups:
        assert group["lr"] * group["weight_decay"] == pytest.approx(
            recipe.learning_rate * recipe.weight_decay
        )
    given = {id(p) for group in groups for p in group["params"]}
    assert given == {id(p) for p in model.parameters() if p.requires_grad}


def test_weights_that_are_missing_or_broken(tmp_path: Path) -> None:
    path = base_file("tiny-cnn", tmp_path)
    said = refusal(DataError, lambda: base_network("tiny-cnn", tmp_path))
    assert said == f"{path} is not there: train it with `python benchmarks/base.py tiny-cnn`"
    assert made_by(path) is None
    train(recipe_of("tiny-cnn"), tmp_path)
    whole = path.read_bytes()
    for raw in (b"", whole[:7], whole[:100], whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(raw)
        said = refusal(DataError, lambda: base_network("tiny-cnn", tmp_path))
        assert said.startswith(f"{path} holds no weights of tiny-cnn: ")
        said = refusal(DataError, lambda: train(recipe_of("tiny-cnn"), tmp_path))
        assert said.startswith(f"{path} cannot be read: ")
    other, _ = train(recipe_of("tiny-vit"), tmp_path)
    path.write_bytes(other.read_bytes())
    said = refusal(DataError, lambda: base_network("tiny-cnn", tmp_path))
    assert said.startswith(f"{path} holds no weights of tiny-cnn: ")


def test_a_loss_that_is_not_finite_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(part: str) -> tuple[Tensor, Tensor]:
        images, labels = textured(part)
        images[3] = math.nan
        return images, labels

    recipe = recipe_of("watching")
    monkeypatch.setattr(base, "cifar10", spoilt)
    said = refusal(TrainError, lambda: train(recipe, tmp_path))
    assert said.startswith("epoch 1, step ")
    assert said.endswith("the loss is not finite")
    assert not base_file("watching", tmp_path).exists()
    # Nothing is left that would keep a new try from training.
    monkeypatch.setattr(base, "cifar10", textured)
    assert train(recipe, tmp_path)[0].is_file()


def test_two_do_not_train_the_same(tmp_path: Path) -> None:
    recipe = recipe_of("watching")
    with alone(tmp_path / recipe.key):
        assert "another process" in refusal(TrainError, lambda: train(recipe, tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"network": "none"}, "no network 'none': known are cifar10-cnn"),
        ({"phases": ()}, "no phase"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"learning_rate": 0.0}, "learning_rate must be positive, got 0"),
        ({"learning_rate": math.nan}, "learning_rate must be positive, got nan"),
        ({"bias_rate": math.inf}, "bias_rate must be positive, got inf"),
        ({"momentum": 1.0}, "momentum must be between 0 and 1, got 1"),
        ({"rise": -0.1}, r"rise must be in \[0, 1\)"),
        ({"final": math.nan}, r"final must be in \[0, 1\), got nan"),
        ({"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\)"),
    ],
)
def test_recipes_that_cannot_be(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(recipe_of("tiny-cnn"), **settings)  # type: ignore[arg-type]
    for wrong in ({"epochs": 0}, {"epochs": 1, "side": 7}, {"epochs": 1, "kept": 0}):
        with pytest.raises(SpecError):
            Phase(**wrong)


def test_a_recipe_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text("network: tiny-vit\nphases: [{epochs: 2, kept: 6}, {epochs: 1}]\nbatch: 8\n")
    recipe = load_base(path)
    assert recipe == BaseRecipe("tiny-vit", (Phase(2, kept=6), Phase(1)), batch=8)
    assert recipe.epochs == 3
    assert [recipe.phase(epoch).kept for epoch in range(3)] == [6, 6, None]
    path.write_text("network: tiny-vit\nphases: [{epochs: 2}, {epoch: 1}]\n")
    said = refusal(SpecError, lambda: load_base(path))
    assert said == f"{path}: no setting phases.1.epoch: did you mean epochs?"
    path.write_text("network: tiny-vit\nphases: [{epochs: 2}, {epochs: 0}]\n")
    assert "phases.1: a phase has at least one epoch" in refusal(SpecError, lambda: load_base(path))


@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if path.stem not in SENTENCES], ids=lambda path: path.stem
)
def test_every_recipe_of_images_that_ships_loads(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    recipe = load_base(path)
    assert recipe.network == path.stem
    model = NETWORKS[recipe.network](torch.randn(8, 3, 32, 32)).train()
    for phase in recipe.phases:
        if phase.kept is not None:
            assert hasattr(model, "kept")
        with torch.no_grad():
            assert model(torch.randn(2, 3, phase.side, phase.side)).shape == (2, 10)


def test_there_is_a_recipe_for_each_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert {path.stem for path in CONFIGS} == set(NETWORKS)
