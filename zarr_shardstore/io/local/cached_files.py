"""Cache of shard files: a chunk of a cached file costs one positioned read and one ``stat``.

Theory of operation::

    pread   the bytes of the entry, by a descriptor that stays open
    stat    the path still leads to that file, and the file has not changed

1. A cached file is an index, an open descriptor, and the state of the file from before its index
   was read: inode, size, and the times of its last write and last change.
2. A read takes the bytes first and looks at the state afterwards. If the state is that of rule 1,
   no writer came before the bytes were read: they are what the index says, and the value of the
   chunk at that moment. The other order would miss a writer that comes between the two.
3. A rename over the path, an append, a truncation and a write into the file all change the state.
   The open descriptor keeps the inode number from being used again.
4. Linux takes the times of files from a clock that ticks every 1 to 10 ms, so two writes within a
   tick leave one time. A file is cached only if its last change was `MIN_AGE_NS` before it was
   opened. Any later write then has another time.
5. A stale file is a miss: the flow opens the path and reads the index again. Its descriptor may
   be closed and its index kept; then the path is opened again and compared with rule 1.
6. A thread that reads keeps the descriptor open, whichever thread evicts the file: the descriptor
   of a cached file is closed when nothing refers to its `FileHandle` any more.
7. An index is not trusted: an entry that leaves the data of the file is a miss, and the flow
   raises the error.

On a network file system rule 3 fails, because a client learns of other hosts' writes when it opens
a file. Stores with ``locking="lockfile"`` keep no descriptor.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, Literal, TypeAlias, cast

from zarr_shardstore.format.index import MISSING, ShardIndex, ShardingSpec
from zarr_shardstore.format.ranges import ByteRange, plan_spans, resolve_range
from zarr_shardstore.io.index_cache import CachedIndex, index_cache
from zarr_shardstore.io.local.fs import MIN_AGE_NS, close_when_short, max_cached_files
from zarr_shardstore.synchronized import synchronized

MAX_INLINE_NBYTES = 256 * 1024
"""Largest chunk that is read in the event loop: copying more takes as long as a hop to a thread."""

_MAX_GAP_NBYTES = 16 * 1024
"""Between two chunks that one call reads: copying as much takes as long as a call."""

_MAX_SPAN_NBYTES = 16 * 1024 * 1024
"""Of one call. All of it stays in memory as long as one of its chunks is in use."""

_CAN_READ_WITHOUT_WAITING = hasattr(os, "preadv") and hasattr(os, "RWF_NOWAIT")


class Miss(Enum):
    """Sign that the cache has no answer."""

    MISS = "unknown"


MISS: Final = Miss.MISS
CachedValue: TypeAlias = "bytes | memoryview | Literal[Miss.MISS] | None"


class FileHandle:
    """An open file. A shared one is closed when nothing refers to it any more (rule 6)."""

    __slots__ = ("fd", "is_shared")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.is_shared = False

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Close the file, which must not be shared."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            close(fd)  # a default argument: `os` may be gone when the interpreter ends

    def __del__(self) -> None:
        self.close()


class CachedShardFile(CachedIndex):
    """A shard file with a known index.

    Parameters
    ----------
    handle : FileHandle
        Of the file that the index was read from.
    status
        State of the file from before the index was read.

    Thread safety: may be used from any thread.
    """

    __slots__ = ("_data_start", "_data_stop", "_entries", "_state", "handle")

    def __init__(
        self, index: ShardIndex, spec: ShardingSpec, handle: FileHandle, status: os.stat_result
    ) -> None:
        super().__init__(index, spec, None, status.st_size)
        self.handle: FileHandle | None = handle
        self._entries = index.fields.data.cast("B").cast("Q")
        is_at_start = spec.index.location == "start"
        self._data_start = spec.index_nbytes if is_at_start else 0
        self._data_stop = status.st_size - (0 if is_at_start else spec.index_nbytes)
        self._state = status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size

    @property
    def changed_ns(self) -> int:
        """Time of the last change of the file, in ns."""
        return max(self._state[:2])

    @property
    def file_nbytes(self) -> int:
        """Size of the file."""
        return self._state[3]

    def has_spec(self, spec: ShardingSpec) -> bool:
        """Whether the index was decoded by this specification."""
        if self.spec is not spec:
            if self.spec != spec:
                return False
            self.spec = spec  # an equal one: the next comparison is one of identity
        return True

    def locate(
        self, entry_id: int, byte_range: ByteRange | None = None
    ) -> tuple[int, int] | Literal[Miss.MISS] | None:
        """Return the half-open byte range of an entry, or of a part of its value.

        ``None``: the entry is missing. `MISS`: it leaves the data of the file (rule 7).
        """
        offset, nbytes = self._entries[2 * entry_id], self._entries[2 * entry_id + 1]
        if offset == nbytes == MISSING:
            return None
        stop = offset + nbytes
        if offset < self._data_start or stop > self._data_stop:
            return MISS
        if byte_range is not None:
            first, last = resolve_range(byte_range, nbytes)
            return offset + first, offset + last
        return offset, stop

    def is_current(self, file: str | int) -> bool:
        """Whether a path, or a descriptor, leads to this file, and the file has not changed."""
        try:
            now = os.stat(file)
        except OSError:
            return False
        if (now.st_mtime_ns, now.st_ctime_ns, now.st_ino, now.st_size) != self._state:
            return False
        self.was_used = True
        return True

    def read(
        self,
        path: str,
        entry_id: int,
        byte_range: ByteRange | None,
        *,
        may_wait: bool = True,
    ) -> CachedValue:
        """Return the value of a chunk, ``None`` if it is missing, `MISS` if the file is stale.

        Parameters
        ----------
        may_wait
            If false, also `MISS` for bytes that are not in memory, and for large chunks.
        """
        place, handle = self.locate(entry_id, byte_range), self.handle
        data: bytes | memoryview | None = None
        if place is not None:
            if place is MISS or handle is None:
                return MISS
            start, stop = place
            nbytes = stop - start
            data = (os.pread if may_wait else _read_without_waiting)(handle.fd, nbytes, start)
            if len(data) != nbytes:
                return MISS
        return data if self.is_current(path) else MISS

    def read_many(
        self,
        path: str,
        entry_ids: Sequence[int],
        byte_ranges: Sequence[ByteRange | None] | None,
    ) -> list[bytes | memoryview | None] | None:
        """Return values of entries, or ranges of them, as the shard had them at one moment.

        Parameters
        ----------
        byte_ranges
            Of the values; ``None``: all of each.

        Returns
        -------
        list or None
            ``None``: as `MISS` of `read`. Cost: few reads, and one ``stat``.
        """
        values: list[bytes | memoryview | None] = [None] * len(entry_ids)
        ranges: list[tuple[int, int]] = []
        owners: list[int] = []
        handle = self.handle
        for i, entry_id in enumerate(entry_ids):
            place = self.locate(entry_id, None if byte_ranges is None else byte_ranges[i])
            if place is None:
                continue
            if place is MISS or handle is None:
                return None
            ranges.append(place)
            owners.append(i)
            values[i] = b""  # a span has no member without bytes
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
        return values if self.is_current(path) else None


def _read_without_waiting(fd: int, nbytes: int, offset: int) -> memoryview:
    """Return bytes of a file that are in memory; too few if the disk would be waited for."""
    data = bytearray(nbytes if nbytes <= MAX_INLINE_NBYTES and _CAN_READ_WITHOUT_WAITING else 0)
    if data:
        try:
            n_read = os.preadv(fd, [data], offset, os.RWF_NOWAIT)
        except OSError:  # it would block, or this file system has no such reads
            n_read = 0
        if n_read != nbytes:
            return memoryview(b"")
    return memoryview(data).toreadonly()


find_file = cast("Callable[[str], CachedShardFile | None]", index_cache.find)
"""Return the cached file of a path, which may be stale. No other objects have a path as key."""

_synchronized = synchronized()
_open: OrderedDict[str, None] = OrderedDict()
"""Paths of the cached files whose descriptor stays open, the oldest first."""


def cache_file(path: str, file: CachedShardFile, opened_ns: int) -> None:
    """Cache a file, unless it is too young (rule 4).

    Parameters
    ----------
    opened_ns
        A time before the state of the file was looked at.
    """
    if opened_ns - file.changed_ns >= MIN_AGE_NS and file.handle is not None:
        file.handle.is_shared = True
        index_cache.put(path, file)
        _keep_open(path)


def reopen(path: str, file: CachedShardFile, handle: FileHandle) -> None:
    """Give a cached file a descriptor again."""
    handle.is_shared = True
    file.handle = handle
    _keep_open(path)


def forget_below(directory: str) -> None:
    """Drop the cached files below a directory, so that their room is free."""
    for path in index_cache.scopes():
        if isinstance(path, str) and path.startswith(directory):
            index_cache.forget(path)


@_synchronized
def _keep_open(path: str) -> None:
    most = max_cached_files()
    _open[path] = None
    _open.move_to_end(path)
    while len(_open) > most:
        oldest, _ = _open.popitem(last=False)
        file = find_file(oldest)
        if file is None:
            continue
        if file.was_used:  # a second chance
            file.was_used = False
            _open[oldest] = None
        else:
            file.handle = None


@_synchronized
def _close_all() -> None:
    """Close the descriptors of the cache; those that a thread reads from, when it has read."""
    for path in _open:
        file = find_file(path)
        if file is not None:
            file.handle = None
    _open.clear()


close_when_short(_close_all)
