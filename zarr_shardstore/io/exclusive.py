"""One process at a time, where the base store lets us: files on a local disk.

The lock is the operating system's, so it ends with the process that holds it, however that ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from filelock import FileLock, Timeout

from zarr_shardstore.errors import ShardConflictError
from zarr_shardstore.io.backend import Backend
from zarr_shardstore.io.local_backend import LocalBackend

__all__ = ["exclusive"]


@contextmanager
def exclusive(backend: Backend, directory: str, what: str) -> Iterator[None]:
    """Hold a lock on a directory of a base store; on other than local ones, nothing is held.

    Parameters
    ----------
    directory
        Where the file of the lock is made; removed at the end if it is empty.
    what
        What goes on, for the message.

    Raises
    ------
    ShardConflictError
        If another process, or another caller of this one, holds it.
    """
    if not isinstance(backend, LocalBackend):
        yield
        return
    path = backend.path_of(directory)
    os.makedirs(path, exist_ok=True)
    name = os.path.join(path, "lock")
    try:
        lock = FileLock(name, timeout=0, thread_local=False)
        lock.acquire()
    except Timeout:
        raise ShardConflictError(f"{what} goes on already: wait until it has ended") from None
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(name)
        lock.release()
        with suppress(OSError):
            os.rmdir(path)
