"""Base stores that fail at some of their calls, one of each kind that the package takes."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
import uuid
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
)
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias
from unittest import mock

import fsspec
import obstore
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.memory import MemoryFileSystem
from obstore.store import MemoryStore as ObstoreMemory
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype, cpu, default_buffer_prototype
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore

from tests.support.bases import OtherMapping
from zarr_shardstore.io.local.locks import LOCK_SUFFIX

Keys: TypeAlias = list[str]
Buffers: TypeAlias = list[Buffer | None]
Kind: TypeAlias = Literal["error", "lost reply", "short read", "slow"]

SLOW_S = 0.001

_READS = ("get", "get_partial_values", "getitem", "cat_file", "pread", "read")
_MAY_BE_ASKED_AGAIN = (*_READS, "getsize", "info", "head", "open to read", "fstat")
_WITHOUT_EFFECT = (*_MAY_BE_ASKED_AGAIN, "exists", "stat", "list_prefix", "iter", "find")
_NOT_NEEDED = ("mkdir", "stat directory", "list_dir")
"""Calls whose error the caller need not see. A read may be tried in another way; a lock may be
given up without a sound, and batches try again to get it; if a directory is there nobody asks who
made it; and new arrays look around, where a store can list, whether they have chunks already."""


class Faults:
    """Counts the calls of one base store, and makes some fail.

    Parameters
    ----------
    kind
        ``"error"``: without effect. ``"lost reply"``: the call has its effect, and then an error;
        only calls that have one are counted. Every second one of both is a time-out. ``"short
        read"``: half of the bytes asked for; only reads are counted. ``"slow"``: the right reply,
        late.
    at
        Numbers of the calls, from 0 on.
    """

    def __init__(self, kind: Kind = "error", at: Collection[int] = ()) -> None:
        self.kind = kind
        self.at = at
        self.n_calls = 0
        self.failed: list[str] = []
        self.has_lock_failed = False
        self.errors: list[Exception] = []
        self._is_on = threading.local()
        self._lock = threading.Lock()

    @property
    def must_come_out(self) -> bool:
        """Whether a call failed whose error somebody must see."""
        silent = (*_MAY_BE_ASKED_AGAIN, *_NOT_NEEDED)
        return bool(self.errors) and any(
            name not in silent and not name.endswith(" lock") for name in self.failed
        )

    @property
    def is_replaced(self) -> bool:
        """Whether the caller may see another error: who asks if a directory is there gets no."""
        return "stat directory" in self.failed

    def raised(self, error: BaseException) -> bool:
        """Whether it is one of the errors since `forget`; asyncio of Python 3.11 copies some."""
        return any(error is e or repr(error) == repr(e) for e in self.errors)

    def forget(self) -> None:
        self.failed.clear()
        self.errors.clear()

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        """Make one call. Those that it makes itself are not counted."""
        if getattr(self._is_on, "inside", False):
            return function()
        self._is_on.inside = True
        try:
            number = self._count(name)
            if number is None:
                return function()
            if self.kind == "slow" or number % 2:
                time.sleep(SLOW_S)
            if self.kind == "error":
                raise self._error(name, number)
            return self._after(name, number, function())
        finally:
            self._is_on.inside = False

    async def call_async(self, name: str, function: Callable[[], Awaitable[Any]]) -> Any:
        number = self._count(name)
        if number is None:
            return await function()
        if self.kind == "slow" or number % 2:
            await asyncio.sleep(SLOW_S)
        if self.kind == "error":
            raise self._error(name, number)
        return self._after(name, number, await function())

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Calls of this thread that are not counted."""
        self._is_on.inside = True
        try:
            yield
        finally:
            self._is_on.inside = False

    def _count(self, name: str) -> int | None:
        """The number of a call that shall fail."""
        with self._lock:
            if self.kind == "short read" and name not in _READS:
                return None
            if self.kind == "lost reply" and name in _WITHOUT_EFFECT:
                return None
            self.n_calls += 1
            number = self.n_calls - 1
            return number if number in self.at else None

    def _error(self, name: str, number: int) -> Exception:
        code = errno.ENOSPC if name in ("open", "pwrite", "pwritev", "set") else errno.EIO
        error: Exception = OSError(code, f"{name} failed, call {number}")
        if number % 2:
            error = TimeoutError(f"{name} took too long, call {number}")
        self.failed.append(name)
        self.errors.append(error)
        self.has_lock_failed |= name.endswith(" lock")
        return error

    def _after(self, name: str, number: int, result: Any) -> Any:
        if self.kind == "lost reply":
            raise self._error(name, number)
        if self.kind != "short read":
            return result
        self.failed.append(name)
        return half(result)


def half(result: Any) -> Any:
    """The first half of the bytes of a reply, also of one about several objects."""
    if isinstance(result, list):
        return [half(value) for value in result]
    if isinstance(result, Buffer):
        return cpu.Buffer.from_bytes(half(result.to_bytes()))
    return result[: len(result) // 2] if isinstance(result, bytes) else result


class FailingStore(Store):
    """Any store of zarr; async."""

    def __init__(self, store: Store, faults: Faults) -> None:
        super().__init__()
        self.store = store
        self.faults = faults

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]

    supports_writes = supports_deletes = supports_listing = True

    async def _call(self, name: str, *args: Any) -> Any:
        return await self.faults.call_async(name, lambda: getattr(self.store, name)(*args))

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        value: Buffer | None = await self._call("get", key, prototype, byte_range)
        return value

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> Buffers:
        values: Buffers = await self._call("get_partial_values", prototype, [*key_ranges])
        return values

    async def exists(self, key: str) -> bool:
        return bool(await self._call("exists", key))

    async def getsize(self, key: str) -> int:
        return int(await self._call("getsize", key))

    async def set(self, key: str, value: Buffer) -> None:
        await self._call("set", key, value)

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        await self._call("set_if_not_exists", key, value)

    async def delete(self, key: str) -> None:
        await self._call("delete", key)

    async def delete_dir(self, prefix: str) -> None:
        await self._call("delete_dir", prefix)

    async def list(self) -> AsyncIterator[str]:
        async for key in self.list_prefix(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        async def keys() -> Keys:
            return [key async for key in self.store.list_prefix(prefix)]

        for key in await self.faults.call_async("list_prefix", keys):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        async def names() -> Keys:
            return [name async for name in self.store.list_dir(prefix)]

        for name in await self.faults.call_async("list_dir", names):
            yield name


class BlockingFailingStore(FailingStore):
    """One that can block, too, as some are since zarr 3.2."""

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        prototype = prototype or default_buffer_prototype()
        value: Buffer | None = self._call_blocking("get", key, prototype, byte_range)
        return value

    def set_sync(self, key: str, value: Buffer) -> None:
        self._call_blocking("set", key, value)

    def delete_sync(self, key: str) -> None:
        self._call_blocking("delete", key)

    def _call_blocking(self, name: str, *args: Any) -> Any:
        return self.faults.call(name, lambda: _result(getattr(self.store, name)(*args)))


def _result(coro: Coroutine[Any, Any, Any]) -> Any:
    """Of a coroutine that waits for nothing."""
    try:
        coro.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")


class FailingMapping(OtherMapping):
    """A mapping, reached from several threads."""

    def __init__(self, faults: Faults) -> None:
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
    faults: Faults

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
        self.meta = reply.meta
        self._reply = reply

    async def bytes_async(self) -> bytes:
        value: bytes = half((await self._reply.bytes_async()).to_bytes())
        return value


@contextmanager
def failing_obstore(faults: Faults) -> Iterator[None]:
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
def failing_files(root: Path, faults: Faults) -> Iterator[None]:
    """The system calls about files below `root`, and about locks."""
    real = {name: getattr(os, name) for name in (*_BY_PATH, *_BY_NUMBER)}
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
            path = os.fspath(path)
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
    with mock.patch.multiple(os, **(calls | {"open": open_file, "close": close})):
        yield


_BY_PATH = ("open", "replace", "unlink", "mkdir", "stat")
_BY_NUMBER = ("pwritev", "pwrite", "ftruncate", "fsync", "pread", "fstat", "close")


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
    faults: Faults
    _failing: Callable[[], AbstractContextManager[Any]] = nullcontext

    def at_work(self) -> AbstractContextManager[Any]:
        """While it is open the store fails."""
        return self._failing()


def store(faults: Faults) -> Base:
    healthy = MemoryStore()
    return Base(FailingStore(healthy, faults), healthy, faults)


def blocking_store(faults: Faults) -> Base:
    healthy = MemoryStore()
    return Base(BlockingFailingStore(healthy, faults), healthy, faults)


def mapping(faults: Faults) -> Base:
    failing = FailingMapping(faults)
    return Base(failing, failing.data, faults)


def file_system(faults: Faults) -> Base:
    path = f"/test-{uuid.uuid4().hex}"
    fs = FailingFileSystem()
    fs.faults = faults

    def over(fs: Any) -> FsspecStore:
        return FsspecStore(AsyncFileSystemWrapper(fs, asynchronous=True), path=path)

    return Base(over(fs), over(fsspec.filesystem("memory")), faults)


def object_store(faults: Faults) -> Base:
    objects = ObjectStore(ObstoreMemory())
    return Base(objects, objects, faults, lambda: failing_obstore(faults))


def files(root: Path, faults: Faults) -> Base:
    return Base(LocalStore(root), LocalStore(root), faults, lambda: failing_files(root, faults))


BASES: dict[str, Callable[[Faults], Base]] = {
    "store": store,
    "blocking store": blocking_store,
    "mapping": mapping,
    "fsspec": file_system,
    "obstore": object_store,
}
