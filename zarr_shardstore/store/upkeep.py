"""`Upkeep`: facts about the arrays of a store; flush, compaction and consolidation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from zarr.abc.store import Store

from zarr_shardstore.arrays.array_cache import invalidate_documents
from zarr_shardstore.io.driver import Stats
from zarr_shardstore.io.seal import seal_all, seal_all_async
from zarr_shardstore.operations.locate import Region, chunks_initialized, shard_shape
from zarr_shardstore.store.engine import EngineStore, documented_like

if TYPE_CHECKING:
    from zarr_shardstore.store.obspec_store import ObspecStore


class Upkeep(EngineStore):
    """Methods for facts about arrays and requests, and for the order of shard files."""

    def refresh(self) -> None:
        """Drop the cached metadata of arrays; the next use of an array reads it again.

        Call it after another process has created, removed, moved or re-declared an array that this
        store has used. Also call it after a change of metadata in the base store. Stores of one
        process see each other's changes immediately. A resize by another process needs no call.
        """
        invalidate_documents()

    def stats(self) -> Stats:
        """Return counts of requests to the base store, bytes, rounds and cached indexes.

        Examples
        --------
        >>> store = ShardingStore({}, chunks_per_shard=4)
        >>> store.set_sync("data/root/a/c0", b"abc")
        >>> before = store.stats()
        >>> store.get_sync("data/root/a/c0").to_bytes()
        b'abc'
        >>> after = store.stats()  # two rounds: the index, the chunk
        >>> after.requests - before.requests, after.rounds - before.rounds
        (2, 2)
        """
        return self._engine.driver.counters.stats()

    def as_obspec(self) -> ObspecStore:
        """Return the keys and values of this store as an object with the methods of ``obspec``.

        Tools that take the protocols of ``obspec`` read and write chunks through it. It has
        ``get``, ``get_range``, ``get_ranges``, ``head``, ``list``, ``list_with_delimiter``, ``put``
        and ``delete``, each also with ``_async``. The package ``obspec`` need not be installed.

        Notes
        -----
        ``put`` with ``mode="create"`` raises `AlreadyExistsError` if the value exists, and never
        replaces it. If two writers create one metadata document at the same instant, one document
        is stored, and both calls may succeed. Conditions on ETags, attributes and tags raise
        `UnsupportedError`: a chunk has none of its own. ``last_modified`` is the time of the reply,
        because a shard keeps no time for a chunk.

        Examples
        --------
        >>> store = ShardingStore({}, chunks_per_shard=4)
        >>> store.set_sync("data/root/a/c0", b"abcdef")
        >>> chunks = store.as_obspec()
        >>> chunks.head("data/root/a/c0")["size"]
        6
        >>> ranges = chunks.get_ranges("data/root/a/c0", starts=[0, 4], ends=[2, 6])
        >>> [bytes(each) for each in ranges]
        [b'ab', b'ef']
        """
        from zarr_shardstore.store.obspec_store import ObspecStore

        return ObspecStore(self)

    def shard_shape(self, path: str) -> tuple[int, ...] | None:
        """Return the shape of the shards of an array in elements; ``None`` if it has no shards.

        The call blocks. A write of a region that begins and ends at multiples of this shape stores
        each shard once. Shards do not exceed the grid: ask again after the array has grown. zarr's
        ``z.shards`` is ``None``, unless the store has ``view="shards"``.

        Raises `SpecError` if there is no array at `path`.

        Examples
        --------
        >>> import zarr
        >>> store = ShardingStore({}, chunks_per_shard=(2, 3))
        >>> z = zarr.create_array(store, name="z", shape=(80, 80), chunks=(10, 10), dtype="u1")
        >>> store.shard_shape("z")
        (20, 30)
        """
        return self._engine.driver.run(shard_shape(self._engine.operations.arrays, path))

    async def chunks_initialized(self, path: str, region: Region = None) -> npt.NDArray[np.bool_]:
        """Return a mask of the stored chunks of a sharded array: one bool for each chunk.

        `region` is a part of the chunk grid, as a tuple of slices in chunk coordinates; by default
        the whole grid.

        Raises
        ------
        SpecError
            If there is no sharded array at `path`, or the region is not valid.
        CorruptShardError
            If the index of a shard is damaged.

        Notes
        -----
        Cost: a listing of the shards, and their indexes unless they are cached. After
        `consolidate_index` the call reads a single object instead.

        Examples
        --------
        >>> import asyncio, zarr
        >>> store = ShardingStore({}, chunks_per_shard=(2, 2))
        >>> z = zarr.create_array(store, name="z", shape=(4, 6), chunks=(2, 2), dtype="u1")
        >>> z[:2, 2:] = 1
        >>> asyncio.run(store.chunks_initialized("z"))
        array([[False,  True,  True],
               [False, False, False]])
        """
        flow = chunks_initialized(self._engine.operations.flusher, path, region)
        return await self._run(flow, only_reads=True)

    async def flush(self) -> None:
        """Store what open batches have buffered; seal the shard files that the process appended to.

        Without a batch all writes are stored already. Sealing a shard removes its journal and its
        gap for later chunks. It compacts the shard if more than half of it is dead. `close` and the
        end of the process also seal shards.
        """
        await self._run(self._engine.operations.flusher.flush_below(""))
        await seal_all_async(self._engine.driver.backend, self._engine.options.order)

    @documented_like(flush, "blocking")
    def flush_sync(self) -> None:
        self._engine.driver.run(self._engine.operations.flusher.flush_below(""))
        seal_all(self._engine.driver.backend, self._engine.options.order)

    async def compact(self, prefix: str = "") -> None:
        """Store the shards below a prefix again, without their dead bytes.

        Erased and replaced chunks, and moved indexes, leave dead bytes in a file. Other writers may
        continue meanwhile. A damaged shard stays unchanged: the call compacts all others, and then
        raises `CorruptShardError`.
        """
        self._check_writable()
        await self._run(self._engine.operations.flusher.flush_below(prefix))
        driver, flow = self._engine.compaction(prefix)
        await driver.run_async(flow)

    @documented_like(compact, "blocking")
    def compact_sync(self, prefix: str = "") -> None:
        self._check_writable()
        self._engine.driver.run(self._engine.operations.flusher.flush_below(prefix))
        driver, flow = self._engine.compaction(prefix)
        driver.run(flow)

    async def consolidate_index(self, path: str = "") -> list[str]:
        """Store a copy of the indexes of all shards, in one object for each array.

        A reader of an object store then reads one object instead of an index for each shard. If a
        shard has changed since, the version in its reply shows it, and the reader reads the index
        of the shard. So you may consolidate at any time, and again after many changes.

        `path` is the path of an array or a group, by default all of the store. The call returns the
        paths of the consolidated arrays. The list omits arrays without a stored shard, arrays that
        only ``chunks_per_shard`` declares, and arrays with transformers below the shards.

        Raises
        ------
        UnsupportedError
            If the base store is neither local files nor an obstore store with ETags.
        SpecError
            If a `path` is given and has no such array at or below it.

        Notes
        -----
        On local files, versions are sizes and modification times. The copy helps readers by HTTP;
        local readers do not need it. The call waits two seconds if a file has just changed. An
        upload does not keep the times: consolidate the uploaded copy again.
        """
        self._check_writable()
        flow = self._engine.consolidation(path)
        await self.flush()
        return await self._run(flow)

    @documented_like(consolidate_index, "blocking")
    def consolidate_index_sync(self, path: str = "") -> list[str]:
        self._check_writable()
        flow = self._engine.consolidation(path)
        self.flush_sync()
        return self._engine.driver.run(flow)

    def close(self) -> None:
        """Seal shards, see `flush`, and close this store and the base store."""
        if not self.read_only:
            self.flush_sync()
            self._engine.operations.view.warn_of_names()
        if isinstance(self.base, Store):
            self.base.close()
        super().close()
