"""Train the originals that are not to be had ready: `python benchmarks/base.py [NETWORK...]`.

Weights are kept in T3C_BASE, by default in the user's cache folder; a run that was stopped goes on
at its last epoch. `--test` adds the accuracy on the test part; `minilm --hf DIR` writes that
network as a Hugging Face folder, with its tokenizer and the names of its classes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lab.base import accuracy
from lab.sentences import LENGTH, load_any, sentence_accuracy, train_any
from lab.zoo.bases import NETWORKS, SENTENCES, base_folder, base_network
from lab.zoo.minilm import SentenceClassifier, sst2_ids, write_hugging_face
from t3c.errors import DataError, T3CError
from t3c.zoo.cifar10 import cifar10

CONFIGS = Path(__file__).parents[1] / "configs" / "base"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=", ".join(NETWORKS))
    parser.add_argument("--to", type=Path, default=base_folder())
    parser.add_argument("--test", action="store_true", help="test the weights at the end")
    parser.add_argument("--hf", type=Path, metavar="DIR", help="write minilm for transformers")
    given = parser.parse_args()

    def say(text: str) -> None:
        sys.stderr.write(f"· {text}\n")

    try:
        unknown = [name for name in given.networks if name not in NETWORKS]
        if unknown:
            raise DataError(f"no network {unknown[0]!r}: known are {', '.join(NETWORKS)}")
        if given.hf is not None and given.networks != ["minilm"]:
            raise DataError("--hf is for minilm alone: python benchmarks/base.py minilm --hf DIR")
        for name in given.networks or NETWORKS:
            recipe = load_any(CONFIGS / f"{name}.yaml")
            path = train_any(recipe, given.to, say=say, watch=lambda text, done, of: None)
            sys.stdout.write(f"{path}\n")
            if given.hf is not None:
                network = base_network(name, given.to)
                assert isinstance(network, SentenceClassifier)
                write_hugging_face(network, given.hf)
                sys.stdout.write(f"{given.hf}\n")
            if given.test:
                sys.stdout.write(f"{name} {tested(name, given.to)}\n")
    except T3CError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def tested(name: str, folder: Path) -> str:
    """The accuracy of a trained network on all of its test part."""
    model = base_network(name, folder)
    if name in SENTENCES:
        part = sst2_ids("test", LENGTH)
        return f"{sentence_accuracy(model, part):.4f} of the {len(part[1]):,} test sentences"
    return f"{accuracy(model, cifar10('test')):.4f} of the 10,000 test images"


if __name__ == "__main__":
    raise SystemExit(main())
