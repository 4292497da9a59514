"""Small networks with artifacts of them, made once for all tests of evidence."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lab.certified import Made, Subject, make
from t3c.exporter import norms
from t3c.nn.inputs import Inputs, batches_of, select

POINTS = ((1 / 2, 4), (3 / 4, 6), (1.0, 8))


class Residual(nn.Module):
    """Convolutions with norms, a strided shortcut, overlapping pools and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.conv = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.after = nn.BatchNorm2d(32)
        self.down = nn.Conv2d(32, 48, 1, stride=2)
        self.wide = nn.Conv2d(32, 48, 3, stride=2, padding=1)
        self.head = nn.Linear(48, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(x + self.after(self.conv(x)))
        x = nn.functional.max_pool2d(x, 3, 1, 1)
        x = nn.functional.gelu(self.wide(x)) + self.down(x)
        x = nn.functional.avg_pool2d(x, 2)
        out: Tensor = self.head(x.mean(dim=(2, 3)))
        return out


def mlp() -> tuple[nn.Module, Inputs]:
    layers = [nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 6)]
    return nn.Sequential(*layers), torch.randn(80, 24)


def cnn() -> tuple[nn.Module, Inputs]:
    model = Residual()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = torch.randn(32) * 0.1
            module.running_var = torch.rand(32) + 0.5
    return model, torch.randn(80, 3, 12, 12)


def bert() -> tuple[nn.Module, Inputs]:
    import transformers

    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=16,
    )  # fmt: skip
    mask = torch.ones(80, 12, dtype=torch.long)
    mask[:, 9:] = 0
    ids = torch.randint(0, 64, (80, 12))
    model = transformers.BertForSequenceClassification(config)
    return model, {"input_ids": ids, "attention_mask": mask}


def llama() -> tuple[nn.Module, Inputs]:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=64, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), {"input_ids": torch.randint(0, 64, (80, 8))}


NETWORKS = {"mlp": mlp, "cnn": cnn, "bert": bert, "llama": llama}


@cache
def made_of(name: str) -> Made:
    """The artifact of a network, its original, and 48 samples nothing was made from."""
    torch.manual_seed(3)
    model, inputs = NETWORKS[name]()
    return artifact_of(model, inputs, name)


def artifact_of(model: nn.Module, inputs: Inputs, name: str = "net") -> Made:
    """An artifact in a folder of its own: 16 samples for statistics, 16 for ranges, the rest."""
    parts = [select(inputs, slice(a, b)) for a, b in ((0, 16), (16, 32), (32, None))]
    subject = Subject(name, model.eval(), list(batches_of(parts[0], 8)), parts[1], parts[2], POINTS)
    with patch.object(norms, "LEAST", 4):  # of the 16 samples for ranges
        return make(subject, Path(mkdtemp(prefix="t3c-")) / f"{name}.t3c")


def tensors_of(made: Made, count: int) -> list[Tensor]:
    """Some of the samples nothing was made from."""
    return [torch.from_numpy(value[:count]) for value in made.pool]
