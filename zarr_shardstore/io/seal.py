"""Sealing of the shard files that this process has appended to: at flush, at close, at exit.

A sealed shard has no gap and no journal. Sealing is an update of the shard, so it goes through the
update queue.
"""

from __future__ import annotations

import asyncio
import atexit
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from multiprocessing.util import Finalize, register_after_fork

from zarr_shardstore.errors import CorruptShardError
from zarr_shardstore.format.shard import EntryOrder
from zarr_shardstore.io.backends.base import Backend
from zarr_shardstore.io.backends.local import LocalBackend
from zarr_shardstore.io.driver import Driver
from zarr_shardstore.io.local.open_shards import open_shards
from zarr_shardstore.io.local.shard_files import ShardFile
from zarr_shardstore.io.update_queue import Groups, Outcomes, commit
from zarr_shardstore.shards.append import seal_shard
from zarr_shardstore.shards.requests import Flow, UpdateShard
from zarr_shardstore.synchronized import in_forked_child


def seal_all(backend: Backend | None = None, order: EntryOrder = "morton") -> None:
    """Seal every shard file that this process has appended to, below the root of `backend`.

    The first error is raised after the other shards are sealed.
    """
    if backend is not None and not isinstance(backend, LocalBackend):
        return
    errors: list[Exception] = []
    for file in open_shards.below("" if backend is None else backend.root):
        try:
            _seal(file, order)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


async def seal_all_async(backend: Backend, order: EntryOrder) -> None:
    """Seal as `seal_all` does, in a thread of its own."""
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(_sealing_thread(), seal_all, backend, order)


@cache
def _sealing_thread() -> ThreadPoolExecutor:
    """Return a thread of its own: it waits for commits, which the worker threads make. Those wait
    for the threads of the event loop."""
    return ThreadPoolExecutor(1, thread_name_prefix="zarr-shardstore-seal")


def _seal_later(file: ShardFile) -> None:
    def seal() -> None:
        try:
            _seal(file, "morton")
        finally:
            open_shards.being_sealed.discard(file.path)

    with suppress(RuntimeError):  # the process ends, and seals all
        # Its error is dropped: an unsealed shard is also whole, and flush reports what is wrong.
        _sealing_thread().submit(seal)


def _seal(file: ShardFile, order: EntryOrder) -> None:
    """Seal as an update of the shard, so that the other threads of this process wait for it."""
    shard = file.shard
    if shard is None or not os.path.isfile(file.path):
        open_shards.forget(file)
        return
    is_another, share = False, file.owner.max_dead_share

    def sealing(_: UpdateShard, groups: Groups) -> Flow[Outcomes]:
        nonlocal is_another
        is_another = not open_shards.files[file.path].is_what_was_opened()
        if not is_another:
            yield from seal_shard(shard, order=order, max_dead_share=share)
        elif shard.spec.index.checksum:  # otherwise it may have another layout
            with suppress(CorruptShardError):
                yield from seal_shard(shard, order=order, max_dead_share=share)
        return [None] * len(groups)

    commit(Driver(file.owner, sealing), UpdateShard(shard, ()))
    if is_another:
        open_shards.forget(file)


def _seal_at_exit() -> None:
    with suppress(Exception):  # unsealed shards are also whole
        seal_all()


open_shards.seal_later = _seal_later
in_forked_child(_sealing_thread.cache_clear)  # the child has none of its parent's threads

atexit.register(_seal_at_exit)
# A forked process of multiprocessing skips `atexit`.
register_after_fork(open_shards, lambda _: Finalize(None, _seal_at_exit, exitpriority=0))
