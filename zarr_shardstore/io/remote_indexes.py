"""Cache of the indexes of remote shards, and the versions that show whether one is stale.

1. A hit costs no request and is *unverified*: the flow compares its version with the version of the
   bytes that it reads next.
2. If a chunk is missing no bytes are read, and the flow revalidates: the request has the cached
   ETag, and the server answers that the object is not modified.
3. On a miss the consolidated index of the array is read, if there is one. Its records are
   unverified hits. This store does not read one again that was missing, unreadable, damaged, larger
   than the cache, or of shards of another form.
4. Concurrent misses share one request. Tasks that join it get an unverified index, because its
   bytes may be older than their question.
5. An index is cached if its version is a strong ETag. Indexes of static objects are always cached,
   and verified, until any store of this process writes to the object.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from zarr_shardstore.format.consolidated_index import ConsolidatedIndex
from zarr_shardstore.format.layout import ArrayLayout, ShardRef
from zarr_shardstore.io.concurrency import SingleFlight
from zarr_shardstore.io.local.cached_files import CachedIndex, index_cache
from zarr_shardstore.io.write_epochs import lasting_version_of
from zarr_shardstore.shards.index_reads import found_index, index_get
from zarr_shardstore.shards.requests import Found, FoundIndex, Get, GetIndex

_MAX_LAG_S = 60
"""Most seconds from the time in a consolidated index of files to the time of its own file. In a
copy of the directory they differ more, as do the times of the shards."""


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """Version of a remote object. Two are equal if their ETags are. Where one has no ETag, as a
    record of a local file, two are equal if their sizes and times are."""

    etag: str | None
    size: int | None = None
    modified_s: int | None = None
    """Second of the last change, since 1970."""
    write_ids: str | None = None
    """Ids of the last writes, the latest first; ``None``: another program has stored the object."""
    generation: str | None = None
    """Condition of a write on GCS, in place of the ETag."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Version):
            return NotImplemented
        if self.etag is not None and other.etag is not None:
            return self.etag == other.etag
        return (self.size, self.modified_s) == (other.size, other.modified_s)

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_strong(self) -> bool:
        """Whether equal versions have equal bytes: a weak ETag promises equal meaning."""
        return self.etag is not None and not self.etag.startswith("W/")

    def is_listed_as(self, listed: object) -> bool:
        """Whether a listing shows this version; some servers list ETags without quotes."""
        if not isinstance(listed, Version) or listed.etag is None or not listed.is_strong:
            return False
        if self.etag is None:
            return self == listed
        return self.etag.strip('"') == listed.etag.strip('"')


_Read: TypeAlias = Callable[[Get, Version | None], Awaitable[Found | None]]
_ReadConsolidated: TypeAlias = Callable[[str, int], Awaitable[Found]]


class RemoteIndexes:
    """Replies to `GetIndex` for one base store.

    `read` reads an object, or returns ``None`` if it still has a version. `scope_of` returns the
    scope of an object. `read_consolidated`, for base stores with ETags, reads an object of at
    most so many bytes. A store that `is_static` has no other writers.

    Thread safety: may be used from any thread and any event loop.
    """

    def __init__(
        self,
        read: _Read,
        scope_of: Callable[[str], Hashable],
        *,
        is_static: bool,
        read_consolidated: _ReadConsolidated | None = None,
    ) -> None:
        self._read_if = read
        # Indexes of static objects count for as long as this store is open.
        opened = object()
        self._identity_of = (lambda key: (opened, scope_of(key))) if is_static else scope_of
        self._scope_of = scope_of
        self._is_static = is_static
        self._read_consolidated = read_consolidated
        self._unusable: set[str] = set()  # keys of consolidated indexes
        self._reads: SingleFlight[FoundIndex] = SingleFlight()
        self._loads: SingleFlight[tuple[ConsolidatedIndex | None, int]] = SingleFlight()

    @contextmanager
    def changing(self, key: str) -> Iterator[None]:
        """Drop cached indexes of an object that this process changes within the block."""
        self._drop(key)
        try:
            yield
        finally:
            self._drop(key)  # a request within the block may have read the old object

    def _drop(self, key: str) -> None:
        index_cache.forget(self._identity_of(key))
        self._unusable.discard(key)

    def _written(self, key: str) -> object:
        """Return the version of a static object by the writes of this process."""
        return lasting_version_of(self._scope_of(key)) if self._is_static else None

    async def get(self, request: GetIndex) -> FoundIndex:
        scope, spec, nbytes = self._identity_of(request.key), request.shard.spec, None
        written = self._written(request.key)
        cached: CachedIndex | None = index_cache.get(scope, spec)
        if cached is not None and not cached.is_recorded and cached.written != written:
            index_cache.forget(scope)
            cached = None
        may_be_stale = not request.consistent and (
            not request.revalidate or request.version is not None
        )
        if cached is None and may_be_stale:
            nbytes = await self._read_recorded(request.shard, scope)
            cached = index_cache.get(scope, spec)
        is_verified = False
        if cached is not None and not request.consistent:
            version = cached.version
            is_verified = self._is_static and not cached.is_recorded
            if request.revalidate and isinstance(version, Version):
                is_verified |= version.is_listed_as(request.version)
        if cached is not None and (is_verified or not request.revalidate):
            found = FoundIndex(cached.index, cached.version, cached.size, was_requested=False)
            found = found._replace(is_unverified=not is_verified)
        elif request.revalidate:
            found = await self._read(request, scope, cached)
        else:
            # No version of static objects is compared: no request from before our write is joined.
            found, is_ours = await self._reads.join(
                (scope, written), lambda: self._read(request, scope, None)
            )
            if not is_ours:
                found = found._replace(was_requested=False, is_unverified=True, value=None)
        return found if nbytes is None else found._replace(consolidated_nbytes=nbytes)

    async def _read(
        self, request: GetIndex, scope: Hashable, cached: CachedIndex | None
    ) -> FoundIndex:
        """Read an index, or revalidate the cached one."""
        written = self._written(request.key)
        version = None if cached is None else cached.version
        unless = version if isinstance(version, Version) else None
        reply = await self._read_if(index_get(request), unless)
        if reply is None:
            assert cached is not None, "without a version nothing is not modified"
            return FoundIndex(cached.index, cached.version, cached.size)
        found = found_index(request, reply)
        layout = request.shard.layout
        if cached is not None and cached.is_recorded:  # it is stale, or is now read
            of_array = self._identity_of(layout.index_key or "")
            consolidated: ConsolidatedIndex | None = index_cache.get(of_array, layout.spec)
            if consolidated is not None:
                consolidated.drop(request.key[len(layout.prefix) :])
            index_cache.forget(scope)
        if found.decoded is None:
            index_cache.forget(scope)
            return found
        if self._is_static:
            may_cache = written == self._written(request.key)
        else:
            may_cache = isinstance(found.version, Version) and found.version.is_strong
        if may_cache:
            spec = request.shard.spec
            item = CachedIndex(found.decoded, spec, found.version, found.size, written=written)
            index_cache.put(scope, item)
        return found

    # ---------------------------------------------------------- consolidated indexes

    async def _read_recorded(self, shard: ShardRef, scope: Hashable) -> int | None:
        """Cache the recorded index of a shard; return the number of bytes read for it, if any."""
        layout = shard.layout
        key = layout.index_key
        read = self._read_consolidated
        if read is None or key is None or key in self._unusable or not index_cache.max_nbytes:
            return None
        identity, nbytes = self._identity_of(key), None
        indexes: ConsolidatedIndex | None = index_cache.get(identity, layout.spec)
        if indexes is None:
            (indexes, n_read), is_ours = await self._loads.join(
                (identity, layout.spec), lambda: self._load(read, key, layout)
            )
            nbytes = n_read if is_ours else None
        suffix, spec = shard.key[len(layout.prefix) :], shard.spec
        found = None if indexes is None else indexes.find(suffix, spec.n_entries)
        # Another task may have read the index by now.
        if found is not None and index_cache.get(scope, spec) is None:
            if isinstance(found.version, int):
                version = Version(None, found.size, found.version)
            else:
                version = Version(found.version, found.size)
            item = CachedIndex(found.index, spec, version, found.size, is_recorded=True)
            index_cache.put(scope, item)
        return nbytes

    async def _load(
        self, read: _ReadConsolidated, key: str, layout: ArrayLayout
    ) -> tuple[ConsolidatedIndex | None, int]:
        try:
            found = await read(key, index_cache.max_nbytes)
        except Exception:  # S3 forbids missing objects; a real failure shows when a shard is read
            found = Found(None, None)
        indexes, version = None, found.version
        if found.value is not None and isinstance(version, Version) and version.is_strong:
            indexes = ConsolidatedIndex.decode(found.value, layout.spec)
            if indexes is not None and indexes.has_file_times:
                modified_s = -1 if version.modified_s is None else version.modified_s
                if abs(modified_s - indexes.written_s) > _MAX_LAG_S:
                    indexes = None  # the times of the shards also differ
        if indexes is None or indexes.nbytes > index_cache.max_nbytes:
            self._unusable.add(key)
        if indexes is not None:
            index_cache.put(self._identity_of(key), indexes)
        return indexes, len(found.value or b"")
