"""What an answer stands for, as it is shown: its remarks, guarantee and likeliest classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from t3c.engines.protocol import Array
from t3c.runtime.remarks import Remark
from t3c.spec import Certificate

SHOWN = 3  # classes


class Shown(BaseModel):
    model_config = ConfigDict(frozen=True)


class ClassShare(Shown):
    name: str = Field(serialization_alias="class")
    probability: float


class Rendered(Shown):
    """A profile, why it serves, and what to know about it: as sentences, and their codes."""

    profile: str
    reason: str
    reason_code: str
    warnings: list[str]
    warning_codes: list[str]

    @classmethod
    def of(cls, profile: str, reason: Remark, warnings: Sequence[Remark], **other: object) -> Self:
        """Render remarks; `other` are the fields of a subclass."""
        return cls.model_validate({
            "profile": profile, "reason": str(reason), "reason_code": reason.code,
            "warnings": [str(warning) for warning in warnings],
            "warning_codes": [warning.code for warning in warnings], **other,
        })  # fmt: skip


def guarantee(certificate: Certificate | None) -> str:
    """Return what is guaranteed of an answer, as one sentence without a full stop."""
    if certificate is None:
        return "not certified here: another engine, device or set of forms"
    return (
        f"within {certificate.epsilon:.4f} of the original's output, relative to its norm, for "
        f"{1 - certificate.delta:.0%} of inputs like the {certificate.samples} it was certified on"
    )


def top_classes(
    logits: Array, classes: Sequence[str] | None, most: int = SHOWN
) -> list[ClassShare]:
    """Return the likeliest of one sample's logits (classes,); none where it has no classes."""
    if classes is None or logits.ndim != 1 or len(logits) != len(classes):
        return []
    shares = np.exp(logits - logits.max())
    shares = shares / shares.sum()
    best = map(int, np.argsort(-shares)[:most])
    return [ClassShare(name=classes[i], probability=float(shares[i])) for i in best]
