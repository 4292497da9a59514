"""Your language model as one artifact: `python examples/decoder.py FOLDER TEXT.txt OUT.t3c`.

FOLDER is a Hugging Face decoder (Llama, GPT-2 and the like) with its tokenizer, or its name on the
hub; TEXT is running text, in which `<|endoftext|>` ends one text.
"""

import sys

from transformers import AutoTokenizer

import t3c

LENGTH = 128  # tokens the model reads at once in training and in its certificate


def main(
    folder: str, text: str, out: str, minutes: float = 30, length: int = LENGTH,
    prompt: str = "Once upon a time",
) -> None:  # fmt: skip
    made = t3c.compress(folder, text, out, minutes=minutes, length=length)
    print(made)

    rt = t3c.load(out)  # from here on torch is not needed
    words = AutoTokenizer.from_pretrained(folder)
    ids = [words.bos_token_id, *words(prompt, add_special_tokens=False)["input_ids"]]
    smallest = min(v.size_bytes for v in made.result.variants if v.name.startswith("t3c-"))
    writing = rt.generate([ids], tokens=40, stop=[words.eos_token_id])
    for token in writing:
        print(words.decode(token.ids), token.profile)
        if token.index == 19:  # the other half within the bytes of the smallest profile
            writing.budget = t3c.Budget(size_mb=smallest / 1e6)
    print(words.decode(writing.ids[0]))


if __name__ == "__main__":
    main(*sys.argv[1:4])
