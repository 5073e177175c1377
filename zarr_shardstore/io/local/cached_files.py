"""Cache of shard indexes, and reads of shard files that writers may be changing.

Each index is cached with the version of its object. A user checks that the object still has it.

Theory of operation for local files: a chunk of a cached file costs two system calls::

    pread   the bytes of the entry, by a descriptor that stays open
    stat    the path still leads to that file, and the file has not changed

1. A cached file is an index, an open descriptor, and the state of the file from before its index
   was read: inode, size, and the times of its last write and last change.
2. A read takes the bytes first and looks at the state afterwards: the other order would miss a
   writer that comes between the two. If the state is as in rule 1, the bytes are the value.
3. Every way to change the file changes the state. The open descriptor keeps the inode number from
   being used again.
4. The clock of files ticks every 1 to 10 ms on Linux; on some file systems a tick takes a second
   or two. Two writes within a tick leave one time. A file is cached only if its last change was
   `min_age_ns` before it was opened. Any later write then has another time.
5. A stale file is a miss: the flow opens the path and reads the index again. Its descriptor may
   be closed and its index kept; then the path is opened again and compared with rule 1.
6. An entry outside the data of the file is a miss, and the flow raises the error.

On a network file system rule 3 fails: a client learns of other hosts' writes when it opens a file.
Stores with ``locking="lockfile"`` keep no descriptor. Windows keeps none either, because an open
file cannot be replaced. Every read opens the file, as after rule 5.

Cache misses:

7. A reader opens a file once and takes index and entries from it. Entries that an index points to
   stay as they are while the file lives. A rename over its path, and an append to it, change none
   of them.
8. A read of an index may meet one that is half written. A *consistent* read takes the lock of
   writers, shared with other readers, and applies the repair of the journal in memory.
9. Only a wrapper of fsspec writes another shard into the same file. Writers of this process
   register it in `open_shards`; readers then see another version, and read again.
"""

from __future__ import annotations

import os
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal, TypeAlias

from zarr_shardstore.format.arguments import whole_number
from zarr_shardstore.format.journal import Repair
from zarr_shardstore.format.layout import Document, ShardRef
from zarr_shardstore.format.ranges import ByteRange, Range, resolve_range
from zarr_shardstore.format.shard import ENTRY_NBYTES, MISSING, ShardIndex, ShardingSpec
from zarr_shardstore.io.local import fs
from zarr_shardstore.io.local.fs import at_offset
from zarr_shardstore.io.local.open_shards import open_shards
from zarr_shardstore.io.write_epochs import UNSTABLE
from zarr_shardstore.synchronized import synchronized

MAX_INLINE_NBYTES = 256 * 1024
"""Largest chunk that is read in the event loop: copying more takes as long as a hop to a thread."""

_MAX_TOGETHER_NBYTES = 16 * 1024 * 1024  # most data of a shard that are read at one go
_DEFAULT_MAX_NBYTES = 64 * 1024 * 1024  # four million entries
_ITEM_NBYTES = 1024  # memory of an item besides the entries of its index, about

_CAN_READ_WITHOUT_WAITING = hasattr(os, "preadv") and hasattr(os, "RWF_NOWAIT")


class Miss(Enum):
    """Type of the sign that the cache has no answer."""

    MISS = "unknown"


MISS: Final = Miss.MISS
_Pread: TypeAlias = Callable[[int, int, int], bytes | memoryview]
CachedValue: TypeAlias = "bytes | memoryview | Literal[Miss.MISS] | None"

_synchronized = synchronized()


@dataclass(slots=True, eq=False)
class CachedIndex:
    """Cached index, and the version of the object that it was read from."""

    index: ShardIndex
    spec: ShardingSpec
    version: object
    """Version of a remote object; ``None`` for a `CachedShardFile`."""
    size: int | None
    is_recorded: bool = False
    """Whether it comes from a consolidated index, which may be stale."""
    written: object = None
    """Of a static object: its version by the writes of this process."""
    was_used: bool = False

    @property
    def nbytes(self) -> int:
        return len(self.index.fields) * ENTRY_NBYTES + _ITEM_NBYTES


class IndexCache:
    """Indexes, and known versions, of all stores of the process, by the identity of their object.

    An item has a `spec`, its `nbytes`, and `was_used`. Thread safety: may be used from any thread.
    """

    def __init__(self, max_nbytes: int) -> None:
        self.max_nbytes = max_nbytes
        self.nbytes = 0
        self._items: OrderedDict[Hashable, Any] = OrderedDict()
        self.find = self._items.get  # its user sets `was_used`

    def get(self, scope: Hashable, spec: ShardingSpec | None) -> Any:
        """Return the item of an object, if it was decoded with this spec."""
        item = self._items.get(scope)
        if item is None or item.spec != spec:
            return None
        item.was_used = True
        return item

    @_synchronized
    def put(self, scope: Hashable, item: Any) -> None:
        if scope in self._items:
            self.forget(scope)
        if item.nbytes <= self.max_nbytes:
            self._items[scope] = item
            self.nbytes += item.nbytes
        if self.nbytes > self.max_nbytes:
            self.resize(self.max_nbytes)

    @_synchronized
    def forget(self, scope: Hashable) -> None:
        item = self._items.pop(scope, None)
        if item is not None:
            self.nbytes -= item.nbytes

    def forget_if(self, is_unwanted: Callable[[Any], bool]) -> None:
        """Drop the items whose scope, the path of a file or a tuple, is not wanted any more."""
        for scope in list(self._items):
            if is_unwanted(scope):
                self.forget(scope)

    @_synchronized
    def resize(self, max_nbytes: int) -> None:
        """Set another bound, and evict what exceeds it."""
        self.max_nbytes = max_nbytes
        while self.nbytes > max_nbytes and self._items:
            scope, item = self._items.popitem(last=False)
            if item.was_used:  # a second chance, so that a use needs no lock
                item.was_used = False
                self._items[scope] = item
            else:
                self.nbytes -= item.nbytes
        if not self._items:  # an exception may have come between two counts
            self.nbytes = 0


index_cache = IndexCache(_DEFAULT_MAX_NBYTES)


def set_index_cache_nbytes(max_nbytes: int) -> None:
    """Bound the memory of the shard indexes that this process caches.

    Parameters
    ----------
    max_nbytes : int
        64 MiB by default; an index takes 16 bytes for each chunk of its shard.
        With 0 each read asks for the index again.

    Raises
    ------
    SpecError
        If the bound is no whole number, or negative.
    """
    index_cache.resize(whole_number("max_nbytes", max_nbytes))


class FileHandle:
    """An open file, closed with its last reference: no thread loses one that it reads."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)  # a default argument: `os` may be gone when the interpreter ends


class CachedShardFile(CachedIndex):
    """A shard file with a known index, and the file's state from before the index was read.

    Thread safety: may be used from any thread.
    """

    __slots__ = ("_data_start", "_data_stop", "_entries", "_state", "document", "handle")
    size: int

    def __init__(
        self, index: ShardIndex, shard: ShardRef, handle: FileHandle | None, status: os.stat_result
    ) -> None:
        spec = shard.spec
        super().__init__(index, spec, None, status.st_size)
        self.document = shard.layout.document
        self.handle = handle
        self._entries = index.fields.data.cast("B").cast("Q")
        is_at_start = spec.index.location == "start"
        self._data_start = spec.index_nbytes if is_at_start else 0
        self._data_stop = status.st_size - (0 if is_at_start else spec.index_nbytes)
        self._state = status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size

    def is_of(self, spec: ShardingSpec, document: Document | None) -> bool:
        """Whether the index was decoded by this specification, for the array of this document."""
        if self.document is not document:
            if self.document and document and not document.has_same_chunks(self.document):
                return False
            self.document = document
        return self.spec is spec or self.spec == spec

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
        self, path: str, entry_id: int, byte_range: ByteRange | None, *, may_wait: bool = True
    ) -> CachedValue:
        """Return the value of a chunk, ``None`` if it is missing, `MISS` if the file is stale.

        Unless it may wait, also `MISS` for bytes that are not in memory, and for large chunks.
        """
        pread = at_offset.pread if may_wait else _read_without_waiting
        value = self._read(entry_id, byte_range, pread)
        return MISS if value is MISS or not self.is_current(path) else value

    def read_many(
        self,
        path: str,
        entry_ids: Sequence[int],
        byte_ranges: Sequence[ByteRange | None] | None,
        pread: _Pread | None = None,
    ) -> list[bytes | memoryview | None] | None:
        """Return values of entries, or ranges of them, of one moment; ``None`` as `MISS` of `read`.

        Cost: one read if at least half of the bytes from first to last are wanted, otherwise one
        for each entry; and one ``stat``.
        """
        values: list[bytes | memoryview | None] = []
        if pread is None:
            pread = (self._read_most(entry_ids) if byte_ranges is None else None) or at_offset.pread
        for i, entry_id in enumerate(entry_ids):
            value = self._read(entry_id, None if byte_ranges is None else byte_ranges[i], pread)
            if value is MISS:
                return None
            values.append(value)
        return values if self.is_current(path) else None

    def _read_most(self, entry_ids: Sequence[int]) -> _Pread | None:
        """Read from the first to the last entry if at least half of these bytes are wanted.

        Return them as a `pread`.
        """
        handle = self.handle
        if handle is None or len(entry_ids) == 1:
            return None
        offsets, sizes = self.index.fields[entry_ids].T
        is_inside = (offsets < self._data_stop) & (sizes <= self._data_stop)
        if not is_inside.any():
            return None
        start = int(offsets[is_inside].min())
        n_bytes = int((offsets + sizes)[is_inside].max()) - start
        if n_bytes > min(_MAX_TOGETHER_NBYTES, 2 * int(sizes[is_inside].sum())):
            return None
        data = memoryview(at_offset.pread(handle.fd, n_bytes, start))
        return lambda _, nbytes, offset: data[offset - start : offset - start + nbytes]

    def _read(self, entry_id: int, byte_range: ByteRange | None, pread: _Pread) -> CachedValue:
        offset, nbytes = self._entries[2 * entry_id], self._entries[2 * entry_id + 1]
        if offset == nbytes == MISSING:
            return None
        handle = self.handle
        if handle is None or offset < self._data_start or offset + nbytes > self._data_stop:
            return MISS  # rules 5 and 6
        if byte_range is not None:
            first, last = resolve_range(byte_range, nbytes)
            offset, nbytes = offset + first, last - first
        data = pread(handle.fd, nbytes, offset)
        return data if len(data) == nbytes else MISS


def _read_without_waiting(fd: int, nbytes: int, offset: int) -> memoryview:
    """Return bytes of a file that are in memory; none if the disk would be waited for."""
    data = bytearray(nbytes if nbytes <= MAX_INLINE_NBYTES and _CAN_READ_WITHOUT_WAITING else 0)
    if data:
        try:
            n_read = os.preadv(fd, [data], offset, os.RWF_NOWAIT)
        except OSError:  # it would block, or this file system has no such reads
            n_read = 0
        if n_read != nbytes:
            return memoryview(b"")
    return memoryview(data).toreadonly()


find_file: Callable[[str], CachedShardFile | None] = index_cache.find
"""Return the cached file of a path, which may be stale. No other objects have a path as key."""

_open: OrderedDict[str, None] = OrderedDict()
"""Paths of the cached files whose descriptor stays open, the oldest first."""


def cache_file(
    path: str, index: ShardIndex, shard: ShardRef, reader: ShardFileReader, *, keeps_handle: bool
) -> None:
    """Cache a file and the index that was read from it, unless it is too young (rule 4)."""
    changed_ns = max(reader.status.st_mtime_ns, reader.status.st_ctime_ns)
    if reader.opened_ns - changed_ns >= max(fs.min_age_ns(changed_ns), fs.MIN_AGE_OF_CACHED_NS):
        handle = reader.handle if keeps_handle else None
        index_cache.put(path, CachedShardFile(index, shard, handle, reader.status))
        if keeps_handle:
            keep_open(path)


@_synchronized
def keep_open(path: str | None = None) -> None:
    """Keep the descriptor of a cached file open, and close others beyond the limit, or all."""
    most = 0
    if path is not None:
        _open[path] = None
        _open.move_to_end(path)
        most = fs.max_cached_files()
    while len(_open) > most:
        file = find_file(_open.popitem(last=False)[0])
        if file is not None:
            file.handle = None


fs.close_when_short(keep_open)


class ShardFileReader:
    """A file that is open for the reads of one flow; with `cached`, its index came from there."""

    __slots__ = ("_cached", "_n_overwrites", "handle", "opened_ns", "size", "status", "version")

    def __init__(self, path: str, cached: CachedShardFile | None = None) -> None:
        """Open a file; one of `NO_FILE` is raised also for a directory, a pipe or a device."""
        self._n_overwrites = open_shards.n_overwrites
        self._cached = cached
        self.opened_ns = time.time_ns()
        self.handle = FileHandle(fs.open_to_read(path))
        try:
            self.status = os.fstat(self.handle.fd)
            if not stat.S_ISREG(self.status.st_mode):
                raise IsADirectoryError(path)
        except BaseException:
            self.close()  # the error refers to this object
            raise
        self.size = self.status.st_size
        self.version = object()  # not the reader itself: a reply must not keep the file open

    def close(self) -> None:
        """Close the file, unless it is cached."""
        if hasattr(self, "handle"):
            del self.handle

    def version_now(self) -> object:
        """Return the version of bytes that are read now: another one after a write of this process
        into any file, or if the index was cached and the file has changed."""
        is_stale = self._cached is not None and not self._cached.is_current(self.handle.fd)
        is_other = is_stale or self._n_overwrites != open_shards.n_overwrites
        return UNSTABLE if is_other else self.version

    def read(self, byte_range: ByteRange | None, repair: Repair | None = None) -> memoryview:
        """Return bytes of the file, as they are after a repair."""
        fd = self.handle.fd
        if not isinstance(byte_range, Range):  # where it ends: writers may have changed that
            self.size = os.fstat(fd).st_size
        if repair is not None and repair.size is not None:
            self.size = repair.size
        start, stop = resolve_range(byte_range, self.size)
        data = fs.read_at(fd, start, stop)
        if repair is None or not repair.writes:
            return data
        buffer = bytearray(data)
        for offset, new in repair.writes:
            first, stop = max(offset, start), min(offset + len(new), start + len(data))
            if first < stop:
                buffer[first - start : stop - start] = new[first - offset : stop - offset]
        return memoryview(buffer).toreadonly()


class OpenFiles(dict[str, ShardFileReader]):
    """Files that the backend has open for one flow, by key."""

    def close(self) -> None:
        """Close all: after a commit the names may belong to other files."""
        while self:
            self.popitem()[1].close()

    def close_one(self, key: str) -> None:
        """Close a file after its key got another one, or none."""
        if key in self:
            self.pop(key).close()
