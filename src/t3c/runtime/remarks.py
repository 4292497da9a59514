"""All that a runtime says of its choices, as values: a code with its fields, and the sentence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class Coded(StrEnum):
    """A value that a caller branches on, and the sentence it is rendered as."""

    def __new__(cls, value: str, text: str) -> Self:
        member = str.__new__(cls, value)
        member._value_, member.text = value, text
        return member

    text: str


class Code(Coded):
    """What a remark says."""

    # Reasons: why a profile serves.
    # fmt: off
    LEAST_DRIFT = "least_drift", "the least drift of {0.count} profiles within the limits"
    PROPOSED = "proposed", "the controller's proposal, which is within the limits"
    ABOVE_PROPOSED = "above_proposed", "the next above the controller's, which is within the limits"
    NOTHING_FITS = "nothing_fits", "nothing meets the limits"
    UNLIMITED = "unlimited", "no limit was named: the largest profile"
    FASTEST_WITHIN_CAP = "fastest_within_cap", "the fastest with drift within {0.limit:g}"
    FASTEST_WITHIN_DROP = "fastest_within_drop", (
        "the fastest with a measured loss within {0.limit:g}"
    )
    FASTEST_WITHIN_CAPS = "fastest_within_caps", (
        "the fastest with drift within {0.value:g} and a measured loss within {0.limit:g}"
    )
    NOTHING_WITHIN_CAP = "nothing_within_cap", "nothing keeps {0.both}"
    NAMED = "named", "asked for by name"
    HELD_BACK = "held_back", "held back from {0.profile}: {0.cause}"
    SAFER = "safer", "activations have moved: safer than {0.profile}"
    STAND_IN = "stand_in", "in place of {0.profile}, which {0.engine} cannot run"
    # Warnings: what the caller should know.
    OVER_LIMITS = "over_limits", "no profile meets the limits: {0.profile}, the smallest, serves"
    NOT_MEASURED = "not_measured", (
        "no profile meets the limits ({0.both} not measured on this device): {0.profile}, the "
        "smallest, serves"
    )
    CAP_UNCONFIRMED = "cap_unconfirmed", (
        "{0.profile} is not certified here: the drift cap cannot be confirmed"
    )
    OVER_CAP = "over_cap", "{0.profile} may drift up to {0.value:.3g}, over the cap {0.limit:g}"
    DROP_UNCONFIRMED = "drop_unconfirmed", (
        "the loss of {0.profile} was not measured here: max_drop cannot be confirmed"
    )
    OVER_DROP = "over_drop", (
        "{0.profile} lost {0.value:.3g} where it was measured, over max_drop {0.limit:g}"
    )
    UNTRUSTED = "untrusted", (
        "activations have moved, and no larger profile than {0.profile} fits the request: its "
        "certificate may not hold"
    )
    CANNOT_RUN = "cannot_run", "{0.profile} cannot run on {0.engine}: {0.cause}"
    LARGER_SERVES = "larger_serves", (
        "{0.profile} cannot run on {0.engine}: {0.cause}; {0.other} is larger, and may be over "
        "the limits"
    )
    NOT_CERTIFIED = "not_certified", "{0.profile} is not certified on this engine and device"
    SHIFTED = "shifted", "{0.cause}"
    SEVERAL_READERS = "several_readers", (
        "read by {0.listed}: certificates are of texts that one reads"
    )
    PROMPT_CUT = "prompt_cut", "the prompt of {0.count} tokens was cut to {0.limit:g}"
    PADDING_READ = "padding_read", (
        "{0.other} takes no {0.listed}: {0.count} tokens of padding count as text"
    )
    PARAMETER_IGNORED = "parameter_ignored", "the parameter {0.listed} changes nothing here"
    NOT_FOLLOWED = "not_followed", "{0.other} does not follow yet"
    # Where latencies are from, if not from this device.
    OTHER_TABLE = "other_table", "latencies are from {0.cause}"
    NO_TABLE = "no_table", "this artifact was never calibrated: latencies are not known"
    TRANSFERRED_TABLE = "transferred_table", (
        "this device was not calibrated: latencies are from {0.cause}"
    )
    DISTURBED = "disturbed", (
        "what was measured here was disturbed ({0.cause}): run t3c calibrate {0.other} when the "
        "machine is quiet"
    )
    # Refusals: why a profile does not run here.
    DIFFERS = "differs", "{0.cause}"
    NO_FORM = "no_form", "{0.engine} has no {0.listed} form"
    ENGINE_FAILED = "engine_failed", "{0.cause}"
    # Explanations: why a profile was or was not chosen.
    CHOSEN = "chosen", "chosen"
    TOO_SLOW = "too_slow", (
        "latency {0.value:.4g} ms ({0.listed} and {0.guard:.1%} guard) over {0.limit:.4g}"
    )
    OVER_LIMIT = "over_limit", "{0.listed} {0.value:.4g} {0.unit} over {0.limit:.4g}"
    UNKNOWN = "unknown", "its {0.listed} is not known here"
    LARGER_DRIFTS_LESS = "larger_drifts_less", (
        "within the limits, but {0.other} is larger and drifts less"
    )
    CONTROLLER_CONTENT = "controller_content", (
        "within the limits, but the controller asks for no more than {0.other}"
    )
    OTHER_PREFERRED = "other_preferred", "{0.other} is preferred"
    REFUSED = "refused", "does not run here: {0.cause}"
    # fmt: on


@dataclass(frozen=True, repr=False)
class Remark:
    """A reason, a warning or a refusal; `str` renders the sentence, of the fields it names.

    `profile` is the one that it is about, `other` what stands in its place. `causes` are what is
    behind it: remarks, tiles, or the words of an engine, a table or a signal.

    >>> str(Remark(Code.OVER_CAP, "tiny", value=0.4, limit=0.3))
    'tiny may drift up to 0.4, over the cap 0.3'
    """

    code: Code
    profile: str = ""
    other: str = ""
    engine: str = ""
    names: tuple[str, ...] = ()
    count: int = 0
    value: float = 0.0
    limit: float = 0.0
    guard: float = 0.0
    unit: str = ""
    causes: tuple[object, ...] = ()

    def __str__(self) -> str:
        return self.code.text.format(self)

    def __repr__(self) -> str:
        return f"<{self.code}: {self}>"

    @property
    def cause(self) -> str:
        return "; ".join(map(str, self.causes))

    @property
    def listed(self) -> str:
        return ", ".join(self.names)

    @property
    def both(self) -> str:
        return " and ".join(self.names)
