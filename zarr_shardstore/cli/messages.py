"""Messages on stderr: how far a command is, and why it failed.

Exit codes:

====  ==================================================================
0     done
1     it failed, and one sentence says why; or the store is damaged
2     the call is wrong: nothing was done
130   interrupted
====  ==================================================================
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Self

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from zarr_shardstore.cli.reports import path_text, printable
from zarr_shardstore.convert.report import OnProgress, Progress
from zarr_shardstore.errors import ShardStoreError

_INTERRUPTED = 130
"""As shells have it: 128 and the number of SIGINT."""

_MAX_ERRORS = 20
"""Most damaged shards that a command names."""

_MAX_BARS = 8
"""Most arrays with a bar; finished ones make room."""

_PAUSE_S = 1.0
"""Between two lines, where there is no terminal."""


class NotPossibleError(Exception):
    """A refusal of a command; the message says why in one sentence."""


@contextmanager
def failures_as_sentences(*, debug: bool, resume: bool = False) -> Iterator[None]:
    """Turn exceptions into a sentence and an exit code; `resume` adds a hint to interrupts."""
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
        raise
    except KeyboardInterrupt:
        hint = ": run the same command again to resume" if resume else ""
        typer.echo(f"interrupted{hint}", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    except Exception as error:
        if debug:
            raise
        typer.echo(f"error: {_sentence(error)}", err=True)
        raise typer.Exit(1) from None


def _sentence(error: Exception) -> str:
    """Return the message of an error in one line, with its type if that is not ours."""
    text = printable(" ".join(str(error).split()))
    if isinstance(error, ShardStoreError | NotPossibleError):
        return text
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename!r}" if error.filename else error.strerror
    name = type(error).__name__
    return f"{name}: {text} (--debug shows where)" if text else f"{name} (--debug shows where)"


def fail_if_damaged(errors: Sequence[str]) -> None:
    """Name damaged shards, and end with status 1, if there are any."""
    for error in errors[:_MAX_ERRORS]:
        typer.echo(f"! {printable(error)}", err=True)
    if len(errors) > _MAX_ERRORS:
        typer.echo(f"! and {len(errors) - _MAX_ERRORS:,} more", err=True)
    if errors:
        raise typer.Exit(1)


class ProgressBars(Bars):
    """Bars of the arrays that are converted. Call it with each step, as a context."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rates]}", markup=False),
            TimeRemainingColumn(),
            console=console,
        )
        self._bars: dict[str, TaskID] = {}

    def __call__(self, step: Progress) -> None:
        if step.path not in self._bars:
            self._make_room()
            name = f"{path_text(step.path)} {step.action}"
            self._bars[step.path] = self.add_task(name, rates="")
        bar = self._bars[step.path]
        elapsed = next((task.elapsed for task in self.tasks if task.id == bar), None)
        rates = _rates(step, elapsed or 0.0)
        self.update(bar, total=step.n_tasks, completed=step.n_tasks_done, rates=rates)

    def _make_room(self) -> None:
        finished = {task.id for task in self.tasks if task.finished}
        ended = [path for path, bar in self._bars.items() if bar in finished]
        for path in ended[: max(0, len(self._bars) + 1 - _MAX_BARS)]:
            self.remove_task(self._bars.pop(path))


class ProgressLines:
    """Plain lines: at most one a second, and the last one. Call it with each step."""

    def __init__(
        self, write: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write, self._clock = write, clock
        self._started: dict[str, float] = {}
        self._written_at = clock()
        self._unwritten: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._unwritten is not None:
            self._write(self._unwritten)

    def __call__(self, step: Progress) -> None:
        now = self._clock()
        rates = _rates(step, now - self._started.setdefault(step.path, now))
        self._unwritten = (
            f"{path_text(step.path)} {step.action}: {step.n_tasks_done:,} of {step.n_tasks:,} "
            f"tasks, {step.n_chunks:,} chunks, {decimal(step.n_bytes)}{rates and f', {rates}'}"
        )
        if now - self._written_at >= _PAUSE_S:
            self._write(self._unwritten)
            self._unwritten, self._written_at = None, now


def progress_on_stderr() -> AbstractContextManager[OnProgress]:
    """Return bars if stderr is a terminal, else lines."""
    console = Console(stderr=True)
    if console.is_terminal:
        return ProgressBars(console)
    return ProgressLines(lambda line: typer.echo(line, err=True))


def _rates(step: Progress, elapsed: float) -> str:
    if elapsed <= 0:
        return ""
    return f"{step.n_chunks / elapsed:,.0f} chunks/s, {decimal(int(step.n_bytes / elapsed))}/s"
