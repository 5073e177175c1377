"""Calls of zarr stores beyond zarr's ``Store`` interface: reads of any range, streams, moves.

A client may know no suffix ranges, or raise for a range behind the end of an object, or take one
key a call. `ObjectReader` then reads in another way. `obstore.py` has the calls of obstore.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from zarr.abc.store import Store
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore

from zarr_shardstore.format.ranges import ByteRange, Range, Suffix, resolve_range
from zarr_shardstore.io.backends.store_traits import has_no_such_key
from zarr_shardstore.io.buffers import as_view, byte_request_of
from zarr_shardstore.io.uploads import PART_NBYTES, StreamUpload, Upload
from zarr_shardstore.shards.requests import Found, Get

_N_ATTEMPTS_OF_SUFFIX = 10
"""Attempts to read the end of an object that is replaced repeatedly."""

_N_ATTEMPTS_OF_RANGE = 2
"""Attempts to read a range of an object that was shorter for a moment; then it is read whole."""


class ObjectReader:
    """Reads objects of one zarr store.

    Parameters
    ----------
    store
        Tells sizes, and reads many ranges in one call.
    read_once
        Makes one request for an object or a range of it; by default a ``get`` of the store.

    Thread safety: that of the store.
    """

    def __init__(
        self,
        store: Store,
        read_once: Callable[[str, ByteRange | None], Awaitable[Found]] | None = None,
    ) -> None:
        self._store = store
        self._read_once = read_once or self._get_once
        # LocalStore raises where one of many keys is missing. ObjectStore merges ranges over
        # gaps of 1 MiB: it reads 780 kB for 20 kB. Other stores show by raising.
        self.has_get_many = not isinstance(store, LocalStore | ObjectStore)
        """Whether `get_many` is worth a try."""

    async def get(self, key: str, byte_range: ByteRange | None) -> Found:
        """Read an object, or a range of it."""
        for _ in range(_N_ATTEMPTS_OF_RANGE):
            try:
                return await self._read_once(key, byte_range)
            except Exception as error:
                if has_no_such_key(error) and await self.size(key) is None:
                    return Found(None, None)
                if byte_range is None:
                    raise
                # No suffix ranges here (Azure), or an error for a range behind the end (obstore).
                if isinstance(byte_range, Suffix):
                    return await self._get_end(key, byte_range)
                size = await self.size(key)
                if size is None:
                    raise
                start, stop = resolve_range(byte_range, size)
                if start >= stop:
                    return Found(memoryview(b""), None, size)
                # Not behind the end now: another writer may have replaced the object.
        return cut(await self._read_once(key, None), byte_range)

    async def get_many(self, gets: Sequence[Get]) -> list[Found] | None:
        """Read ranges in one call of the store; ``None`` if it does not take them."""
        try:
            values = await self._store.get_partial_values(
                default_buffer_prototype(),
                [(get.key, byte_request_of(get.byte_range)) for get in gets],
            )
        except (FileNotFoundError, NotImplementedError, TypeError, ValueError):
            # Some stores raise for a missing key (icechunk a TypeError), some take no suffix. `get`
            # tells these apart.
            self.has_get_many = False
            return None
        founds = list(map(found_of, values))
        for i, get in enumerate(gets):
            if may_be_cut(self._store, founds[i], get.byte_range):
                founds[i] = await self.get(get.key, get.byte_range)
        return founds

    async def size(self, key: str) -> int | None:
        """Return the size of an object in bytes; ``None`` if there is none."""
        try:
            size = await self._store.getsize(key)
            # icechunk returns 0 for a missing chunk.
            return size if size or await self._store.exists(key) else None
        except FileNotFoundError:
            return None
        except Exception as error:
            if has_no_such_key(error):
                return None
            raise

    async def exists(self, key: str) -> bool:
        """Whether there is an object."""
        try:
            return await self._store.exists(key)
        except Exception as error:
            if has_no_such_key(error):
                return False
            raise

    async def keys_below(self, prefix: str) -> AsyncGenerator[str, None]:
        """List the keys in a directory, recursively. Closing it closes the listing of the store."""
        directory: str | None = prefix
        while directory is not None:
            keys: Any = None
            try:
                keys = self._store.list_prefix(directory)
                async for key in keys:
                    if key.startswith(prefix):
                        yield key
                return
            except Exception as error:
                if not directory or not has_no_such_key(error):
                    raise
            finally:
                if hasattr(keys, "aclose"):
                    await keys.aclose()
            # icechunk lists groups and arrays only: the directory above also has these keys.
            directory = "/".join(directory.rstrip("/").split("/")[:-1])

    async def _get_end(self, key: str, suffix: Suffix) -> Found:
        """Read the size, then a range of that size; again, if another writer has replaced the
        object by one of another size."""
        size_at_failure: int | None = None
        for n_left in reversed(range(_N_ATTEMPTS_OF_SUFFIX)):
            size = await self.size(key)
            if size is None:
                return Found(None, None)
            start, stop = resolve_range(suffix, size)
            if start == stop:
                return Found(memoryview(b""), None, size)
            try:
                found = await self._read_once(key, Range(start, stop))
            except Exception:
                if not n_left or size == size_at_failure:  # no writer has replaced it: it fails
                    raise
                size_at_failure = size
                continue
            is_whole = found.value is not None and len(found.value) == stop - start
            if is_whole and found.size in (None, size):
                return found._replace(size=size)
        return found

    async def _get_once(self, key: str, byte_range: ByteRange | None) -> Found:
        prototype = default_buffer_prototype()
        found = found_of(await self._store.get(key, prototype, byte_request_of(byte_range)))
        if may_be_cut(self._store, found, byte_range):
            found = cut(found_of(await self._store.get(key, prototype)), byte_range)
        return found


def found_of(value: Buffer | None) -> Found:
    """Return the reply of a store of zarr as a `Found`."""
    return Found(None if value is None else as_view(value), None)


def may_be_cut(store: Store, found: Found, byte_range: ByteRange | None) -> bool:
    """Whether zarr 3.1's MemoryStore cut a value that is shorter than the requested suffix."""
    return (
        isinstance(byte_range, Suffix)
        and isinstance(store, MemoryStore)
        and found.value is not None
        and len(found.value) < byte_range.nbytes
    )


def cut(found: Found, byte_range: ByteRange | None) -> Found:
    """Cut a range out of a whole value."""
    if found.value is None:
        return found
    start, stop = resolve_range(byte_range, len(found.value))
    return Found(found.value[start:stop], None, len(found.value))


def upload_to(store: Store, key: str) -> Upload | None:
    """Open a stream to an object; ``None`` if the store takes whole objects only."""
    if type(store) is FsspecStore:
        fs, path = _blocking_fs(store), f"{store.path}/{key}"
        with suppress(Exception):  # object stores have no directories
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        stream: Any = fs.open(path, "wb", block_size=PART_NBYTES)
        return StreamUpload(stream, getattr(stream, "discard", stream.close))
    return None


async def move(store: Store, key: str, to: str) -> None:
    """Give an object another key; no error if there is none."""
    try:
        if type(store) is FsspecStore:
            source, target = f"{store.path}/{key}", f"{store.path}/{to}"
            with suppress(NotImplementedError, AttributeError):
                await store.fs._makedirs(target.rpartition("/")[0], exist_ok=True)
            await store.fs._cp_file(source, target)
            await store.fs._rm_file(source)
        else:
            value = await store.get(key, default_buffer_prototype())
            if value is not None:
                await store.set(to, value)
                await store.delete(key)
    except FileNotFoundError:
        return


def _blocking_fs(store: FsspecStore) -> Any:
    """Return the file system of a store for use by a thread."""
    fs: Any = store.fs
    blocking = getattr(fs, "sync_fs", None)
    if blocking is not None:
        return blocking
    return type(fs)(*fs.storage_args, **{**fs.storage_options, "asynchronous": False})
