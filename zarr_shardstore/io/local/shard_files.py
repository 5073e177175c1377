"""Shard files that this process appends to: descriptors, lock, journal, repair.

::

    c/0/0              the shard
    c/0/0.__journal    state of the shard, and the record of a change under way; until it is sealed
    c/0/0.__lock       locked for each change; there while the shard has a journal

The `ShardWriter` of the last change is used again only under three conditions; otherwise the index
is read again. The journal still names this process as owner. The path leads to the open file. Size
and index are as they were left. An exception at any step of a change leaves the writer invalid:
`release` then repairs the file, or the next writer does.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, Literal

from zarr_shardstore.format.journal import Journal, Repair, decode_journal, find_repair
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.ranges import ByteRange, resolve_range
from zarr_shardstore.io.local import fs
from zarr_shardstore.io.local.fs import NOT_FOUND, FileState, at_offset, read_at, state_of
from zarr_shardstore.io.local.locks import LOCK_SUFFIX, KeptLock, beside
from zarr_shardstore.shards.shard_writer import Barrier, FileStep, ShardWriter, Truncate, WriteAt

JOURNAL_SUFFIX = ".__journal"

_OWNER_OFFSET, _OWNER_NBYTES = 8, 8
"""Field of the journal with the writer that changed the shard last."""


class ShardFile:
    """One shard file with its lock and its journal, for the thread that has locked the shard."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.owner: Any = None
        """The backend that opened the shard, to seal it."""
        self.shard: ShardRef | None = None
        """The shard that the file was when it was opened, see `is_what_was_opened`."""
        self.has_journal = False
        self._lock = KeptLock(beside(path, LOCK_SUFFIX))
        self._journal_path = beside(path, JOURNAL_SUFFIX)
        self._token = int.from_bytes(os.urandom(8), "little")
        self._fd: int | None = None
        self._journal: int | None = None
        self._writer: ShardWriter | None = None
        self._is_synced = False
        self._left: FileState = None

    def acquire(self) -> None:
        """Take the lock, and repair what another writer, or an exception here, left unfinished."""
        self._lock.acquire()
        try:
            if not self._is_ours():
                self._repair()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock. Its file stays as long as the shard has a journal."""
        try:
            if self._writer is not None and not self._writer.is_valid:
                self._writer = None
                with suppress(OSError):  # then the next writer repairs it
                    self._repair()
        finally:  # also after an interrupt
            if self.has_journal:
                self._lock.release()
            else:
                self.close()
                self._lock.remove()

    def _repair(self) -> None:
        """Repair what was left unfinished, with the files closed."""
        try:
            is_same_file = self.is_what_was_opened()
        finally:
            self.close()
        self.has_journal = repair(self.path)
        self._left = state_of(self.path) if is_same_file else None

    def close(self) -> None:
        """Close the files, but not the lock's file."""
        fds = self._fd, self._journal
        self._fd = self._journal = None  # also if closing fails: the numbers are free
        with ExitStack() as stack:
            for fd in fds:
                if fd is not None:
                    stack.callback(os.close, fd)
            if fds[0] is not None:
                self._left = state_of(fds[0])

    def close_all(self) -> None:
        """Close the files, forget the index, and release the lock."""
        self._writer = None
        self._lock.close()
        self.close()

    def _is_ours(self) -> bool:
        """Whether no other writer has changed the shard since this process did."""
        if self._writer is None or not self._writer.is_valid or self._journal is None:
            return False
        try:  # another program may have removed it, or given its file another name
            status = os.lstat(self._journal_path)
        except NOT_FOUND:
            return False
        if _is_shared(status) or not os.path.samestat(status, os.fstat(self._journal)):
            return False
        token: bytes = at_offset.pread(self._journal, _OWNER_NBYTES, _OWNER_OFFSET)
        return token == self._token.to_bytes(_OWNER_NBYTES, "little")

    def is_what_was_opened(self) -> bool:
        """Whether the path leads to the file that was opened as `shard`: another one may belong
        to another array."""
        left = self._left if self._fd is None else state_of(self._fd)
        return left is not None and state_of(self.path) == left

    def open(
        self, shard: ShardRef, data_end: int | None = None, to_seal: bool = False
    ) -> ShardWriter | None:
        """Return the writer of the shard as it is, see the request `OpenShard`."""
        try:
            status = os.lstat(self.path)
            if _is_shared(status):
                if to_seal and shard.is_adopted and not self.has_journal:
                    return None
                self.close()
                _separate(self.path)
            writer = self._writer
            if writer is not None and self._is_as_left(writer, status) and writer.belongs_to(shard):
                return writer
            self._writer = None
            self.close()
            self._fd = fs.open_to_change(self.path)
        except NOT_FOUND:
            self._writer = None
            self.end_journal()
            return None
        size = os.fstat(self._fd).st_size
        self._is_synced = data_end is not None  # as its upload was
        spec = shard.spec
        start = 0 if spec.index.location == "start" else max(0, size - spec.index_nbytes)
        index = at_offset.pread(self._fd, spec.index_nbytes, start)
        if data_end is None and self.has_journal:
            journal = _read_journal(self.path)
            data_end = None if journal is None else journal.data_end_at(start)
        self._writer = ShardWriter(shard, index, size, data_end, self._token)
        self.shard = shard
        return self._writer

    def read(self, byte_range: ByteRange | None) -> memoryview:
        """Return bytes of the file that the index was read from, whatever has its path now."""
        assert self._fd is not None, "only of an opened shard"
        return read_at(self._fd, *resolve_range(byte_range, os.fstat(self._fd).st_size))

    def _is_as_left(self, writer: ShardWriter, status: os.stat_result) -> bool:
        """Whether the file with that status is the open one, with the index of its writer.

        Another program that left the index as it was changed no entry: appended bytes go elsewhere.
        """
        if not writer.is_valid or self._fd is None or status.st_size != writer.size:
            return False
        is_same_file = os.path.samestat(status, os.fstat(self._fd))
        return is_same_file and writer.has_index_of(self._fd, at_offset.pread)

    def take(self, steps: Sequence[FileStep], *, durable_below: str | None) -> None:
        """Take all steps of a change with the files; then the writer is valid.

        With `durable_below`, a directory above, barriers sync; the directories are synced once.
        """
        is_durable = durable_below is not None
        if durable_below is not None and not self._is_synced:
            # The journal forgets the last change, which may not be synced; this one builds on it.
            assert self._fd is not None, "steps are taken with an opened shard"
            fs.sync(self._fd)
            fs.sync_directories(self.path, durable_below)
            self._is_synced = True
        last_ns = 0 if self._fd is None else os.fstat(self._fd).st_mtime_ns
        changed: dict[int, None] = {}
        for step in steps:
            match step:
                case WriteAt(name, offset, pieces):
                    fd = self._fd_of(name, is_durable)
                    fs.write_at(fd, pieces, offset)
                    changed[fd] = None
                case Truncate("journal") if not self.has_journal:
                    pass
                case Truncate(name, nbytes):
                    fd = self._fd_of(name, is_durable)
                    fs.truncate(fd, nbytes)
                    changed[fd] = None
                case Barrier() if is_durable:
                    for fd in changed:
                        fs.sync(fd)
                    changed.clear()
        if self._fd is not None:
            fs.renew_time(self._fd, last_ns)
        if self._writer is not None:
            self._writer.is_valid = True

    def _fd_of(self, name: Literal["shard", "journal"], is_durable: bool) -> int:
        if name == "shard":
            assert self._fd is not None, "steps are taken with an opened shard"
            return self._fd
        if self._journal is None:
            path = self._journal_path
            self.has_journal = True  # first: otherwise an exception would leave it
            self._journal = fs.open_to_change(path, create=True)
            if is_durable:
                fs.sync_file(os.path.dirname(path))
        return self._journal

    def end_journal(self, *, is_durable: bool = False) -> None:
        """Remove the journal of a whole shard. A writer that has it open reads the index again."""
        self.close()
        if self.has_journal:
            end_journal(self.path, is_durable)
            self.has_journal = False


def repair(path: str) -> bool:
    """Undo or finish the change of a killed writer; return whether there is a journal."""
    journal = beside(path, JOURNAL_SUFFIX)
    try:
        if _is_shared(os.lstat(journal)):
            _separate(journal)
    except NOT_FOUND:
        return False
    try:
        if _is_shared(os.lstat(path)):
            _separate(path)
        fd = fs.open_to_change(path)
    except NOT_FOUND:
        return True
    try:
        found = find_repair_of(path, fd)
        if found is not None:
            for offset, data in found.writes:
                fs.write_at(fd, [data], offset)
            if found.size is not None:
                fs.truncate(fd, found.size)
            fs.sync(fd)
    finally:
        os.close(fd)
    return True


def _is_shared(status: os.stat_result) -> bool:
    """Whether a file has other names, which a change in its place would also change."""
    return stat.S_ISLNK(status.st_mode) or status.st_nlink > 1


def _separate(path: str) -> None:
    """Give a name a file of its own with the same bytes."""
    source = fs.open_to_read(path)
    try:
        with fs.new_file(path, os.path.dirname(path)) as fd:
            fs.copy(source, fd)
    finally:
        os.close(source)


def _read_journal(path: str) -> Journal | None:
    try:
        with open(fs.open_to_read(beside(path, JOURNAL_SUFFIX)), "rb") as file:
            return decode_journal(file.read())
    except NOT_FOUND:
        return None


def find_repair_of(path: str, fd: int) -> Repair | None:
    """Return the repair of an open shard by the journal of its path, if it needs one."""
    size = os.fstat(fd).st_size
    return find_repair(_read_journal(path), size, lambda at, n: at_offset.pread(fd, n, at))


def end_journal(path: str, is_durable: bool) -> None:
    """Remove a journal. It is emptied first: then a process that has it open is not its owner."""
    name = beside(path, JOURNAL_SUFFIX)
    with suppress(*NOT_FOUND):
        if not _is_shared(os.lstat(name)):  # otherwise that process sees its missing name
            fd = fs.open_to_change(name)
            try:
                fs.truncate(fd, 0)
                if is_durable:  # it must not come back, for a file that is not there any more
                    fs.sync(fd)
            finally:
                os.close(fd)
        fs.unlink(name)
