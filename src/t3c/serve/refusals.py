"""What is refused over HTTP for reasons that only HTTP has."""

from t3c.errors import DataError


class TooLargeError(DataError):
    """A body over the limit."""


class SlowError(DataError):
    """A body that does not come."""


class NotServedError(DataError):
    """A model, version, replica or file that is not served here."""
