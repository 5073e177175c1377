"""How far a conversion is: bars on a terminal, else a line now and then, on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.text import Text

from zarr_shardstore.cli.printing import name_of, printable
from zarr_shardstore.convert.report import Progress

_MAX_BARS = 8
"""Arrays that are shown at once; those that ended first make room."""

_PAUSE_S = 1.0
"""Between two lines, where there is no terminal."""


class _Rates(ProgressColumn):
    """Chunks and bytes a second, since the first task of the array."""

    def render(self, task: Task) -> Text:
        elapsed = task.finished_time if task.finished else task.elapsed
        return Text(_rates(task.fields["n_chunks"], task.fields["n_bytes"], elapsed or 0.0))


class ProgressBars:
    """A bar for each array that is worked on. Call it with each step; used as a context."""

    def __init__(self, console: Console) -> None:
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            _Rates(),
            TimeRemainingColumn(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._bars.stop()

    def __call__(self, step: Progress) -> None:
        if step.path not in self._tasks:
            self._make_room()
            self._tasks[step.path] = self._bars.add_task(
                printable(f"{name_of(step.path)} {step.action}"), n_chunks=0, n_bytes=0
            )
        self._bars.update(
            self._tasks[step.path],
            total=step.n_tasks,
            completed=step.n_tasks_done,
            n_chunks=step.n_chunks,
            n_bytes=step.n_bytes,
        )

    def _make_room(self) -> None:
        finished = {task.id for task in self._bars.tasks if task.finished}
        ended = [path for path, task_id in self._tasks.items() if task_id in finished]
        for path in ended[: max(0, len(self._tasks) + 1 - _MAX_BARS)]:
            self._bars.remove_task(self._tasks.pop(path))


class ProgressLines:
    """Plain lines: at most one a second, and the last one.

    Parameters
    ----------
    write
        Takes each line.
    clock
        Tells seconds.
    """

    def __init__(
        self, write: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write, self._clock = write, clock
        self._started: dict[str, float] = {}
        self._written_at: float | None = None
        self._held: str | None = None

    def __enter__(self) -> Self:
        self._written_at = self._clock()
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._held is not None:
            self._write(self._held)
            self._held = None

    def __call__(self, step: Progress) -> None:
        now = self._clock()
        elapsed = now - self._started.setdefault(step.path, now)
        self._held = printable(
            f"{name_of(step.path)} {step.action}: {step.n_tasks_done:,} of {step.n_tasks:,} tasks, "
            f"{step.n_chunks:,} chunks, {decimal(step.n_bytes)}"
        )
        if rates := _rates(step.n_chunks, step.n_bytes, elapsed):
            self._held += f", {rates}"
        if step.n_tasks_done >= step.n_tasks:
            self._started.pop(step.path, None)
        if self._written_at is None or now - self._written_at >= _PAUSE_S:
            self._write(self._held)
            self._held, self._written_at = None, now


def progress_on(console: Console) -> ProgressBars | ProgressLines:
    """Bars if the console is a terminal, lines if not."""
    if console.is_terminal:
        return ProgressBars(console)
    return ProgressLines(lambda line: console.print(line, markup=False, soft_wrap=True))


def _rates(n_chunks: int, n_bytes: int, elapsed: float) -> str:
    if elapsed <= 0:
        return ""
    return f"{n_chunks / elapsed:,.0f} chunks/s, {decimal(int(n_bytes / elapsed))}/s"
