"""Backend for stores of fsspec, also inside zarr's wrappers: what its file systems do otherwise."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import aclosing, suppress
from functools import cache
from typing import Any

from fsspec.core import has_magic
from zarr.abc.store import Store
from zarr.storage import FsspecStore

from zarr_shardstore.errors import UnsupportedError
from zarr_shardstore.format.ranges import ByteRange, Range
from zarr_shardstore.io.backends import base, store_traits
from zarr_shardstore.io.backends.zarr_store import (
    CHANGES,
    Listed,
    ZarrBackend,
    unless_missing,
    visible,
)
from zarr_shardstore.shards import requests
from zarr_shardstore.shards.requests import Found, Request
from zarr_shardstore.synchronized import in_forked_child
from zarr_shardstore.telemetry import warn

_PAUSE_S = 0.0005  # between two attempts to take the lock

_one_call = threading.Lock()
"""fsspec's caches and archives mix up the calls of several threads."""
in_forked_child(_one_call._at_fork_reinit)  # type: ignore[attr-defined]


def _is_of_part(request: Request, is_static: bool) -> bool:
    """Whether a read is of bytes at known places, where no former size of the object counts."""
    match request:
        case requests.Get(byte_range=Range()):
            return not request.consistent
        case requests.GetIndex():
            return is_static and not (request.consistent or request.with_data)
    return False


def _is_whole(request: Any, reply: requests.Found | requests.FoundIndex) -> bool:
    if isinstance(reply, requests.FoundIndex):
        return reply.decoded is not None
    wanted: Range = request.byte_range
    return reply.value is not None and len(reply.value) == wanted.stop - wanted.start


@cache
def _warn_of_other_writers() -> None:
    warn(
        "through fsspec nothing keeps two processes from updating a shard of an object store at "
        "a time: let each shard have one writer, or wrap an obstore store, which is safe "
        "(locking='none' says that you know)",
        stacklevel=2,
    )


class FsspecBackend(ZarrBackend):
    """Reads and writes through fsspec.

    Its caches, archives and references are only read: one call at a time.
    """

    store: Any

    def __init__(self, store: Store, options: base.BackendOptions = base.DEFAULT_OPTIONS) -> None:
        super().__init__(store, options)
        self._read_only_kind = store_traits.kind_that_is_only_read(store)
        self._fs: Any = store.fs if type(store) is FsspecStore else None
        """File system, if no wrapper or subclass has methods of its own."""
        fs: Any = getattr(store, "fs", None)
        self._is_web = "http" in getattr(fs, "protocol", ())
        self._has_inline_values = hasattr(fs, "references")
        self.process: int | None = None
        self._has_threads = getattr(fs, "async_impl", False) and not hasattr(fs, "sync_fs")

    def lock(self, key: str) -> base.Lock | None:
        if not store_traits.is_in_memory(self.store) and self._options.locking != "none":
            _warn_of_other_writers()
        return super().lock(key)

    # --------------------------------------------------------------- changes

    async def perform_async(self, batch: list[Request]) -> list[Any]:
        if self._has_threads:
            base.check_no_fork(self, self)
        self._check_changes(batch)
        # Dropped before each read, its directory would be listed for each anew.
        is_static = self._options.is_static
        if self._keeps_listings and all(_is_of_part(request, is_static) for request in batch):
            replies = await super().perform_async(batch)
            if all(map(_is_whole, batch, replies)):
                return replies
        self._drop_listings()
        return await super().perform_async(batch)

    def _check_changes(self, batch: Sequence[Request]) -> None:
        if self._read_only_kind and CHANGES & {type(r) for r in batch}:
            raise UnsupportedError(
                f"{self!r} is {self._read_only_kind}: it is only read here, and nothing was "
                "written; write into another store, or into the one behind it"
            )

    def upload(self, key: str, parts: base.Parts) -> None:
        change: list[Request] = [requests.Set(key, b"")]
        self._check_changes(change)
        fs, path = self._fs, self._path_of(key)
        if fs is None:
            super().upload(key, parts)
            return
        if hasattr(fs, "sync_fs"):
            fs = fs.sync_fs
        else:
            fs = type(fs)(*fs.storage_args, **{**fs.storage_options, "asynchronous": False})
        with suppress(Exception):  # object stores have no directories
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        try:
            stream: Any = fs.open(path, "wb", block_size=base.PART_NBYTES)
            base.write_stream(stream, getattr(stream, "discard", stream.close), parts)
        except NotImplementedError as error:
            self._refuse(change, error)
            raise

    async def _delete(self, key: str) -> None:
        # FsspecStore takes the key for a pattern. Its `_rm` of many objects, or of one, does not
        # raise if S3 replies that it has not deleted some.
        if self._fs is not None and not self.store.read_only:
            try:
                await unless_missing(self._fs._rm_file(self._path_of(key)), None)
                return
            except NotImplementedError:  # of file systems with `rm` alone
                if has_magic(self._path_of(key)):
                    raise
        await super()._delete(key)

    async def delete_prefix(self, request: requests.DeletePrefix) -> None:
        await super().delete_prefix(request)
        if self._has_threads and self._fs is not None:
            for key in [key async for key, *_ in self._listed(request.prefix)]:
                await self._delete(key)

    async def _deletes_by_key(self, prefix: str) -> bool:
        if await super()._deletes_by_key(prefix) or has_magic(self._path_of(prefix)):
            return True
        if not prefix:
            return False
        # FsspecStore.delete_dir also removes an object with the name of the directory. It may
        # be a shard: the name of a shard may be the path of a chunk of another shard.
        inner: Any = self._inner
        return bool(await inner.fs._isfile(self._path_of(prefix.removesuffix("/"))))

    async def move(self, request: requests.Move) -> None:
        if self._fs is None:
            await super().move(request)
            return
        source, target = self._path_of(request.key), self._path_of(request.to)
        with suppress(FileNotFoundError):
            with suppress(NotImplementedError, AttributeError):
                await self._fs._makedirs(target.rpartition("/")[0], exist_ok=True)
            await self._fs._cp_file(source, target)
            await self._fs._rm_file(source)

    def _path_of(self, key: str) -> str:
        """Return the path of an object in the file system of fsspec."""
        root = getattr(self._inner, "path", "").rstrip("/")
        return f"{root}/{key}" if root else key

    @property
    def _keeps_listings(self) -> bool:
        """Whether a client without async methods, such as that of ``ftp://``, has some now."""
        client: Any = getattr(getattr(self._inner, "fs", None), "sync_fs", None)
        return len(getattr(client, "dircache", ())) > 0

    def _drop_listings(self) -> None:
        """Let the next reply come from the base store: its client keeps listings for ever. By these
        what another process stores later is missing, or has its former size."""
        fs: Any = getattr(self._inner, "fs", None)
        if fs is not None and not self._read_only_kind:
            getattr(fs, "sync_fs", fs).invalidate_cache()

    # --------------------------------------------------------------- reads

    async def _get_once(self, key: str, byte_range: ByteRange | None) -> Found:
        if not self._read_only_kind:
            return await super()._get_once(key, byte_range)
        while not _one_call.acquire(blocking=False):
            await asyncio.sleep(_PAUSE_S)
        try:
            return await super()._get_once(key, byte_range)
        finally:
            _one_call.release()

    async def exists(self, request: requests.Exists) -> bool:
        # For fsspec's `exists` an object is missing whatever fails.
        return await self._size(request.key) is not None

    async def _size(self, key: str) -> int | None:
        if self._has_inline_values:
            # fsspec states the size of an inline value before it is decoded.
            value = (await self._get_once(key, None)).value
            return None if value is None else len(value)
        if self._fs is not None:
            info = await unless_missing(self._fs._info(self._path_of(key)), None)
            if info is None or info["type"] == "directory":
                return None
            if info.get("size") is not None:
                return int(info["size"])
        return await super()._size(key)

    # ------------------------------------------------------------ listings

    async def _names(self, prefix: str) -> list[str]:
        self._drop_listings()
        try:
            paths = await self._paths_without_root("_ls", prefix)
            if paths is not None:
                below = [path.removeprefix(prefix) for path in paths if path.startswith(prefix)]
                return visible([name for name in below if name])
            return await super()._names(prefix)
        except NotADirectoryError:  # a local file has this name
            return []
        finally:
            self._drop_listings()

    async def _listed(self, prefix: str) -> Listed:
        self._drop_listings()
        try:
            paths = await self._paths_without_root("_find", prefix)
            if paths is not None:
                for path in paths:
                    if path.startswith(prefix):
                        yield path, None, None
                return
            async with aclosing(super()._listed(prefix)) as listed:
                async for item in listed:
                    yield item
        finally:
            self._drop_listings()

    async def _paths_without_root(self, method: str, prefix: str) -> list[str] | None:
        """List a file system of fsspec whose root is ``""``, where zarr 3.1 lists other keys."""
        if self._is_web:
            raise NotImplementedError("the directory pages of a web server are no listings")
        if self._fs is None or self.store.path.strip("/"):
            return None
        try:
            paths = await getattr(self._fs, method)(prefix.rstrip("/"), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [path.strip("/") for path in paths]
