"""Conversions that are stopped at one operation, as by a kill, and what is left of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.bases import OtherMapping


class Killed(BaseException):
    """No handler for errors catches it."""


class Countdown:
    """Raises at one operation that changes a store, and at all later ones: nobody cleans up."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.n_operations = 0

    def operation(self) -> None:
        self.n_operations += 1
        if self.stop_at is not None and self.n_operations >= self.stop_at:
            raise Killed(self.n_operations)


class StoppingMapping(OtherMapping):
    """Counts what changes it."""

    def __init__(self, data: dict[str, bytes] | None = None) -> None:
        super().__init__()
        self.data = dict(data or {})
        self.countdown = Countdown()

    def __setitem__(self, key: str, value: bytes) -> None:
        self.countdown.operation()
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self.countdown.operation()
        super().__delitem__(key)


@contextmanager
def stopping_files(root: Path, countdown: Countdown) -> Iterator[None]:
    """Count the system calls that change files below `root`; the lock of a killed process goes."""

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **options: Any) -> Any:
            path = args[0]
            is_here = isinstance(path, str | os.PathLike) and (
                str(path).startswith(str(root)) or options.get("dir_fd") is not None
            )
            if is_here and not str(path).endswith("/lock"):
                countdown.operation()
            return call(*args, **options)

        return count

    def counted_open(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT and str(path).startswith(str(root)) and not path.endswith("/lock"):
            countdown.operation()
        return real_open(path, flags, *args, **options)

    def counted_writev(fd: int, buffers: Any) -> int:
        countdown.operation()
        return real_writev(fd, buffers)

    real_open, real_writev = os.open, os.writev
    calls: dict[str, Any] = {
        "open": counted_open,
        "writev": counted_writev,
        "sync": lambda: None,  # nothing here loses power
        **{name: counted(getattr(os, name)) for name in ("replace", "unlink", "rmdir", "mkdir")},
    }
    with mock.patch.multiple(os, create=True, **calls):
        yield


class InCaller(Executor):
    """Runs each task at once, in the thread of the caller: always in the same order."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


def files_in(root: Path) -> dict[str, bytes]:
    """All files, but those that zarr's own ``LocalStore`` had not renamed yet.

    Those of the package are removed with the directory that they are in.
    """
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and (path.suffix != ".partial" or ".zarr_shardstore" in path.parts)
    }


def empty_directories(root: Path) -> list[str]:
    """Those in which no file is, however deep."""
    return [
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_dir() and not any(p.is_file() for p in path.rglob("*"))
    ]


def write_files(root: Path, objects: dict[str, bytes]) -> None:
    for key, value in objects.items():
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value)
