"""Small models whose units of channels are in order and left out, and artifacts of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from t3c.artifact.reader import Artifact
from t3c.convert import ElasticConfig, LayerPlan, Units, elasticize_, order_units_, state_of
from t3c.exporter import content
from t3c.exporter.allocate import Allocated
from t3c.exporter.described import Described
from t3c.nn.inputs import Inputs, batches_of, select, tensors
from t3c.nn.norms import OutputNorms
from t3c.spec import Profile, ProfileChain

transformers = pytest.importorskip("transformers")
SAMPLES = 48
POINTS = (("tiny", 0.5, 5), ("med", 0.75, 6), ("max", 1.0, 8))  # name, share of width, bits
BITS = (3, 4, 5, 6, 8)


class Own(nn.Module):
    """An inverted bottleneck with norms, then a gated layer on tokens; x (n, 3, 6, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 48, 3, padding=1)
        self.expand, self.norm = nn.Conv2d(48, 96, 1, bias=False), nn.BatchNorm2d(96)
        self.depth = nn.Conv2d(96, 96, 3, padding=1, groups=96)
        self.reduce = nn.Conv2d(96, 48, 1)
        self.gate, self.up = nn.Linear(48, 128), nn.Linear(48, 128, bias=False)
        self.scale = nn.Parameter(torch.rand(128) + 0.5)
        self.down, self.head = nn.Linear(128, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        inner = torch.relu(self.depth(torch.relu(self.norm(self.expand(x)))))
        x = torch.relu(x + self.reduce(inner)).flatten(2).transpose(1, 2)
        x = self.down(F.gelu(self.gate(x)) * self.up(x) * self.scale)
        out: Tensor = self.head(torch.tanh(x).mean(1))
        return out


def _own() -> tuple[nn.Module, Inputs]:
    return Own(), torch.randn(SAMPLES, 3, 6, 6)


def _bert() -> tuple[nn.Module, Inputs]:
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=16, initializer_range=0.05, num_labels=8,
    )  # fmt: skip
    ids = torch.randint(0, 100, (SAMPLES, 8))
    mask = torch.ones_like(ids)
    mask[:, 6:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    return transformers.BertForSequenceClassification(config), inputs


def _llama() -> tuple[nn.Module, Inputs]:
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=96, num_hidden_layers=2, num_attention_heads=6, head_dim=16,
        num_key_value_heads=3, intermediate_size=128, max_position_embeddings=16,
        initializer_range=0.1, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 100, (SAMPLES, 8))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids}


def _resnet() -> tuple[nn.Module, Inputs]:
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128], depths=[1, 2], layer_type="bottleneck",
        num_labels=8,
    )  # fmt: skip
    return transformers.ResNetForImageClassification(config), torch.randn(SAMPLES, 3, 32, 32)


def _mobilenet() -> tuple[nn.Module, Inputs]:
    config = transformers.MobileNetV2Config(
        image_size=32, tf_padding=False, depth_multiplier=0.35, num_labels=8
    )
    return transformers.MobileNetV2ForImageClassification(config), torch.randn(32, 3, 32, 32)


def _vit() -> tuple[nn.Module, Inputs]:
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        image_size=32, patch_size=8, initializer_range=0.1, num_labels=8,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), torch.randn(SAMPLES, 3, 32, 32)


BUILD = {
    "bert": _bert, "llama": _llama, "resnet": _resnet, "mobilenet": _mobilenet, "vit": _vit,
    "own": _own,
}  # fmt: skip


def plain(name: str) -> tuple[nn.Module, Inputs]:
    """Return a model whose every vector has values of its own, and samples."""
    torch.manual_seed(0)
    model, inputs = BUILD[name]()
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        if not value.is_floating_point() or "inv_freq" in key:
            continue
        if value.dim() == 1:
            low = 0.4 if "var" in key or ("weight" in key and value.mean() == 1) else -0.3
            value.data.uniform_(low, 1.0 if low > 0 else 0.3)
        elif value.dim() == 4:
            value.data.normal_(0, (2 / value[0].numel()) ** 0.5)  # else little comes through
    return model.eval(), inputs


def example_of(inputs: Inputs) -> Inputs:
    return select(inputs, slice(0, 2))


def data_of(inputs: Inputs) -> list[Inputs]:
    return list(batches_of(inputs, 16))


@dataclass(frozen=True)
class Narrow:
    """An elastic model that is narrowed by its units, and samples."""

    model: nn.Module
    inputs: Inputs
    units: Units

    @property
    def plans(self) -> tuple[LayerPlan, ...]:
        return state_of(self.model).plan.layers

    @property
    def narrowed(self) -> list[LayerPlan]:
        return [plan for plan in self.plans if plan.spec.narrows]

    def profile(self, name: str, share: float, bits: int) -> Profile:
        """Return the profile of a share of all widths; what is not narrowed is whole."""
        points = {
            plan.spec.name: plan.point_at(share if plan.spec.narrows else 1.0, bits)
            for plan in self.plans
        }
        return Profile(name, points)

    @property
    def chain(self) -> ProfileChain:
        return ProfileChain(tuple(self.profile(*point) for point in POINTS))

    def written(
        self, chain: ProfileChain | None = None, norms: Mapping[str, OutputNorms] | None = None
    ) -> Artifact:
        """Write an artifact in a folder of its own."""
        allocated = replace(Allocated.of(chain or self.chain), norms=norms or {})
        described = Described(self.model, content.topology(self.model), "narrow")
        packed = content.pack(described, allocated)
        folder = Path(mkdtemp(prefix="t3c-"))
        return content.write(folder, packed, allocated, select(self.inputs, slice(0, 32)))


def narrow_model(
    model: nn.Module, inputs: Inputs, *, calibrated: bool = True, **config: Any
) -> Narrow:
    """Put the units of a model in order and make it elastic, in place."""
    example, data = example_of(inputs), data_of(inputs)
    units = order_units_(model, example, data)
    how = ElasticConfig(**{"widths": units.groups, "min_weights": 0, "bits": BITS, **config})
    elasticize_(model, example, how, calibration=data if calibrated else None)
    assert len(tensors(inputs)[0]) >= 32
    return Narrow(model, inputs, units)


@cache
def narrow_of(name: str) -> Narrow:
    return narrow_model(*plain(name))


@cache
def artifact_of(name: str) -> Artifact:
    """Return the artifact of a model with the profiles of `POINTS`."""
    return narrow_of(name).written()
