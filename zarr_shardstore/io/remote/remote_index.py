"""Indexes of shards that are objects: remembered, and asked for once by many tasks at a time.

An index that is remembered is not asked for again before it is used: the reply to the request for
the bytes that it points to tells the version of the object, and the flow compares. Where no bytes
are read, because the chunk is missing, the flow asks for a fresh index, and the base store
answers that it is not modified. An index of a collection counts as one that is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol

from zarr_shardstore.io.concurrency import SingleFlight
from zarr_shardstore.io.index_cache import RememberedIndex, index_cache
from zarr_shardstore.io.remote.consolidated_reads import ConsolidatedIndexes, Finding
from zarr_shardstore.io.remote.etags import is_listed_as
from zarr_shardstore.shards.index_reads import found_index, index_get
from zarr_shardstore.shards.requests import Found, FoundIndex, Get, GetIndex


class _Base(Protocol):
    """What is needed of the backend."""

    async def get(self, request: Get) -> Found: ...

    async def get_if_modified(self, request: Get, known: RememberedIndex) -> Found | None:
        """``None``: the object is the one that is known."""

    def can_be_remembered(self, found: FoundIndex) -> bool:
        """Whether its version says that an object is the same."""


class RemoteIndexes:
    """Replies to `GetIndex` for one base store.

    Parameters
    ----------
    base
        Reads bytes.
    identity_of
        Of an object, by its key: the same for all stores of the process on this base store.
    is_static
        Nobody changes the objects: what is remembered is true.
    collected
        Where indexes may be found without a request; for base stores with versions.

    Thread safety: may be used from any thread and any event loop.
    """

    def __init__(
        self,
        base: _Base,
        identity_of: Callable[[str], Hashable],
        *,
        is_static: bool,
        collected: ConsolidatedIndexes | None = None,
    ) -> None:
        self._base = base
        self._identity_of = identity_of
        self._is_static = is_static
        self._collected = collected
        self._flights: SingleFlight[FoundIndex] = SingleFlight()
        self._n_changes = 0

    @contextmanager
    def changing(self, key: str) -> Iterator[None]:
        """Within the block this process changes an object: what is known of it is of no use, and
        neither is what was asked for meanwhile."""
        self._forget(key)
        try:
            yield
        finally:
            self._forget(key)

    def _forget(self, key: str) -> None:
        self._n_changes += 1
        index_cache.forget(self._identity_of(key))
        if self._collected is not None:
            self._collected.forget(key)

    async def get(self, request: GetIndex) -> FoundIndex:
        """The index, and whether it is one that was asked for before."""
        scope = self._identity_of(request.key)
        known = self._known(scope, request)
        if known is None and not request.consistent and (not request.revalidate or request.version):
            known, nbytes = await self._find_collected(scope, request)
            if nbytes is not None:
                found = await self._get(request, scope, known)
                return found._replace(consolidated_nbytes=nbytes)
        return await self._get(request, scope, known)

    async def _get(
        self, request: GetIndex, scope: Hashable, known: RememberedIndex | None
    ) -> FoundIndex:
        if known is not None and not request.consistent:
            is_true = self._is_static and known.is_checked
            if is_true or (request.revalidate and is_listed_as(known.version, request.version)):
                return FoundIndex(known.index, known.version, known.size, was_requested=False)
        if request.revalidate:
            return await self._ask(request, scope, known)
        if known is not None:
            return FoundIndex(
                known.index, known.version, known.size, was_requested=False, is_unverified=True
            )
        # Nobody compares what is static: a request that is older than our change is of no use.
        flight = (scope, self._n_changes) if self._is_static else scope
        found, is_ours = await self._flights.join(flight, lambda: self._ask(request, scope, None))
        if is_ours:
            return found
        # The bytes may be older than the question; the index is looked at again.
        return found._replace(was_requested=False, is_unverified=True, value=None)

    def _known(self, scope: Hashable, request: GetIndex) -> RememberedIndex | None:
        item = index_cache.get(scope, request.shard.layout.spec)
        return item if isinstance(item, RememberedIndex) else None

    async def _find_collected(self, scope: Hashable, request: GetIndex) -> Finding:
        if self._collected is None or request.shard.layout.index_key is None:
            return Finding(None)
        found = await self._collected.find(request.shard)
        known = self._known(scope, request)  # somebody may have read it meanwhile
        if known is not None:
            return found._replace(remembered=known)
        if found.remembered is not None:
            index_cache.put(scope, found.remembered)
        return found

    async def _ask(
        self, request: GetIndex, scope: Hashable, known: RememberedIndex | None
    ) -> FoundIndex:
        n_changes = self._n_changes
        if known is None:
            reply: Found | None = await self._base.get(index_get(request))
        else:
            reply = await self._base.get_if_modified(index_get(request), known)
        if reply is None and known is not None:
            return FoundIndex(known.index, known.version, known.size)
        assert reply is not None
        found = found_index(request, reply)
        if known is not None and not known.is_checked and self._collected is not None:
            self._collected.drop(request.shard)
            index_cache.forget(scope)
        if found.decoded is None:
            index_cache.forget(scope)
        elif (
            n_changes == self._n_changes if self._is_static else self._base.can_be_remembered(found)
        ):
            spec = request.shard.layout.spec
            item = RememberedIndex(found.decoded, spec, found.version, found.size)
            index_cache.put(scope, item)
        return found
