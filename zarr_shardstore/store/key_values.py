"""`KeyValues`: the operations of zarr's ``Store``, also for many chunks at once.

Source: zarr-python 3, ``zarr.abc.store``, and the methods that its codec pipelines look for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterable, Sequence
from contextlib import aclosing
from reprlib import repr as short
from typing import Any

from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import MemoryStore

from zarr_shardstore.errors import ShardConflictError, ShardStoreError
from zarr_shardstore.format.keys import SHARD_MARK, MarkedKey
from zarr_shardstore.format.layout import ArrayLayout, ShardRef
from zarr_shardstore.io.buffers import buffer_class_of, own_bytes, range_of, to_buffer_of
from zarr_shardstore.io.concurrency import one_ahead
from zarr_shardstore.metadata.declaration import has_sharding_codec
from zarr_shardstore.metadata.documents import ArrayDocument, Node, node_of_document
from zarr_shardstore.operations.listing import as_directory, raise_first
from zarr_shardstore.operations.locate import shard_ids
from zarr_shardstore.shards.read import ShardReads
from zarr_shardstore.shards.requests import Modify
from zarr_shardstore.shards.shard_listing import ListedKeys
from zarr_shardstore.shards.updates import EntryBlock
from zarr_shardstore.store.engine import EngineStore, Value
from zarr_shardstore.zarr_hooks.array_jobs import Prototype
from zarr_shardstore.zarr_hooks.box_jobs import Values
from zarr_shardstore.zarr_hooks.pipeline import is_unsafe, warn_of_other_pipeline

_KEYS_BETWEEN_TURNS = 4096
"""Keys of a listing after which other tasks get a turn."""


class WholeOperations(EngineStore):
    """Requests of `ShardedCodecPipeline` for many chunks; see ``zarr_hooks``."""

    async def _shard_ids(self, keys: Sequence[str]) -> Sequence[Hashable]:
        flow = shard_ids(self._engine.operations.catalog, keys)
        return await self._run(flow, only_reads=True)

    def _takes_shards(self, document: bytes) -> bool:
        return self._engine.operations.view.takes_shards(memoryview(document))

    async def _shards_of(self, keys: Sequence[MarkedKey]) -> Sequence[ShardRef | None]:
        """Return the shards of one array; ``None`` if the document leaves its sharding to zarr.

        Raises
        ------
        ShardConflictError
            If a shard has other chunks than it has for the array object.
        """
        flow = self._engine.operations.catalog.shards_of([marked.key for marked in keys])
        found = await self._run(flow, only_reads=True)
        raise_first([shard for shard in found if isinstance(shard, ShardStoreError)])
        shards = [shard if isinstance(shard, ShardRef) else None for shard in found]
        for shard, marked in zip(shards, keys, strict=True):
            if shard and not shard.layout.spec.boxes.has_box(shard.coords, marked.known):
                raise ShardConflictError.of_replaced(shard.layout.path)
        document = await self._document_of(keys[0].key, None) if None in shards else None
        if document and not has_sharding_codec(document.members):  # it is unsharded by now
            raise ShardConflictError.of_replaced(document.node.path)
        return shards

    async def _get_values(self, keys: Sequence[str], prototype: Prototype = None) -> Values:
        await self._ensure_open()
        engine = self._engine.of(buffer_class_of(prototype))
        return await engine.get_many([(key, None) for key in keys])

    async def _set_or_erase(
        self, items: Iterable[tuple[str, Value | Modify | None]], prototype: Prototype = None
    ) -> None:
        owned = [
            (key, value if value is None or isinstance(value, bytes | Modify) else own_bytes(value))
            for key, value in items
        ]
        engine = self._engine.of(buffer_class_of(prototype))
        await self._write(engine.operations.set_chunks(owned), engine)

    def _blocking_reads(self) -> Callable[[Sequence[ShardReads]], Any] | None:
        return None if self._engine.root is None else self._engine.get_groups_blocking

    async def _layout_of(self, key: str, *, reads: bool) -> ArrayLayout | None:
        operations = self._engine.operations
        if reads and operations.buffer.is_active:
            return None
        (chunk,) = operations.arrays.current().chunks_of([key])
        if chunk is not None:
            return chunk.shard.layout
        return await self._run(operations.layout_of(key), only_reads=True)

    async def _document_of(self, key: str, node: Node | None) -> ArrayDocument | None:
        """Return the document at `node`, or of the cached array with this chunk key."""
        operations = self._engine.operations
        if node is None:
            documents = operations.catalog.documents_above([key])
            node = node_of_document(next(iter(documents), ""))
        if node is None:
            return None
        array: Any = operations.arrays.current().arrays.get(node)
        if array is None:
            found = await self._run(operations.arrays.lookup([node]), only_reads=True)
            (array,) = found.values()
            if isinstance(array, ShardStoreError):
                raise array
        return None if array is None else array.document

    async def _get_groups(
        self, groups: Sequence[ShardReads], prototype: BufferPrototype
    ) -> Sequence[Values]:
        await self._ensure_open()
        return await self._engine.of(buffer_class_of(prototype)).get_groups(groups)

    def _blocking_writes(self) -> Callable[[Sequence[EntryBlock]], None] | None:
        engine = self._engine
        if engine.driver.backend.mode != "thread":
            return None
        self._check_writable()
        return lambda blocks: engine.driver.run(engine.operations.set_blocks(blocks))

    async def _set_blocks(self, blocks: Sequence[EntryBlock], prototype: BufferPrototype) -> None:
        engine = self._engine.of(buffer_class_of(prototype))
        await self._write(engine.operations.set_blocks(blocks), engine)


class KeyValues(WholeOperations):
    """The operations of zarr's ``Store`` on keys and values."""

    # -------------------------------------------------------------------- reads

    async def get(
        self, key: str, prototype: Prototype = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        if not self._is_open:
            await self._ensure_open()
        engine = self._engine.of(buffer_class_of(prototype))
        value = await engine.get(key, range_of(byte_range))
        return to_buffer_of(value, prototype)

    def get_sync(
        self, key: str, *, prototype: Prototype = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Same as `get`, but blocking."""
        engine = self._engine.of(buffer_class_of(prototype))
        value = engine.get_blocking(key, range_of(byte_range))
        return to_buffer_of(value, prototype)

    def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]] = ()
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
        values = await self._engine.of(buffer_class_of(prototype)).get_many(ranges)
        return [to_buffer_of(value, prototype) for value in values]

    async def get_ranges(
        self,
        key: str,
        byte_ranges: Sequence[ByteRequest | None],
        *,
        prototype: BufferPrototype,
        **_: int,
    ) -> AsyncIterator[Sequence[tuple[int, Buffer | None]]]:
        """Yield many ranges of one value, in one batch; the options of the store coalesce them."""
        ranges = [(key, byte_range) for byte_range in byte_ranges]
        values = await self.get_partial_values(prototype, ranges)
        if any(value is None for value in values):
            raise BaseExceptionGroup("chunk read failed", [FileNotFoundError(key)])
        yield list(enumerate(values))

    async def get_many(
        self,
        requests: Sequence[str | tuple[str, ByteRequest | None]],
        *,
        prototype: BufferPrototype,
    ) -> AsyncIterator[Sequence[tuple[int, Buffer | None]]]:
        """Yield positions and values of many keys or ranges, in one batch of at most two rounds."""
        ranges = [(each, None) if isinstance(each, str) else each for each in requests]
        values = await self.get_partial_values(prototype, ranges)
        if values:
            yield list(enumerate(values))

    async def exists(self, key: str) -> bool:
        return await self._run(self._engine.operations.exists(key), only_reads=True)

    async def getsize(self, key: str) -> int:
        """Return the size of a value in bytes, for a chunk from the index.

        Raises `FileNotFoundError` if the key is missing.
        """
        (size,) = await self._run(self._engine.operations.get_sizes([key]), only_reads=True)
        if size is None:
            raise FileNotFoundError(key)
        return size

    async def getsize_prefix(self, prefix: str) -> int:
        flow = self._engine.operations.get_total_size(as_directory(prefix))
        return await self._run(flow, only_reads=True)

    # ------------------------------------------------------------------- writes

    async def set(self, key: str, value: Value) -> None:
        operations = self._engine.operations
        flow = operations.set_many([(key, own_bytes(value))])
        await self._write(flow, self._engine_for(value), key)
        if is_unsafe() and await self._run(operations.is_in_shard(key), only_reads=True):
            warn_of_other_pipeline()

    def set_sync(self, key: str, value: Value) -> None:
        """Same as `set`, but blocking."""
        self._check_writable()
        run, operations = self._engine_for(value).driver.run, self._engine.operations
        run(operations.set_many([(key, own_bytes(value))]))
        if is_unsafe() and run(operations.is_in_shard(key)):
            warn_of_other_pipeline()

    async def set_if_not_exists(self, key: str, value: Value) -> None:
        items = [(key, own_bytes(value))]
        flow = self._engine.operations.set_many(items, only_if_missing=True)
        await self._write(flow, self._engine_for(value), key)

    async def delete(self, key: str) -> None:
        operations = self._engine.operations
        # A resize of an array that was made with shards= deletes whole shards.
        if isinstance(key, str) and key.endswith(SHARD_MARK):
            marked = MarkedKey.parse(key)
            await self._shards_of([marked])
            await self._write(operations.erase_shard(marked.key))
        else:
            async with self._engine.turn(key):
                await self._write(operations.set_many([(key, None)]))

    def delete_sync(self, key: str) -> None:
        """Same as `delete`, but blocking."""
        self._check_writable()
        self._engine.driver.run(self._engine.operations.set_many([(key, None)]))

    async def delete_dir(self, prefix: str) -> None:
        await self._write(self._engine.operations.erase_prefix(as_directory(prefix)))

    async def clear(self) -> None:
        await self.delete_dir("")

    # ------------------------------------------------------------------ listing

    def list(self) -> AsyncIterator[str]:
        return self.list_prefix("")

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield all keys that start with `prefix`.

        On a base store that lists directories, the path of an array means its directory: for
        ``lat`` zarr does not expect the keys of ``lat_bounds``. For zarr's MemoryStore and for
        mappings each prefix is text.

        Cost: keys come in rounds of up to 64 shards, one round ahead of the caller, in bounded
        memory. A caller that stops early closes the iterator.
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
