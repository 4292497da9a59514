"""`t3c run --prompt` as a stranger types it."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import LIGHT, Made, quick, supply_times
from decoders import MadeDecoder, words
from t3c.artifact.folder import MANIFEST
from t3c.artifact.manifest import TOKENIZER
from t3c.artifact.reader import Artifact
from t3c.convert import elasticize_
from t3c.exporter import ExportConfig, export
from t3c.runtime.runtime import load
from t3c.runtime.tokens import Tokenizer
from t3c.spec import Goal
from test_cli import ok, one_object, refused, t3c, typed

pytestmark = pytest.mark.usefixtures("briefly")
LENGTH, CLASSES = 6, ("bad", "good", "neither")


class Sentiment(nn.Module):
    """The mean of the words' features, two layers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(100, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, len(CLASSES))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        kept = attention_mask[..., None].to(self.table.weight.dtype)
        mean = (self.table(input_ids) * kept).sum(dim=1) / kept.sum(dim=1)
        found: Tensor = self.head(self.inner(mean).relu())
        return found


@pytest.fixture(scope="module")
def sentiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of texts of one length, exported with its tokenizer from a file."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("sentiment")
    words().save(str(folder / TOKENIZER))
    mask = (torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (60, 1))).long()
    samples = {"input_ids": torch.randint(0, 100, (60, LENGTH)), "attention_mask": mask}
    model = Sentiment().eval()
    elasticize_(model, {n: v[:2] for n, v in samples.items()}, calibration=[samples])
    wanted = ExportConfig(
        goal=Goal(profiles=2, worst_drift=1.0),
        timing=quick(3),
        certificate=replace(LIGHT, delta=0.1),
    )
    with pytest.MonkeyPatch.context() as patch:
        supply_times(patch)
        export(
            model, folder / "s.t3c", [samples], wanted, classes=CLASSES, tokenizer=folder
        )  # fmt: skip
    return folder / "s.t3c"


def test_the_text_is_that_of_the_runtime(decoder: MadeDecoder) -> None:
    said = ok("run", decoder.path, "--prompt", "w14 w15", "--tokens", 7, "--explain")
    runtime = load(decoder.path)
    writing = runtime.generate([[1, 14, 15]], profile="max", tokens=7, stop=(2,))
    tokens = list(writing)
    ids = writing.ids[0, 3:].tolist()
    assert said["ids"] == ids
    assert said["text"] == " " + Tokenizer.of(runtime.artifact).decode(ids)
    assert said["prompt_tokens"] == 3
    assert said["stopped"] is False
    assert said["profile"] == "max"
    assert said["profiles"] == ["max"] * len(tokens)
    assert said["first_ms"] > 0
    assert said["tokens_per_second"] > 0
    assert said["certificate"]["epsilon"] == runtime.certificates["max"].epsilon
    assert "for 90% of inputs" in said["guarantee"]
    assert said["warnings"] == []
    assert [row["profile"] for row in said["explain"] if row["chosen"]] == ["max"]
    shown = t3c("run", decoder.path, "--prompt", "w14 w15", "--tokens", 7, "--explain")
    assert (shown.returncode, shown.stdout) == (0, said["text"] + "\n")
    assert re.search(r"profile max: .*\n7 tokens: the first after [\d.]+ ms, then", shown.stderr)
    assert "for 90% of inputs" in " ".join(shown.stderr.split())
    assert "with guard" in shown.stderr


def test_budgets_and_draws(decoder: MadeDecoder) -> None:
    run = ("run", decoder.path, "--prompt", "w14 w15", "--tokens", 12)
    small = ok(*run, "--size-mb", 1e-6)
    assert set(small["profiles"]) == {"tiny"}
    assert [w for w in small["warnings"] if "no profile meets the limits" in w]
    likeliest, drawn, again, other = (
        ok(*run, *given)["ids"]
        for given in (
            (), ("--temperature", 3), ("--temperature", 3, "--seed", 0),
            ("--temperature", 3, "--seed", 1),
        )
    )  # fmt: skip
    assert drawn == again != other
    assert drawn != likeliest


def test_text_ends_before_the_stop(decoder: MadeDecoder, tmp_path: Path) -> None:
    """The third token that is written is made one to stop at, by the manifest."""
    ids = ok("run", decoder.path, "--prompt", "w14", "--tokens", 3)["ids"]
    assert ids[2] not in ids[:2]
    path = Path(shutil.copytree(decoder.path, tmp_path / "m.t3c"))
    text = (path / MANIFEST).read_text()
    assert text.count('"stop":[2]') == 1
    (path / MANIFEST).write_text(text.replace('"stop":[2]', f'"stop":[{ids[2]}]'))
    shutil.rmtree(path / "devices")
    (path / "ledger.json").unlink()
    said = ok("run", path, "--prompt", "w14")
    assert said["ids"] == ids
    assert said["stopped"] is True
    assert said["text"] == "".join(f" w{token}" for token in ids[:2])
    assert "not certified here" in said["guarantee"]


def test_a_process_streams_and_says_nothing_else(decoder: MadeDecoder) -> None:
    run = ("run", decoder.path, "--prompt", "w14 w15", "--tokens", 5)
    done = typed(*run, "--json")
    assert done.stderr == ""
    assert one_object(done)["text"] == ok(*run)["text"]


def test_a_classifier_answers_a_prompt_as_it_does_an_input(sentiment: Path, tmp_path: Path) -> None:
    said = ok("run", sentiment, "--prompt", "w5 w6 w7", "--explain")
    ids, mask = np.zeros((1, LENGTH), np.int64), np.zeros((1, LENGTH), np.int64)
    ids[0, :3], mask[0, :3] = (5, 6, 7), 1
    np.savez(tmp_path / "one.npz", input_ids=ids, attention_mask=mask)
    given = ok("run", sentiment, "--input", tmp_path / "one.npz", "--explain")
    assert said == given
    assert said["answers"][0]["classes"][0]["class"] in CLASSES
    long = ok("run", sentiment, "--prompt", "w5 w6 w7 w8 w9 w10 w11")
    assert long["warnings"][0] == "the prompt of 7 tokens was cut to 6"
    shown = t3c("run", sentiment, "--prompt", "w5 w6 w7 w8 w9 w10 w11")
    assert "warning: the prompt of 7 tokens was cut to 6" in shown.stdout
    refused("--tokens is for a model that has states", "run", sentiment, "--prompt", "a",
            "--tokens", 3)  # fmt: skip


def test_a_tokenizer_from_elsewhere(made: Made, decoder: MadeDecoder, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    rust = words()
    rust.add_tokens(["brandnew"])  # 100, which the model does not have
    rust.save(str(file))
    run = ("run", decoder.path, "--tokens", 3, "--tokenizer", file)
    assert ok(*run, "--prompt", "w5")["prompt_tokens"] == 2
    refused("ids are of 0 to 99, got 1 to 100", *run, "--prompt", "w5 brandnew")
    refused("input: text gives input_ids", "run", made.artifact, "--prompt", "w5",
            "--tokenizer", file)  # fmt: skip
    file.write_text("{}")
    refused(r"mine\.json: not a tokenizer", *run, "--prompt", "w5")
    refused("no such file", "run", decoder.path, "--prompt", "w5", "--tokenizer", tmp_path / "x")


def test_wrong_uses(made: Made, decoder: MadeDecoder) -> None:
    assert Artifact(made.artifact).tokenizer is None
    one = made.folder / "one.npy"
    run = ("run", decoder.path)
    refused("missing: give --input FILE or --prompt TEXT", *run)
    refused("give --input or --prompt, not both", *run, "--prompt", "w5", "--input", one)
    refused("no tokenizer in it: give one", "run", made.artifact, "--prompt", "w5")
    refused("the prompt is empty", *run, "--prompt", "")
    refused("the prompt is empty", *run, "--prompt", "  ")
    refused("tokens must be at least 1, got 0", *run, "--prompt", "w5", "--tokens", 0)
    refused("temperature must be at least 0", *run, "--prompt", "w5", "--temperature", -1)
    refused("seed must be at least 0", *run, "--prompt", "w5", "--seed", -1)
    refused("latency_ms must be positive", *run, "--prompt", "w5", "--latency-ms", 0)
    for option, value in (("--tokens", 3), ("--seed", 1), ("--tokenizer", one)):
        refused(f"{option} goes with --prompt", "run", made.artifact, "--input", one, option, value)


def test_a_missing_library_is_one_line(
    decoder: MadeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refused("tokenizers is not installed: pip install", "run", decoder.path, "--prompt", "w5")
