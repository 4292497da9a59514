"""Fine-tuning of encoders: batches of like length, resumed where it stopped, kept by its recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lab import sentences
from lab.base import HELD
from lab.sentences import (
    SentenceRecipe,
    load_any,
    sentence_accuracy,
    train_sentences,
)
from lab.zoo.minilm import SentenceClassifier
from t3c.errors import SpecError

CONFIGS = Path(__file__).parents[2] / "configs" / "base"
RECIPE = SentenceRecipe("minilm", epochs=2, batch=20, learning_rate=0.1)


class Bag(nn.Module):
    """A classifier without order: the mean of the words' own vectors; called as BERT is."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(40, 8), nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        words = attention_mask[..., None].float()
        return (self.head((self.table(input_ids) * words).sum(dim=1) / words.sum(dim=1)),)


def sentences_of(count: int) -> tuple[Tensor, Tensor]:
    """Padded words 1..39; good are those with more of the words above 20."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 40, (count, 12), generator=generator)
    lengths = torch.randint(3, 13, (count, 1), generator=generator)
    ids = torch.where(torch.arange(12) < lengths, ids, 0)
    above = (ids > 20).sum(1)
    return ids, (2 * above > (ids > 0).sum(1)).long()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentences, "sst2_ids", lambda split, length: sentences_of(HELD + 1000))
    monkeypatch.setattr(sentences, "new_network", lambda name: SentenceClassifier(Bag()))


def test_padding_does_not_change_an_answer() -> None:
    torch.manual_seed(0)
    model = SentenceClassifier(Bag())
    ids = torch.tensor([[3, 5, 7]])
    filled = torch.cat([ids, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    torch.testing.assert_close(model(filled), model(ids))


def test_it_learns_and_is_trained_once(small: None, tmp_path: Path) -> None:
    said: list[str] = []
    path = train_sentences(RECIPE, tmp_path, say=said.append, watch=lambda *about: None)
    assert said[-1].startswith("epoch 2 of 2")
    model = SentenceClassifier(Bag())
    model.load_state_dict(load_file(path))
    ids, labels = sentences_of(HELD + 1000)
    assert sentence_accuracy(model, (ids[-HELD:], labels[-HELD:])) > 0.8
    written = path.read_bytes()
    train_sentences(RECIPE, tmp_path, say=said.append, watch=lambda *about: None)
    assert "is trained" in said[-1]
    assert path.read_bytes() == written


def test_it_goes_on_as_if_it_had_not_been_stopped(small: None, tmp_path: Path) -> None:
    whole = train_sentences(RECIPE, tmp_path / "a", say=print, watch=lambda *about: None)

    class KilledError(Exception):
        pass

    def stop(text: str, done: int, of: int) -> None:
        if text.startswith("epoch 2") and done == 3:
            raise KilledError

    with pytest.raises(KilledError):
        train_sentences(RECIPE, tmp_path / "b", say=print, watch=stop)
    said: list[str] = []
    resumed = train_sentences(RECIPE, tmp_path / "b", say=said.append, watch=lambda *about: None)
    assert "going on after epoch 1" in " ".join(said)
    assert resumed.read_bytes() == whole.read_bytes()


def test_recipes_that_cannot_be() -> None:
    for change, told in (
        ({"network": "bert"}, "no encoder 'bert'"),
        ({"epochs": 0}, "epochs and batch"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"rise": 1.0}, "rise must be in"),
    ):
        with pytest.raises(SpecError, match=told):
            replace(RECIPE, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_of_the_network_they_are_named_by(path: Path) -> None:
    assert load_any(path).network == path.stem
