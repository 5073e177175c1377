"""Read files that somebody may be changing in their place, and keep out who does."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from typing import Self

from zarr_shardstore.format.consolidated_index import is_consolidated_index_key
from zarr_shardstore.format.journal import Repair
from zarr_shardstore.format.ranges import ByteRange, Range, resolve_range
from zarr_shardstore.io.local.cached_files import CachedShardFile, FileHandle, open_to_read
from zarr_shardstore.io.local.fs import read_at, state_of
from zarr_shardstore.io.local.locks import LOCK_SUFFIX, Locking, held, shared
from zarr_shardstore.io.local.open_shards import open_shards
from zarr_shardstore.io.local.shard_files import (
    JOURNAL_SUFFIX,
    end_journal,
    find_repair_of,
    repair,
)
from zarr_shardstore.shards.requests import Found

NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)

# What LocalStore calls a file that it has not renamed yet, locks, and journals. A killed writer
# leaves them behind.
_SIDE_FILE = re.compile(
    rf"\.[0-9a-f]{{32}}\.partial$|(?<=[^/])({re.escape(LOCK_SUFFIX)}|{re.escape(JOURNAL_SUFFIX)})$"
)


def is_side_file(name: str) -> bool:
    """Whether a file is no object, by its name or its key."""
    return _SIDE_FILE.search(name) is not None


def is_hidden(name: str) -> bool:
    """Whether a file is not to be listed, by its name or its key."""
    return is_side_file(name) or is_consolidated_index_key(name)


def is_appended_to(path: str) -> bool:
    """Whether a file has a journal, and this process does not replace it."""
    return not open_shards.is_replaced(path) and os.path.exists(path + JOURNAL_SUFFIX)


def read_consistent(path: str, byte_range: ByteRange | None) -> Found:
    """Read a file when nobody changes it, as it is when an interrupted change is taken back."""
    with ExitStack() as opened:

        def open_anew() -> OpenFile | None:
            opened.close()
            try:
                return opened.enter_context(closing(OpenFile(path)))
            except NO_FILE:
                return None

        return when_settled(path, open_anew, byte_range)._replace(version=None)


@contextmanager
def hold_to_replace(
    path: str, locking: Locking, *, in_this_thread: bool = False, overwrites: bool = False
) -> Iterator[None]:
    """Hold a shard file that will only be replaced, by whatever means.

    Parameters
    ----------
    in_this_thread
        Only it reads the shard for that.
    overwrites
        The new shard is written into the same file: who has it open sees bytes of both.
    """
    with held(path, locking):
        if repair(path):
            end_journal(path, is_durable=False)
        # Not before: a repair changes it in its place.
        with open_shards.being_replaced(path, by_this_thread=in_this_thread, overwrites=overwrites):
            yield


def when_settled(
    path: str, open_anew: Callable[[], OpenFile | None], byte_range: ByteRange | None
) -> Found:
    """Read a shard file while writers are kept from changing its index.

    Parameters
    ----------
    open_anew
        Opens the file, and closes the one that it opened before.
    """
    is_held = open_shards.is_used_here(path)
    while True:
        before = state_of(path)
        with nullcontext(True) if is_held else shared(path) as is_locked:
            file = open_anew()
            found = Found(None, None)
            if file is not None:
                value = file.read(byte_range, find_repair_of(path, file.handle.fd))
                found = Found(value, file.version, file.size)
        # Without a lock a writer may have come before the bytes were read. If it is gone, too,
        # it has replaced the file, or made it longer: a shard without a journal has no gap.
        if is_locked or (not os.path.exists(path + LOCK_SUFFIX) and state_of(path) == before):
            return found


class OpenFile:
    """A file open for reading.

    Entries that an index read from it points to are the same for as long as it is open, whatever
    another writer renames over its name or appends to it. Only fsspec overwrites files; of its
    writers in this process `version_now` tells.
    """

    __slots__ = ("_n_overwrites", "handle", "known", "opened_ns", "size", "status", "version")

    def __init__(self, path: str) -> None:
        self.opened_ns = time.time_ns()
        self._n_overwrites = open_shards.n_overwrites
        self.handle = open_to_read(path)
        self.known: CachedShardFile | None = None
        self.version = object()  # not the file itself: it shall not stay open with a reply
        try:
            self.status = status = os.fstat(self.handle.fd)
            if not stat.S_ISREG(status.st_mode):  # nor a pipe, or a device
                raise IsADirectoryError(path)
            self.size = status.st_size
        except BaseException:
            self.handle.close()
            raise

    @classmethod
    def of(cls, handle: FileHandle, status: os.stat_result) -> Self:
        """A file that is open already."""
        file = cls.__new__(cls)
        file.opened_ns = 0
        file.handle, file.status, file.size = handle, status, status.st_size
        file.version = object()
        file._n_overwrites = open_shards.n_overwrites
        file.known = None
        return file

    def version_now(self) -> object:
        """Another version, if its index is known, and somebody has written into it since; or if
        this process has put another shard into any file."""
        if self._n_overwrites != open_shards.n_overwrites:
            return object()
        if self.known is not None and not self.known.is_same(os.fstat(self.handle.fd)):
            return object()
        return self.version

    def close(self) -> None:
        """Close it, unless it is kept open for others, too."""
        if not self.handle.is_shared:
            self.handle.close()

    def read(self, byte_range: ByteRange | None, repair: Repair | None = None) -> memoryview:
        """Bytes of the file, as they will be when it is repaired."""
        fd = self.handle.fd
        if not isinstance(byte_range, Range):  # where it ends: writers may have changed that
            self.size = os.fstat(fd).st_size
        if repair is not None and repair.size is not None:
            self.size = repair.size
        start, stop = resolve_range(byte_range, self.size)
        data = read_at(fd, start, stop)
        if repair is not None and repair.writes:
            data = memoryview(_overlaid(data, start, repair))
        return data


def _overlaid(data: memoryview, start: int, repair: Repair) -> bytes:
    """Bytes of a file from `start` on, with the writes of a repair."""
    buffer = bytearray(data)
    for offset, new in repair.writes:
        first, stop = max(offset, start), min(offset + len(new), start + len(data))
        if first < stop:
            buffer[first - start : stop - start] = new[first - offset : stop - offset]
    return bytes(buffer)
