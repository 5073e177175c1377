"""Shard files whose index is known: one positioned read and one look at the file give a chunk.

::

    pread   the bytes of the entry, from a handle that is kept open
    stat    the name still leads to that file, and nobody has written into it

In this order: if the file is the same *after* the read, what was read is what its index says,
and was the value of the chunk at that moment. Names that lead to another file, files that were
appended to, cut or overwritten all show: by inode (the kept handle keeps its number from being
used again), size, or time of the last change. A time that is younger than the clock of the file
system is fine proves nothing: such a file is not remembered.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, Literal, TypeAlias

from zarr_shardstore.format.index import MISSING, ShardIndex
from zarr_shardstore.format.ranges import ByteRange, plan_spans, resolve_range
from zarr_shardstore.format.sharding_spec import ShardingSpec
from zarr_shardstore.io.index_cache import CachedIndex, index_cache
from zarr_shardstore.io.local import fs
from zarr_shardstore.io.local.fs import MIN_AGE_NS, close_when_short, max_warm_files
from zarr_shardstore.synchronized import synchronized

MAX_INLINE_NBYTES = 256 * 1024
"""Of a chunk that is read without leaving the event loop: copying more takes as long as a hop
to a thread."""


_MAX_GAP_NBYTES = 16 * 1024
"""Between two chunks that are read in one go: copying so much takes as long as a call."""

_MAX_SPAN_NBYTES = 16 * 1024 * 1024
"""Read in one go; as long as one of its chunks is in use, all of it stays in memory."""


class Miss(Enum):
    """That an answer takes more than one look."""

    MISS = "unknown"


MISS: Final = Miss.MISS
CachedValue: TypeAlias = "bytes | memoryview | Literal[Miss.MISS] | None"


class FileHandle:
    """An open file. One that is shared is closed when nobody refers to it any more: also not a
    thread that reads it while another one forgets it."""

    __slots__ = ("fd", "is_shared")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.is_shared = False

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Close it now; only one that is not shared."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            close(fd)  # `os` may be gone when the interpreter ends

    def __del__(self) -> None:
        self.close()


class CachedShardFile(CachedIndex):
    """A shard file with a known index.

    Parameters
    ----------
    handle : FileHandle
        Of the file that the index was read from.
    status
        Of it, from before the index was read.
    """

    __slots__ = (
        "_ctime_ns",
        "_data_start",
        "_data_stop",
        "_entries",
        "_ino",
        "_mtime_ns",
        "_size",
        "handle",
    )

    def __init__(
        self, index: ShardIndex, spec: ShardingSpec, handle: FileHandle, status: os.stat_result
    ) -> None:
        super().__init__(index, spec, None, status.st_size)
        self.handle: FileHandle | None = handle
        self._entries = index.fields.data.cast("B").cast("Q")
        is_at_start = spec.index.location == "start"
        self._data_start = spec.index_nbytes if is_at_start else 0
        self._data_stop = status.st_size - (0 if is_at_start else spec.index_nbytes)
        self._ino = status.st_ino
        self._size = status.st_size
        self._mtime_ns = status.st_mtime_ns
        self._ctime_ns = status.st_ctime_ns

    @property
    def changed_ns(self) -> int:
        """Time of its last change, in ns."""
        return max(self._mtime_ns, self._ctime_ns)

    def is_read_as(self, spec: ShardingSpec) -> bool:
        """Whether the index was decoded so."""
        if self.spec is not spec:
            if self.spec != spec:
                return False
            self.spec = spec  # an equal one: next time this is seen at once
        return True

    def is_same(self, status: os.stat_result) -> bool:
        """Whether a file is this one, and nobody has written into it."""
        return (
            status.st_mtime_ns == self._mtime_ns
            and status.st_ctime_ns == self._ctime_ns
            and status.st_ino == self._ino
            and status.st_size == self._size
        )

    def read(self, path: str, entry_id: int, byte_range: ByteRange | None) -> CachedValue:
        """The value of a chunk, ``None`` if it is missing; blocking.

        `MISS`: the file is another one now, or an entry is damaged.
        """
        handle = self.handle
        offset, nbytes = self._entries[2 * entry_id], self._entries[2 * entry_id + 1]
        data: bytes | None
        if offset == MISSING and nbytes == MISSING:
            data = None
        else:
            stop = offset + nbytes
            if offset < self._data_start or stop > self._data_stop or handle is None:
                return MISS
            if byte_range is not None:
                first, last = resolve_range(byte_range, nbytes)
                offset, nbytes = offset + first, last - first
            data = os.pread(handle.fd, nbytes, offset)
            if len(data) != nbytes:
                return MISS
        try:
            status = os.stat(path)
        except OSError:
            return MISS
        if not self.is_same(status):
            return MISS
        self.was_used = True
        return data

    def read_many(
        self,
        path: str,
        entry_ids: Sequence[int],
        byte_ranges: Sequence[ByteRange | None] | None,
    ) -> list[bytes | memoryview | None] | None:
        """Values of entries, or ranges of them, in few reads and one look at the file.

        Parameters
        ----------
        byte_ranges
            Of the values; ``None``: all of each.

        So they are what the shard held at one moment. ``None``: as `MISS` of `read`.
        """
        values: list[bytes | memoryview | None] = [None] * len(entry_ids)
        handle, entries = self.handle, self._entries
        ranges: list[tuple[int, int]] = []
        owners: list[int] = []
        for i, entry_id in enumerate(entry_ids):
            offset, nbytes = entries[2 * entry_id], entries[2 * entry_id + 1]
            if offset == MISSING and nbytes == MISSING:
                continue
            if offset < self._data_start or offset + nbytes > self._data_stop or handle is None:
                return None
            if byte_ranges is not None:
                first, last = resolve_range(byte_ranges[i], nbytes)
                offset, nbytes = offset + first, last - first
            values[i] = b""
            ranges.append((offset, offset + nbytes))
            owners.append(i)
        for span in plan_spans(
            ranges, max_gap_bytes=_MAX_GAP_NBYTES, max_coalesced_bytes=_MAX_SPAN_NBYTES
        ):
            assert handle is not None, "there are ranges"
            data = memoryview(os.pread(handle.fd, span.stop - span.start, span.start))
            if len(data) != span.stop - span.start:
                return None
            for member in span.members:
                start, stop = ranges[member]
                values[owners[member]] = data[start - span.start : stop - span.start]
        try:
            status = os.stat(path)
        except OSError:
            return None
        self.was_used = True
        return values if self.is_same(status) else None

    def read_at_once(self, path: str, entry_id: int, byte_range: ByteRange | None) -> CachedValue:
        """As `read`; also `MISS` if the bytes are not in memory, and would be waited for."""
        handle = self.handle
        offset, nbytes = self._entries[2 * entry_id], self._entries[2 * entry_id + 1]
        if offset == MISSING and nbytes == MISSING:
            return self.read(path, entry_id, byte_range)
        if offset < self._data_start or offset + nbytes > self._data_stop or handle is None:
            return MISS
        if byte_range is not None:
            first, last = resolve_range(byte_range, nbytes)
            offset, nbytes = offset + first, last - first
        if nbytes > MAX_INLINE_NBYTES or not _can_read_at_once:
            return MISS
        data = bytearray(nbytes)
        try:
            if os.preadv(handle.fd, [data], offset, os.RWF_NOWAIT) != nbytes:
                return MISS
            status = os.stat(path)
        except OSError:  # it would block, or this file system does not know
            return MISS
        if not self.is_same(status):
            return MISS
        self.was_used = True
        return memoryview(data).toreadonly()


_can_read_at_once = hasattr(os, "preadv") and hasattr(os, "RWF_NOWAIT")

_synchronized = synchronized()
_open: OrderedDict[str, None] = OrderedDict()
"""Paths of those whose handle is kept; the oldest first."""


def open_to_read(path: str) -> FileHandle:
    """Open a file."""
    return FileHandle(fs.open_to_read(path))


@_synchronized
def _close_all() -> None:
    """Close the files that are kept; those that are being read, when they have been read."""
    for path in _open:
        file = warm_file(path)
        if file is not None:
            file.handle = None
    _open.clear()


def warm_file(path: str) -> CachedShardFile | None:
    """The shard file at a path, if its index is known. It may be another one now."""
    found = index_cache.find(path)
    return found if isinstance(found, CachedShardFile) else None


def remember(path: str, file: CachedShardFile, opened_ns: int) -> None:
    """Remember a file, if nobody can write into it and leave its time as it is.

    Parameters
    ----------
    opened_ns
        The time before its status was asked for.
    """
    if opened_ns - file.changed_ns >= MIN_AGE_NS and file.handle is not None:
        file.handle.is_shared = True
        index_cache.put(path, file)
        _keep_open(path)


def reopened(path: str, file: CachedShardFile, handle: FileHandle) -> None:
    """Keep the handle of a file again."""
    handle.is_shared = True
    file.handle = handle
    _keep_open(path)


def forget(path: str) -> None:
    """Let go of a file that this process has replaced or removed, so that its room is free."""
    index_cache.forget(path)


def forget_below(directory: str) -> None:
    """As `forget`, for all files below a directory."""
    for path in index_cache.scopes():
        if isinstance(path, str) and path.startswith(directory):
            index_cache.forget(path)


@_synchronized
def _keep_open(path: str) -> None:
    most = max_warm_files()
    _open[path] = None
    _open.move_to_end(path)
    while len(_open) > most:
        oldest, _ = _open.popitem(last=False)
        file = warm_file(oldest)
        if file is None:
            continue
        if file.was_used:  # a second chance
            file.was_used = False
            _open[oldest] = None
        else:
            file.handle = None


close_when_short(_close_all)
