"""One process at a time, where the base store lets us: files on a local disk.

The lock is the operating system's, so it ends with the process that holds it, however that ends.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from zarr_shardstore.errors import SpecError
from zarr_shardstore.io.backend import Backend
from zarr_shardstore.io.local_backend import LocalBackend
from zarr_shardstore.io.local_files import holds_a_file
from zarr_shardstore.io.locks import lock_file

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
    SpecError
        If the directory is a link.
    """
    if not isinstance(backend, LocalBackend):
        yield
        return
    path = backend.path_of(directory)
    if os.path.islink(path.rstrip("/")):
        raise SpecError(f"{path!r} is a link, which nothing of ours is: remove it")
    message = f"{what} goes on already: wait until it has ended"
    try:
        with lock_file(os.path.join(path, "lock"), "os", 0, message):
            yield
            _remove_what_holds_no_file(path)
    finally:
        with suppress(OSError):
            os.rmdir(path)


def _remove_what_holds_no_file(path: str) -> None:
    """Remove directories, and files that were begun, of those who held the lock and were killed."""
    with os.scandir(path) as entries:
        directories = [entry.path for entry in entries if entry.is_dir()]
    for directory in directories:
        if not holds_a_file(directory):
            shutil.rmtree(directory, ignore_errors=True)
