"""Backend for stores that reach local files in a way of their own: wrappers and subclasses.

Their own methods read and write, but another store of this process, or another process, may
append to the same files. So each read is checked against the file:

1. A file that has a journal is read by the local backend, while writers are kept away.
2. A file that has changed since the read began is read again in the same way.
3. A reply has the state of the file as its version. A file that is younger than the clock of the
   file system is fine gets a version that equals nothing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from zarr.abc.store import Store
from zarr.storage import LocalStore, ObjectStore

from zarr_shardstore.io.backends import store_traits
from zarr_shardstore.io.backends.base import DEFAULT_OPTIONS, BackendOptions
from zarr_shardstore.io.backends.local import LocalBackend
from zarr_shardstore.io.backends.zarr_store import ZarrBackend
from zarr_shardstore.io.concurrency import worker_pool
from zarr_shardstore.io.local import files, fs
from zarr_shardstore.io.local.open_shards import lock_to_replace, open_shards
from zarr_shardstore.io.local.shard_files import JOURNAL_SUFFIX
from zarr_shardstore.io.write_epochs import version_of
from zarr_shardstore.shards.requests import DeletePrefix, Found, Get, ListDir, Request
from zarr_shardstore.shards.shard_writer import ShardWriter

_PAUSE_S = 0.001
"""Before a read that met a write in place is repeated: about what writing a shard takes."""

_MAX_TORN_S = 10.0
"""Then the reply is taken as it is: its checks find what is torn."""


class WrappedFilesBackend(ZarrBackend):
    """Reads and writes through a store's own methods, beside writers that append to its files."""

    locks_whole_writes = True

    def __init__(self, store: Store, options: BackendOptions = DEFAULT_OPTIONS) -> None:
        super().__init__(store, options)
        root = store_traits.root_of_files(store)
        assert root is not None, "the store is one of local files"
        self._root = root
        self._local = LocalBackend(LocalStore(root))
        self.max_requests_at_once = None
        self._overwrites = store_traits.is_local_fsspec(store_traits.innermost(store))

    def lock(
        self,
        key: str,
        fits: Callable[[ShardWriter], bool] | None = None,  # noqa: ARG002  it is async
    ) -> AbstractContextManager[bool]:
        return lock_to_replace(self._root + key, self._options.locking, overwrites=self._overwrites)

    def refuse_links(self, key: str) -> None:
        self._local.refuse_links(key)

    def linked_directory(self, prefix: str) -> str | None:
        return self._local.linked_directory(prefix)

    def _is_linked(self, key: str) -> bool:
        return files.link_on_way(self._root, key) is not None

    def _reply_blocking(self, request: Request) -> Any:
        if not isinstance(request, Get):
            return super()._reply_blocking(request)
        path = self._root + request.key
        before, began_ns = fs.state_of(path), time.time_ns()
        found: Found | None = None
        if not _is_appended_to(path):
            found = super()._reply_blocking(request)
            if request.consistent and not _is_consistent(path, before):
                found = None
        if found is None:
            found = self._read_consistent(request)
        return found._replace(version=_version_since(path, before, began_ns))

    async def _reply(self, request: Request) -> Any:
        match request:
            case Get(together=None):
                return await self._get_stable(request)
            case DeletePrefix(prefix) if self._removes_through_links(prefix):
                await asyncio.to_thread(files.remove_directory, self._root, prefix)
                return None
            case ListDir(prefix) if not files.is_directory(self._root + prefix):
                return []  # of a file fsspec lists the file itself
        return await super()._reply(request)

    async def _get_stable(self, request: Get) -> Found:
        """Read; repeat a read that may have seen half of a write of this process in place."""
        scope, end = self.scope(request.key), time.monotonic() + _MAX_TORN_S
        while True:
            epoch = version_of(scope)
            found = await self._get_checked(request)
            if not self._overwrites or version_of(scope) == epoch or time.monotonic() > end:
                return found
            await asyncio.sleep(_PAUSE_S)

    async def _get_checked(self, request: Get) -> Found:
        path = self._root + request.key
        before, began_ns = fs.state_of(path), time.time_ns()
        found: Found | None = None
        if not _is_appended_to(path):
            try:
                found = await super()._reply(request)
            except Exception:  # obstore's, of a file that is cut while it is read
                if _is_consistent(path, before):
                    raise
            if not _is_consistent(path, before):
                found = None
        if found is None:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(worker_pool(), self._read_consistent, request)
        return found._replace(version=_version_since(path, before, began_ns))

    def _read_consistent(self, request: Get) -> Found:
        (found,) = self._local.perform([request._replace(consistent=True)])
        return found  # type: ignore[no-any-return]

    def _removes_through_links(self, prefix: str) -> bool:
        # obstore's removes what it lists, and lists through links; others stop at a link.
        if store_traits.deletes_only_by_key(self.store):
            return False
        is_obstore = isinstance(store_traits.innermost(self.store), ObjectStore)
        return is_obstore or files.link_on_way(self._root, prefix) is not None


def _is_appended_to(path: str) -> bool:
    return path not in open_shards.replaced and os.path.exists(path + JOURNAL_SUFFIX)


def _is_consistent(path: str, before: fs.FileState) -> bool:
    """Whether no writer has changed a file in its place since `before`; true for a shard that this
    process is replacing, as its commit, too, reads through here."""
    if path in open_shards.replaced:
        return True
    return not _is_appended_to(path) and fs.state_of(path) == before


def _version_since(path: str, before: fs.FileState, began_ns: int) -> object:
    is_young = before is not None and began_ns - before[2] < fs.MIN_AGE_NS
    return object() if is_young or fs.state_of(path) != before else before
