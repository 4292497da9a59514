"""Your own text classifier and your own sentences, as one artifact.

    PYTHONPATH=benchmarks python examples/encoder.py FOLDER DATA.tsv --out mine.t3c

FOLDER holds a Hugging Face classifier of texts (BERT, RoBERTa, DistilBERT) with its tokenizer.
DATA.tsv has a header, a column `sentence` (or `content`, or `text`) and a column `label`: names of
the model's classes, or their numbers from 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor

import t3c
from lab.zoo.glue import encode, read_sentences
from lab.zoo.language import load_encoder
from t3c.certify.slices import sample_keys, split_unique
from t3c.device.calibrate import CalibrationConfig
from t3c.device.measured import time_sessions
from t3c.engines.protocol import Array
from t3c.errors import DataError
from t3c.evidence.original import to_original
from t3c.nn.inputs import select
from t3c.runtime.tokens import Tokenizer, text_inputs

SHARES = (0.6, 0.2, 0.2)  # to train on, to calibrate and certify with, to test
LEAST, MOST = 27, 600  # sentences to calibrate with: what certificates need, and enough for them
STATISTICS = 512  # sentences that factors are made to suit
BATCH, ROUNDS, SEED = 32, 100, 3407
GOAL = t3c.Goal(worst_drift=0.8, size_weight=0.3)  # by estimate, of the smallest profile
EXPORT = t3c.ExportConfig(  # without cold starts, which take minutes more
    goal=GOAL,
    timing=CalibrationConfig(rounds=60, grid=0, busy=True, starts=False),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="One artifact of your own text classifier.")
    parser.add_argument("folder", help="a Hugging Face classifier with its tokenizer")
    parser.add_argument("data", type=Path, help="a TSV with the columns sentence and label")
    parser.add_argument("--out", type=Path, default=Path("mine.t3c"))
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--length", type=int, default=128, help="tokens; longer texts are cut")
    try:
        run(parser.parse_args(argv))
    except t3c.T3CError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def run(given: argparse.Namespace) -> None:
    training = t3c.TrainConfig(steps=given.steps, learning_rate=1e-4, goal=GOAL, precision="auto")
    loaded = load_encoder(given.folder)
    model, tokenizer = loaded.model, loaded.tokenizer
    if tokenizer is None:
        raise DataError(f"{given.folder} has no tokenizer")
    classes = [model.config.id2label[index] for index in range(model.config.num_labels)]
    data = read_sentences(given.data, classes)
    if len(set(data.labels)) < 2:
        raise DataError(f"{given.data}: all sentences are {classes[data.labels[0]]!r}")
    inputs, labels = encode(tokenizer, data.texts, given.length), torch.tensor(data.labels)
    keys = sample_keys([value.numpy() for value in inputs.values()])  # equal texts stay together
    train, calibration, test = map(torch.from_numpy, split_unique(keys, SHARES, SEED))
    if len(calibration) < LEAST:
        raise DataError(f"{given.data}: {len(keys)} sentences are too few: 135 are needed")
    calibration = calibration[:MOST]
    say(f"{len(train)} sentences to train, {len(calibration)} to calibrate, {len(test)} to test")

    say("making the model elastic")
    statistics = batches(inputs, labels, train[:STATISTICS])
    t3c.elasticize_(model, select(inputs, train[:2]), calibration=statistics)
    t3c.fit(
        model, batches(inputs, labels, train), training,
    )  # fmt: skip
    t3c.export(
        model, given.out, [select(inputs, calibration)], EXPORT, name=loaded.name, classes=classes,
        tokenizer=tokenizer,
    )  # fmt: skip

    rt = t3c.load(given.out)  # from here on torch is not needed
    arrays = [value[test].numpy() for value in inputs.values()]
    whole_ms = compare(rt, to_original(model), arrays, labels[test].numpy())
    ask(rt, data.texts[int(test[0])][0], t3c.Budget(latency_ms=whole_ms / 2))


def batches(
    inputs: dict[str, Tensor], labels: Tensor, index: Tensor
) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Batches of sentences of like length, in chance order, without the padding at their ends."""
    lengths = inputs["attention_mask"].sum(dim=1)
    near = torch.split(index[lengths[index].argsort(stable=True)], BATCH)
    made = []
    for i in torch.randperm(len(near), generator=torch.Generator().manual_seed(SEED)):
        longest = int(lengths[near[i]].max())
        made.append(({n: v[near[i], :longest] for n, v in inputs.items()}, labels[near[i]]))
    return made


def compare(
    rt: t3c.Runtime, original: onnx.ModelProto, arrays: list[Array], labels: Array
) -> float:
    """Print the original and every profile on the test sentences; the original's p50 in ms."""
    sessions = {"original": rt.engine.compile(original)}
    sessions |= {profile.name: rt.session(profile.name) for profile in rt.chain}
    say(f"timing {len(sessions)} variants in turns")
    times = time_sessions(sessions, [array[:1] for array in arrays], ROUNDS)
    parts = [[a[i : i + BATCH] for a in arrays] for i in range(0, len(labels), BATCH)]
    whole = times["original"]
    print("variant   accuracy     of  p50/original  p90/original      MB  epsilon")
    for name, session in sessions.items():
        answers = np.concatenate([session.run(part)[0].argmax(axis=1) for part in parts])
        ratios = times[name].p50 / whole.p50, times[name].p90 / whole.p90
        size, known = original.ByteSize(), rt.certificates.get(name)
        if name != "original":
            size = rt.artifact.manifest.size_bytes(name)
        row = f"{name:<10}{(answers == labels).mean():8.4f}{len(labels):7}"
        epsilon = f"{known.epsilon:9.4f}" if known else ""
        print(f"{row}{ratios[0]:14.2f}{ratios[1]:14.2f}{size / 1e6:8.2f}{epsilon}")
    print(f"the original takes {whole.p50:.2f} ms at p50, {whole.p90:.2f} at p90")
    return whole.p50


def ask(rt: t3c.Runtime, sentence: str, budget: t3c.Budget) -> None:
    """One sentence within a budget, by what the artifact holds alone."""
    model = rt.artifact.manifest.model
    inputs, warnings = text_inputs(Tokenizer.of(rt.artifact), sentence, model)
    answer = rt.answer(inputs, budget)
    named = (model.classes or ())[int(answer.output[0].argmax())]
    print(f"within {budget.latency_ms:.2f} ms: {sentence!r} is {named}, says {answer.profile}")
    for warning in (*warnings, *answer.warnings):
        print(f"warning: {warning}")


def say(text: str) -> None:
    sys.stderr.write(f"· {text}\n")


if __name__ == "__main__":
    raise SystemExit(main())
