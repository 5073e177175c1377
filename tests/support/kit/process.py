"""Control of this process in tests: its memory of files, its limits, its system calls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from zarr_shardstore.io import update_queue, write_epochs
from zarr_shardstore.io.local import fs
from zarr_shardstore.io.local.cached_files import index_cache
from zarr_shardstore.io.local.locks import Locking, locked
from zarr_shardstore.io.local.open_shards import open_shards

_LIMITS = {
    "busy_wait_s": "io.local.fs.MAX_BUSY_S",
    "lock_wait_s": "io.local.locks.MAX_WAIT_S",
    "min_file_age_ns": "io.local.fs.MIN_AGE_NS",
    "conflict_wait_s": "io.driver.MAX_CONFLICT_S",
    "conflict_pause_s": "io.backends.obstore._LONGEST_PAUSE_S",
    "refused_s": "io.backends.obstore._LONGEST_REFUSAL_S",
    "unsealed_shards": "io.local.open_shards._MAX_UNSEALED",
    "names_at_once": "io.local.files._NAMES_AT_ONCE",
    "keys_per_page": "shards.shard_listing.KEYS_PER_PAGE",
    "indexes_per_round": "shards.index_reads._SHARDS_PER_ROUND",
    "pipeline_box_chunks": "zarr_hooks.pipeline.MIN_CHUNKS",
    "pipeline_read_nbytes": "zarr_hooks.box_jobs.READ_NBYTES",
    "pipeline_write_nbytes": "zarr_hooks.box_jobs.WRITE_NBYTES",
    "pipeline_group_nbytes": "zarr_hooks.box_jobs.MAX_NBYTES_AT_ONCE",
    "copy_nbytes": "tools.convert.task.ROUND_NBYTES",
    "copy_values": "tools.convert.task._MAX_ROUND",
    "copy_gap_nbytes": "tools.convert.task._MAX_GAP_NBYTES",
    "chunk_names": "tools.inspect.find._MAX_CHUNK_NAMES",
}


SYSTEM_CALLS: tuple[str, ...] = (
    "open_new",
    "open_to_change",
    "open_to_read",
    "renew_time",
    "replace",
    "scan",
)
SYSTEM_CALLS += ("sync", "truncate", "unlink", "write_at")
"""Functions of `io.local.fs` between which a killed process leaves a state."""


@contextmanager
def tuned(**limits: float) -> Iterator[None]:
    """Change limits of the package, so that a small test reaches them.

    Parameters
    ----------
    **limits
        ``lock_wait_s``, ``busy_wait_s``, ``conflict_wait_s``, ``conflict_pause_s``, ``refused_s``:
        how long a writer waits for a lock, for a file that Windows has open, repeats a conditional
        write, pauses in between, and is refused in vain.
        ``min_file_age_ns``: age at which a file is cached.
        ``unsealed_shards``: appended shards that stay unsealed.
        ``names_at_once``, ``keys_per_page``, ``indexes_per_round``: limits of a listing.
        ``pipeline_box_chunks``, ``pipeline_read_nbytes``, ``pipeline_write_nbytes``,
        ``pipeline_group_nbytes``: limits of the codec pipeline. ``copy_nbytes``,
        ``copy_values``, ``copy_gap_nbytes``: limits of one step of a conversion.
        ``chunk_names``: keys of chunks in a directory that is listed.

    Raises
    ------
    KeyError
        If there is no such limit.
    """
    with ExitStack() as patches:
        for name, value in limits.items():
            patches.enter_context(mock.patch(f"zarr_shardstore.{_LIMITS[name]}", value))
        yield


@contextmanager
def system_calls(wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace the calls that open and change local files.

    Each call leaves a state that a killed process may leave. Locks are taken by other calls.

    Parameters
    ----------
    wrap
        Takes the name and the function of a call, and returns what is called instead. The names
        are ``open_new``, ``open_to_change``, ``open_to_read``, ``renew_time``, ``replace``,
        ``scan``, ``sync``, ``truncate``, ``unlink``, and ``write_at(fd, pieces, offset)``. The
        first argument is a path or a file descriptor.
    """
    calls: dict[str, Any] = {name: wrap(name, getattr(fs, name)) for name in SYSTEM_CALLS}
    with mock.patch.multiple(fs, **calls):
        yield


@contextmanager
def lock_shard(path: Path | str, locking: Locking = "os") -> Iterator[None]:
    """Hold the lock of a shard file, as the commit of another process does.

    Parameters
    ----------
    path
        The shard file, which need not exist.
    locking
        As the option of `ShardingStore`.

    Raises
    ------
    ShardConflictError
        If the lock is not free in time.
    """
    with locked(str(path), locking):
        yield


def forget(directory: Path | str = "/") -> None:
    """Forget local shards and all cached indexes, as if this process had ended.

    The files of shards that it has appended to are closed, not sealed. Without a directory also
    updates that wait are forgotten: let no writer be at work.

    Parameters
    ----------
    directory
        Only shards below it are closed; those of other directories may be in use.
    """
    index_cache.forget_if(lambda _: True)
    root = os.path.join(os.path.realpath(directory), "")
    if root == "/":
        update_queue._queues.clear()
        write_epochs._under_way.clear()
    while files := open_shards.below(root):
        for file in files:
            open_shards.forget(file)
        time.sleep(0.001)  # some may be locked by a thread that seals them


def wait_until_idle() -> None:
    """Wait until no update of a shard is under way or waits.

    A commit replies to its callers before it ends, and shards may be sealed in a thread.

    Raises
    ------
    TimeoutError
        If an update lasts longer than five seconds.
    """
    for _ in range(5000):
        if not update_queue._queues:
            return
        time.sleep(0.001)
    raise TimeoutError(f"updates under way: {list(update_queue._queues)}")
