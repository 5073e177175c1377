"""Collections of indexes: each is read once, when an index of its array is first wanted.

What they say is recorded, not true: whoever uses an index compares versions, as with one that
is remembered. A collection that is missing, damaged, too large to be kept, of shards of
another form, or that cannot be read is not asked for again by its store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from typing import NamedTuple

from zarr_shardstore.format.consolidated_index import ConsolidatedIndex
from zarr_shardstore.format.layout import ArrayLayout, ShardRef
from zarr_shardstore.io.concurrency import SingleFlight
from zarr_shardstore.io.index_cache import RememberedIndex, index_cache
from zarr_shardstore.io.remote.etags import ObjectVersion, is_strong, version_recorded
from zarr_shardstore.shards.requests import Found

_MAX_LAG_S = 60
"""Between the moment that a collection of files names, and the time of its own file. A copy of
the directory that was made later has other times; its shards, too."""


class _KnownCollection:
    """An `ConsolidatedIndex` in the cache of indexes."""

    __slots__ = ("collection", "spec", "was_used")

    def __init__(self, collection: ConsolidatedIndex) -> None:
        self.collection = collection
        self.spec = collection.spec
        self.was_used = False

    @property
    def nbytes(self) -> int:
        return self.collection.nbytes


class Finding(NamedTuple):
    """What was found of a shard."""

    remembered: RememberedIndex | None
    nbytes_read: int | None = None
    """Of the collection, if it was asked for by this."""


class ConsolidatedIndexes:
    """Finds indexes of shards in the collections of one base store.

    Parameters
    ----------
    read
        Reads an object, unless it has more than so many bytes.
    identity_of
        Of an object, by its key: the same for all stores of the process on this base store.

    Thread safety: may be used from any thread and any event loop.
    """

    def __init__(
        self,
        read: Callable[[str, int], Awaitable[Found]],
        identity_of: Callable[[str], Hashable],
    ) -> None:
        self._read = read
        self._identity_of = identity_of
        self._flights: SingleFlight[tuple[ConsolidatedIndex | None, int | None]] = SingleFlight()
        self._useless: dict[str, None] = {}

    async def find(self, shard: ShardRef) -> Finding:
        """The index that was recorded of a shard, if there is one."""
        key = shard.layout.index_key
        if key is None or key in self._useless or not index_cache.max_nbytes:
            return Finding(None)
        collection = self._known(shard.layout)
        nbytes: int | None = None
        if collection is None:
            layout, scope = shard.layout, (self._identity_of(key), shard.layout.spec)
            loaded, is_ours = await self._flights.join(scope, lambda: self._load(key, layout))
            collection, nbytes = loaded if is_ours else (loaded[0], None)
        if collection is None:
            return Finding(None, nbytes)
        found = collection.find(shard.key[len(shard.layout.prefix) :])
        if found is None:
            return Finding(None, nbytes)
        version = version_recorded(found.version, found.size)
        index = RememberedIndex(found.index, collection.spec, version, found.size, is_checked=False)
        return Finding(index, nbytes)

    def drop(self, shard: ShardRef) -> None:
        """What was recorded of a shard does not hold any more."""
        collection = self._known(shard.layout)
        if collection is not None:
            collection.drop(shard.key[len(shard.layout.prefix) :])

    def forget(self, key: str) -> None:
        """This process has changed an object: perhaps a collection."""
        self._useless.pop(key, None)

    def _known(self, layout: ArrayLayout) -> ConsolidatedIndex | None:
        if layout.index_key is None:
            return None
        item = index_cache.get(self._identity_of(layout.index_key), layout.spec)
        return item.collection if isinstance(item, _KnownCollection) else None

    async def _load(
        self, key: str, layout: ArrayLayout
    ) -> tuple[ConsolidatedIndex | None, int | None]:
        known = self._known(layout)
        if known is not None:  # another flight has just landed
            return known, None
        try:
            found = await self._read(key, index_cache.max_nbytes)
        except Exception:  # S3 forbids what is missing; and if it is more, reading a shard tells
            found = Found(None, None)
        nbytes = 0 if found.value is None else len(found.value)
        collection = None
        if found.value is not None and is_strong(found.version):
            collection = ConsolidatedIndex.decode(found.value, layout.spec)
        if collection is None or not _is_original(collection, found.version):
            self._useless[key] = None
            return None, nbytes
        item = _KnownCollection(collection)
        if item.nbytes > index_cache.max_nbytes:
            self._useless[key] = None
        index_cache.put(self._identity_of(key), item)
        return collection, nbytes


def _is_original(collection: ConsolidatedIndex, version: object) -> bool:
    """Whether times of files that it recorded may be those of the objects beside it."""
    if not collection.has_file_times:
        return True
    if not isinstance(version, ObjectVersion):
        return False
    return abs(version.modified_s - collection.written_s) <= _MAX_LAG_S
