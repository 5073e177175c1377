"""zarr's ``Store`` interface on a `ShardingEngine`: each method runs one flow.

Source: zarr-python 3, ``zarr.abc.store``, and the methods that its codec pipelines look for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from reprlib import repr as short
from typing import Any, TypeAlias, TypeVar

from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import MemoryStore

from zarr_shardstore.errors import ReadOnlyError
from zarr_shardstore.format.keys import check_prefix
from zarr_shardstore.io.backends.resolve import BaseStore
from zarr_shardstore.io.buffers import as_view, own_bytes, range_of, to_buffer_of
from zarr_shardstore.io.concurrency import one_ahead
from zarr_shardstore.io.seal import seal_all
from zarr_shardstore.operations.listing import raise_first
from zarr_shardstore.shards.requests import Flow
from zarr_shardstore.shards.shard_listing import ListedKeys
from zarr_shardstore.store.engine import ShardingEngine

_KEYS_BETWEEN_TURNS = 4096
"""Keys of a listing between two turns of other tasks; a listing itself may never wait."""

T = TypeVar("T")
Value: TypeAlias = Buffer | bytes | bytearray | memoryview


class ZarrInterface(Store):
    """Methods of ``Store`` that zarr calls, on an engine that the subclass makes.

    Thread safety: may be used from any thread and any event loop.
    """

    _engine: ShardingEngine

    @property
    def base(self) -> BaseStore:
        """The zarr store or the mapping that has the shards."""
        return self._engine.base

    # ----------------------------------------------------- open and capabilities

    async def _open(self) -> None:
        if self._is_open:
            raise ValueError("store is already open")
        await self._ensure_open()

    async def _ensure_open(self) -> None:
        if not self._is_open:
            if isinstance(self.base, Store):
                try:
                    await self.base._ensure_open()
                except ValueError:
                    # "already open": another thread, in a loop of its own, was faster.
                    if not self.base._is_open:
                        raise
            self._is_open = True

    def close(self) -> None:
        """Seal shards, see `flush`, and close this store and the base store."""
        if not self.read_only:
            seal_all(self._engine.driver.backend, self._engine.options.order)
        if isinstance(self.base, Store):
            self.base.close()
        super().close()

    def _check_writable(self) -> None:
        if self.read_only:
            raise ReadOnlyError

    @property
    def supports_writes(self) -> bool:
        return not isinstance(self.base, Store) or self.base.supports_writes

    @property
    def supports_deletes(self) -> bool:
        return not isinstance(self.base, Store) or self.base.supports_deletes

    @property
    def supports_listing(self) -> bool:
        return not isinstance(self.base, Store) or self.base.supports_listing

    @property
    def supports_consolidated_metadata(self) -> bool:
        return not isinstance(self.base, Store) or self.base.supports_consolidated_metadata

    @property
    def _supports_sync_io(self) -> bool:
        # zarr's fused pipeline asks this. It writes one chunk a thread at a time: cheap where a
        # chunk is appended to its shard, a rewrite of the shard elsewhere.
        return self._engine.appends

    async def _run(self, flow: Flow[T], *, only_reads: bool = False) -> T:
        await self._ensure_open()
        # In a batch a read may flush. A commit must not wait for another one in the worker pool.
        only_reads = only_reads and not self._engine.operations.buffer.is_active
        return await self._engine.driver.run_async(flow, only_reads=only_reads)

    async def _write(self, flow: Flow[None]) -> None:
        self._check_writable()
        await self._run(flow)

    # -------------------------------------------------------------------- reads

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        if not self._is_open:
            await self._ensure_open()
        value = await self._engine.get(key, range_of(byte_range))
        return to_buffer_of(value, prototype)

    def get_partial_values(
        self,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]] = (),
    ) -> Coroutine[Any, Any, list[Buffer | None]]:
        """Return values, or ranges of them, ``None`` for missing keys, in at most two rounds."""
        if not isinstance(prototype, BufferPrototype):
            raise TypeError(
                "prototype is a BufferPrototype of zarr, got "
                f"{short(prototype)}; the draft's operation of this name is "
                "ShardingMapping(store).get_partial_values(key_ranges)"
            )
        return self._get_partial_values(prototype, key_ranges)

    async def _get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        ranges = [(key, range_of(byte_range)) for key, byte_range in key_ranges]
        await self._ensure_open()
        values = await self._engine.get_many(ranges)
        return [to_buffer_of(value, prototype) for value in values]

    async def _get_many(
        self, requests: Iterable[tuple[str, BufferPrototype, ByteRequest | None]]
    ) -> AsyncGenerator[tuple[str, Buffer | None], None]:
        requests = list(requests)
        ranges = [(key, range_of(byte_range)) for key, _, byte_range in requests]
        await self._ensure_open()
        values = await self._engine.get_many(ranges)
        for (key, prototype, _), value in zip(requests, values, strict=True):
            yield key, to_buffer_of(value, prototype)

    async def get_ranges(
        self,
        key: str,
        byte_ranges: Sequence[ByteRequest | None],
        *,
        prototype: BufferPrototype,
        **_: int,
    ) -> AsyncIterator[Sequence[tuple[int, Buffer | None]]]:
        """Yield many ranges of one value, in one batch; coalesced by the options of the store."""
        ranges = [(key, byte_range) for byte_range in byte_ranges]
        values = await self.get_partial_values(prototype, ranges)
        if any(value is None for value in values):
            raise BaseExceptionGroup("chunk read failed", [FileNotFoundError(key)])
        yield list(enumerate(values))

    async def exists(self, key: str) -> bool:
        return await self._run(self._engine.operations.exists(key), only_reads=True)

    async def getsize(self, key: str) -> int:
        """Return the size of a value in bytes; the size of a chunk is in the index.

        Raises
        ------
        FileNotFoundError
            If the key is missing.
        """
        size = await self._run(self._engine.operations.get_size(key), only_reads=True)
        if size is None:
            raise FileNotFoundError(key)
        return size

    async def getsize_prefix(self, prefix: str) -> int:
        flow = self._engine.operations.get_total_size(_directory(prefix))
        return await self._run(flow, only_reads=True)

    # ------------------------------------------------------------------- writes

    async def set(self, key: str, value: Value) -> None:
        await self._write(self._engine.operations.set_many([(key, own_bytes(value))]))

    async def set_if_not_exists(self, key: str, value: Value) -> None:
        items = [(key, own_bytes(value))]
        flow = self._engine.operations.set_many(items, only_if_missing=True)
        await self._write(flow)

    async def _set_many(self, values: Iterable[tuple[str, Value]]) -> None:
        items = [(key, own_bytes(value)) for key, value in values]
        await self._write(self._engine.operations.set_many(items))

    async def delete(self, key: str) -> None:
        await self._write(self._engine.operations.erase_values([key]))

    async def delete_dir(self, prefix: str) -> None:
        await self._write(self._engine.operations.erase_prefix(_directory(prefix)))

    async def clear(self) -> None:
        await self.delete_dir("")

    # ------------------------------------------------------------------ listing

    def list(self) -> AsyncIterator[str]:
        return self.list_prefix("")

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield all keys that start with `prefix`.

        On a base store that lists directories, the path of an array means its directory: zarr
        asks so for the chunks of ``lat``, and does not expect those of ``lat_bounds``. zarr's
        MemoryStore and mappings take each prefix as text.

        Cost: keys come in rounds of up to 64 shards, one round ahead of the caller; memory
        does not grow with their number. A caller that stops early closes the iterator.
        """
        is_path = isinstance(self.base, Store) and not isinstance(self.base, MemoryStore)
        begin = self._engine.operations.listing.stream(prefix, is_path=is_path)
        stream = await self._run(begin, only_reads=True)

        async def next_round() -> ListedKeys | None:
            if not stream.has_more:
                return None
            return await self._run(stream.next_round(), only_reads=True)

        n_left = _KEYS_BETWEEN_TURNS
        try:
            async with aclosing(one_ahead(next_round)) as rounds:
                async for listed in rounds:
                    for keys in listed.key_lists():
                        for key in keys:
                            yield key
                        n_left -= len(keys)
                        if n_left <= 0:
                            n_left = _KEYS_BETWEEN_TURNS
                            await asyncio.sleep(0)
        finally:
            if stream.has_more:
                await self._run(stream.close(), only_reads=True)
        raise_first(stream.errors)

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names of keys and of directories directly in a directory.

        Inside the chunk grid of a sharded array this reads the index of each shard below.
        """
        flow = self._engine.operations.listing.list_dir(prefix, is_exact=True)
        for name in await self._run(flow, only_reads=True):
            yield name

    # ----------------------------------------------------------------- blocking

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """As `get`, blocking."""
        part = None if byte_range is None else range_of(byte_range)
        return to_buffer_of(self._engine.get_blocking(key, part), prototype)

    def set_sync(self, key: str, value: Value) -> None:
        """As `set`, blocking."""
        self._check_writable()
        self._engine.driver.run(self._engine.operations.set_many([(key, as_view(value))]))

    def delete_sync(self, key: str) -> None:
        """As `delete`, blocking."""
        self._check_writable()
        self._engine.driver.run(self._engine.operations.erase_values([key]))


def _directory(prefix: str) -> str:
    """Return a prefix as zarr means it: a directory, with or without its slash."""
    prefix = check_prefix(prefix)
    return prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
