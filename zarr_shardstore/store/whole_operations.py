"""`WholeOperations`: what `ShardedCodecPipeline` asks of a store, for many chunks at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from zarr.core.buffer import BufferPrototype

from zarr_shardstore.errors import ShardStoreError
from zarr_shardstore.format.layout import ArrayLayout, ShardRef
from zarr_shardstore.io.buffers import buffer_class_of, own_bytes
from zarr_shardstore.operations.listing import raise_first
from zarr_shardstore.operations.locate import shard_ids
from zarr_shardstore.shards.read import ShardReads
from zarr_shardstore.shards.requests import Modify
from zarr_shardstore.shards.updates import EntryBlock
from zarr_shardstore.store.engine import EngineStore, Value


class WholeOperations(EngineStore):
    """Requests of whole array operations; see the protocols in ``zarr_hooks``."""

    async def _shard_ids(self, keys: Sequence[str]) -> Sequence[Hashable]:
        flow = shard_ids(self._engine.operations.catalog, keys)
        return await self._run(flow, only_reads=True)

    def _takes_shards(self, document: bytes) -> bool:
        return self._engine.operations.view.takes_shards(memoryview(document))

    async def _shards_of(self, keys: Sequence[str]) -> Sequence[ShardRef | None]:
        shards = await self._run(self._engine.operations.catalog.shards_of(keys), only_reads=True)
        raise_first([shard for shard in shards if isinstance(shard, ShardStoreError)])
        return [shard if isinstance(shard, ShardRef) else None for shard in shards]

    async def _get_values(
        self, keys: Sequence[str], prototype: BufferPrototype | None = None
    ) -> Sequence[bytes | memoryview | None]:
        await self._ensure_open()
        engine = self._engine.of(buffer_class_of(prototype))
        return await engine.get_many([(key, None) for key in keys])

    async def _set_or_erase(
        self,
        items: Iterable[tuple[str, Value | Modify | None]],
        prototype: BufferPrototype | None = None,
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

    async def _get_groups(
        self, groups: Sequence[ShardReads], prototype: BufferPrototype
    ) -> Sequence[Sequence[bytes | memoryview | None]]:
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
