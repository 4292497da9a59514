"""Keep what a long measurement has done, so that one that was stopped resumes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from t3c.files import write_atomic, writing


class Journal:
    """Results by key, each a line of JSON that is on disk when `put` returns.

    A journal that is about something else, or that was cut off within a line, counts as far as it
    is whole and right. Without a path it is kept in memory alone.
    """

    def __init__(self, path: Path | None, about: dict[str, Any]) -> None:
        self.path = path
        self.about = json.loads(json.dumps(about))
        self.results: dict[str, Any] = {}
        if path is not None:
            self.results = self._read(path)
            write_atomic(path, "".join(map(_line, [self.about, *self.results.items()])).encode())

    @property
    def resumed(self) -> int:
        """How many results it holds."""
        return len(self.results)

    def read(self, key: str, kind: Any) -> Any | None:
        """A result of a kind; None where there is none, or none of that kind."""
        if key not in self.results:
            return None
        try:
            return TypeAdapter(kind).validate_python(self.results[key])
        except ValidationError:
            return None

    def put(self, key: str, value: Any) -> None:
        """Keep a result, as plain JSON."""
        self.results[key] = json.loads(json.dumps(value))
        if self.path is not None:
            with writing(self.path), self.path.open("a") as file:
                file.write(_line([key, value]))
                file.flush()
                os.fsync(file.fileno())

    def finish(self) -> None:
        """Forget everything: the work is done and stored elsewhere."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _read(self, path: Path) -> dict[str, Any]:
        if path.is_symlink() or not path.is_file():
            return {}
        head, *lines = path.read_bytes().splitlines() or [b""]
        if _parsed(head) != self.about:
            return {}
        results: dict[str, Any] = {}
        for line in lines:
            pair = _parsed(line)
            if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
                break
            results[pair[0]] = pair[1]
        return results


def _line(value: Any) -> str:
    return json.dumps(value) + "\n"


def _parsed(line: bytes) -> Any | None:
    try:
        return json.loads(line)
    except ValueError:
        return None
