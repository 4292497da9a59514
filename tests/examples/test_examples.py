"""The worked examples, each on a small model and a made-up text: what they print is so."""

from __future__ import annotations

import importlib.util
import io
import random
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import t3c
from conftest import LIGHT, quick, supply_times
from decoders import fast_tokenizer
from t3c.certify.slices import sample_keys
from t3c.engines.decode import Generation
from t3c.measure import latency
from t3c.runtime.tokens import Tokenizer, text_inputs

transformers = pytest.importorskip("transformers")
pytest.importorskip("openvino")
ROOT = Path(__file__).parents[2]
WORDS = [f"w{i}" for i in range(45)]
LENGTH, WINDOW = 12, 8


@dataclass
class Ran:
    """An example that has run: what it printed, what it left, and what went through it."""

    module: ModuleType
    folder: Path
    out: Path
    printed: str
    seen: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)

    def rows(self) -> dict[str, list[str]]:
        """The table by variant."""
        lines = self.printed.splitlines()
        cells = [line.split() for line in lines[1 : 2 + len(t3c.load(self.out).chain)]]
        return {name: rest for name, *rest in cells}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / f"examples/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def ran(name: str, folder: Path, argv: list[str], watched: tuple[str, ...]) -> Ran:
    """The example with little effort; calls of the functions that are watched are kept."""
    module, out, printed = example(name), folder / "made.t3c", io.StringIO()
    done = Ran(module, folder, out, "", {})
    with pytest.MonkeyPatch.context() as patch:
        supply_times(patch)
        patch.setattr(latency, "warm_up", lambda call, **_: call())
        light = replace(module.EXPORT, goal=t3c.Goal(profiles=2, worst_drift=1.0), timing=quick(3))
        patch.setattr(module, "EXPORT", replace(light, certificate=LIGHT))
        patch.setattr(module, "ROUNDS", 3)
        for function in watched:
            patch.setattr(module, function, _kept(getattr(module, function), done.seen, function))
        with redirect_stdout(printed), redirect_stderr(io.StringIO()) as errors:
            assert module.main([*argv, "--out", str(out), "--steps", "3"]) == 0, errors.getvalue()
    assert "step 0 of 3" in errors.getvalue()
    done.printed = printed.getvalue()
    return done


def _kept(function: Any, seen: dict[str, list[tuple[Any, ...]]], name: str) -> Any:
    def call(*args: Any) -> Any:
        seen.setdefault(name, []).append(args)
        return function(*args)

    return call


def make_classifier(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=64, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=128, max_position_embeddings=40, initializer_range=0.2,
        id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1},
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *WORDS]))
    return folder


def make_decoder(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=128, max_position_embeddings=64,
        initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    fast_tokenizer().save_pretrained(folder)
    return folder


def make_sentences(path: Path, count: int = 160, labels: tuple[str, ...] = ("bad", "1")) -> Path:
    """Sentences of one word to more than fit, every tenth twice."""
    draw = random.Random(0)
    lines = ["label\tsentence"]
    for index in range(count):
        words = " ".join(draw.choices(WORDS, k=draw.randrange(1, 14)))
        lines += [f"{draw.choice(labels)}\t{words}"] * (1 + (index % 10 == 0))
    path.write_text("\n".join(lines) + "\n")
    return path


def make_text(path: Path, count: int) -> Path:
    draw = random.Random(0)
    path.write_text(" ".join(f"w{draw.randrange(3, 100)}" for _ in range(count)))
    return path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("encoder")
    model, data = make_classifier(folder / "model"), make_sentences(folder / "data.tsv")
    argv = [str(model), str(data), "--length", str(LENGTH)]
    return ran("encoder", folder, argv, ("batches", "compare", "ask"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("decoder")
    model, text = make_decoder(folder / "model"), make_text(folder / "text.txt", 1500)
    argv = [str(model), str(text), "--length", str(WINDOW), "--prompt", "w14 w15", "--tokens", "9"]
    return ran("decoder", folder, argv, ("compare", "write"))


def test_a_classifier_is_compared_on_sentences_that_nothing_else_saw(encoder: Ran) -> None:
    (inputs, _, _), (_, _, train) = encoder.seen["batches"]
    ((rt, _, arrays, labels),) = encoder.seen["compare"]
    keys = np.array(sample_keys([value.numpy() for value in inputs.values()]))
    tested, trained = set(sample_keys(arrays)), set(keys[train.numpy()])
    (certified,) = rt.artifact.ledger().certifications
    calibrated = {key for part in certified.keys.values() for key in part}
    calibrated |= set(rt.artifact.manifest.calibrated_on)
    assert len(keys) == 176
    assert len(set(keys)) < len(keys)
    assert tested | trained | calibrated == set(keys)
    assert not tested & trained
    assert not tested & calibrated
    assert not trained & calibrated
    assert {row[1] for row in encoder.rows().values()} == {str(len(labels))}


def test_accuracies_are_those_of_torch_and_of_the_runtime(encoder: Ran) -> None:
    ((_, _, arrays, labels),) = encoder.seen["compare"]
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = dict(zip(names, arrays, strict=True))
    kind = transformers.AutoModelForSequenceClassification
    plain = kind.from_pretrained(encoder.folder / "model").eval()
    with torch.no_grad():
        logits = plain(**{name: torch.from_numpy(value) for name, value in inputs.items()}).logits
    rows, rt = encoder.rows(), t3c.load(encoder.out)
    expected = {"original": logits.numpy()} | {p.name: rt(inputs, profile=p.name) for p in rt.chain}
    assert list(rows) == list(expected)
    for name, outputs in expected.items():
        assert rows[name][0] == f"{(outputs.argmax(axis=1) == labels).mean():.4f}"
    assert rows["original"][2:4] == ["1.00", "1.00"]
    for profile in rt.chain:
        assert rows[profile.name][4] == f"{rt.artifact.manifest.size_bytes(profile.name) / 1e6:.2f}"
        assert rows[profile.name][5] == f"{rt.certificates[profile.name].epsilon:.4f}"


def test_a_sentence_is_answered_by_what_the_artifact_holds(encoder: Ran) -> None:
    ((_, sentence, budget),) = encoder.seen["ask"]
    rt = t3c.load(encoder.out)
    model = rt.artifact.manifest.model
    assert model.classes == ("bad", "good")
    words = transformers.AutoTokenizer.from_pretrained(encoder.folder / "model")
    assert Tokenizer.of(rt.artifact).encode("w3 w7 nobody") == words("w3 w7 nobody")["input_ids"]
    inputs, _ = text_inputs(Tokenizer.of(rt.artifact), sentence, model)
    answer = rt.answer(inputs, budget)
    named = model.classes[answer.output[0].argmax()]
    assert f"{sentence!r} is {named}, says {answer.profile}\n" in encoder.printed


def test_batches_are_whole_and_without_their_padding(encoder: Ran) -> None:
    inputs, labels, train = encoder.seen["batches"][1]
    made = encoder.module.batches(inputs, labels, train)
    assert sum(len(target) for _, target in made) == len(train)
    for part, _ in made:
        assert part["attention_mask"][:, -1].any()
    assert min(part["input_ids"].shape[1] for part, _ in made) < LENGTH
    wanted = sorted(
        map(tuple, torch.cat([inputs["input_ids"][train], labels[train, None]], 1).tolist())
    )
    padded = [
        torch.nn.functional.pad(part["input_ids"], (0, LENGTH - part["input_ids"].shape[1]))
        for part, _ in made
    ]
    rows = zip(torch.cat(padded).tolist(), torch.cat([t for _, t in made]).tolist(), strict=True)
    assert sorted((*ids, label) for ids, label in rows) == wanted


def test_perplexity_is_that_of_torch_on_text_held_out(decoder: Ran) -> None:
    kind, folder = transformers.AutoModelForCausalLM, decoder.folder / "model"
    plain = kind.from_pretrained(folder).eval()
    ids = [int(word[1:]) for word in (decoder.folder / "text.txt").read_text().split()][1200:]
    losses: dict[int, float] = {}
    for start in range(0, len(ids), WINDOW // 2):  # each token in the first window that holds it
        window = [1, *ids[start : start + WINDOW - 1]]
        with torch.no_grad():
            scores = plain(torch.tensor([window])).logits[0].double().log_softmax(dim=-1)
        for place, token in enumerate(window[1:]):
            losses.setdefault(start + place, -float(scores[place, token]))
    assert sorted(losses) == list(range(300))
    value, tokens, _, _ = decoder.rows()["original"]
    assert tokens == "300"
    assert float(value) == pytest.approx(np.exp(np.mean(list(losses.values()))), rel=1e-4)


def test_a_language_model_keeps_its_words_and_its_sizes(decoder: Ran) -> None:
    rt = t3c.load(decoder.out)
    assert Tokenizer.of(rt.artifact).encode("w14 w15") == [14, 15]
    assert rt.artifact.manifest.model.text == t3c.TextSpec(1, (2,))
    assert rt.artifact.manifest.model.inputs[0].shape == (None, "sequence")
    rows = decoder.rows()
    assert list(rows) == ["original", *(profile.name for profile in rt.chain)]
    for profile in rt.chain:
        size = rt.artifact.manifest.size_bytes(profile.name)
        assert rows[profile.name][2] == f"{size / 1e6:.2f}"
        assert float(rows[profile.name][3]) > 0
    ((_, _, test, _, _),) = decoder.seen["compare"]
    assert len(test) == 300


def test_another_profile_goes_on_with_what_was_remembered(
    decoder: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((rt, prompt, tokens),) = decoder.seen["write"]
    assert (prompt.tolist(), tokens) == ([[1, 14, 15]], 9)
    read, served = [], rt.served

    def watched(arrays: Any, *args: Any) -> Any:
        answer = served(arrays, *args)
        read.append((answer.profile, arrays[0].shape[1], arrays[1].shape[2] if arrays[1:] else 0))
        return answer

    monkeypatch.setattr(rt, "served", watched)
    text = decoder.module.write(rt, prompt, tokens)
    by = ["max"] * 4 + ["tiny"] * 5
    assert read == [("max", 3, 0), *((name, 1, 3 + i) for i, name in enumerate(by[1:]))]
    generation = Generation(prompt)
    ids = [int(generation.step(rt.session(name).run).ids[0]) for name in by]
    assert text.ids[0, 3:].tolist() == ids
    words = re.findall(r"^(\w+) wrote ' ?(.*)'$", decoder.printed, flags=re.MULTILINE)
    assert words == [
        (name, " ".join(f"w{i}" for i in part))
        for name, part in (("max", ids[:4]), ("tiny", ids[4:]))
    ]
    assert "warning: read by max, tiny" in decoder.printed


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return


def refused(name: str, said: str, capsys: pytest.CaptureFixture[str], *argv: object) -> None:
    assert example(name).main([str(word) for word in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if "error" in line.lower()]
    assert len(lines) == 1
    assert captured.err.splitlines()[-1] == lines[0]
    assert re.match(f"error: .*{said}", lines[0])


@pytest.mark.usefixtures("offline")
def test_a_classifier_is_refused_what_it_cannot_be_made_of(
    encoder: Ran, decoder: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = encoder.folder / "model", encoder.folder / "data.tsv"

    def no(said: str, *argv: object) -> None:
        refused("encoder", said, capsys, *argv, "--out", tmp_path / "no.t3c")
        assert not (tmp_path / "no.t3c").exists()

    no("is no folder with a config.json", tmp_path / "nothing", data)
    no("is a LlamaForCausalLM, a decoder", decoder.folder / "model", data)
    no("cannot be read: No such file", model, tmp_path / "nothing.tsv")
    file = tmp_path / "data.tsv"
    file.write_text("")
    no("data.tsv is empty", model, file)
    file.write_text("sentence\tlabel\n")
    no("has a header and no rows", model, file)
    file.write_text("sentence\tlabel\nw1\tgreat\n")
    no("line 2: label is 'great', not one of bad, good, 0, 1", model, file)
    no("all sentences are 'good'", model, make_sentences(file, labels=("good",)))
    no("33 sentences are too few: 135 are needed", model, make_sentences(file, 30))
    no("steps must be at least 1, got 0", model, data, "--steps", 0)
    no("length must be over the tokenizer's 2 own tokens", model, data, "--length", 2)
    no("the model does not take the example", model, data, "--length", 64)
    (bare := tmp_path / "bare").mkdir()
    for kept in ("config.json", "model.safetensors"):
        (bare / kept).write_bytes((model / kept).read_bytes())
    no("bare has no tokenizer", bare, data)


@pytest.mark.usefixtures("offline")
def test_a_language_model_is_refused_what_it_cannot_be_made_of(
    encoder: Ran, decoder: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, text = decoder.folder / "model", decoder.folder / "text.txt"

    def no(said: str, *argv: object) -> None:
        refused("decoder", said, capsys, *argv, "--out", tmp_path / "no.t3c")
        assert not (tmp_path / "no.t3c").exists()

    no("is no folder with a config.json", tmp_path / "nothing", text)
    no("which does not continue texts", encoder.folder / "model", text)
    no("cannot be read: No such file", model, tmp_path / "nothing.txt")
    file = tmp_path / "text.txt"
    file.write_text(" \n")
    no("text.txt is empty", model, file)
    no("100 tokens are too few: 1080 will do", model, make_text(file, 100), "--length", WINDOW)
    no("stride must be from 1 to under the length 1", model, text, "--length", 1)
    no("steps must be at least 1", model, text, "--steps", -1)
    no("give a prompt, and at least 2 tokens", model, text, "--prompt", " ")
    no("give a prompt, and at least 2 tokens", model, text, "--tokens", 1)
