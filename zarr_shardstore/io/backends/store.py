"""Backend for a zarr ``Store`` that does what zarr's class says: one call for each request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Hashable, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any, TypeAlias

from zarr.abc.store import RangeByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype, cpu
from zarr.core.sync import sync
from zarr.storage import MemoryStore, WrapperStore

from zarr_shardstore.errors import UnsupportedError
from zarr_shardstore.format.ranges import ByteRange, Range, Suffix, resolve_range
from zarr_shardstore.format.shard import Bytes
from zarr_shardstore.io.backends import base, store_traits
from zarr_shardstore.io.backends.store_traits import remedy_of
from zarr_shardstore.io.buffers import as_view, byte_request_of
from zarr_shardstore.io.concurrency import PerLoop, SingleFlight, gather_bounded
from zarr_shardstore.io.local.files import is_hidden
from zarr_shardstore.io.remote_indexes import RemoteIndexes, Version
from zarr_shardstore.metadata.documents import node_of_document
from zarr_shardstore.shards import requests
from zarr_shardstore.shards.index_reads import check_whole, found_index, index_get
from zarr_shardstore.shards.requests import Found, FoundIndex, Request
from zarr_shardstore.shards.shard_listing import VersionedKeys

Listed: TypeAlias = AsyncGenerator[tuple[str, object], None]
"""Keys, with versions where the base store has them."""

_REMOVALS: set[type] = {requests.Delete, requests.DeletePrefix}
CHANGES: set[type] = _REMOVALS | {requests.Set, requests.SetIfNotExists, requests.Move}
_WRITES = (requests.Set, requests.SetIfNotExists, requests.Delete)
_LISTINGS: set[type] = {requests.ListPage, requests.ListDir}


def has_sync_surface(store: Store) -> bool:
    """Whether get_sync, set_sync and delete_sync of a store all work now.

    A wrapper that overrides ``get`` alone inherits the ``get_sync`` of the wrapped store.
    """
    layers = [store]
    while isinstance(layers[-1], WrapperStore):
        layers.append(layers[-1]._store)
    return bool(getattr(store, "_supports_sync_io", True)) and all(
        _defines(layer, f"{name}_sync") >= _defines(layer, name) > 0
        for layer in layers
        for name in ("get", "set", "delete")
    )


def _defines(store: Store, name: str) -> int:
    """Return the number of classes from the root to that which defines a method; 0 without one."""
    classes = type(store).__mro__
    return next((len(classes) - i for i, cls in enumerate(classes) if name in vars(cls)), 0)


class StoreBackend(base.Backend):
    """Reads and writes through the methods of a zarr store that has all of them.

    Cost: one call of the store for each request, up to 64 concurrently.
    """

    def __init__(self, store: Store, options: base.BackendOptions = base.DEFAULT_OPTIONS) -> None:
        self.store = store
        self._store: Any = store  # with methods that only some stores have, see `can_block`
        self._inner = store_traits.innermost(store)
        self._options = options
        self._place, self._path = store_traits.scope_of_store(store)
        self._single_flight: SingleFlight[Found] = SingleFlight()
        self._prototype = cpu.buffer_prototype
        self.slots = PerLoop(lambda: asyncio.Semaphore(base.MAX_CONCURRENCY))
        self.can_block = has_sync_surface(store)
        if not store_traits.is_in_memory(store):
            self.max_requests_at_once = base.MAX_CONCURRENCY
        self._indexes: RemoteIndexes | None = None
        if options.is_static and not self.can_block:  # zarr's stores that block are not remote
            identity = object()
            self._indexes = RemoteIndexes(self.read, lambda key: (identity, key), is_static=True)

    def __repr__(self) -> str:
        return repr(self.store)

    def with_buffers(self, cls: type[Buffer]) -> StoreBackend:
        """Return this backend with buffers of a class for the base store. Documents keep zarr's."""
        view, self.lacks = copy(self), self.lacks  # one set for both
        view._prototype = BufferPrototype(cls, cpu.NDBuffer)
        return view

    def _prototype_for(self, key: str) -> BufferPrototype:
        return self._prototype if node_of_document(key) is None else cpu.buffer_prototype

    def _buffer(self, key: str, value: Bytes) -> Buffer:
        return self._prototype_for(key).buffer.from_bytes(value)

    def scope(self, key: str) -> Hashable:
        return self._place, self._path + key

    def _refuse(self, batch: Sequence[Request], error: Exception) -> None:
        """Raise `UnsupportedError` for what the store, or its server, never does."""
        if remedy_of(error) != "another way":
            return
        kinds = {type(request) for request in batch}
        if kinds & _REMOVALS:
            self.lacks.add("delete")
        what = "read this; copy the objects into another store, and read them there"
        if kinds & CHANGES:
            what = "store or remove this, it was not done; write into another store"
        elif kinds & _LISTINGS:
            what = "list keys: arrays are opened by their paths, and tools need a store that lists"
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UnsupportedError(f"{self!r} cannot {what} ({why})") from error

    # ------------------------------------------------------------ blocking

    def perform(self, batch: list[Request], _: base.OpenFiles | None = None) -> list[Any]:
        try:
            return [self._reply_sync(request) for request in batch]
        except Exception as error:
            self._refuse(batch, error)
            raise

    def _reply_sync(self, request: Request) -> Any:
        method = self.replies_sync.get(type(request))
        return sync(self._reply(request)) if method is None else method(self, request)

    def get_sync(self, request: requests.Get) -> Found:
        get = partial(self._store.get_sync, request.key, prototype=self._prototype_for(request.key))
        found = found_of(get(byte_range=byte_request_of(request.byte_range)))
        if self._is_cut(found, request.byte_range) or is_longer(found, request.byte_range):
            found = part_of(found_of(get()), request.byte_range)
        return found

    def get_index_sync(self, request: requests.GetIndex) -> FoundIndex:
        return found_index(request, self.get_sync(index_get(request)))

    def exists_sync(self, request: requests.Exists) -> bool:
        return self._store.get_sync(request.key, byte_range=RangeByteRequest(0, 1)) is not None

    def set_sync(self, request: requests.Set) -> None:
        self._store.set_sync(request.key, self._buffer(request.key, request.value))

    def delete_sync(self, request: requests.Delete) -> None:
        if request.placeholder is None:
            self._store.delete_sync(request.key)
        else:
            sync(self._reply(request))

    def _is_cut(self, found: Found, byte_range: ByteRange | None) -> bool:
        """Whether zarr 3.1 may have cut a value that is shorter than the requested suffix."""
        if not isinstance(self.store, MemoryStore) or not isinstance(byte_range, Suffix):
            return False
        return found.value is not None and len(found.value) < byte_range.nbytes

    # --------------------------------------------------------------- async

    async def perform_async(self, batch: list[Request]) -> list[Any]:
        try:
            return await super().perform_async(batch)
        except Exception as error:
            self._refuse(batch, error)
            raise

    async def _reply_in_turn(self, request: Request) -> Any:
        if isinstance(request, requests.GetMany):  # each of its reads takes a turn
            return await self._reply(request)
        async with self.slots.here():
            return await self._reply(request)

    async def read(self, get: requests.Get, _: Version | None, /) -> Found | None:
        return await self.get(get)

    async def _reply(self, request: Request) -> Any:
        if not self._inner._is_open:
            await self._inner._ensure_open()  # listings of a zip do not open it
        if self._indexes is None or not isinstance(request, _WRITES):
            return await super()._reply(request)
        with self._indexes.changing(request.key):
            return await super()._reply(request)

    async def get(self, request: requests.Get) -> Found:
        key, byte_range, together = request.key, request.byte_range, request.together
        if together is None:
            return await self._get(key, byte_range)
        alone = request._replace(together=None)
        scope = (key, byte_range, together)
        found, _ = await self._single_flight.join(scope, lambda: self.get(alone))
        return found

    async def get_many(self, request: requests.GetMany) -> list[Found]:
        gets = [self._reply_in_turn(requests.Get(key)) for key in request.keys]
        return await gather_bounded(gets, base.MAX_CONCURRENCY)

    async def get_index(self, request: requests.GetIndex) -> FoundIndex:
        if self._indexes is None:
            return found_index(request, await self.get(index_get(request)))
        return await self._indexes.get(request)

    async def exists(self, request: requests.Exists) -> bool:
        return await self.store.exists(request.key)

    async def get_size(self, request: requests.GetSize) -> int | None:
        return await self._size(request.key)

    async def set(self, request: requests.Set) -> None:
        await self.store.set(request.key, self._buffer(request.key, request.value))

    async def set_if_not_exists(self, request: requests.SetIfNotExists) -> None:
        value = self._buffer(request.key, request.value)
        await self.store.set_if_not_exists(request.key, value)

    async def delete(self, request: requests.Delete) -> None:
        await self.store.delete(request.key)

    async def delete_prefix(self, request: requests.DeletePrefix) -> None:
        directory = request.prefix.removesuffix("/")
        await (self.store.delete_dir(directory) if directory else self.store.clear())

    async def move(self, request: requests.Move) -> None:
        key, to = request.key, request.to
        with suppress(FileNotFoundError):
            found = await self._get(key, None)
            if found.value is not None:
                check_whole(key, found.value, await self._size(key))
                await self.store.set(to, self._buffer(to, found.value))
                await self.store.delete(key)

    async def list_page(self, request: requests.ListPage) -> VersionedKeys:
        cursor = request.cursor
        cursor.pages = cursor.pages or self._listed(cursor.prefix)
        if not request.n_keys:
            await cursor.pages.aclose()
            return VersionedKeys()
        return await next_page(cursor.pages, request.n_keys, shows_all=cursor.shows_all)

    async def list_dir(self, request: requests.ListDir) -> list[str]:
        return await self._names(request.prefix)

    async def _get(self, key: str, byte_range: ByteRange | None) -> Found:
        """Read an object, or a range of it."""
        return await self._get_once(key, byte_range)

    async def _get_once(self, key: str, byte_range: ByteRange | None) -> Found:
        """Make one request for an object, or a range of it."""
        prototype = self._prototype_for(key)
        found = found_of(await self.store.get(key, prototype, byte_request_of(byte_range)))
        if self._is_cut(found, byte_range):
            found = part_of(found_of(await self.store.get(key, prototype)), byte_range)
        return found

    async def _size(self, key: str) -> int | None:
        """Return the size of an object in bytes; ``None`` if there is none."""
        with suppress(FileNotFoundError):
            return await self.store.getsize(key)
        return None

    async def _names(self, prefix: str) -> list[str]:
        """List the names in a directory."""
        names = self.store.list_dir(prefix.removesuffix("/"))
        return self._visible([name.rstrip("/") async for name in names])

    def _visible(self, names: list[str]) -> list[str]:
        # fsspec lists an object of that name with a path.
        return [name for name in names if not is_hidden(name) and "/" not in name]

    async def _listed(self, prefix: str) -> Listed:
        """List the keys in a directory, recursively; closing it closes the listing of the store."""
        keys: Any = self.store.list_prefix(prefix)
        try:
            async for key in keys:
                yield key, None
        finally:
            if hasattr(keys, "aclose"):
                await keys.aclose()


async def next_page(listed: Listed, n_keys: int, *, shows_all: bool = False) -> VersionedKeys:
    """Return at most so many of the next keys and versions; none if there are no more."""
    page: list[tuple[str, object]] = []
    async for item in listed:
        if shows_all or not is_hidden(item[0]):
            page.append(item)
            if len(page) == n_keys:
                break
    return VersionedKeys([key for key, _ in page], [version for _, version in page])


def found_of(value: Buffer | None) -> Found:
    return Found(None if value is None else as_view(value), None)


def part_of(found: Found, byte_range: ByteRange | None) -> Found:
    if found.value is None:
        return found
    start, stop = resolve_range(byte_range, len(found.value))
    return found._replace(value=found.value[start:stop], size=len(found.value))


def is_longer(found: Found, byte_range: ByteRange | None) -> bool:
    """Whether more came than was asked for."""
    match byte_range:
        case Range(start, stop):
            return len(found.value or b"") > stop - start
        case Suffix(nbytes):
            return len(found.value or b"") > nbytes
    return False
