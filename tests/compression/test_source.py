"""Models of a user: folders, functions of a file, modules; what is refused, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from t3c.compression.data import Data
from t3c.compression.judging import judge_of
from t3c.compression.source import Source, Task, open_source, task_of
from t3c.errors import DataError
from t3c.spec import Metric

transformers = pytest.importorskip("transformers")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def test_a_function_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "def model():\n"
        "    return torch.nn.Linear(4, 3).half(), torch.zeros(2, 4)\n"
        "def nothing():\n"
        "    return 3\n"
        "def broken():\n"
        "    raise ZeroDivisionError('my own\\nmistake')\n"
    )
    source = open_source(f"{path}:model")
    assert next(source.model.parameters()).dtype == torch.float32
    assert not source.model.training
    assert any("float16" in note for note in source.notes)
    assert any("training mode" in note for note in source.notes)
    for name, message in (
        ("nothing", "has to return a torch.nn.Module and an example"),
        ("other", "has no function 'other': it has model, nothing, broken"),
        ("broken", r"mine.py:broken raised ZeroDivisionError: my own mistake$"),
    ):
        with pytest.raises(DataError, match=message):
            open_source(f"{path}:{name}")
    (tmp_path / "wrong.py").write_text("import no_such_module")
    with pytest.raises(DataError, match=r"wrong.py raised ModuleNotFoundError"):
        open_source(f"{tmp_path / 'wrong.py'}:model")
    with pytest.raises(DataError, match=r"none.py: no such file"):
        open_source(f"{tmp_path / 'none.py'}:model")


def test_weights_that_are_not_finite_and_a_missing_example_are_refused() -> None:
    broken = network()
    with torch.no_grad():
        next(broken.parameters())[0, 0] = float("nan")
    with pytest.raises(DataError, match=r"0.weight holds NaN"):
        open_source(broken, torch.zeros(1, 4))
    with pytest.raises(DataError, match="needs an example"):
        open_source(network())
    with pytest.raises(DataError, match="no weights"):
        open_source(nn.ReLU(), torch.zeros(1, 4))


def test_labels_are_split_off_the_example() -> None:
    source = open_source(network(), {"input": torch.zeros(2, 4), "labels": torch.zeros(2)})
    assert isinstance(source.example, dict)
    assert list(source.example) == ["input"]


def tiny(kind: str) -> nn.Module:
    """A small model of a kind, with random weights."""
    if kind == "ResNetForImageClassification":
        config = transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3, layer_type="basic"
        )
    elif kind == "LlamaForCausalLM":
        config = transformers.LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2,
        )  # fmt: skip
    else:
        config = transformers.BertConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_labels=2,
        )  # fmt: skip
    made: nn.Module = getattr(transformers, kind)(config)
    return made.eval()


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("ResNetForImageClassification", Task.IMAGES),
        ("BertForSequenceClassification", Task.TEXTS),
        ("BertModel", Task.EMBEDDING),
        ("LlamaForCausalLM", Task.LANGUAGE),
    ],
)
def test_what_a_model_does_is_told_by_its_class(kind: str, task: Task) -> None:
    assert task_of(tiny(kind)) is task


def test_a_text_model_without_a_tokenizer_and_a_folder_without_weights(tmp_path: Path) -> None:
    tiny("BertForSequenceClassification").save_pretrained(tmp_path / "bert")  # type: ignore[operator]
    with pytest.raises(DataError, match=r"bert has no tokenizer: put its tokenizer.json"):
        open_source(tmp_path / "bert")
    (tmp_path / "bare").mkdir()
    config = tiny("BertModel").config
    config.save_pretrained(tmp_path / "bare")  # type: ignore[union-attr, operator]
    with pytest.raises(DataError, match="no weights to compress"):
        open_source(tmp_path / "bare")


def test_each_task_is_judged_by_its_own_metric() -> None:
    model = network()

    def metric(task: Task, data: Data) -> Metric:
        return judge_of(Source("x", model, torch.zeros(2, 4), task), data, None).metric

    inputs = torch.randn(6, 4)
    assert metric(Task.OUTPUTS, Data(inputs, torch.zeros(6).long())) is Metric.ACCURACY
    assert metric(Task.OUTPUTS, Data(inputs)) is Metric.AGREEMENT
    assert metric(Task.OUTPUTS, Data(inputs, torch.zeros(6))) is Metric.AGREEMENT
    assert metric(Task.EMBEDDING, Data(inputs)) is Metric.NEIGHBOURS
    ids = torch.ones(6, 5).long()
    assert metric(Task.LANGUAGE, Data({"input_ids": ids})) is Metric.PERPLEXITY
