"""Backend for any zarr ``Store`` that is not local files: fsspec, memory, wrappers, others.

A client may know no suffix ranges, no ranges, no listing of one kind, or raise for a range behind
the end of an object. The backend then takes another way, or says what is lacking. It finds out by
trying, see decisions/0028-base-stores.md.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Sequence,
)
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from copy import copy
from functools import cache, partial
from typing import Any, TypeVar

from zarr.abc.store import RangeByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype, cpu
from zarr.core.sync import sync
from zarr.storage import FsspecStore, MemoryStore, WrapperStore

from zarr_shardstore.errors import UnsupportedError
from zarr_shardstore.format.keys import check_no_loop
from zarr_shardstore.format.ranges import ByteRange, Range, Suffix, resolve_range
from zarr_shardstore.format.shard import Bytes
from zarr_shardstore.io.backends import base, store_traits
from zarr_shardstore.io.backends.remote_indexes import ObjectVersion, RemoteIndexes
from zarr_shardstore.io.buffers import as_view, byte_request_of
from zarr_shardstore.io.concurrency import SingleFlight, Slots, gather_bounded
from zarr_shardstore.io.local.files import is_hidden
from zarr_shardstore.metadata.documents import node_of_document
from zarr_shardstore.shards import requests
from zarr_shardstore.shards.index_reads import check_whole, found_index, index_get
from zarr_shardstore.shards.requests import Found, Request
from zarr_shardstore.shards.shard_writer import ShardWriter
from zarr_shardstore.synchronized import in_forked_child
from zarr_shardstore.telemetry import warn

T = TypeVar("T")

_N_ATTEMPTS_OF_RANGE = 10
"""Attempts to read a range of an object that is replaced repeatedly."""


_REMOVALS = (requests.Delete, requests.DeletePrefix)
_CHANGES = (requests.Set, requests.SetIfNotExists, requests.Move, *_REMOVALS)
_LISTINGS = (requests.ListPrefix, requests.ListPage, requests.ListDir)


_call_of_a_copy = threading.Lock()
in_forked_child(_call_of_a_copy._at_fork_reinit)  # type: ignore[attr-defined]


@asynccontextmanager
async def _turn() -> AsyncIterator[None]:
    """Wait for a turn: fsspec's caches and archives mix up the calls of several threads."""
    while not _call_of_a_copy.acquire(blocking=False):
        await asyncio.sleep(0.0005)
    try:
        yield
    finally:
        _call_of_a_copy.release()


def has_sync_surface(store: Store) -> bool:
    """Whether get_sync, set_sync and delete_sync of a store all work now.

    A subclass of zarr's wrapper that overrides ``get`` alone inherits a ``get_sync`` of the wrapped
    store, which passes it by.
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


@cache
def _warn_of_other_writers() -> None:
    warn(
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
        self._prototype = cpu.buffer_prototype
        self.slots = Slots(lambda: base.MAX_CONCURRENCY)
        self._read_only_kind = store_traits.kind_that_is_only_read(store)
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

    def with_buffers(self, cls: type[Buffer]) -> ZarrBackend:
        """Return this backend, which hands buffers of a class to the base store, and asks for them.

        Documents are no values of the caller: their buffers stay zarr's own.
        """
        view, self.lacks = copy(self), self.lacks  # one set for both
        view._prototype = BufferPrototype(cls, cpu.NDBuffer)
        return view

    def _prototype_for(self, key: str) -> BufferPrototype:
        return self._prototype if node_of_document(key) is None else cpu.buffer_prototype

    def _buffer(self, key: str, value: Bytes) -> Buffer:
        return self._prototype_for(key).buffer.from_bytes(value)

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

    def ranges_of(self, keys: Sequence[str]) -> base.RangesOfKeys | None:
        find: Any = getattr(self.store, "ranges_in_files", None)  # of `ReferenceStore`
        found: base.RangesOfKeys | None = None if find is None else find(keys)
        return found

    def upload(self, key: str, parts: Iterable[Sequence[bytes | memoryview]]) -> None:
        self._check_changes([requests.Set(key, b"")])
        store = self.store
        if type(store) is not FsspecStore:
            super().upload(key, parts)
            return
        try:
            self._upload(store, self._path_of(key), parts)
        except NotImplementedError as error:
            raise self._refusal([requests.Set(key, b"")], error) from error

    def _path_of(self, key: str) -> str:
        """Return the path of an object in the file system of fsspec."""
        root = getattr(store_traits.innermost(self.store), "path", "").rstrip("/")
        return f"{root}/{key}" if root else key

    def _upload(
        self, store: FsspecStore, path: str, parts: Iterable[Sequence[bytes | memoryview]]
    ) -> None:
        fs: Any = store.fs
        if hasattr(fs, "sync_fs"):
            fs = fs.sync_fs
        else:
            fs = type(fs)(*fs.storage_args, **{**fs.storage_options, "asynchronous": False})
        with suppress(Exception):  # object stores have no directories
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        stream: Any = fs.open(path, "wb", block_size=base.PART_NBYTES)
        base.write_stream(stream, getattr(stream, "discard", stream.close), parts)

    def _check_changes(self, batch: Sequence[Request]) -> None:
        if self._read_only_kind and any(isinstance(request, _CHANGES) for request in batch):
            raise UnsupportedError(
                f"{self!r} is {self._read_only_kind}: it is only read here, and nothing was "
                "written; write into another store, or into the one behind it"
            )

    def _refusal(self, batch: Sequence[Request], error: Exception) -> UnsupportedError:
        """Return the error for what the store, or its server, never does."""
        if any(isinstance(request, _REMOVALS) for request in batch):
            self.lacks.add("delete")
        what = "read this; copy the objects into another store, and read them there"
        if any(isinstance(request, _CHANGES) for request in batch):
            what = "store or remove this, it was not done; write into another store"
        elif any(isinstance(request, _LISTINGS) for request in batch):
            what = "list keys; name the paths of arrays, which are found without a listing"
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return UnsupportedError(f"{self!r} cannot {what} ({why})")

    # ------------------------------------------------------------ blocking

    def perform(self, batch: list[Request], _: base.OpenFiles | None = None) -> list[Any]:
        try:
            return [self._reply_blocking(request) for request in batch]
        except Exception as error:
            if store_traits.is_never_done(error):
                raise self._refusal(batch, error) from error
            raise

    def _reply_blocking(self, request: Request) -> Any:
        store: Any = self.store  # has the sync surface, see `can_block`
        match request:
            case requests.GetIndex():
                return found_index(request, self._reply_blocking(index_get(request)))
            case requests.Get(key, byte_range):
                get = partial(store.get_sync, key, prototype=self._prototype_for(key))
                found = _found_of(get(byte_range=byte_request_of(byte_range)))
                if self._is_cut(found, byte_range) or _is_longer(found, byte_range):
                    found = _part_of(_found_of(get()), byte_range)
                return found
            case requests.Exists(key):
                return store.get_sync(key, byte_range=RangeByteRequest(0, 1)) is not None
            case requests.GetSize(key) if hasattr(store, "getsize_sync"):  # a ReferenceStore
                with suppress(FileNotFoundError):
                    return store.getsize_sync(key)
            case requests.Set(key, value):
                store.set_sync(key, self._buffer(key, value))
            case requests.Delete(key, None):
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

    async def perform_async(self, batch: list[Request]) -> list[Any]:
        self._check_changes(batch)
        try:
            return await super().perform_async(batch)
        except Exception as error:
            if store_traits.is_never_done(error):
                raise self._refusal(batch, error) from error
            raise

    async def _reply_in_turn(self, request: Request) -> Any:
        if isinstance(request, requests.GetMany):  # each of its reads takes a turn
            return await self._reply(request)
        async with self.slots.here():
            return await self._reply(request)

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
        if not inner._is_open:
            await inner._ensure_open()  # listings of a zip do not open it
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
                gets = [self._reply_in_turn(requests.Get(key)) for key in keys]
                return await gather_bounded(gets, base.MAX_CONCURRENCY)
            case requests.Exists(key):
                # For fsspec's `exists` an object is missing whatever fails.
                if not isinstance(inner, FsspecStore) and "exists" not in self.lacks:
                    try:
                        return await _unless_no_such_key(store.exists(key), False)
                    except NotImplementedError:
                        self.lacks.add("exists")
                return await self._size(key) is not None
            case requests.GetSize(key):
                return await self._size(key)
            case requests.Set(key, value):
                with self._changing(key):
                    await store.set(key, self._buffer(key, value))
            case requests.SetIfNotExists(key, value):
                with self._changing(key):
                    await store.set_if_not_exists(key, self._buffer(key, value))
            case requests.Delete(key, placeholder):
                with self._changing(key):
                    try:
                        await store.delete(key)
                    except NotImplementedError:
                        if placeholder is None:
                            raise
                        await store.set(key, self._buffer(key, placeholder()))
            case requests.Move(key, to):
                with suppress(FileNotFoundError):
                    await self._move(key, to)
            case requests.DeletePrefix(prefix):
                await self._delete_prefix(prefix)
            case requests.ListPrefix(prefix):
                return [key async for key, _ in self._listed(prefix) if not is_hidden(key)]
            case requests.ListPage(cursor, n_keys):
                cursor.pages = cursor.pages or self._listed(cursor.prefix)
                return await base.next_page(cursor.pages, n_keys, shows_all=cursor.shows_all)
            case requests.CloseListing(cursor):
                if cursor.pages is not None:
                    await cursor.pages.aclose()
            case requests.ListDir(prefix):
                return await self._names(prefix)
            case _:
                return await super()._reply(request)
        return None

    # --------------------------------------------------------------- reads

    async def _get(self, key: str, byte_range: ByteRange | None) -> Found:
        """Read an object, or a range of it, whatever the client cannot do."""
        if byte_range is not None and "ranges" in self.lacks:
            return _part_of(await self._get(key, None), byte_range)
        if isinstance(byte_range, Suffix) and "suffixes" in self.lacks:
            return await self._get_within(key, byte_range)
        try:
            found = await self._get_once(key, byte_range)
        except Exception as error:
            # No suffix ranges here (Azure), or an error for a range behind the end (obstore).
            if byte_range is not None:
                if isinstance(byte_range, Suffix) and store_traits.is_never_done(error):
                    self.lacks.add("suffixes")
                return await self._get_within(key, byte_range)
            if store_traits.has_no_such_key(error) or (
                isinstance(error, LookupError) and await self._size(key) is None
            ):  # the latter is fsspec's, for a key that is not in an archive
                return Found(None, None)
            raise
        if _is_longer(found, byte_range) and len(found.value or b"") == await self._size(key):
            return _part_of(found, byte_range)  # web servers may send the whole object
        return found

    async def _get_once(self, key: str, byte_range: ByteRange | None) -> Found:
        """Make one request for an object, or a range of it."""
        prototype = self._prototype_for(key)
        if self._read_only_kind:
            async with _turn():
                value = await self.store.get(key, prototype, byte_request_of(byte_range))
            return _found_of(value)
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
            except Exception as error:
                if store_traits.is_never_done(error):
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
        store = self.store
        try:
            if hasattr(getattr(store, "fs", None), "references"):
                # fsspec states the size of an inline value before it is decoded.
                value = (await self._get_once(key, None)).value
                return None if value is None else len(value)
            if type(store) is FsspecStore:
                info = await store.fs._info(self._path_of(key))
                if info["type"] == "directory" or info.get("size") is not None:
                    return None if info["type"] == "directory" else int(info["size"])
            size = await _unless_no_such_key(store.getsize(key), None)
        except FileNotFoundError:
            return None
        # icechunk returns 0 for a missing chunk, and fsspec for a directory.
        return None if size == 0 and (await self._get_once(key, None)).value is None else size

    # ------------------------------------------------------ directories

    async def _delete_prefix(self, prefix: str) -> None:
        store = self.store
        inner = store_traits.innermost(store)
        by_key = store_traits.deletes_only_by_key(store)
        if prefix and not by_key and isinstance(inner, FsspecStore):
            # FsspecStore.delete_dir also removes an object with the name of the directory. It may
            # be a shard: the name of a shard may be the path of a chunk of another shard.
            by_key = await inner.fs._isfile(self._path_of(prefix.removesuffix("/")))
        if not prefix and not by_key:
            await store.clear()
        elif not by_key:
            with suppress(NotImplementedError):
                await store.delete_dir(prefix.removesuffix("/"))
                return
        # FsspecStore.clear stops at the first directory that it has removed already.
        for key in [key async for key, _ in self._listed(prefix)]:
            if not self._is_linked(key):
                await store.delete(key)

    async def _names(self, prefix: str) -> list[str]:
        """List the names in a directory."""
        paths = await self._paths_without_root("_ls", prefix)
        if paths is not None:
            below = [path.removeprefix(prefix) for path in paths if path.startswith(prefix)]
            return [name for name in below if name and not is_hidden(name)]
        try:
            names = self.store.list_dir(prefix.removesuffix("/"))
            # fsspec lists an object of that name with a path, and a directory of HTTP with a slash.
            listed = [name.rstrip("/") async for name in names if self._is_name(name)]
            found = [name for name in listed if not is_hidden(name) and "/" not in name]
            if prefix and not found and self._lacks_prefixes():
                # VirtualiZarr's has no names in a directory below one that it does not list.
                await self._names(prefix[: prefix.rstrip("/").rfind("/") + 1])
            return found
        except NotADirectoryError:  # fsspec, where a local file has this name
            return []
        except NotImplementedError:
            if self._lacks_prefixes():
                raise
        keys = [key async for key, _ in self._listed(prefix, walks=False) if not is_hidden(key)]
        return list(dict.fromkeys(key[len(prefix) :].split("/", 1)[0] for key in keys))

    def _is_web(self) -> bool:
        return "http" in getattr(getattr(self.store, "fs", None), "protocol", ())

    def _is_name(self, name: str) -> bool:
        """Whether a name is one in its directory. On the web some are links that sort a listing, or
        lead to the root."""
        return not self._is_web() or bool(name.strip("./") and not name.startswith("?"))

    async def _names_on_web(self, directory: str) -> list[str]:
        """List a directory, with a slash behind those in it, which zarr 3.4 takes off."""
        store: Any = self.store
        root = f"{store.path.rstrip('/')}/{directory}"
        with suppress(FileNotFoundError):
            paths = await store.fs._ls(root.rstrip("/"), detail=False)
            return [path[len(root) :].removeprefix("./") for path in paths if path.startswith(root)]
        return []

    async def _listed_on_web(self, prefix: str) -> AsyncGenerator[str, None]:
        """List keys by directories, which may be listed in each other."""
        level = [prefix[: prefix.rfind("/") + 1]]
        while level:
            check_no_loop(level)
            below = []
            for directory in level:
                for name in await self._names_on_web(directory):
                    key = directory + name
                    if self._is_name(name) and key.startswith(prefix[: len(key)]):
                        if name.endswith("/"):
                            below.append(key)
                        elif key.startswith(prefix):
                            yield key
            level = below

    async def _paths_without_root(self, method: str, prefix: str) -> list[str] | None:
        """List a file system of fsspec whose root is ``""``, where zarr 3.1 lists other keys."""
        store = self.store
        if type(store) is not FsspecStore or store.path.strip("/"):
            return None
        try:
            paths = await getattr(store.fs, method)(prefix.rstrip("/"), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [path.strip("/") for path in paths]

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

    async def _listed(
        self, prefix: str, *, walks: bool = True
    ) -> AsyncGenerator[tuple[str, object], None]:
        """List the keys in a directory, recursively, with versions where the base store tells them.

        Closing it closes the listing of the store.
        """
        paths = await self._paths_without_root("_find", prefix)
        if paths is not None:
            for path in paths:
                if path.startswith(prefix):
                    yield path, None
            return
        if self._is_web():
            async for key in self._listed_on_web(prefix):
                yield key, None
            return
        directory: str | None = prefix
        while directory is not None and "list_prefix" not in self.lacks:
            keys: Any = None
            try:
                keys = self.store.list_prefix(directory)
                async for key in keys:
                    if key.startswith(prefix):
                        yield key, None
                return
            except NotImplementedError:
                self.lacks.add("list_prefix")
            except Exception as error:
                if not directory or not store_traits.has_no_such_key(error):
                    raise
            finally:
                if hasattr(keys, "aclose"):
                    await keys.aclose()
            # icechunk lists groups and arrays only: the directory above also has these keys.
            directory = "/".join(directory.rstrip("/").split("/")[:-1])
        if not walks:
            raise NotImplementedError("it lists neither directories nor prefixes")
        async for key in self._walked(prefix[: prefix.rfind("/") + 1]):
            if key.startswith(prefix):
                yield key, None

    async def _move(self, key: str, to: str) -> None:
        store = self.store
        if type(store) is FsspecStore:
            source, target = self._path_of(key), self._path_of(to)
            with suppress(NotImplementedError, AttributeError):
                await store.fs._makedirs(target.rpartition("/")[0], exist_ok=True)
            await store.fs._cp_file(source, target)
            await store.fs._rm_file(source)
            return
        found = await self._get(key, None)
        if found.value is not None:
            check_whole(key, found.value, await self._size(key))
            await store.set(to, self._buffer(to, found.value))
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
    return found._replace(value=found.value[start:stop], size=len(found.value))


def _is_longer(found: Found, byte_range: ByteRange | None) -> bool:
    """Whether more came than was asked for."""
    match byte_range:
        case Range(start, stop):
            return len(found.value or b"") > stop - start
        case Suffix(nbytes):
            return len(found.value or b"") > nbytes
    return False
