"""Reads of shard files that writers may be changing.

1. A reader opens a file once and takes index and entries from it. Entries that an index points to
   stay as they are while the file lives, whatever is renamed over its path or appended to it.
2. A read of an index may meet one that is half written, by a writer or by a killed one. A
   *consistent* read takes the lock that writers take, shared with other readers, and applies the
   repair of the journal in memory. It changes no file.
3. Only a wrapper of fsspec writes another shard into the same file. Writers of this process tell
   the registry of open shards; readers then see another version, and read again.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext

from zarr_shardstore.format.journal import Repair
from zarr_shardstore.format.ranges import ByteRange, Range, resolve_range
from zarr_shardstore.io.local import fs
from zarr_shardstore.io.local.cached_files import CachedShardFile, FileHandle
from zarr_shardstore.io.local.locks import LOCK_SUFFIX, shared
from zarr_shardstore.io.local.open_shards import open_shards
from zarr_shardstore.io.local.shard_files import find_repair_of
from zarr_shardstore.shards.requests import Found


class ShardFileReader:
    """A file that is open for the reads of one flow.

    Parameters
    ----------
    handle
        Of the file; `open` makes one.
    size
        Of the file, in bytes.
    cached
        The cached file whose index is used, if any: then any writer makes another version.
    """

    __slots__ = ("_cached", "_n_overwrites", "handle", "opened_ns", "size", "status", "version")
    opened_ns: int
    """A time before `status` was looked at."""
    status: os.stat_result
    """State of the file when `open` opened it."""

    def __init__(
        self, handle: FileHandle, size: int, *, cached: CachedShardFile | None = None
    ) -> None:
        self._n_overwrites = open_shards.n_overwrites
        self._cached = cached
        self.handle = handle
        self.size = size
        self.version = object()  # not the reader itself: a reply must not keep the file open

    @classmethod
    def open(cls, path: str, cached: CachedShardFile | None = None) -> ShardFileReader:
        """Open a file.

        Raises
        ------
        OSError
            One of `fs.NO_FILE` if there is no file: also for a directory, a pipe or a device.
        """
        opened_ns = time.time_ns()
        handle = FileHandle(fs.open_to_read(path))
        try:
            status = os.fstat(handle.fd)
            if not stat.S_ISREG(status.st_mode):
                raise IsADirectoryError(path)
        except BaseException:
            handle.close()
            raise
        reader = cls(handle, status.st_size, cached=cached)
        reader.opened_ns, reader.status = opened_ns, status
        return reader

    def close(self) -> None:
        """Close the file, unless it is cached."""
        if not self.handle.is_shared:
            self.handle.close()

    def version_now(self) -> object:
        """Return the version of bytes that are read now.

        It differs from `version` if this process has written another shard into any file, or if the
        index came from the cache and a writer has changed the file since.
        """
        if self._n_overwrites != open_shards.n_overwrites:
            return object()
        if self._cached is not None and not self._cached.is_current(self.handle.fd):
            return object()
        return self.version

    def read(self, byte_range: ByteRange | None, repair: Repair | None = None) -> memoryview:
        """Return bytes of the file, as they are after a repair."""
        fd = self.handle.fd
        if not isinstance(byte_range, Range):  # where it ends: writers may have changed that
            self.size = os.fstat(fd).st_size
        if repair is not None and repair.size is not None:
            self.size = repair.size
        start, stop = resolve_range(byte_range, self.size)
        data = fs.read_at(fd, start, stop)
        if repair is not None and repair.writes:
            data = memoryview(_overlaid(data, start, repair))
        return data


def _overlaid(data: memoryview, start: int, repair: Repair) -> bytes:
    """Apply the writes of a repair to bytes of a file from `start` on."""
    buffer = bytearray(data)
    for offset, new in repair.writes:
        first, stop = max(offset, start), min(offset + len(new), start + len(data))
        if first < stop:
            buffer[first - start : stop - start] = new[first - offset : stop - offset]
    return bytes(buffer)


def read_consistent(path: str, byte_range: ByteRange | None) -> Found:
    """Read a file as it is when no writer changes it and each interrupted change is repaired."""

    with ExitStack() as opened:

        def open_again() -> ShardFileReader | None:
            opened.close()
            try:
                return opened.enter_context(closing(ShardFileReader.open(path)))
            except fs.NO_FILE:
                return None

        return read_when_consistent(path, open_again, byte_range)._replace(version=None)


def read_when_consistent(
    path: str, open_again: Callable[[], ShardFileReader | None], byte_range: ByteRange | None
) -> Found:
    """Read a shard file while writers are kept from changing its index.

    Parameters
    ----------
    open_again
        Opens the file that has the path now, and closes the one that it opened before.
    """
    is_ours = open_shards.is_locked_by_me(path)
    while True:
        before = fs.state_of(path)
        with nullcontext(True) if is_ours else shared(path) as is_locked:
            reader = open_again()
            found = Found(None, None)
            if reader is not None:
                value = reader.read(byte_range, find_repair_of(path, reader.handle.fd))
                found = Found(value, reader.version, reader.size)
        # Without a lock a writer may have come before the bytes were read. If it is gone, too,
        # it has replaced the file, or made it longer: a shard without a journal has no gap.
        if is_locked or (not os.path.exists(path + LOCK_SUFFIX) and fs.state_of(path) == before):
            return found
