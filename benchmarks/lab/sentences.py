"""Fine-tuning of an encoder on SST-2: resumable, the weights kept as those of other originals are.

The recipe is YAML in `configs/base`. Batches are of phrases of like length, so that little of them
is padding; which ones, and in what order, depends on the seed alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.base import (
    HELD,
    BaseRecipe,
    Lesson,
    Say,
    Watch,
    load_base,
    train_base,
    trained_once,
)
from lab.zoo.bases import SENTENCES, base_file, new_network
from lab.zoo.minilm import PADDING, sst2_ids
from t3c.errors import SpecError, TrainError
from t3c.train.lengths import like_lengths
from t3c.train.precision import Precision, multiplying
from t3c.zoo.settings import read_settings

LENGTH = 128


@dataclass(frozen=True)
class SentenceRecipe:
    """How an encoder is fine-tuned on SST-2, less the phrases held back.

    AdamW; the learning rate rises over the first `rise` of the steps and falls in a line to 0.
    """

    network: str
    epochs: int = 2
    batch: int = 32
    learning_rate: float = 5e-5
    weight_decay: float = 0.01
    rise: float = 0.06
    precision: Precision = "float"
    seed: int = 3407

    def __post_init__(self) -> None:
        if self.network not in SENTENCES:
            raise SpecError(f"no encoder {self.network!r}: known are {', '.join(SENTENCES)}")
        if self.epochs < 1 or self.batch < 1:
            raise SpecError(f"epochs and batch must be at least 1, got {self.epochs}, {self.batch}")
        if not 0 < self.learning_rate < math.inf or not 0 <= self.weight_decay < math.inf:
            raise SpecError(
                f"learning_rate must be positive and weight_decay not negative, "
                f"got {self.learning_rate:g} and {self.weight_decay:g}"
            )
        if not 0 <= self.rise < 1:
            raise SpecError(f"rise must be in [0, 1), got {self.rise:g}")

    @property
    def key(self) -> str:
        """A name for these settings and shapes; what else the code does is not in it."""
        shapes = {name: list(t.shape) for name, t in new_network(self.network).state_dict().items()}
        told = json.dumps([asdict(self), HELD, LENGTH, shapes], sort_keys=True)
        return f"{self.network}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"


def load_any(path: Path) -> BaseRecipe | SentenceRecipe:
    """The base recipe of a YAML file, named by its network."""
    return read_settings(path, SentenceRecipe) if path.stem in SENTENCES else load_base(path)


def train_any(recipe: BaseRecipe | SentenceRecipe, folder: Path, *, say: Say, watch: Watch) -> Path:
    """The weights a recipe leaves, trained now where that was not done."""
    train = train_sentences if isinstance(recipe, SentenceRecipe) else train_base
    return train(recipe, folder, say=say, watch=watch)  # type: ignore[arg-type]


def train_sentences(recipe: SentenceRecipe, folder: Path, *, say: Say, watch: Watch) -> Path:
    """Fine-tune the encoder, or go on where it stopped; the file of its weights.

    It is checked on the phrases held back; neither the development nor the test part is looked at.
    """

    def begin() -> Lesson:
        ids, labels = sst2_ids("train", LENGTH)
        kept, held = (ids[:-HELD], labels[:-HELD]), (ids[-HELD:], labels[-HELD:])
        torch.manual_seed(recipe.seed)
        model = new_network(recipe.network)
        optimizer = torch.optim.AdamW(
            model.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay
        )
        return Lesson(
            model, optimizer,
            lambda epoch: _epoch(model, optimizer, recipe, kept, epoch, watch),
            lambda: sentence_accuracy(model, held),
        )  # fmt: skip

    final = base_file(recipe.network, folder)
    return trained_once(final, recipe.key, recipe.epochs, begin, say)


@torch.no_grad()
def sentence_accuracy(model: nn.Module, part: tuple[Tensor, Tensor], batch: int = 50) -> float:
    """The share of sentences (n, t) with labels (n,) that the model gets right."""
    model.eval()
    right = 0
    for ids, labels in zip(*(torch.split(values, batch) for values in part), strict=True):
        right += int((model(trimmed(ids)).argmax(1) == labels).sum())
    return right / len(part[1])


def _epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: SentenceRecipe,
    part: tuple[Tensor, Tensor],
    epoch: int,
    watch: Watch,
) -> float:
    """Go through the part once; the mean loss."""
    lengths = (part[0] != PADDING).sum(dim=1).numpy()
    batches = like_lengths(lengths, recipe.batch, recipe.seed, epoch)
    torch.manual_seed(recipe.seed + epoch)  # what dropout draws
    model.train()
    total = 0.0
    for step, chosen in enumerate(batches):
        share = (epoch + step / len(batches)) / recipe.epochs
        rising = min(1.0, share / recipe.rise) if recipe.rise else 1.0
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rising * (1 - share)
        ids, labels = (values[torch.from_numpy(chosen)] for values in part)
        with multiplying(recipe.precision):
            outputs = model(trimmed(ids)).float()
        loss = F.cross_entropy(outputs, labels)
        if not torch.isfinite(loss):
            raise TrainError(f"epoch {epoch + 1}, step {step + 1}: the loss is not finite")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += float(loss.detach())
        watch(f"epoch {epoch + 1} of {recipe.epochs}: loss {loss:.3f}", step + 1, len(batches))
    return total / len(batches)


def trimmed(ids: Tensor) -> Tensor:
    """Texts (n, t) without the columns at their end that are nothing but padding; at least one."""
    used = (ids != PADDING).any(dim=0).nonzero()
    return ids[:, : int(used[-1]) + 1] if len(used) else ids[:, :1]
