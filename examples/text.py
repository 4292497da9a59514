"""Your text classifier as one artifact: `python examples/text.py FOLDER DATA.tsv OUT.t3c`.

FOLDER is a Hugging Face classifier with its tokenizer, or its name on the hub; DATA is a CSV, TSV
or JSONL with a column of texts and a column `label`.
"""

import sys

from transformers import AutoTokenizer

import t3c

LENGTH = 64  # tokens a text is filled up to or cut to: time grows with it
TEXT = "a film to see twice"


def main(folder: str, data: str, out: str, minutes: float = 30, length: int = LENGTH) -> None:
    made = t3c.compress(folder, data, out, minutes=minutes, length=length)
    print(made)

    rt = t3c.load(out)  # from here on torch is not needed
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer([TEXT], padding="max_length", max_length=length, return_tensors="np")
    inputs = {entry.name: encoded[entry.name] for entry in rt.inputs}
    smallest = min(v.size_bytes for v in made.result.variants if v.name.startswith("t3c-"))
    for budget in (t3c.Budget(), t3c.Budget(size_mb=smallest / 1e6), t3c.Budget(drift=0.5)):
        logits = rt(inputs, budget=budget)
        print(f"{budget}: {rt.profile} answers {logits.argmax()}")
    print(f'without Python: t3c run {out} --prompt "{TEXT}" --explain')


if __name__ == "__main__":
    main(*sys.argv[1:4])
