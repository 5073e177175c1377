"""A file layer that stops at one call, as a kill does, and a record of what a disk was told.

All that changes shards goes through `zarr_shardstore.io.file_calls`; besides, locks and
temporary files are made and removed by `os` itself. Both are caught here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from zarr_shardstore.io import commits, file_calls
from zarr_shardstore.io.shard_files import open_shards

_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial")


class Stopped(BaseException):
    """No handler for errors catches it."""


@dataclass(frozen=True)
class Call:
    """One call of the layer: of which function, for which file, and how many bytes a piece has."""

    name: str
    file: str
    pieces: tuple[int, ...] = ()

    def stops(self) -> Iterator[Stop]:
        """Where a process can stop at it, but for its number: before, after, half-way."""
        yield Stop(0, "before")
        yield Stop(0, "after")
        n = sum(self.pieces)
        ends = [sum(self.pieces[:i]) for i in range(1, len(self.pieces))]
        for n_written in sorted({1, 8, n // 2, n - 4, n - 1, *ends}):
            if 0 < n_written < n:
                yield Stop(0, n_written)


@dataclass(frozen=True)
class Stop:
    """Stop at call number `position`: before it, after it, or when so many bytes are written."""

    position: int
    how: Literal["before", "after"] | int


class FileLayer:
    """Counts calls, stops at one of them, and from then on lets nobody change anything.

    Parameters
    ----------
    root
        Below it files are caught; elsewhere nothing is changed.
    stop
        Where; ``None``: nowhere.
    """

    def __init__(self, root: Path, stop: Stop | None = None) -> None:
        self.root = str(root)
        self.stop = stop
        self.calls: list[Call] = []
        self.is_dead = False
        self._is_inside = False

    @contextmanager
    def installed(self) -> Iterator[FileLayer]:
        wrapped = {name: self._caught(name) for name in file_calls.__all__}
        system = {name: self._system_caught(name) for name in ("open", "unlink", "mkdir")}
        with mock.patch.multiple(file_calls, **wrapped), mock.patch.multiple(os, **system):
            yield self

    def _caught(self, name: str) -> Callable[..., Any]:
        call = getattr(file_calls, name)
        return lambda *args, **options: self._run(name, call, args, options)

    def _system_caught(self, name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def run(path: Any, *args: Any, **options: Any) -> Any:
            is_ours = isinstance(path, str) and path.startswith(self.root)
            is_change = name != "open" or args[0] & os.O_CREAT
            if self._is_inside or not is_ours or not is_change:
                return call(path, *args, **options)
            if self.is_dead and name == "unlink":
                return None  # whoever cleans up is not there any more
            return self._run(name, call, (path, *args), options)

        return run

    def _run(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        if self.is_dead:
            raise Stopped
        number = len(self.calls)
        self.calls.append(self._described(name, args))
        how = self.stop.how if self.stop and self.stop.position == number else None
        self._is_inside = True
        try:
            if how is None:
                return self.perform(name, call, args, options)
            self.is_dead = True
            if isinstance(how, int):
                fd, pieces, offset = args
                call(fd, [b"".join(pieces)[:how]], offset)
            elif how == "after":
                result = call(*args, **options)
                if name.startswith("open"):
                    os.close(result)
            raise Stopped(f"{how} {self.calls[-1]}")
        finally:
            self._is_inside = False

    def perform(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        return call(*args, **options)

    def _described(self, name: str, args: tuple[Any, ...]) -> Call:
        path = path_of(args[0])
        kinds = {".__journal": "journal", ".__lock": "lock", ".partial": "temporary"}
        kind = next((k for end, k in kinds.items() if path.endswith(end)), "shard")
        pieces = tuple(map(len, args[1])) if name == "write_at" else ()
        return Call(name, "directory" if os.path.isdir(path) else kind, pieces)


def path_of(file: int | str) -> str:
    """Path of a file, also if it is open."""
    return os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else file


def restart() -> None:
    """Forget what a killed process would have forgotten."""
    open_shards.reset_after_fork()
    commits._queues.clear()


def state_of(root: Path) -> dict[str, bytes]:
    """All files; temporary ones by a name that is always the same."""
    found = {}
    for directory, _, names in os.walk(root):
        for name in names:
            path = os.path.join(directory, name)
            with open(path, "rb") as file:
                key = _PARTIAL.sub(".partial", os.path.relpath(path, root))
                found[key] = file.read()
    return found
