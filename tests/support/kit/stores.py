"""Stores that fail at chosen requests, and stores that count them.

::

    faults = Faults("lost reply", at={3})            # the fourth request that changes bytes
    store = ShardingStore(FailingStore(MemoryStore(), faults))

    base = CountingStore()
    ... ShardingStore(base) ...
    assert len(base.reads) == 2 and base.rounds == 2
"""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype, cpu, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import MemoryStore

from zarr_shardstore.io.local.locks import LOCK_SUFFIX
from zarr_shardstore.io.local.shard_files import JOURNAL_SUFFIX

Kind: TypeAlias = Literal["error", "lost reply", "short read", "slow"]

_SLOW_S = 0.001

_READS = ("get", "get_partial_values", "getitem", "cat_file", "pread", "read")
_QUESTIONS = ("getsize", "info", "head", "open to read", "fstat", "exists", "stat")
_WITHOUT_EFFECT = (*_READS, *_QUESTIONS, "list_prefix", "iter", "find")


class Faults:
    """Choice of the requests that fail, and record of those that did.

    Parameters
    ----------
    kind
        ``"error"``: the request has no effect. ``"lost reply"``: the request has its effect and
        then raises; only requests with an effect are counted. Every second error of both kinds
        is a `TimeoutError`, the others are `OSError`. ``"short read"``: the reply has half of the
        bytes; only reads are counted. ``"slow"``: the reply is right and late.
    at
        Numbers of the requests that fail, from 0 on.

    Attributes
    ----------
    n_calls : int
        Requests that were counted.
    failed : list of str
        Names of the requests that failed, since `forget`.
    errors : list of Exception
        The errors that were raised, since `forget`.

    Notes
    -----
    Thread safety: may be used from any thread.
    """

    def __init__(self, kind: Kind = "error", at: Collection[int] = ()) -> None:
        self.kind = kind
        self.at = at
        self.n_calls = 0
        self.failed: list[str] = []
        self.errors: list[Exception] = []
        self._is_on = threading.local()
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Clear `failed` and `errors`."""
        self.failed.clear()
        self.errors.clear()

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        """Make one request. Requests inside `function` are not counted."""
        if getattr(self._is_on, "inside", False):
            return function()
        self._is_on.inside = True
        try:
            number = self._count(name)
            if number is None:
                return function()
            if self.kind == "slow" or number % 2:
                time.sleep(_SLOW_S)
            if self.kind == "error":
                raise self._error(name, number)
            return self._after(name, number, function())
        finally:
            self._is_on.inside = False

    async def call_async(self, name: str, function: Callable[[], Awaitable[Any]]) -> Any:
        """Make one request, as `call`."""
        number = self._count(name)
        if number is None:
            return await function()
        if self.kind == "slow" or number % 2:
            await asyncio.sleep(_SLOW_S)
        if self.kind == "error":
            raise self._error(name, number)
        return self._after(name, number, await function())

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Count no requests of this thread."""
        self._is_on.inside = True
        try:
            yield
        finally:
            self._is_on.inside = False

    def _count(self, name: str) -> int | None:
        """Return the number of a request that must fail."""
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
        return error

    def _after(self, name: str, number: int, result: Any) -> Any:
        if self.kind == "lost reply":
            raise self._error(name, number)
        if self.kind != "short read":
            return result
        self.failed.append(name)
        return half(result)


def half(result: Any) -> Any:
    """Return the first half of the bytes of a reply, also of a reply about several objects."""
    if isinstance(result, list):
        return [half(value) for value in result]
    if isinstance(result, Buffer):
        return cpu.Buffer.from_bytes(half(result.to_bytes()))
    return result[: len(result) // 2] if isinstance(result, bytes) else result


class FailingStore(Store):
    """A zarr store whose requests fail as `faults` say.

    Parameters
    ----------
    store
        The store that replies.
    faults
        Which requests fail, and how.
    """

    def __init__(self, store: Store, faults: Faults) -> None:
        super().__init__()
        self.store = store
        self.faults = faults

    def __eq__(self, other: object) -> bool:
        return self is other

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
    ) -> list[Buffer | None]:
        values: list[Buffer | None] = await self._call(
            "get_partial_values", prototype, [*key_ranges]
        )
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
        async def keys() -> list[str]:
            return [key async for key in self.store.list_prefix(prefix)]

        for key in await self.faults.call_async("list_prefix", keys):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        async def names() -> list[str]:
            return [name async for name in self.store.list_dir(prefix)]

        for name in await self.faults.call_async("list_dir", names):
            yield name


class BlockingFailingStore(FailingStore):
    """A `FailingStore` with zarr's blocking methods, which `store` must have."""

    store: Any

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        value: Buffer | None = self.faults.call(
            "get", lambda: self.store.get_sync(key, prototype=prototype, byte_range=byte_range)
        )
        return value

    def set_sync(self, key: str, value: Buffer) -> None:
        self.faults.call("set", lambda: self.store.set_sync(key, value))

    def delete_sync(self, key: str) -> None:
        self.faults.call("delete", lambda: self.store.delete_sync(key))


class CountingStore(MemoryStore):
    """A memory store that records its requests.

    Attributes
    ----------
    reads : list of (key, byte range)
        The reads, in order; ``None``: of a whole object.
    writes : list of (``"set"`` or ``"delete"``, key)
        The writes, in order.
    rounds : int
        Reads that began while no other read was under way: reads that are made together count
        as one, as they cost one latency.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, ByteRequest | None]] = []
        self.writes: list[tuple[str, str]] = []
        self.rounds = 0
        self._under_way = 0

    async def _turn(self) -> None:
        self.rounds += self._under_way == 0
        self._under_way += 1
        for _ in range(20):  # let all reads of this round arrive
            await asyncio.sleep(0)
        self._under_way -= 1

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        self.reads.append((key, byte_range))
        await self._turn()
        return await super().get(key, prototype, byte_range)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        key_ranges = list(key_ranges)
        self.reads += key_ranges
        await self._turn()
        return [await MemoryStore.get(self, key, prototype, r) for key, r in key_ranges]

    async def set(self, key: str, value: Buffer, byte_range: Any = None) -> None:
        self.writes.append(("set", key))
        await super().set(key, value, byte_range)

    async def delete(self, key: str) -> None:
        self.writes.append(("delete", key))
        await super().delete(key)

    def forget(self) -> None:
        """Clear the records."""
        self.reads, self.writes, self.rounds = [], [], 0


def objects_of(base: Any) -> dict[str, bytes]:
    """Return all objects of a base store, without the side files of shards that are open.

    Parameters
    ----------
    base
        A zarr store, or a mapping.
    """
    if not isinstance(base, Store):
        return dict(base)

    async def read() -> dict[str, bytes]:
        objects = {}
        async for key in base.list():
            if key.endswith((LOCK_SUFFIX, JOURNAL_SUFFIX)):
                continue
            value = await base.get(key, default_buffer_prototype())
            assert value is not None
            objects[key] = value.to_bytes()
        return objects

    return sync(read())
