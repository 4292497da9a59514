"""An output with what it stands for."""

from __future__ import annotations

from typing import NamedTuple

from t3c.engines.protocol import Array
from t3c.runtime.monitor import Shift
from t3c.runtime.remarks import Remark
from t3c.spec import Certificate


class Answer(NamedTuple):
    """An output with its profile, its certificate, and remarks, whose `str` is a sentence each.

    `outputs` are all the model has, `output` is the first; `flagged` says that activations have
    moved and nothing safer fitted the request.
    """

    output: Array
    profile: str
    certificate: Certificate | None
    reason: Remark
    warnings: tuple[Remark, ...]
    shift: Shift | None = None
    flagged: bool = False
    outputs: tuple[Array, ...] = ()
