"""A file layer that stops at one call, as a kill does, and a record of what a disk was told.

All that changes shards goes through the calls of `tests.support.kit.system_calls`; besides,
locks and temporary files are made and removed by `os` itself. Both are caught here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from tests.support.kit import system_calls
from tests.support.side_files import LOCK_SUFFIX

_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial")


class Stopped(BaseException):
    """No handler for errors catches it."""


@dataclass(frozen=True)
class Call:
    """One call of the layer: of which function, for which file, and how many bytes a piece has."""

    name: str
    file: str
    pieces: tuple[int, ...] = ()
    lengthens: bool = False
    """Whether bytes are written behind the end of the file."""

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
        system: dict[str, Any] = {
            name: self._system_caught(name) for name in ("open", "unlink", "mkdir")
        }
        with system_calls(self._caught), mock.patch.multiple(os, **system):
            yield self

    def _caught(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
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
                self.perform(name, call, (fd, [b"".join(pieces)[:how]], offset), {})
            elif how == "after":
                result = self.perform(name, call, args, options)
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
        is_longer = bool(pieces) and args[2] + sum(pieces) > os.fstat(args[0]).st_size
        return Call(name, "directory" if os.path.isdir(path) else kind, pieces, is_longer)


# ------------------------------------------------------------------------ loss of power


@dataclass(eq=False)
class Op:
    """Something that a file or a directory was told, and that may be lost with the power."""

    node: int
    apply: Callable[[Any, tuple[float, float]], Any]
    """Takes a content and which part of the bytes survives (0 to 1); returns the new content."""


@dataclass
class Disk:
    """What a disk has for certain, and what it was told since; by number of inode."""

    certain: dict[int, Any]
    pending: list[Op] = field(default_factory=list)

    def sync(self, node: int) -> None:
        for op in self.pending:
            if op.node == node:
                self.certain[node] = op.apply(self.certain[node], (0, 1))
        self.pending = [op for op in self.pending if op.node != node]

    def after_loss(
        self, top: int, survives: Callable[[int], tuple[float, float] | None]
    ) -> dict[str, bytes]:
        """All files after the power was lost; `survives` says what of each pending op is there."""
        contents = dict(self.certain)
        for number, op in enumerate(self.pending):
            part = survives(number)
            if part is not None:
                contents[op.node] = op.apply(contents[op.node], part)
        found: dict[str, bytes] = {}
        self._collect(top, "", contents, found)
        return found

    def _collect(
        self, node: int, prefix: str, contents: dict[int, Any], found: dict[str, bytes]
    ) -> None:
        for name, child in contents[node].items():
            content = contents[child]
            if isinstance(content, dict):
                self._collect(child, f"{prefix}{name}/", contents, found)
            else:
                found[_PARTIAL.sub(f".{0:032x}.partial", prefix + name)] = content


class RecordingLayer(FileLayer):
    """Records what the disk is told; nothing waits for it."""

    def __init__(self, root: Path, stop: Stop | None = None) -> None:
        super().__init__(root, stop)
        self.events: list[tuple[str, Any]] = []
        self._kept: list[int] = []
        self.top = os.stat(root).st_ino
        self._start = Disk({})
        self._add_tree(str(root))

    def _add_tree(self, directory: str) -> None:
        names: dict[str, int] = {}
        for entry in os.scandir(directory):
            names[entry.name] = entry.inode()
            if entry.is_dir():
                self._add_tree(entry.path)
            else:
                self._start.certain[entry.inode()] = Path(entry.path).read_bytes()
        self._start.certain[os.stat(directory).st_ino] = names

    def revive(self) -> None:
        """Another process goes on."""
        self.is_dead, self.stop = False, None

    def close(self) -> None:
        for fd in self._kept:
            os.close(fd)

    def disk_after(self, n_events: int) -> Disk:
        """The disk when it was told so much."""
        disk = Disk(dict(self._start.certain))
        for kind, argument in self.events[:n_events]:
            match kind:
                case "new":
                    node, content = argument
                    disk.certain[node] = content
                case "op":
                    disk.pending.append(argument)
                case "sync":
                    disk.sync(argument)
        return disk

    def perform(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        if name == "sync":
            self.events.append(("sync", os.fstat(args[0]).st_ino))
            return None
        is_new = name in ("open", "open_new", "open_to_change") and not os.path.exists(args[0])
        result = call(*args, **options)
        match name:
            case "open" | "open_new" | "open_to_change" if is_new:
                if not args[0].endswith(LOCK_SUFFIX):
                    self._kept.append(os.dup(result))  # so that its number stays its own
                self.events.append(("new", (os.fstat(result).st_ino, b"")))
                self._link(args[0], os.fstat(result).st_ino)
            case "mkdir":
                node = os.stat(args[0]).st_ino
                self.events.append(("new", (node, {})))
                self._link(args[0], node)
            case "write_at":
                self._op(os.fstat(args[0]).st_ino, _written(args[2], b"".join(args[1])))
            case "truncate":
                self._op(os.fstat(args[0]).st_ino, _truncated(args[1]))
            case "replace":
                self._link(args[1], os.stat(args[1]).st_ino, instead_of=os.path.basename(args[0]))
            case "unlink":
                self._unlink(args[0])
        return result

    def _op(self, node: int, apply: Callable[[Any, tuple[float, float]], Any]) -> None:
        self.events.append(("op", Op(node, apply)))

    def _link(self, path: str, node: int, instead_of: str | None = None) -> None:
        directory, name = os.path.split(path)

        def apply(names: Any, _: Any) -> Any:
            return {n: i for n, i in names.items() if n != instead_of} | {name: node}

        self._op(os.stat(directory).st_ino, apply)

    def _unlink(self, path: str) -> None:
        directory, name = os.path.split(path)
        self._op(
            os.stat(directory).st_ino,
            lambda names, _: {n: i for n, i in names.items() if n != name},
        )


def _written(offset: int, data: bytes) -> Callable[[Any, tuple[float, float]], Any]:
    def apply(content: Any, part: tuple[float, float]) -> Any:
        start, stop = (round(share * len(data)) for share in part)
        if start >= stop:
            return content
        content = content.ljust(offset + stop, b"\0")
        return content[: offset + start] + data[start:stop] + content[offset + stop :]

    return apply


def _truncated(nbytes: int) -> Callable[[Any, tuple[float, float]], Any]:
    return lambda content, _: content[:nbytes].ljust(nbytes, b"\0")


# ------------------------------------------------------------------------------- others


def path_of(file: int | str) -> str:
    """Path of a file, also if it is open."""
    return os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else file


def state_of(root: Path) -> dict[str, bytes]:
    """All files; temporary ones by a name that is always the same."""
    found = {}
    for directory, _, names in os.walk(root):
        for name in names:
            path = os.path.join(directory, name)
            with open(path, "rb") as file:
                key = _PARTIAL.sub(f".{0:032x}.partial", os.path.relpath(path, root))
                found[key] = file.read()
    return found


def write_state(root: Path, files: dict[str, bytes]) -> None:
    """Make a directory with these files."""
    for key, value in files.items():
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value)
