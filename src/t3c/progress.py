"""Progress of long work on stderr: the stage, how far it is, and the time it has left."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_SECONDS = 20.0  # between lines where stderr is no terminal


class Show:
    """Tells of stages and of steps in them; a terminal has a bar, a log a line now and then."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._started = self._told = time.monotonic()
        self._piece = _Piece(self._started)

    def start(self) -> None:
        """Draw the bar, where there is a terminal to draw it on."""
        if not (self.enabled and sys.stderr.isatty()):
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (
            TextColumn("  {task.description}"),
            BarColumn(),
            TextColumn("{task.fields[left]}"),
        )
        console = Console(stderr=True, markup=False, highlight=False)
        self._bar = Progress(*columns, console=console, transient=True)
        self._bar.start()

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, text: str) -> None:
        """Print one line with the minutes since the start."""
        if not self.enabled:
            return
        line = f"{clock(time.monotonic() - self._started)}  {text}"
        if self._bar is not None:
            self._bar.console.print(line, soft_wrap=True)
        else:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        self._told = time.monotonic()

    def watch(self, what: str, done: int, total: int) -> None:
        """Move the bar, or print a line if none was for a while."""
        if not self.enabled:
            return
        seconds = self._piece.left(done, total)
        left = "" if seconds is None else f"{clock(seconds).strip()} left"
        if self._bar is None:
            if time.monotonic() - self._told >= LINE_SECONDS:
                self.say(f"  {what}, {done} of {total}" + (f", {left}" if left else ""))
            return
        if self._task is None:
            self._task = self._bar.add_task(what, total=total, left=left)
        self._bar.update(self._task, description=what, completed=done, total=total, left=left)


class _Piece:
    """A piece of work of so many steps, from when it was first heard of."""

    def __init__(self, now: float) -> None:
        self._began, self._first, self._done, self._total = now, 0, 0, 0

    def left(self, done: int, total: int) -> float | None:
        """Return the seconds left at the pace so far; None before the first step is done."""
        now = time.monotonic()
        if total != self._total or done < self._done:  # another piece
            self._began, self._first, self._total = now, done, total
        self._done = done
        if done == self._first:
            return None
        return (now - self._began) * (total - done) / (done - self._first)


_open: ContextVar[Show | None] = ContextVar("_open", default=None)


@contextmanager
def showing(enabled: bool = True) -> Iterator[Show]:
    """Yield what to tell progress to: what is open already, as stderr is one, or a new one.

    Where it is not enabled nothing is told, nor by what is called within.
    """
    outer = _open.get()
    if outer is not None and enabled:
        yield outer
        return
    show = Show(enabled)
    token = _open.set(show)
    show.start()
    try:
        yield show
    finally:
        show.stop()
        _open.reset(token)


def clock(seconds: float) -> str:
    """Return minutes and seconds: `  2:05`."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes:3d}:{rest:02d}"
