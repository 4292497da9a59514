"""Your own language model and your own text, as one artifact.

    PYTHONPATH=benchmarks python examples/decoder.py FOLDER TEXT.txt --out lm.t3c

FOLDER holds a Hugging Face decoder (Llama and the like) with its tokenizer. TEXT.txt is text as it
runs; `<|endoftext|>` in it parts one text from the next.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import torch
from torch import Tensor

import t3c
from lab.perplexity import perplexity, sliding_windows
from lab.zoo.language import load_decoder
from t3c.compression.tables import read_text
from t3c.device.calibrate import CalibrationConfig
from t3c.engines import Session
from t3c.engines.decode import Generation
from t3c.engines.protocol import Array
from t3c.errors import DataError
from t3c.evidence.estimates import EstimateConfig
from t3c.evidence.original import to_original
from t3c.measure.latency import interleave
from t3c.runtime.generating import Writing
from t3c.runtime.tokens import Continued, Tokenizer, prompt_ids
from t3c.zoo.text import story_tokens

SHARES = (0.6, 0.8)  # where the part to train on ends, and the part to calibrate with
LEAST, MOST = 27, 100  # windows to calibrate with: what certificates need, and enough for them
STATISTICS, TESTED = 64, 5_000  # windows that factors suit, tokens to test on at most
BATCH, WRITTEN, ROUNDS = 4, 16, 10
GOAL = t3c.Goal(worst_drift=0.3)  # by estimate, of the smallest profile
AXES = {"input_ids": {1: "sequence"}}
FEW = EstimateConfig(samples=2, path_samples=0)  # logits are many: more would take minutes
EXPORT = t3c.ExportConfig(  # no cold starts, worst case or monitor, for the same reason
    goal=GOAL, activations="float",
    certificate=t3c.CertifyConfig(estimates=FEW),
    timing=CalibrationConfig(rounds=60, grid=0, busy=True, starts=False),
)  # fmt: skip
Ids = npt.NDArray[np.int64]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="One artifact of your own language model.")
    parser.add_argument("folder", help="a Hugging Face decoder with its tokenizer")
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--out", type=Path, default=Path("lm.t3c"))
    parser.add_argument("--steps", type=int, default=100, help="of training")
    parser.add_argument("--length", type=int, default=128, help="tokens the model reads at once")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=40, help="to write after the prompt")
    try:
        run(parser.parse_args(argv))
    except t3c.T3CError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def run(given: argparse.Namespace) -> None:
    training = t3c.TrainConfig(
        steps=given.steps, loss="language_modelling", goal=GOAL, precision="auto"
    )
    if given.tokens < 2 or not given.prompt.strip():
        raise DataError("give a prompt, and at least 2 tokens to write after it")
    loaded = load_decoder(given.folder)
    model, tokenizer = loaded.model, loaded.tokenizer
    if tokenizer is None:
        raise DataError(f"{given.folder} has no tokenizer")
    bos = tokenizer.bos_token_id
    ids = story_tokens(tokenizer, read_text(given.text))
    first, second = (int(share * len(ids)) for share in SHARES)
    parts = ids[:first], ids[first:second], ids[second:]
    least = LEAST * given.length
    if len(parts[1]) < least:
        raise DataError(f"{given.text}: {len(ids)} tokens are too few: {5 * least} will do")
    train, calibration = (windows(part, given.length, bos) for part in parts[:2])
    calibration, test = calibration[:MOST], parts[2][:TESTED]
    say(f"{len(train)} windows to train, {len(calibration)} to calibrate, {len(test)} test tokens")

    say("making the model elastic")
    statistics = [{"input_ids": part} for part in train[:STATISTICS].split(BATCH)]
    t3c.elasticize_(model, statistics[0], calibration=statistics)
    t3c.fit(
        model, [{"input_ids": part} for part in train.split(BATCH)], training,
    )  # fmt: skip
    t3c.export(
        model, given.out, [{"input_ids": calibration}], EXPORT, name=loaded.name, axes=AXES,
        tokenizer=tokenizer,
    )  # fmt: skip

    rt = t3c.load(given.out)
    prompt = prompt_ids(Tokenizer.of(rt.artifact), given.prompt, spec_of(rt))
    compare(rt, to_original(model, AXES), test, given.length, prompt)
    write(rt, prompt, given.tokens)


def windows(ids: Ids, length: int, bos: int | None) -> Tensor:
    """Windows (n, length) of a text one after the other, each begun by BOS if there is one."""
    found = [window.ids for window in sliding_windows(ids, length, length - 1, bos)]
    return torch.from_numpy(np.stack([window for window in found if len(window) == length]))


def compare(
    rt: t3c.Runtime, original: onnx.ModelProto, test: Ids, length: int, prompt: Ids
) -> None:
    """Print the original and every profile: perplexity of the text, bytes, tokens a second."""
    sessions = {"original": rt.engine.compile(original)}
    sessions |= {profile.name: rt.session(profile.name) for profile in rt.chain}
    say(f"timing {len(sessions)} variants in turns")
    times = interleave({n: partial(continued, s, prompt) for n, s in sessions.items()}, ROUNDS)
    laid = {"length": length, "stride": length // 2, "bos": spec_of(rt).bos, "batch": BATCH}
    print("variant   perplexity  tokens      MB  tokens/s")
    for name, session in sessions.items():
        found = perplexity(partial(logits, session), test, **laid)
        size = original.ByteSize()
        if name != "original":
            size = rt.artifact.manifest.size_bytes(name)
        speed = 1e3 * WRITTEN / times[name].p50
        print(f"{name:<10}{found.value:10.3f}{found.tokens:8}{size / 1e6:8.2f}{speed:10.1f}")


def logits(session: Session, ids: Ids) -> Array:
    return session.run([ids])[0]  # nothing is remembered from one window to the next


def continued(session: Session, prompt: Ids) -> None:
    generation = Generation(prompt)
    for _ in range(WRITTEN):
        generation.step(session.run)


def write(rt: t3c.Runtime, prompt: Ids, tokens: int) -> Writing:
    """Half of a text without a limit, the rest within the bytes of the smallest profile."""
    smallest = rt.artifact.manifest.size_bytes(rt.chain.profiles[0].name)
    text = rt.generate(prompt, tokens=tokens, stop=spec_of(rt).stop)
    said, wrote = Continued(Tokenizer.of(rt.artifact), prompt[0].tolist()), dict[str, str]()
    for token in text:
        wrote[token.profile] = wrote.get(token.profile, "") + said.add(int(token.ids[0]))
        if token.index + 1 == tokens // 2:
            text.budget = t3c.Budget(size_mb=smallest / 1e6)  # the next token goes by it
    for profile, words in wrote.items():
        print(f"{profile} wrote {words!r}")
    for warning in token.warnings:
        print(f"warning: {warning}")
    return text


def spec_of(rt: t3c.Runtime) -> t3c.TextSpec:
    """What texts begin with and end at."""
    return rt.artifact.manifest.model.text or t3c.TextSpec()


def say(text: str) -> None:
    sys.stderr.write(f"· {text}\n")


if __name__ == "__main__":
    raise SystemExit(main())
