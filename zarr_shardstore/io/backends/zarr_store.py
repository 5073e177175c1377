"""Backend for any zarr ``Store`` that is not local files: fsspec, memory, wrappers, others.

A client may know no suffix ranges, or raise for a range behind the end of an object. The backend
then reads in another way.
"""

from __future__ import annotations

import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import Any, TypeVar

from zarr.abc.store import RangeByteRequest, Store
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, MemoryStore, ZipStore

from zarr_shardstore.format.ranges import ByteRange, Range, Suffix, resolve_range
from zarr_shardstore.io.backends import base, store_traits
from zarr_shardstore.io.backends.remote_indexes import ObjectVersion, RemoteIndexes
from zarr_shardstore.io.buffers import as_view, byte_request_of, to_buffer
from zarr_shardstore.io.concurrency import SingleFlight, gather_bounded
from zarr_shardstore.io.local.files import is_hidden
from zarr_shardstore.shards import requests
from zarr_shardstore.shards.index_reads import check_whole, found_index, index_get
from zarr_shardstore.shards.requests import Found, Request
from zarr_shardstore.shards.shard_writer import ShardWriter

T = TypeVar("T")

_N_ATTEMPTS_OF_RANGE = 10
"""Attempts to read a range of an object that is replaced repeatedly."""


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


class ZarrBackend(base.Backend):
    """Reads and writes through a zarr store's own methods.

    Cost: one call of the store for each request, up to 64 concurrently.
    """

    def __init__(self, store: Store, options: base.BackendOptions = base.DEFAULT_OPTIONS) -> None:
        self.store = store
        self._options = options
        self._place, self._path = store_traits.scope_of_store(store)
        self._single_flight: SingleFlight[Found] = SingleFlight()
        self.can_block = has_sync_surface(store)
        self.max_requests_at_once = (
            None if store_traits.is_in_memory(store) else base.MAX_CONCURRENCY
        )
        self._indexes: RemoteIndexes | None = None
        if options.is_static and not self.can_block:  # zarr's stores that block are not remote
            identity = object()
            self._indexes = RemoteIndexes(self, lambda key: (identity, key), is_static=True)

    def __repr__(self) -> str:
        return repr(self.store)

    def scope(self, key: str) -> Hashable:
        return self._place, self._path + key

    def lock(
        self, key: str, fits: Callable[[ShardWriter], bool] | None = None
    ) -> AbstractContextManager[bool] | None:
        inner = store_traits.innermost(self.store)
        is_remote = isinstance(inner, FsspecStore) and not store_traits.is_in_memory(self.store)
        if is_remote and self._options.locking != "none":
            _warn_of_other_writers()
        return super().lock(key, fits)

    def upload(self, key: str, parts: Iterable[Sequence[bytes | memoryview]]) -> None:
        store = self.store
        if type(store) is not FsspecStore:
            super().upload(key, parts)
            return
        fs: Any = store.fs
        if hasattr(fs, "sync_fs"):
            fs = fs.sync_fs
        else:
            fs = type(fs)(*fs.storage_args, **{**fs.storage_options, "asynchronous": False})
        path = f"{store.path}/{key}"
        with suppress(Exception):  # object stores have no directories
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        stream: Any = fs.open(path, "wb", block_size=base.PART_NBYTES)
        base.write_stream(stream, getattr(stream, "discard", stream.close), parts)

    # ------------------------------------------------------------ blocking

    def perform(self, batch: list[Request], _: base.OpenFiles | None = None) -> list[Any]:
        return [self._reply_blocking(request) for request in batch]

    def _reply_blocking(self, request: Request) -> Any:
        store: Any = self.store  # has the sync surface, see `can_block`
        match request:
            case requests.GetIndex():
                return found_index(request, self._reply_blocking(index_get(request)))
            case requests.Get(key, byte_range):
                found = _found_of(store.get_sync(key, byte_range=byte_request_of(byte_range)))
                if self._is_cut(found, byte_range):
                    found = _part_of(_found_of(store.get_sync(key)), byte_range)
                return found
            case requests.Exists(key):
                return store.get_sync(key, byte_range=RangeByteRequest(0, 1)) is not None
            case requests.Set(key, value):
                store.set_sync(key, to_buffer(value))
            case requests.Delete(key):
                store.delete_sync(key)
            case _:
                return sync(self._reply(request))
        return None

    def _is_cut(self, found: Found, byte_range: ByteRange | None) -> bool:
        """Whether zarr 3.1 may have cut a value that is shorter than the requested suffix."""
        if not isinstance(self.store, MemoryStore) or not isinstance(byte_range, Suffix):
            return False
        return found.value is not None and len(found.value) < byte_range.nbytes

    # --------------------------------------------------------------- async

    async def read(self, get: requests.Get, _: ObjectVersion | None = None, /) -> Found | None:
        found: Found = await self._reply(get)
        return found

    def _changing(self, key: str) -> AbstractContextManager[None]:
        return nullcontext() if self._indexes is None else self._indexes.changing(key)

    def _is_linked(self, key: str) -> bool:  # noqa: ARG002
        """Whether a key is reached through a link below the root."""
        return False

    async def _reply(self, request: Request) -> Any:
        inner = store_traits.innermost(self.store)
        if isinstance(inner, ZipStore) and not inner._is_open:
            await inner._ensure_open()  # its listings do not open it
        store = self.store
        match request:
            case requests.GetIndex():
                if self._indexes is None:
                    return found_index(request, await self._reply(index_get(request)))
                return await self._indexes.get(request)
            case requests.Get(key, byte_range, together=together) if together is not None:
                alone = request._replace(together=None)
                scope = (key, byte_range, together)
                found, _ = await self._single_flight.join(scope, lambda: self._reply(alone))
                return found
            case requests.Get(key, byte_range):
                return await self._get(key, byte_range)
            case requests.GetMany(keys):
                return await gather_bounded(
                    [self._get(key, None) for key in keys], base.MAX_CONCURRENCY
                )
            case requests.Exists(key) if isinstance(inner, FsspecStore):
                # For fsspec's `exists` an object is missing whatever fails.
                return await self._size(key) is not None
            case requests.Exists(key):
                return await _unless_no_such_key(store.exists(key), False)
            case requests.GetSize(key):
                return await self._size(key)
            case requests.Set(key, value):
                with self._changing(key):
                    await store.set(key, to_buffer(value))
            case requests.SetIfNotExists(key, value):
                with self._changing(key):
                    await store.set_if_not_exists(key, to_buffer(value))
            case requests.Delete(key):
                with self._changing(key):
                    await store.delete(key)
            case requests.Move(key, to):
                with suppress(FileNotFoundError):
                    await self._move(key, to)
            case requests.DeletePrefix(prefix):
                await self._delete_prefix(prefix)
            case requests.ListPrefix(prefix):
                return [key async for key, _ in self._listed(prefix) if not is_hidden(key)]
            case requests.ListPage(cursor, n_keys):
                cursor.pages = cursor.pages or self._listed(cursor.prefix)
                return await base.next_page(cursor.pages, n_keys)
            case requests.CloseListing(cursor):
                if cursor.pages is not None:
                    await cursor.pages.aclose()
            case requests.ListDir(prefix):
                try:
                    names = store.list_dir(prefix.removesuffix("/"))
                    # Directories of web servers end in a slash. fsspec lists an object of that
                    # name with a path.
                    listed = [name.removesuffix("/") async for name in names]
                    return [name for name in listed if not is_hidden(name) and "/" not in name]
                except NotADirectoryError:  # fsspec, where a local file has this name
                    return []
            case _:
                return await super()._reply(request)
        return None

    # --------------------------------------------------------------- reads

    async def _get(self, key: str, byte_range: ByteRange | None) -> Found:
        """Read an object, or a range of it, whatever the client cannot do."""
        try:
            return await self._get_once(key, byte_range)
        except Exception as error:
            # No suffix ranges here (Azure), or an error for a range behind the end (obstore).
            if byte_range is not None:
                return await self._get_within(key, byte_range)
            if store_traits.has_no_such_key(error):
                return Found(None, None)
            raise

    async def _get_once(self, key: str, byte_range: ByteRange | None) -> Found:
        """Make one request for an object, or a range of it."""
        prototype = default_buffer_prototype()
        found = _found_of(await self.store.get(key, prototype, byte_request_of(byte_range)))
        if self._is_cut(found, byte_range):
            found = _part_of(_found_of(await self.store.get(key, prototype)), byte_range)
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
            except Exception:
                if not n_left or size == size_at_failure:  # no writer has replaced it: it fails
                    raise
                size_at_failure = size
                continue
            is_whole = found.value is not None and len(found.value) == stop - start
            if is_whole and found.size in (None, size):
                return found._replace(size=size)
        return found

    async def _size(self, key: str) -> int | None:
        """Return the size of an object in bytes; ``None`` if there is none."""
        try:
            size = await _unless_no_such_key(self.store.getsize(key), None)
            # icechunk returns 0 for a missing chunk.
            return None if size == 0 and not await self.store.exists(key) else size
        except FileNotFoundError:
            return None

    # ------------------------------------------------------ directories

    async def _delete_prefix(self, prefix: str) -> None:
        store = self.store
        inner = store_traits.innermost(store)
        by_key = store_traits.deletes_only_by_key(store)
        if prefix and not by_key and isinstance(inner, FsspecStore):
            # FsspecStore.delete_dir also removes an object with the name of the directory. It may
            # be a shard: the name of a shard may be the path of a chunk of another shard.
            by_key = await inner.fs._isfile(f"{inner.path}/{prefix.removesuffix('/')}")
        if not prefix and not by_key:
            await store.clear()
        elif not by_key:
            await store.delete_dir(prefix.removesuffix("/"))
            return
        # FsspecStore.clear stops at the first directory that it has removed already.
        for key in [key async for key, _ in self._listed(prefix)]:
            if not self._is_linked(key):
                await store.delete(key)

    async def _listed(self, prefix: str) -> AsyncGenerator[tuple[str, object], None]:
        """List the keys in a directory, recursively, with versions where the base store tells them.

        Closing it closes the listing of the store.
        """
        directory: str | None = prefix
        while directory is not None:
            keys: Any = None
            try:
                keys = self.store.list_prefix(directory)
                async for key in keys:
                    if key.startswith(prefix):
                        yield key, None
                return
            except Exception as error:
                if not directory or not store_traits.has_no_such_key(error):
                    raise
            finally:
                if hasattr(keys, "aclose"):
                    await keys.aclose()
            # icechunk lists groups and arrays only: the directory above also has these keys.
            directory = "/".join(directory.rstrip("/").split("/")[:-1])

    async def _move(self, key: str, to: str) -> None:
        store = self.store
        if type(store) is FsspecStore:
            source, target = f"{store.path}/{key}", f"{store.path}/{to}"
            with suppress(NotImplementedError, AttributeError):
                await store.fs._makedirs(target.rpartition("/")[0], exist_ok=True)
            await store.fs._cp_file(source, target)
            await store.fs._rm_file(source)
            return
        found = await self._get(key, None)
        if found.value is not None:
            check_whole(key, found.value, await self._size(key))
            await store.set(to, to_buffer(found.value))
            await store.delete(key)


async def _unless_no_such_key(reply: Awaitable[T], default: T) -> T:
    try:
        return await reply
    except Exception as error:
        if store_traits.has_no_such_key(error):
            return default
        raise


def _found_of(value: Buffer | None) -> Found:
    return Found(None if value is None else as_view(value), None)


def _part_of(found: Found, byte_range: ByteRange | None) -> Found:
    if found.value is None:
        return found
    start, stop = resolve_range(byte_range, len(found.value))
    return Found(found.value[start:stop], None, len(found.value))
