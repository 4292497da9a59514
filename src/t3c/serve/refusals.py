"""What a server refuses: why it does not answer now, and errors that only HTTP has."""

from __future__ import annotations

from dataclasses import dataclass

from t3c.errors import DataError
from t3c.runtime.remarks import Coded


class Refused(Coded):
    """Why a request is not answered now."""

    # fmt: off
    RATE = "rate", "over {0.most:g} requests a second"
    BODIES = "bodies", "over {0.most:.0f} bytes of bodies are being read and answered"
    QUEUE_FULL = "queue_full", "{0.most:.0f} requests are waiting, the most there may be"
    TAKES_LONGER = "takes_longer", (
        "cannot be answered within {0.promised_ms:.3g} ms: {0.profile} takes {0.takes_ms:.3g} ms"
    )
    BEHIND_OTHERS = "behind_others", (
        "cannot be answered within {0.promised_ms:.3g} ms: {0.takes_ms:.3g} ms of {0.profile} "
        "behind {0.wait_ms:.3g} ms of others"
    )
    LANES_BUSY = "lanes_busy", (
        "cannot be answered within {0.promised_ms:.3g} ms: every lane was busy until then"
    )
    WAITED = "waited", (
        "cannot be answered within {0.promised_ms:.3g} ms: waited {0.wait_ms:.3g} ms, {0.profile} "
        "takes longer"
    )
    NOT_LOADED = "not_loaded", "the artifact is not loaded yet"
    STOPPING = "stopping", "the server is stopping"
    LANE_ENDED = "lane_ended", "a lane has ended"
    # fmt: on


@dataclass(frozen=True)
class Refusal:
    """Why a request is not answered now; `str` renders the sentence, of the fields it names.

    `most` is the limit that was reached, `promised_ms` what the request may take, `profile` the
    smallest that may serve it.
    """

    code: Refused
    most: float = 0.0
    promised_ms: float = 0.0
    profile: str = ""
    takes_ms: float = 0.0
    wait_ms: float = 0.0

    def __str__(self) -> str:
        return self.code.text.format(self)


class TooLargeError(DataError):
    """A body over the limit."""


class SlowError(DataError):
    """A body that does not come."""


class NotServedError(DataError):
    """A model, version, replica or file that is not served here."""
