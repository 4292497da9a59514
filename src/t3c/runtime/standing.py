"""What an answer stands for, in words: its guarantee and its likeliest classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from t3c.engines.protocol import Array
from t3c.spec import Certificate

SHOWN = 3  # classes


def guarantee(certificate: Certificate | None) -> str:
    """What is guaranteed of an answer, as one sentence without a full stop."""
    if certificate is None:
        return "not certified here: another engine, device or set of forms"
    return (
        f"within {certificate.epsilon:.4f} of the original's output, relative to its norm, for "
        f"{1 - certificate.delta:.0%} of inputs like the {certificate.samples} it was certified on"
    )


def top_classes(
    logits: Array, classes: Sequence[str] | None, most: int = SHOWN
) -> list[tuple[str, float]]:
    """The likeliest classes of one sample's logits (classes,); none where it has no classes."""
    if classes is None or logits.ndim != 1 or len(logits) != len(classes):
        return []
    shares = np.exp(logits - logits.max())
    shares = shares / shares.sum()
    return [(classes[i], float(shares[i])) for i in map(int, np.argsort(-shares)[:most])]
