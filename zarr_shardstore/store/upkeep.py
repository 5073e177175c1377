"""`Upkeep`: what a store tells about its arrays, and what keeps its shards in order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from zarr.abc.store import Store

from zarr_shardstore.arrays.array_cache import invalidate_documents
from zarr_shardstore.io.counters import Stats
from zarr_shardstore.io.seal import seal_all, seal_all_async
from zarr_shardstore.operations.listing import Region, chunks_initialized
from zarr_shardstore.operations.locate import shard_shape
from zarr_shardstore.store.engine import EngineStore, part_of_sharding_store, twin_of


@part_of_sharding_store
class Upkeep(EngineStore):
    """Facts about arrays and requests; compaction, consolidation, flush and close."""

    def refresh(self) -> None:
        """Drop the cached metadata of arrays; it is read again when it is next needed.

        Call it when another process created, removed, moved or re-declared an array that this
        store has used. Call it also after a change of metadata in the base store. Writes through
        this store, and through any other `ShardingStore` or `ShardingMapping` of this process,
        count immediately. A resize by another process needs no call.
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

    def shard_shape(self, path: str) -> tuple[int, ...] | None:
        """Return the shape of the shards of an array, in elements. The call blocks.

        ``None`` if the array is not sharded: each chunk is an object of its own. Writes of regions
        that begin and end at multiples of this shape store each shard once. The shape is clipped
        to the grid: ask again after the array has grown. zarr's ``z.shards`` shows ``None`` here,
        because users of this store see plain chunks.

        Raises
        ------
        SpecError
            If there is no array at `path`.

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
        """Return a mask of the stored chunks of a sharded array.

        Parameters
        ----------
        path
            Path of the array.
        region : tuple of slice, optional
            In chunk coordinates; ``None``: the whole grid.

        Returns
        -------
        ndarray of bool
            The shape is that of the chunk grid, or of the region.

        Raises
        ------
        SpecError
            If there is no sharded array at `path`, or the region is not valid.
        CorruptShardError
            If the index of a shard is damaged.

        Notes
        -----
        Cost: a listing of the directory of the shards, and the indexes that are not cached; after
        `consolidate_index` a single object instead.

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
        """Seal every shard file of this base store that this process has appended to.

        All writes are stored already. To seal a shard is to remove its journal and its gap for
        later chunks. A shard of which more than half is dead is compacted. `close` and the end of
        the process seal shards, too.
        """
        await seal_all_async(self._engine.driver.backend, self._engine.options.order)

    @twin_of(flush, "blocking")
    def flush_sync(self) -> None:
        seal_all(self._engine.driver.backend, self._engine.options.order)

    async def compact(self, prefix: str = "") -> None:
        """Store shards without dead bytes, those below a prefix that have any.

        Erased and replaced chunks, and indexes that were moved, leave dead bytes in a file. Other
        writers may write concurrently.

        Raises
        ------
        CorruptShardError
            If a shard is damaged; it stays unchanged, and all others are compacted.
        """
        self._check_writable()
        await self._run(self._engine.operations.flusher.flush_below(prefix))
        driver, flow = self._engine.compaction(prefix)
        await driver.run_async(flow)

    @twin_of(compact, "blocking")
    def compact_sync(self, prefix: str = "") -> None:
        self._check_writable()
        self._engine.driver.run(self._engine.operations.flusher.flush_below(prefix))
        driver, flow = self._engine.compaction(prefix)
        driver.run(flow)

    async def consolidate_index(self, path: str = "") -> list[str]:
        """Store a copy of the indexes of all shards, in one object for each array.

        A reader through an object store then reads that one object instead of an index for each
        shard. The object is never trusted: the version of each reply tells whether the shard has
        changed since, and such a shard is read by its own index. So the object may be written at
        any time, and again when many shards have changed.

        Parameters
        ----------
        path
            Path of an array or a group; ``""``: all sharded arrays of the store.

        Returns
        -------
        list of str
            Paths of the arrays. Left out are those without a stored shard, those that only
            ``chunks_per_shard`` declares, and those with storage transformers below the shards.

        Raises
        ------
        UnsupportedError
            If the base store is neither local files nor an obstore store with ETags.
        SpecError
            If there is no such array at or below a path that is not ``""``.

        Notes
        -----
        On local files the versions are size and time of last change, so that the directory
        profits when it is served by HTTP. The call waits two seconds for files that have changed
        just now. Reads of local files do not need it. Uploads do not keep these times:
        consolidate the copy, too.
        """
        self._check_writable()
        flow = self._engine.consolidation(path)
        await self.flush()
        return await self._run(flow)

    @twin_of(consolidate_index, "blocking")
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
