"""Progress of long work on stderr: the stage, how far it is, and what is left of the plan."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

LINE_SECONDS = 20.0  # between lines where stderr is no terminal


class Show:
    """Tells of stages and of steps in them; a terminal has a bar, a log a line now and then."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.console = Console(stderr=True, markup=False, highlight=False)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._started = time.monotonic()
        self._told = self._started

    def __enter__(self) -> Show:
        if self.enabled and self.console.is_terminal:
            columns = (TextColumn("  {task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print one line with the minutes since the start."""
        if not self.enabled:
            return
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        line = f"{minutes:3d}:{seconds:02d}  {text}"
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
        if self._bar is None:
            if time.monotonic() - self._told >= LINE_SECONDS:
                self.say(f"  {what}, {done} of {total}")
            return
        if self._task is None:
            self._task = self._bar.add_task(what, total=total)
        self._bar.update(self._task, description=what, completed=done, total=total)
