"""Backend for any zarr ``Store`` that is not local files: fsspec, memory, wrappers, others."""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from zarr.abc.store import RangeByteRequest, Store
from zarr.core.sync import sync
from zarr.storage import FsspecStore, ZipStore

from zarr_shardstore.io.backends.base import (
    DEFAULT_FILE_OPTIONS,
    Backend,
    FileOptions,
)
from zarr_shardstore.io.backends.key_pages import next_page
from zarr_shardstore.io.backends.store_traits import (
    deletes_only_by_key,
    innermost,
    is_in_memory,
    is_shared_without_locks,
    scope_of_store,
)
from zarr_shardstore.io.buffers import byte_request_of, to_buffer
from zarr_shardstore.io.concurrency import SingleFlight, gather_bounded
from zarr_shardstore.io.local.files import is_hidden
from zarr_shardstore.io.remote.etags import ObjectVersion
from zarr_shardstore.io.remote.object_calls import (
    ObjectReader,
    cut,
    found_of,
    may_be_cut,
    move,
    upload_to,
)
from zarr_shardstore.io.remote.remote_index import RemoteIndexes
from zarr_shardstore.io.uploads import BufferedUpload, Upload
from zarr_shardstore.shards.index_reads import found_indexes, index_gets
from zarr_shardstore.shards.requests import (
    CloseListing,
    Delete,
    DeleteMany,
    DeletePrefix,
    Exists,
    Found,
    Get,
    GetIndex,
    GetMany,
    GetSize,
    ListDir,
    ListPage,
    ListPrefix,
    Move,
    Request,
    Set,
    SetIfNotExists,
)

MAX_CONCURRENCY = 64
"""Concurrent requests of one batch; zarr's own limit of 10 is one of chunks."""


def has_sync_surface(store: Store) -> bool:
    """Whether get_sync, set_sync and delete_sync of a store all work now."""
    names = ("get_sync", "set_sync", "delete_sync")
    return all(hasattr(store, name) for name in names) and bool(
        getattr(store, "_supports_sync_io", True)
    )


@cache
def _warn_of_other_writers() -> None:
    warnings.warn(
        "through fsspec nothing keeps two processes from updating a shard of an object store at "
        "a time: let each shard have one writer, or wrap an obstore store, which is safe "
        "(locking='none' says that you know)",
        stacklevel=2,
    )


class ZarrBackend(Backend):
    """Reads and writes through a zarr store's own methods.

    Cost: one call of ``get`` for a single read, one of ``get_partial_values`` for several;
    one call of the store for each other request, up to 64 concurrently.
    """

    def __init__(
        self,
        store: Store,
        options: FileOptions = DEFAULT_FILE_OPTIONS,
        *,
        is_static: bool = False,
    ) -> None:
        self.store = store
        self._place, self._path = scope_of_store(store)
        self._single_flight: SingleFlight[Found] = SingleFlight()
        self._indexes: RemoteIndexes | None = None
        if is_static and not has_sync_surface(store):  # zarr's stores that have one are not remote
            identity = object()
            self._indexes = RemoteIndexes(self, lambda key: (identity, key), is_static=True)
        self._options = options
        self.can_block = has_sync_surface(store)
        self.max_requests_at_once = None if is_in_memory(store) else MAX_CONCURRENCY
        self.reads = ObjectReader(store)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZarrBackend) and bool(self.store == other.store)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.store)

    def scope(self, key: str) -> Hashable:
        return self._place, self._path + key

    def lock(self, key: str) -> AbstractContextManager[None] | None:  # noqa: ARG002
        if self._options.locking != "none" and is_shared_without_locks(self.store):
            _warn_of_other_writers()
        return None

    def upload(self, key: str) -> Upload:
        return upload_to(self.store, key) or BufferedUpload(self, key)

    # ------------------------------------------------------------ blocking

    def perform(self, batch: list[Request]) -> list[Any]:
        return found_indexes(batch, [self._perform_one_blocking(r) for r in index_gets(batch)])

    def _perform_one_blocking(self, request: Request) -> Any:
        store: Any = self.store  # has the sync surface, see `can_block`
        match request:
            case Get(key, byte_range):
                found = found_of(store.get_sync(key, byte_range=byte_request_of(byte_range)))
                if may_be_cut(self.store, found, byte_range):
                    found = cut(found_of(store.get_sync(key)), byte_range)
                return found
            case Exists(key):
                return store.get_sync(key, byte_range=RangeByteRequest(0, 1)) is not None
            case Set(key, value):
                store.set_sync(key, to_buffer(value))
            case Delete(key):
                store.delete_sync(key)
            case _:
                return sync(self._perform_one(request))
        return None

    # --------------------------------------------------------------- async

    async def perform_async(self, batch: list[Request]) -> list[Any]:
        if self._indexes is None:
            return found_indexes(batch, await self._perform_batch(index_gets(batch)))
        return await self._perform_batch(batch)

    async def read(
        self,
        get: Get,
        unless: ObjectVersion | None = None,  # noqa: ARG002  there are no versions here
    ) -> Found | None:
        """Read an object for `RemoteIndexes`; ``None``: it still has the version `unless`."""
        found: Found = await self._perform_one(get)
        return found

    async def _perform_batch(self, batch: list[Request]) -> list[Any]:
        gets = [request for request in batch if isinstance(request, Get)]
        if len(gets) == len(batch) > 1 and self.reads.has_get_many:
            replies = await self.reads.get_many(gets)
            if replies is not None:
                return replies
        if len(batch) == 1:
            return [await self._perform_one(batch[0])]
        return await gather_bounded(
            [self._perform_one(request) for request in batch], MAX_CONCURRENCY
        )

    def _changing(self, key: str) -> AbstractContextManager[None]:
        return nullcontext() if self._indexes is None else self._indexes.changing(key)

    def _is_linked(self, key: str) -> bool:  # noqa: ARG002
        """Whether a key is reached through a link below the root."""
        return False

    async def _perform_one(self, request: Request) -> Any:
        inner = innermost(self.store)
        if isinstance(inner, ZipStore) and not inner._is_open:
            await inner._ensure_open()  # its listings do not open it
        store = self.store
        match request:
            case GetIndex():
                assert self._indexes is not None, "without a cache it is a Get"
                return await self._indexes.get(request)
            case Get(key, byte_range, together=together) if together is not None:
                alone = request._replace(together=None)
                scope = (key, byte_range, together)
                found, _ = await self._single_flight.join(scope, lambda: self._perform_one(alone))
                return found
            case Get(key, byte_range):
                return await self.reads.get(key, byte_range)
            case GetMany(keys):
                founds = await gather_bounded(
                    [self.reads.get(key, None) for key in keys], MAX_CONCURRENCY
                )
                return [found.value for found in founds]
            case Exists(key) if isinstance(innermost(store), FsspecStore):
                # For fsspec's `exists` an object is missing whatever fails.
                return await self.reads.size(key) is not None
            case Exists(key):
                return await self.reads.exists(key)
            case GetSize(key):
                return await self.reads.size(key)
            case Set(key, value):
                with self._changing(key):
                    await store.set(key, to_buffer(value))
            case SetIfNotExists(key, value):
                with self._changing(key):
                    await store.set_if_not_exists(key, to_buffer(value))
            case Delete(key):
                with self._changing(key):
                    await store.delete(key)
            case DeleteMany(keys):
                deletions = [store.delete(key) for key in keys]
                await gather_bounded(deletions, MAX_CONCURRENCY)
            case Move(key, to):
                await move(store, key, to)
            case DeletePrefix(prefix) if deletes_only_by_key(store) or await _has_object(
                store, prefix
            ):
                # fsspec also finds an object with the name of the directory.
                for key in [key async for key in store.list_prefix(prefix)]:
                    if key.startswith(prefix) and not self._is_linked(key):
                        await store.delete(key)
            case DeletePrefix(""):
                await store.clear()
                # FsspecStore.clear stops at the first directory that it has removed already.
                for key in [key async for key in store.list()]:
                    await store.delete(key)
            case DeletePrefix(prefix):
                await store.delete_dir(prefix.removesuffix("/"))
            case ListPrefix(prefix):
                return [key async for key in self.reads.keys_below(prefix) if not is_hidden(key)]
            case ListPage(cursor, n_keys):
                if cursor.pages is None:
                    cursor.pages = aiter(self.reads.keys_below(cursor.prefix))
                return await next_page(cursor.pages, n_keys)
            case CloseListing(cursor):
                if hasattr(cursor.pages, "aclose"):
                    await cursor.pages.aclose()
            case ListDir(prefix):
                try:
                    names = store.list_dir(prefix.removesuffix("/"))
                    # fsspec lists an object of that name with a path.
                    return [name async for name in names if not is_hidden(name) and "/" not in name]
                except NotADirectoryError:  # fsspec, where a local file has this name
                    return []
            case _:
                raise TypeError(f"a backend does not perform {request!r}")
        return None


async def _has_object(store: Store, prefix: str) -> bool:
    """Whether an fsspec store has an object with the name of a directory.

    `FsspecStore.delete_dir` also removes that object. It may be a shard: the name of a shard may
    be the path of a chunk of another shard.
    """
    inner = innermost(store)
    if not prefix or not isinstance(inner, FsspecStore):
        return False
    return bool(await inner.fs._isfile(f"{inner.path}/{prefix.removesuffix('/')}"))
