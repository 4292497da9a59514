"""Your image classifier as one artifact: `python examples/vision.py FOLDER PICTURES OUT.t3c`.

FOLDER is a Hugging Face image classifier, or its name on the hub; PICTURES has one folder a class,
or is flat and without labels.
"""

import sys

import numpy as np
import torch
from transformers import AutoModelForImageClassification

import t3c


def main(folder: str, pictures: str, out: str, minutes: float = 30) -> None:
    made = t3c.compress(folder, pictures, out, minutes=minutes)
    print(made)

    rt = t3c.load(out)  # from here on torch is not needed
    shape = [size if isinstance(size, int) else 1 for size in rt.inputs[0].shape]
    image = torch.randn(shape)  # yours: as the folder's preprocessor makes it
    fastest = min(v.latency_ms.p50 for v in made.result.variants if v.name.startswith("t3c-"))
    logits = rt(image.numpy(), budget=t3c.Budget(latency_ms=1.2 * fastest))
    print(f"within {1.2 * fastest:.2f} ms {rt.profile} answers {logits.argmax()}")

    original = AutoModelForImageClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        wanted = original(pixel_values=image).logits.numpy()
    drift = np.linalg.norm(logits - wanted) / np.linalg.norm(wanted)
    print(f"it is {drift:.3f} off the original, and promises {rt.certificate.epsilon:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:4])
