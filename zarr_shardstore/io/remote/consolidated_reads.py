"""Reads of consolidated indexes: one request for each, when an index of its array is first needed.

A recorded index may be stale. Its user compares the version of the shard, as with a cached index.
A consolidated index is not read again by a store that found it unusable: missing, unreadable,
damaged, larger than the cache, or of shards of another form.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable

from zarr_shardstore.format.consolidated_index import ConsolidatedIndex
from zarr_shardstore.format.layout import ArrayLayout, ShardRef
from zarr_shardstore.io.concurrency import SingleFlight
from zarr_shardstore.io.index_cache import CachedIndex, index_cache
from zarr_shardstore.io.remote.etags import ObjectVersion, version_recorded
from zarr_shardstore.shards.requests import Found

_MAX_LAG_S = 60
"""From the time that a consolidated index of files names to the time of its own file. After a copy
of the directory these differ, and so do the times of the shards."""


class ConsolidatedIndexes:
    """Consolidated indexes of one base store, in the cache of indexes.

    Parameters
    ----------
    read
        Reads an object, unless it has more than so many bytes.
    identity_of
        Identity of an object by its key, the same for all stores of the process on this base store.

    Thread safety: may be used from any thread and any event loop.
    """

    def __init__(
        self,
        read: Callable[[str, int], Awaitable[Found]],
        identity_of: Callable[[str], Hashable],
    ) -> None:
        self._read = read
        self._identity_of = identity_of
        self._loads: SingleFlight[tuple[ConsolidatedIndex | None, int | None]] = SingleFlight()
        self._unusable: set[str] = set()

    async def find(self, shard: ShardRef) -> tuple[CachedIndex | None, int | None]:
        """Return the recorded index of a shard, and the bytes that were read for it, if any."""
        layout = shard.layout
        key = layout.index_key
        if key is None or key in self._unusable or not index_cache.max_nbytes:
            return None, None
        indexes, nbytes = self._cached(layout), None
        if indexes is None:
            scope = (self._identity_of(key), layout.spec)
            (indexes, n_read), is_ours = await self._loads.join(
                scope, lambda: self._load(key, layout)
            )
            nbytes = n_read if is_ours else None
        found = None if indexes is None else indexes.find(shard.key[len(layout.prefix) :])
        if found is None:
            return None, nbytes
        version = version_recorded(found.version, found.size)
        return CachedIndex(found.index, layout.spec, version, found.size, is_recorded=True), nbytes

    def drop(self, shard: ShardRef) -> None:
        """Remove the recorded index of a shard, which is stale."""
        indexes = self._cached(shard.layout)
        if indexes is not None:
            indexes.drop(shard.key[len(shard.layout.prefix) :])

    def retry(self, key: str) -> None:
        """Read an object again that was unusable: this process has changed it."""
        self._unusable.discard(key)

    def _cached(self, layout: ArrayLayout) -> ConsolidatedIndex | None:
        if layout.index_key is None:
            return None
        item = index_cache.get(self._identity_of(layout.index_key), layout.spec)
        return item if isinstance(item, ConsolidatedIndex) else None

    async def _load(
        self, key: str, layout: ArrayLayout
    ) -> tuple[ConsolidatedIndex | None, int | None]:
        cached = self._cached(layout)
        if cached is not None:  # another request has just ended
            return cached, None
        try:
            found = await self._read(key, index_cache.max_nbytes)
        except Exception:  # S3 forbids missing objects; a real failure shows when a shard is read
            found = Found(None, None)
        nbytes = 0 if found.value is None else len(found.value)
        indexes = None
        version = found.version
        if found.value is not None and isinstance(version, ObjectVersion) and version.is_strong:
            indexes = ConsolidatedIndex.decode(found.value, layout.spec)
            if indexes is not None and indexes.has_file_times:
                modified_s = -1 if version.modified_s is None else version.modified_s
                if abs(modified_s - indexes.written_s) > _MAX_LAG_S:
                    indexes = None  # the times of the shards are others, too
        if indexes is None or indexes.nbytes > index_cache.max_nbytes:
            self._unusable.add(key)
        if indexes is not None:
            index_cache.put(self._identity_of(key), indexes)
        return indexes, nbytes
