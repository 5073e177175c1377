"""Cache of the indexes of remote shards.

1. A hit costs no request and is *unverified*. The reply to the next request for bytes of the shard
   tells its version, and the flow compares.
2. Where no bytes are read, because a chunk is missing, the flow revalidates: the request has the
   cached ETag, and the server answers that the object is not modified.
3. On a miss a consolidated index is read, if there is one. A recorded index is an unverified hit.
4. Tasks that miss concurrently share one request. Those that joined it get an unverified index,
   because its bytes may be older than their question.
5. An index is cached if its version is a strong ETag. Indexes of static objects are always cached,
   and verified, unless this process wrote to the store while they were read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol

from zarr_shardstore.io.concurrency import SingleFlight
from zarr_shardstore.io.index_cache import CachedIndex, index_cache
from zarr_shardstore.io.remote.consolidated_reads import ConsolidatedIndexes
from zarr_shardstore.io.remote.etags import ObjectVersion
from zarr_shardstore.shards.index_reads import found_index, index_get
from zarr_shardstore.shards.requests import Found, FoundIndex, Get, GetIndex


class _Reader(Protocol):
    async def read(self, get: Get, unless: ObjectVersion | None = None) -> Found | None:
        """Read an object or a range of it; ``None``: it still has the version `unless`."""


class RemoteIndexes:
    """Replies to `GetIndex` for one base store.

    Parameters
    ----------
    reader
        Reads bytes of the base store.
    identity_of
        Identity of an object by its key, the same for all stores of the process on this base store.
    is_static
        No other process changes the objects.
    consolidated
        Consolidated indexes; for base stores with ETags.

    Thread safety: may be used from any thread and any event loop.
    """

    def __init__(
        self,
        reader: _Reader,
        identity_of: Callable[[str], Hashable],
        *,
        is_static: bool,
        consolidated: ConsolidatedIndexes | None = None,
    ) -> None:
        self._reader = reader
        self._identity_of = identity_of
        self._is_static = is_static
        self._consolidated = consolidated
        self._reads: SingleFlight[FoundIndex] = SingleFlight()
        self._n_changes = 0

    @contextmanager
    def changing(self, key: str) -> Iterator[None]:
        """Drop cached indexes of an object that this process changes within the block."""
        self._drop(key)
        try:
            yield
        finally:
            self._drop(key)  # a request within the block may have read the old object

    def _drop(self, key: str) -> None:
        self._n_changes += 1
        index_cache.forget(self._identity_of(key))
        if self._consolidated is not None:
            self._consolidated.retry(key)

    async def get(self, request: GetIndex) -> FoundIndex:
        """Return the index of a shard."""
        scope = self._identity_of(request.key)
        cached = self._cached(scope, request)
        may_be_stale = not request.consistent and (
            not request.revalidate or request.version is not None
        )
        if cached is not None or self._consolidated is None or not may_be_stale:
            return await self._get(request, scope, cached)
        recorded, nbytes = await self._consolidated.find(request.shard)
        cached = self._cached(scope, request)  # another task may have read it by now
        if cached is None and recorded is not None:
            index_cache.put(scope, recorded)
            cached = recorded
        found = await self._get(request, scope, cached)
        return found if nbytes is None else found._replace(consolidated_nbytes=nbytes)

    def _cached(self, scope: Hashable, request: GetIndex) -> CachedIndex | None:
        item = index_cache.get(scope, request.shard.layout.spec)
        return item if isinstance(item, CachedIndex) else None

    async def _get(
        self, request: GetIndex, scope: Hashable, cached: CachedIndex | None
    ) -> FoundIndex:
        if cached is not None and not request.consistent:
            version = cached.version
            is_verified = self._is_static and not cached.is_recorded
            if request.revalidate and isinstance(version, ObjectVersion):
                is_verified |= version.is_listed_as(request.version)
            if is_verified:
                return FoundIndex(cached.index, version, cached.size, was_requested=False)
        if request.revalidate:
            return await self._read(request, scope, cached)
        if cached is not None:
            return FoundIndex(
                cached.index, cached.version, cached.size, was_requested=False, is_unverified=True
            )
        # No version is compared of static objects: a request from before our write is not joined.
        flight = (scope, self._n_changes) if self._is_static else scope
        found, is_ours = await self._reads.join(flight, lambda: self._read(request, scope, None))
        if is_ours:
            return found
        return found._replace(was_requested=False, is_unverified=True, value=None)

    async def _read(
        self, request: GetIndex, scope: Hashable, cached: CachedIndex | None
    ) -> FoundIndex:
        """Read an index, or revalidate the cached one."""
        n_changes = self._n_changes
        version = None if cached is None else cached.version
        unless = version if isinstance(version, ObjectVersion) else None
        reply = await self._reader.read(index_get(request), unless)
        if reply is None:
            assert cached is not None, "without a version nothing is not modified"
            return FoundIndex(cached.index, cached.version, cached.size)
        found = found_index(request, reply)
        if cached is not None and cached.is_recorded and self._consolidated is not None:
            self._consolidated.drop(request.shard)
            index_cache.forget(scope)
        if found.decoded is None:
            index_cache.forget(scope)
            return found
        if self._is_static:
            may_cache = n_changes == self._n_changes
        else:
            may_cache = isinstance(found.version, ObjectVersion) and found.version.is_strong
        if may_cache:
            spec = request.shard.layout.spec
            index_cache.put(scope, CachedIndex(found.decoded, spec, found.version, found.size))
        return found
