"""Base stores that fail at some of their calls, one of each kind that the package takes."""

from __future__ import annotations

import os
import uuid
from collections.abc import (
    Callable,
    Iterator,
)
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import obstore
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.memory import MemoryFileSystem
from obstore.store import MemoryStore as ObstoreMemory
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore

from tests.support.bases import OtherMapping
from tests.support.kit import BlockingFailingStore, FailingStore, Faults
from tests.support.side_files import LOCK_SUFFIX

_RETRIED = (
    *("get", "get_partial_values", "getitem", "cat_file", "pread", "read"),
    *("getsize", "info", "head", "open to read", "fstat"),
)
_OPTIONAL = ("mkdir", "stat directory", "list_dir")
"""Calls whose error the caller of a store need not see. A lock may be released without a reply,
a directory that exists needs no maker, and a new array lists only to look for older chunks."""


class CallFaults(Faults):
    """CallFaults of which it is known whether the caller of the store must see them.

    Attributes
    ----------
    has_lock_failed : bool
        True if a request that failed was about a lock file.
    """

    has_lock_failed = False

    @property
    def must_come_out(self) -> bool:
        """True if a request failed whose error the caller of the store must see."""
        silent = (*_RETRIED, *_OPTIONAL)
        return bool(self.errors) and any(
            name not in silent and not name.endswith(" lock") for name in self.failed
        )

    @property
    def is_replaced(self) -> bool:
        """True if the caller may see another error: ``isdir`` replies no where it fails."""
        return "stat directory" in self.failed

    def raised(self, error: BaseException) -> bool:
        """Return whether `error` is one of `errors`; asyncio of Python 3.11 copies some."""
        return any(error is e or repr(error) == repr(e) for e in self.errors)

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        n_failed = len(self.errors)
        try:
            return super().call(name, function)
        finally:
            self.has_lock_failed |= len(self.errors) > n_failed and name.endswith(" lock")


class FailingMapping(OtherMapping):
    """A mapping, reached from several threads."""

    def __init__(self, faults: CallFaults) -> None:
        super().__init__()
        self.faults = faults

    def __getitem__(self, key: str) -> bytes:
        value: bytes = self.faults.call("getitem", lambda: self.data[key])
        return value

    def __setitem__(self, key: str, value: bytes) -> None:
        self.faults.call("setitem", lambda: self.data.__setitem__(key, value))

    def __delitem__(self, key: str) -> None:
        self.faults.call("delitem", lambda: self.data.__delitem__(key))

    def __iter__(self) -> Any:
        return iter(self.faults.call("iter", lambda: list(self.data)))


class FailingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A blocking file system of fsspec, as most are."""

    cachable = False
    faults: CallFaults

    def cat_file(self, *args: Any, **options: Any) -> Any:
        return self.faults.call("cat_file", partial(super().cat_file, *args, **options))

    def info(self, *args: Any, **options: Any) -> Any:
        return self.faults.call("info", partial(super().info, *args, **options))

    def pipe_file(self, *args: Any, **options: Any) -> Any:
        return self.faults.call("pipe_file", partial(super().pipe_file, *args, **options))

    def rm(self, *args: Any, **options: Any) -> Any:
        return self.faults.call("rm", partial(super().rm, *args, **options))

    def find(self, *args: Any, **options: Any) -> Any:
        return self.faults.call("find", partial(super().find, *args, **options))


class _Reply:
    """obstore's reply to a read, half of which is missing."""

    def __init__(self, reply: Any) -> None:
        self.meta, self.attributes = reply.meta, reply.attributes
        self._reply = reply

    async def bytes_async(self) -> bytes:
        value: bytes = (await self._reply.bytes_async()).to_bytes()
        return value[: len(value) // 2]


@contextmanager
def failing_obstore(faults: CallFaults) -> Iterator[None]:
    """obstore's functions, for whatever store."""

    def failing(name: str, real: Any) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            n_failed = len(faults.failed)
            reply = await faults.call_async(name, lambda: real(*args, **options))
            is_short = faults.kind == "short read" and len(faults.failed) > n_failed
            return _Reply(reply) if is_short else reply

        return call

    names = ("get", "put", "head", "delete")
    calls = {f"{n}_async": failing(n, getattr(obstore, f"{n}_async")) for n in names}
    with mock.patch.multiple(obstore, **calls):
        yield


# ------------------------------------------------------------------------ files


@contextmanager
def failing_files(root: Path, faults: CallFaults) -> Iterator[None]:
    """The system calls about files below `root`, and about locks."""
    real = {name: getattr(os, name) for name in (*_BY_PATH, *_BY_NUMBER) if hasattr(os, name)}
    real["fsync"] = lambda _: None  # nothing here loses power
    paths: dict[int, str] = {}
    """Of the files that are open, if they are written."""

    def named(name: str, path: str) -> str:
        if path.endswith(LOCK_SUFFIX):
            return f"{name} lock"
        is_object = os.path.basename(path).isdigit()
        return "stat directory" if name == "stat" and not is_object else name

    def by_path(name: str) -> Any:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            path = path if isinstance(path, int) else os.fspath(path)
            if not isinstance(path, str) or not path.startswith(str(root)):
                return real[name](path, *args, **options)
            return faults.call(named(name, path), lambda: real[name](path, *args, **options))

        return call

    def open_file(path: Any, flags: int, *args: Any, **options: Any) -> int:
        path = os.fspath(path)
        number: int
        if not path.startswith(str(root)):
            number = real["open"](path, flags, *args, **options)
        elif faults.kind != "error":  # nobody would close it
            number = real["open"](path, flags, *args, **options)
            paths[number] = path if flags & os.O_CREAT else ""
        else:
            name = named("open", path) if flags & os.O_CREAT else "open to read"
            number = faults.call(name, lambda: real["open"](path, flags, *args, **options))
            paths[number] = path if flags & os.O_CREAT else ""
        return number

    def by_number(name: str) -> Any:
        def call(number: int, *args: Any) -> Any:
            if number not in paths:
                return real[name](number, *args)
            path = paths[number]
            return faults.call(named(name, path), lambda: real[name](number, *args))

        return call

    def close(number: int) -> None:
        path = paths.pop(number, "")
        try:
            if path:
                faults.call(named("close", path), lambda: None)
        finally:
            real["close"](number)  # Linux: the number is free, whatever the error

    calls: dict[str, Any] = {name: by_path(name) for name in _BY_PATH}
    calls |= {name: by_number(name) for name in _BY_NUMBER}
    calls |= {"open": open_file, "close": close}
    with mock.patch.multiple(os, **{name: calls[name] for name in real}):
        yield


_BY_PATH = ("open", "replace", "unlink", "mkdir", "stat")
_BY_NUMBER = ("pwritev", "pwrite", "ftruncate", "fsync", "pread", "read", "fstat", "close")


def open_files(root: Path) -> list[str]:
    """Files below `root` that this process has open; where that can be told."""
    directory = Path("/proc/self/fd")
    found = []
    for number in os.listdir(directory) if directory.is_dir() else []:
        try:
            path = os.readlink(directory / number)
        except OSError:  # the one of the listing
            continue
        if path.startswith(str(root)):
            found.append(path)
    return found


# ------------------------------------------------------------------- all of them


@dataclass
class Base:
    """A base store that fails, and a way to the same objects that does not."""

    failing: Any
    healthy: Any
    faults: CallFaults
    _failing: Callable[[], AbstractContextManager[Any]] = nullcontext

    def at_work(self) -> AbstractContextManager[Any]:
        """While it is open the store fails."""
        return self._failing()


def store(faults: CallFaults) -> Base:
    healthy = MemoryStore()
    return Base(FailingStore(healthy, faults), healthy, faults)


def blocking_store(faults: CallFaults) -> Base:
    healthy = MemoryStore()
    return Base(BlockingFailingStore(healthy, faults), healthy, faults)


def mapping(faults: CallFaults) -> Base:
    failing = FailingMapping(faults)
    return Base(failing, failing.data, faults)


def file_system(faults: CallFaults) -> Base:
    path = f"/test-{uuid.uuid4().hex}"
    fs = FailingFileSystem()
    fs.faults = faults

    def over(fs: Any) -> FsspecStore:
        return FsspecStore(AsyncFileSystemWrapper(fs, asynchronous=True), path=path)

    return Base(over(fs), over(fsspec.filesystem("memory")), faults)


def object_store(faults: CallFaults) -> Base:
    objects = ObjectStore(ObstoreMemory())
    return Base(objects, objects, faults, lambda: failing_obstore(faults))


def files(root: Path, faults: CallFaults) -> Base:
    return Base(LocalStore(root), LocalStore(root), faults, lambda: failing_files(root, faults))


BASES: dict[str, Callable[[CallFaults], Base]] = {
    "store": store,
    "blocking store": blocking_store,
    "mapping": mapping,
    "fsspec": file_system,
    "obstore": object_store,
}
