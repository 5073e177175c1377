"""Shards that were changed in their place are brought to rest: at flush, at close, at exit."""

from __future__ import annotations

import asyncio
import atexit
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.util import Finalize, register_after_fork

from zarr_shardstore.errors import CorruptShardError
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.shard import EntryOrder
from zarr_shardstore.io.backends.base import Backend
from zarr_shardstore.io.backends.local import LocalBackend
from zarr_shardstore.io.driver import Driver
from zarr_shardstore.io.local.open_shards import open_shards
from zarr_shardstore.io.local.shard_files import ShardFile
from zarr_shardstore.shards.append import seal_shard
from zarr_shardstore.shards.requests import Flow, UpdateShard
from zarr_shardstore.shards.updates import EntryUpdate


def seal_all(backend: Backend | None = None, order: EntryOrder = "morton") -> None:
    """Seal the shards that this process has changed in their place, and not sealed yet.

    Parameters
    ----------
    backend
        Only those below its root.
    order
        Of the entries of shards that are compacted.

    Raises
    ------
    CorruptShardError, OSError
        The first error there was; the other shards are sealed.
    """
    if backend is not None and not isinstance(backend, LocalBackend):
        return
    errors: list[Exception] = []
    for file in open_shards.below("" if backend is None else backend.real_root):
        if file.shard is None or not os.path.isfile(file.path):
            open_shards.forget(file)
            continue
        try:
            _seal(file, file.shard, order)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


async def seal_all_async(backend: Backend, order: EntryOrder) -> None:
    """As `seal_all`, in a thread of its own."""
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(_sealing_thread(), seal_all, backend, order)


def _sealing_thread() -> ThreadPoolExecutor:
    """Not one of the worker threads: it waits for commits, which they make."""
    global _sealers
    if _sealers is None:
        _sealers = ThreadPoolExecutor(1, thread_name_prefix="zarr-shardstore-seal")
    return _sealers


def _seal_later(file: ShardFile) -> None:
    """Whoever writes another shard shall not wait for it."""
    with suppress(RuntimeError):  # the process ends, and seals all
        _sealing_thread().submit(_seal_if_there, file)


def _seal_if_there(file: ShardFile) -> None:
    with suppress(Exception):  # as it is, it is whole, too; flush says what is wrong
        if file.shard is not None and os.path.isfile(file.path):
            _seal(file, file.shard, "morton")
        else:
            open_shards.forget(file)


def _seal(file: ShardFile, shard: ShardRef, order: EntryOrder) -> None:
    """As an update of the shard, so that the other threads of this process wait for it."""
    is_another = False

    def sealing(
        request: UpdateShard, groups: Sequence[Sequence[EntryUpdate]]
    ) -> Flow[Sequence[Exception | None]]:
        nonlocal is_another
        is_another = not open_shards[file.path].is_what_was_opened()
        if not is_another:
            yield from seal_shard(request.shard, order=order)
        elif shard.layout.spec.index.checksum:  # otherwise nothing tells that it has this layout
            with suppress(CorruptShardError):
                yield from seal_shard(request.shard, order=order)
        return [None] * len(groups)

    def update() -> Flow[None]:
        yield [UpdateShard(shard, ())]

    Driver(file.owner, sealing).run(update())
    if is_another:
        open_shards.forget(file)


def _seal_at_exit() -> None:
    with suppress(Exception):  # whoever opens them next finds them whole, too
        seal_all()


_sealers: ThreadPoolExecutor | None = None

open_shards.seal_later = _seal_later

atexit.register(_seal_at_exit)


def _seal_at_exit_of_child(_: object) -> None:
    """A forked process of multiprocessing ends without what atexit knows."""
    Finalize(None, _seal_at_exit, exitpriority=0)


register_after_fork(open_shards, _seal_at_exit_of_child)


def _reset_after_fork() -> None:
    """The child has none of the parent's threads."""
    global _sealers
    _sealers = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
