"""Backend for any zarr ``Store`` that is not local files: memory, archives, wrappers, others.

A client may lack suffix ranges, all ranges, or one kind of listing. It may raise for a range after
the end of an object. The backend tries, then takes another way, or says what is lacking: see
decisions/0028-base-stores.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Hashable, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, TypeAlias, TypeVar

from zarr.abc.store import Store
from zarr.core.buffer import Buffer, BufferPrototype, cpu
from zarr.storage import MemoryStore

from zarr_shardstore.errors import UnsupportedError
from zarr_shardstore.format.ranges import ByteRange, Range, Suffix, resolve_range
from zarr_shardstore.format.shard import Bytes
from zarr_shardstore.io.backends import base, store_traits
from zarr_shardstore.io.backends.store_traits import remedy_of
from zarr_shardstore.io.buffers import as_view, byte_request_of
from zarr_shardstore.io.concurrency import PerLoop, SingleFlight
from zarr_shardstore.io.local import files
from zarr_shardstore.io.remote_indexes import RemoteIndexes, Version
from zarr_shardstore.metadata.documents import node_of_document
from zarr_shardstore.shards import requests
from zarr_shardstore.shards.index_reads import check_whole, found_index, index_get
from zarr_shardstore.shards.requests import Found, FoundIndex, Request
from zarr_shardstore.shards.shard_listing import VersionedKeys

T = TypeVar("T")
Listed: TypeAlias = AsyncGenerator[tuple[str, object, int | None], None]
"""Keys with their versions and sizes; ``None``: not known."""

_REMOVALS: set[type] = {requests.Delete, requests.DeletePrefix}
CHANGES: set[type] = _REMOVALS | {requests.Set, requests.SetIfNotExists, requests.Move}
_LISTINGS: set[type] = {requests.ListPage, requests.ListDir}
_N_ATTEMPTS_OF_RANGE = 10  # attempts to read a range of an object that is replaced repeatedly


class ZarrBackend(base.Backend):
    """Reads and writes through a zarr store, in another way where it lacks a method.

    Cost: one call of the store for each request, up to 64 concurrently.
    """

    def __init__(self, store: Store, options: base.BackendOptions = base.DEFAULT_OPTIONS) -> None:
        self.store = store
        self._inner = store_traits.innermost(store)
        self._options = options
        self.needs_callers_loop = store_traits.may_belong_to_loop(store)
        self._place, self._path = store_traits.scope_of_store(store)
        self._single_flight: SingleFlight[Found] = SingleFlight()
        self._prototype = cpu.buffer_prototype
        self.slots = PerLoop(lambda: asyncio.Semaphore(base.MAX_CONCURRENCY))
        if not store_traits.is_in_memory(store):
            self.max_requests_at_once = base.MAX_CONCURRENCY
        self._indexes: RemoteIndexes | None = None
        if options.is_static:
            self._indexes = RemoteIndexes(self.read, self.scope, is_static=True)

    def __repr__(self) -> str:
        return repr(self.store)

    def with_buffers(self, cls: type[Buffer]) -> ZarrBackend:
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
            what = "list keys: Python opens arrays by their paths, tools need a store that lists"
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UnsupportedError(f"{self!r} cannot {what} ({why})") from error

    async def perform_async(self, batch: list[Request]) -> list[Any]:
        try:
            return await super().perform_async(batch)
        except Exception as error:
            self._refuse(batch, error)
            raise

    async def read(self, get: requests.Get, _: Version | None, /) -> Found | None:
        return await self.get(get)

    async def _reply(self, request: Request) -> Any:
        """Reply, after a wait if too many requests are under way."""
        async with self.slots.here():
            if not self._inner._is_open:
                await self._inner._ensure_open()  # listings of a zip do not open it
            return await super()._reply(request)

    async def get(self, request: requests.Get) -> Found:
        if request.together is None:
            return await self._get(request.key, request.byte_range)
        alone = request._replace(together=None)
        found, _ = await self._single_flight.join(request, lambda: self.get(alone))
        return found

    async def get_index(self, request: requests.GetIndex) -> FoundIndex:
        if self._indexes is None:
            return found_index(request, await self.get(index_get(request)))
        return await self._indexes.get(request)

    async def exists(self, request: requests.Exists) -> bool:
        if "exists" not in self.lacks:
            try:
                return await unless_missing(self.store.exists(request.key), False)
            except NotImplementedError:
                self.lacks.add("exists")
        return await self._size(request.key) is not None

    async def get_size(self, request: requests.GetSize) -> int | None:
        return await self._size(request.key)

    async def set(self, request: requests.Set) -> None:
        await self.store.set(request.key, self._buffer(request.key, request.value))

    async def set_if_not_exists(self, request: requests.SetIfNotExists) -> None:
        value = self._buffer(request.key, request.value)
        await self.store.set_if_not_exists(request.key, value)

    async def delete(self, request: requests.Delete) -> None:
        try:
            await self._delete(request.key)
        except NotImplementedError:
            if request.placeholder is None:
                raise
            await self.set(requests.Set(request.key, request.placeholder()))

    async def _delete(self, key: str) -> None:
        await self.store.delete(key)

    async def delete_prefix(self, request: requests.DeletePrefix) -> None:
        directory = request.prefix.removesuffix("/")
        if not await self._deletes_by_key(request.prefix):
            if not directory:
                await self.store.clear()
            else:
                with suppress(NotImplementedError):
                    await self.store.delete_dir(directory)
                    return
        # FsspecStore.clear stops at the first directory that it has removed already.
        for key in [key async for key, *_ in self._listed(request.prefix)]:
            if self.root is None or files.link_on_way(self.root, key) is None:
                await self._delete(key)

    async def _deletes_by_key(self, prefix: str) -> bool:  # noqa: ARG002
        return store_traits.deletes_only_by_key(self.store)

    async def move(self, request: requests.Move) -> None:
        key, to = request.key, request.to
        with suppress(FileNotFoundError):
            found = await self._get(key, None)
            if found.value is not None:
                check_whole(key, found.value, await self._size(key))
                await self.store.set(to, self._buffer(to, found.value))
                await self._delete(key)

    async def list_page(self, request: requests.ListPage) -> VersionedKeys:
        cursor = request.cursor
        if not request.n_keys:  # the end of a listing, which may not have begun
            if cursor.pages is not None:
                await cursor.pages.aclose()
            return VersionedKeys()
        cursor.pages = cursor.pages or self._listed(cursor.prefix)
        return await next_page(cursor.pages, request.n_keys, shows_all=cursor.shows_all)

    async def list_dir(self, request: requests.ListDir) -> list[str]:
        return await self._names(request.prefix)

    async def _get_once(self, key: str, byte_range: ByteRange | None) -> Found:
        """Make one request for an object, or a range of it."""
        prototype = self._prototype_for(key)
        found = _found_of(await self.store.get(key, prototype, byte_request_of(byte_range)))
        if (
            isinstance(self.store, MemoryStore)  # zarr 3.1 cuts a value shorter than the suffix
            and isinstance(byte_range, Suffix)
            and found.value is not None
            and len(found.value) < byte_range.nbytes
        ):
            found = _part_of(_found_of(await self.store.get(key, prototype)), byte_range)
        return found

    async def _get(self, key: str, byte_range: ByteRange | None) -> Found:
        """Read an object, or a range of it, whatever the client cannot do."""
        if byte_range is not None and "ranges" in self.lacks:
            return _part_of(await self._get(key, None), byte_range)
        if isinstance(byte_range, Suffix) and "suffixes" in self.lacks:
            return await self._get_within(key, byte_range)
        try:
            found = await self._get_once(key, byte_range)
        except Exception as error:
            # No suffix ranges here (Azure), or an error for a range after the end (obstore).
            if byte_range is not None:
                if isinstance(byte_range, Suffix) and remedy_of(error) == "another way":
                    self.lacks.add("suffixes")
                return await self._get_within(key, byte_range)
            if remedy_of(error) == "missing" or (
                isinstance(error, LookupError) and await self._size(key) is None
            ):  # the latter is fsspec's, for a key that is not in an archive
                return Found(None, None)
            raise
        if _is_longer(found, byte_range) and len(found.value or b"") == await self._size(key):
            return _part_of(found, byte_range)  # web servers may send the whole object
        return found

    async def _get_within(self, key: str, byte_range: ByteRange) -> Found:
        """Read the size, then a range within it; again, if another writer has replaced the object
        by one of another size."""
        size_at_failure: int | None = None
        for n_left in reversed(range(_N_ATTEMPTS_OF_RANGE)):
            size = await self._size(key)
            if size is None:
                return Found(None, None)
            start, stop = resolve_range(byte_range, size)
            if start >= stop:
                return Found(memoryview(b""), None, size)
            try:
                found = await self._get_once(key, Range(start, stop))
            except Exception as error:
                if remedy_of(error) == "another way":
                    self.lacks.add("ranges")
                    return _part_of(await self._get(key, None), byte_range)
                if not n_left or size == size_at_failure:  # no writer has replaced it: it fails
                    raise
                size_at_failure = size
                continue
            if found.size in (None, size) and found.value is not None:
                if len(found.value) == size:
                    found = _part_of(found, Range(start, stop))
                if found.value is not None and len(found.value) == stop - start:
                    return found._replace(size=size)
        # The last reply is of an object of another size: its bytes may be of another range.
        return found if found.value is None else found._replace(value=memoryview(b""))

    async def _size(self, key: str) -> int | None:
        """Return the size of an object in bytes; ``None`` if there is none."""
        size = await unless_missing(self.store.getsize(key), None)
        # icechunk returns 0 for a missing chunk, and fsspec for a directory.
        return None if size == 0 and (await self._get_once(key, None)).value is None else size

    async def _names(self, prefix: str) -> list[str]:
        """List the names in a directory."""
        try:
            names = self.store.list_dir(prefix.removesuffix("/"))
            found = visible([name.rstrip("/") async for name in names])
            if prefix and not found and self._lacks_prefixes():
                # VirtualiZarr's has no names in a directory below one that it does not list.
                await self._names(prefix[: prefix.rstrip("/").rfind("/") + 1])
            return found
        except NotImplementedError:
            if self._lacks_prefixes():
                raise
        keys = [key async for key, *_ in self._listed(prefix) if not files.is_hidden(key)]
        return list(dict.fromkeys(key[len(prefix) :].split("/", 1)[0] for key in keys))

    def _lacks_prefixes(self) -> bool:
        """Whether the store lists directories only. It is asked for a listing, and for no key."""
        try:
            self.store.list_prefix("")
        except NotImplementedError:
            self.lacks.add("list_prefix")
        return "list_prefix" in self.lacks

    async def _walked(self, directory: str) -> AsyncGenerator[str, None]:
        """List keys by one listing for each name, which may be a key, a directory, or both."""
        for name in await self._names(directory):
            n_below = 0
            async for key in self._walked(f"{directory}{name}/"):
                n_below += 1
                yield key
            if not n_below or await self._is_key(directory + name):
                yield directory + name

    async def _is_key(self, path: str) -> bool:
        try:
            return await self._size(path) is not None
        except (ValueError, TypeError, NotImplementedError):  # no key can be called so
            return False

    async def _listed(self, prefix: str) -> Listed:
        """List the keys with a prefix, recursively. To close it closes the store's listing."""
        directory: str | None = prefix
        while directory is not None and "list_prefix" not in self.lacks:
            keys: Any = None
            try:
                keys = self.store.list_prefix(directory)
                async for key in keys:
                    if key.startswith(prefix) and key[-1:] != "/":  # a zip may have directories
                        yield key, None, None
                return
            except NotImplementedError:
                self.lacks.add("list_prefix")
            except Exception as error:
                if not directory or remedy_of(error) != "missing":
                    raise
            finally:
                if hasattr(keys, "aclose"):
                    await keys.aclose()
            # icechunk lists groups and arrays only: the directory above also has these keys.
            directory = "/".join(directory.rstrip("/").split("/")[:-1])
        async for key in self._walked(prefix[: prefix.rfind("/") + 1]):
            if key.startswith(prefix):
                yield key, None, None


async def next_page(listed: Listed, n_keys: int, *, shows_all: bool = False) -> VersionedKeys:
    """Return at most so many of the next keys; none if there are no more."""
    page: list[tuple[str, object, int | None]] = []
    async for item in listed:
        if shows_all or not files.is_hidden(item[0]):
            page.append(item)
            if len(page) == n_keys:
                break
    keys, versions, sizes = zip(*page, strict=True) if page else ((), (), ())
    return VersionedKeys(keys, versions, sizes)


def _found_of(value: Buffer | None) -> Found:
    return Found(None if value is None else as_view(value), None)


def _part_of(found: Found, byte_range: ByteRange | None) -> Found:
    if found.value is None:
        return found
    start, stop = resolve_range(byte_range, len(found.value))
    return found._replace(value=found.value[start:stop], size=len(found.value))


def _is_longer(found: Found, byte_range: ByteRange | None) -> bool:
    """Whether more came than was asked for."""
    match byte_range:
        case Range(start, stop):
            return len(found.value or b"") > stop - start
        case Suffix(nbytes):
            return len(found.value or b"") > nbytes
    return False


def visible(names: list[str]) -> list[str]:
    # fsspec lists an object of that name with a path.
    return [name for name in names if not files.is_hidden(name) and "/" not in name]


async def unless_missing(reply: Awaitable[T], default: T) -> T:
    """Return a reply, or `default` for an object that is missing.

    fsspec's web client calls an object missing after any failure, which it names as the cause.
    """
    try:
        return await reply
    except FileNotFoundError as error:
        cause = error.__cause__
        is_of_web = type(cause).__module__.startswith("aiohttp")
        is_failure = is_of_web or isinstance(cause, ConnectionError | TimeoutError)
        if cause is not None and is_failure and getattr(cause, "status", 0) not in (404, 410):
            raise cause from None
        return default
    except Exception as error:
        if remedy_of(error) != "missing":
            raise
        return default
