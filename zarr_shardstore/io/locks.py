"""One writer at a time for a shard that is a file, among all processes that write through here.

::

    c/0/0           the shard
    c/0/0.__lock    there while the shard is being updated; tensorstore locks files by this name

``"os"``: the operating system's lock on that file. It ends with the process that holds it.
``"lockfile"``: whoever creates the file holds the lock, for network file systems without locks.
A killed writer leaves the file behind, and somebody has to remove it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal, TypeAlias

from filelock import FileLock, SoftFileLock, Timeout

from zarr_shardstore.errors import ShardConflictError

__all__ = ["LOCK_SUFFIX", "Locking", "held", "lock_file"]

Locking: TypeAlias = Literal["os", "lockfile", "none"]

LOCK_SUFFIX = ".__lock"

MAX_WAIT_S = 120.0
"""A commit takes milliseconds: who waits so long waits for a process that hangs."""

_POLL_S = 0.001
"""About what a commit of a small shard takes."""

_LOCKS = {"os": FileLock, "lockfile": SoftFileLock}


@contextmanager
def held(path: str, locking: Locking) -> Iterator[None]:
    """Hold the lock of a file; blocks until it is free.

    Parameters
    ----------
    path
        Of the file, which need not exist; its directory is made.

    Raises
    ------
    ShardConflictError
        If another process holds it for two minutes.
    """
    if locking == "none":
        yield
        return
    name = path + LOCK_SUFFIX
    hint = "" if locking == "os" else ", or was killed: then remove that file"
    message = f"another process holds {name!r} for {MAX_WAIT_S:.0f} s and hangs{hint}"
    with lock_file(name, locking, MAX_WAIT_S, message):
        yield


@contextmanager
def lock_file(
    name: str, locking: Literal["os", "lockfile"], max_wait_s: float, message: str
) -> Iterator[None]:
    """Hold a lock by a file of its own, which is removed at the end; its directory is made.

    Raises
    ------
    ShardConflictError
        With `message`, if it is not free within `max_wait_s` seconds.
    """
    lock = _LOCKS[locking](name, timeout=max_wait_s, thread_local=False)
    while not lock.is_locked:
        os.makedirs(os.path.dirname(name), exist_ok=True)
        try:
            # Not where another process removes the directory in this very moment: once more then.
            with suppress(FileNotFoundError):
                lock.acquire(poll_interval=_POLL_S)
        except Timeout:
            raise ShardConflictError(message) from None
    try:
        yield
    finally:
        if locking == "os":
            # While it is held: who waits for the lock of a file that is gone makes a new one.
            with suppress(OSError):
                os.unlink(name)
        mine = _state(name) if locking == "lockfile" else None
        lock.release()
        if mine is not None and _state(name) == mine:
            # The file is the lock, and it could not be removed: nobody else would do it.
            with suppress(OSError):
                os.unlink(name)


def _state(name: str) -> tuple[int, ...] | None:
    """What tells a file from another one that has its name, and perhaps its number, later."""
    try:
        status = os.stat(name)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns, status.st_mtime_ns
