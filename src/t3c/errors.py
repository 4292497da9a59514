"""Everything T3C raises on purpose.

T3CError
├── SpecError            a value that cannot be: a menu that is no chain, a rank of 0
│   └── BudgetError      a budget that cannot be: latency_ms=-1
├── ConvertError         a model or a layer that cannot be made elastic
├── DataError            data of the wrong shape, empty, not finite
├── TrainError           training that cannot go on
├── ArtifactError        an artifact that cannot be read or written
│   ├── CorruptError     a hash, a length or a structure is wrong
│   └── VersionError     a schema this version does not read
├── EngineError          an engine that is unknown, missing or cannot run a graph
├── RefusedError         a request that a server does not answer: too much is asked of it now
│   └── UnavailableError it answers nothing now: it starts, or stops
├── DisturbedError       the machine is too busy to be measured
└── MissingExtraError    an optional dependency is not installed
"""


class T3CError(Exception):
    """The root: `except t3c.T3CError` catches all that T3C raises on purpose."""


class SpecError(T3CError, ValueError):
    """A value that cannot be."""


class BudgetError(SpecError):
    """A budget that cannot be."""


class ConvertError(T3CError):
    """A model or a layer that cannot be made elastic."""


class DataError(T3CError, ValueError):
    """Data of the wrong shape, empty or not finite."""


class TrainError(T3CError):
    """Training that cannot go on."""


class ArtifactError(T3CError):
    """An artifact that cannot be read or written."""


class CorruptError(ArtifactError):
    """A hash, a length or a structure of an artifact is wrong."""


class VersionError(ArtifactError):
    """An artifact's schema is not one this version reads."""


class EngineError(T3CError):
    """An engine that is unknown, missing or cannot run a graph."""


class RefusedError(T3CError):
    """A request that a server does not answer, why, and after how many seconds it may."""

    def __init__(self, reason: object, retry_seconds: float = 1.0) -> None:
        super().__init__(reason)
        self.reason, self.retry_seconds = reason, retry_seconds


class UnavailableError(RefusedError):
    """A server that answers nothing now."""


class DisturbedError(T3CError):
    """The machine is too busy to be measured."""


class MissingExtraError(T3CError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: pip install 't3c[{extra}]'")
