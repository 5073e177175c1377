"""Backend for stores that reach local files in a way of their own: wrappers and subclasses.

Another store or process may append to the same files. So each read is checked against the file:

1. The local backend reads a file that has a journal, and keeps writers away meanwhile.
2. A file that has changed since the read began is read again in the same way.
3. A reply has the state of the file as its version. If the file is younger than a tick of the
   clock, the version equals nothing.
"""

from __future__ import annotations

import asyncio
import os
import time

from zarr.abc.store import Store
from zarr.storage import LocalStore, ObjectStore

from zarr_shardstore.io.backends import store_traits
from zarr_shardstore.io.backends.base import DEFAULT_OPTIONS, BackendOptions, Lock
from zarr_shardstore.io.backends.fsspec_store import FsspecBackend
from zarr_shardstore.io.backends.local import LocalBackend
from zarr_shardstore.io.backends.zarr_store import ZarrBackend
from zarr_shardstore.io.concurrency import backoff
from zarr_shardstore.io.local import files, fs
from zarr_shardstore.io.local.open_shards import lock_to_replace, open_shards
from zarr_shardstore.io.local.shard_files import JOURNAL_SUFFIX
from zarr_shardstore.io.write_epochs import UNSTABLE, version_of
from zarr_shardstore.shards.requests import DeletePrefix, Found, Get, ListDir

_PAUSE_S = 0.001  # after a read that met a write in place: a write takes as long
_MAX_TORN_S = 10.0  # then the reply is taken as it is: its checks find what is torn


class WrappedFilesBackend(ZarrBackend):
    """Reads and writes through a store's own methods, beside writers that append to its files."""

    locks_whole_writes = True
    root: str
    _overwrites = False
    """Whether the store writes another shard into the same file."""

    def __init__(self, store: Store, options: BackendOptions = DEFAULT_OPTIONS) -> None:
        super().__init__(store, options)
        root = store_traits.root_of_files(store)
        assert root is not None, "the store is one of local files"
        self._local = LocalBackend(LocalStore(root))
        self.root = self._local.root
        self.max_requests_at_once = None

    def lock(self, key: str) -> Lock:
        return lock_to_replace(self.root + key, self._options.locking, overwrites=self._overwrites)

    async def delete_prefix(self, request: DeletePrefix) -> None:
        # obstore's removes what it lists, and lists through links; others stop at a link.
        is_obstore = isinstance(store_traits.innermost(self.store), ObjectStore)
        is_linked = is_obstore or files.link_on_way(self.root, request.prefix) is not None
        if is_linked and not store_traits.deletes_only_by_key(self.store):
            await asyncio.to_thread(files.remove_directory, self.root, request.prefix)
        else:
            await super().delete_prefix(request)

    async def list_dir(self, request: ListDir) -> list[str]:
        if not files.is_directory(self.root + request.prefix):
            return []  # of a file fsspec lists the file itself
        return await super().list_dir(request)

    async def get(self, request: Get) -> Found:
        if request.together is not None:
            return await super().get(request)
        path = self.root + request.key
        found: Found | None = None
        before, began_ns = fs.state_of(path), time.time_ns()
        if not _is_appended_to(path):
            try:
                found = await super().get(request)
            except Exception:  # obstore's, of a file that is cut while it is read
                if _is_consistent(path, before):
                    raise
            if not _is_consistent(path, before):
                found = None
        if found is None:
            consistently = request._replace(consistent=True)
            found = (await self._local.perform_async([consistently]))[0]
        is_young = before is not None and began_ns - before[2] < fs.min_age_ns(before[2])
        is_unstable = is_young or fs.state_of(path) != before
        return found._replace(version=UNSTABLE if is_unstable else before)


class WrappedFsspecBackend(WrappedFilesBackend, FsspecBackend):
    """The same for files that fsspec writes, in place."""

    _overwrites = True

    async def get(self, request: Get) -> Found:
        """Read; repeat a read that may have seen half of a write of this process."""
        scope = self.scope(request.key)
        for pause_s in backoff(_PAUSE_S, _PAUSE_S, _MAX_TORN_S):
            epoch = version_of(scope)
            found = await super().get(request)
            if version_of(scope) == epoch:
                break
            await asyncio.sleep(pause_s)
        return found


def _is_appended_to(path: str) -> bool:
    return path not in open_shards.replaced and os.path.exists(path + JOURNAL_SUFFIX)


def _is_consistent(path: str, before: fs.FileState) -> bool:
    """Whether no writer has changed a file in its place since `before`; true for a shard that this
    process replaces, because its commit also reads through here."""
    if path in open_shards.replaced:
        return True
    return not _is_appended_to(path) and fs.state_of(path) == before
