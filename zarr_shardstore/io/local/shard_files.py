"""Shard files that this process appends to, kept open between two changes.

::

    c/0/0              the shard
    c/0/0.__journal    state of the shard, and how to undo the change under way; until it is sealed
    c/0/0.__lock       held for each change of the shard; stays while a process has it open

One record for each path, shared by all stores of the process. Its user holds the shard
(`zarr_shardstore.io.update_queue` lets one thread at a time). What a record knows of the index is
valid if the journal has the number of this process, the path leads to the file that is open, and
the file has the size and the index that it was left with. Otherwise the index is read again.

Indexes of shard files with a version that others can compare: size, and time of last change.

A web server tells both of a file that it serves. It tells whole seconds, so a file counts only
when it is so old that no change to come can have the same time.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Literal, Protocol

from zarr_shardstore.format.consolidated_index import IndexCopy
from zarr_shardstore.format.journal import Repair, decode_journal, find_repair
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.ranges import ByteRange, resolve_range
from zarr_shardstore.io.local import fs, locks
from zarr_shardstore.io.local.fs import FileState, read_at, state_of, state_of_open
from zarr_shardstore.io.local.locks import LOCK_SUFFIX, KeptLock
from zarr_shardstore.io.uploads import (
    PART_NBYTES,
    LocalUpload,
    sync_directories,
    sync_file,
)
from zarr_shardstore.shards.requests import FoundIndex, GetIndex, Recorded, Request
from zarr_shardstore.shards.shard_writer import (
    Barrier,
    FileStep,
    ShardWriter,
    Truncate,
    WriteAt,
)

JOURNAL_SUFFIX = ".__journal"

_OWNER_OFFSET, _OWNER_NBYTES = 8, 8
"""Where the journal says who changed the shard last."""

_NO_FILE = (FileNotFoundError, NotADirectoryError)


class ShardFile:
    """One shard file and what belongs to it; for the thread that holds the shard.

    Parameters
    ----------
    path
        Of the shard.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.owner: Any = None
        self.shard: ShardRef | None = None
        """Which shard it was when it was opened, see `is_what_was_opened`."""
        self.has_journal = False
        self._lock = KeptLock(path + LOCK_SUFFIX)
        self._token = secrets.randbits(64)
        self._fd: int | None = None
        self._journal: int | None = None
        self._opened: ShardWriter | None = None
        self._is_synced = False
        self._left: FileState = None

    # ---------------------------------------------------------------- lock

    def acquire(self) -> Literal[True]:
        """Take the lock, and take back what a killed writer left unfinished."""
        self._lock.acquire(locks.MAX_WAIT_S)
        try:
            if not self._is_ours():
                self._repair()
        except BaseException:
            self.release()
            raise
        return True

    def acquire_at_once(self, fits: Callable[[ShardWriter], bool]) -> bool:
        """Take the lock of a shard that is open and fits, unless another process has it, or has
        changed the shard."""
        opened = self._opened
        if opened is None or not self._lock.acquire_at_once():
            return False
        is_ours = False
        try:
            is_ours = self._fd is not None and self._is_ours() and fits(opened)
        finally:
            if not is_ours:
                self._lock.release()
        return is_ours

    def release(self) -> None:
        """Give the lock up; its file stays as long as the shard has a journal."""
        try:
            if self._opened is not None and not self._opened.is_valid:
                self._opened = None
                with suppress(OSError):  # then whoever comes next does it
                    self._repair()
        finally:  # also if somebody interrupts it
            if self.has_journal:
                self._lock.release()
            else:
                self.close()
                self._lock.remove()

    def _repair(self) -> None:
        """Take back what was left unfinished, with the files closed."""
        try:
            is_same_file = self.is_what_was_opened()
        finally:
            self.close()
        self.has_journal = repair(self.path)
        self._left = state_of(self.path) if is_same_file else None

    def close(self) -> None:
        """Close the files, but not that of the lock."""
        fds = self._fd, self._journal
        self._fd = self._journal = None  # also if closing fails: the numbers are free
        with ExitStack() as stack:
            for fd in fds:
                if fd is not None:
                    stack.callback(os.close, fd)
            if fds[0] is not None:
                self._left = state_of_open(fds[0])

    def close_all(self) -> None:
        """Close the files, and forget the index. If the lock was held, it is not any more."""
        self._opened = None
        self._lock.close()
        self.close()

    def _is_ours(self) -> bool:
        """Whether nobody else has changed the shard since this process did."""
        if self._opened is None or not self._opened.is_valid or self._journal is None:
            return False
        try:  # whoever removed it, or gave its file another name, knows nothing of us
            status = os.lstat(self.path + JOURNAL_SUFFIX)
        except _NO_FILE:
            return False
        if _is_shared(status) or not os.path.samestat(status, os.fstat(self._journal)):
            return False
        token = os.pread(self._journal, _OWNER_NBYTES, _OWNER_OFFSET)
        return token == self._token.to_bytes(_OWNER_NBYTES, "little")

    def is_what_was_opened(self) -> bool:
        """Whether the path leads to the file that was opened as `shard`: another one may belong
        to another array."""
        left = self._left if self._fd is None else state_of_open(self._fd)
        return left is not None and state_of(self.path) == left

    # ------------------------------------------------------------- changes

    def open(self, shard: ShardRef, data_end: int | None = None) -> ShardWriter | None:
        """The shard as it is; ``None`` if there is none.

        Parameters
        ----------
        data_end
            As of `ShardWriter`, if the caller knows.

        Raises
        ------
        IndexDamageError
            If the index cannot be decoded.
        """
        try:
            status = os.lstat(self.path)
            if _is_shared(status):
                self.close()
                _separate(self.path)
            opened = self._opened
            if opened is not None and self._is_as_left(opened, status) and opened.belongs_to(shard):
                return opened
            self._opened = None
            self.close()
            self._fd = fs.open_to_change(self.path)
        except _NO_FILE:
            self._opened = None
            self.end_journal()
            return None
        size = os.fstat(self._fd).st_size
        self._is_synced = data_end is not None  # as its upload was
        spec = shard.layout.spec
        start = 0 if spec.index.location == "start" else max(0, size - spec.index_nbytes)
        index = os.pread(self._fd, spec.index_nbytes, start)
        if data_end is None and self.has_journal:
            data_end = _data_end_of(self.path, start)
        self._opened = ShardWriter(shard, index, size, data_end, self._token)
        self.shard = shard
        return self._opened

    def read(self, byte_range: ByteRange | None) -> memoryview:
        """Bytes of the opened shard: of the file that its index was read from, whatever another
        program has renamed to its name since."""
        assert self._fd is not None, "only of an opened shard"
        return read_at(self._fd, *resolve_range(byte_range, os.fstat(self._fd).st_size))

    def _is_as_left(self, opened: ShardWriter, status: os.stat_result) -> bool:
        """Whether the file of that status is the one that is known, with the index that is known.

        Other programs may have renamed another one to its name, or written into it. Where they
        left the index as it was they changed no entry, and what is appended goes where no entry is.
        """
        if not opened.is_valid or self._fd is None or status.st_size != opened.size:
            return False
        if not os.path.samestat(status, os.fstat(self._fd)):
            return False
        start, stop = opened.compared_range
        return opened.is_same(os.pread(self._fd, stop - start, start))

    def take(self, steps: Sequence[FileStep], *, durable_below: str | None) -> None:
        """Take all steps of a change with the files; then what is known of the shard is valid.

        Parameters
        ----------
        durable_below
            A directory above the shard. Barriers are some then, and what they protect needs no
            directory that may be lost.
        """
        is_durable = durable_below is not None
        if durable_below is not None and not self._is_synced:
            # Whoever wrote before may have been killed, or promised less: the journal, which is
            # about to forget that change, and what is acknowledged now, build upon it.
            assert self._fd is not None, "steps are taken with an opened shard"
            fs.sync(self._fd)
            sync_directories(self.path, durable_below)
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
        if self._opened is not None:
            self._opened.is_valid = True

    def _fd_of(self, name: Literal["shard", "journal"], is_durable: bool) -> int:
        if name == "shard":
            assert self._fd is not None, "steps are taken with an opened shard"
            return self._fd
        if self._journal is None:
            path = self.path + JOURNAL_SUFFIX
            self.has_journal = True  # first: otherwise it is left behind if an exception comes
            self._journal = fs.open_to_change(path, create=True)
            if is_durable:
                sync_file(os.path.dirname(path))
        return self._journal

    def end_journal(self, *, is_durable: bool = False) -> None:
        """Remove the journal: the shard is whole. Whoever has it open will read it again."""
        self.close()
        if self.has_journal:
            end_journal(self.path, is_durable)
            self.has_journal = False


def repair(path: str) -> bool:
    """Take back, or finish, what a killed writer did; return whether there is a journal."""
    try:
        if _is_shared(os.lstat(path + JOURNAL_SUFFIX)):
            _separate(path + JOURNAL_SUFFIX)
        fd = fs.open_to_change(path + JOURNAL_SUFFIX)
    except _NO_FILE:
        return False
    os.close(fd)
    try:
        if _is_shared(os.lstat(path)):
            _separate(path, is_shard=True)
        fd = fs.open_to_change(path)
    except _NO_FILE:
        return True
    try:
        found = find_repair_of(path, fd)
        if found is not None:
            _write_repair(fd, found)
            fs.sync(fd)
    finally:
        os.close(fd)
    return True


def _write_repair(fd: int, repair: Repair) -> None:
    for offset, data in repair.writes:
        fs.write_at(fd, [data], offset)
    if repair.size is not None:
        fs.truncate(fd, repair.size)


def _is_shared(status: os.stat_result) -> bool:
    """Whether a file has other names, so that what is written into it changes those, too."""
    return stat.S_ISLNK(status.st_mode) or status.st_nlink > 1


def _separate(path: str, *, is_shard: bool = False) -> None:
    """Give a name a file of its own, with the same bytes; of a shard, repaired.

    The other names keep theirs: those of a backup by hard links, of a link to a shard elsewhere.
    """
    source = fs.open_to_read(path)
    try:
        upload = LocalUpload(path, os.path.dirname(path))
        try:
            upload.copy_mode(source)
            offset = 0
            while data := os.pread(source, PART_NBYTES, offset):
                upload.write([data])
                offset += len(data)
            found = find_repair_of(path, source) if is_shard else None
            if found is not None:
                _write_repair(upload.fd, found)
            upload.finish()
        except BaseException:
            upload.abort()
            raise
    finally:
        os.close(source)


def _data_end_of(path: str, index_start: int) -> int | None:
    """What the journal of a shard says of the end of its data."""
    try:
        journal = decode_journal(_read_file(path + JOURNAL_SUFFIX))
    except _NO_FILE:
        return None
    return None if journal is None else journal.data_end_at(index_start)


def find_repair_of(path: str, fd: int) -> Repair | None:
    try:
        journal = decode_journal(_read_file(path + JOURNAL_SUFFIX))
    except _NO_FILE:
        return None
    status = os.fstat(fd)

    def read(offset: int, nbytes: int) -> bytes:
        return os.pread(fd, nbytes, offset)

    return find_repair(journal, status.st_size, read)


def end_journal(path: str, is_durable: bool) -> None:
    """Remove a journal, and tell whoever has it open."""
    name = path + JOURNAL_SUFFIX
    with suppress(*_NO_FILE):
        if not _is_shared(os.lstat(name)):  # whoever has it open sees that its name is gone
            fd = fs.open_to_change(name)
            try:
                fs.truncate(fd, 0)
                if is_durable:  # it must not come back, for a file that is not there any more
                    fs.sync(fd)
            finally:
                os.close(fd)
        fs.unlink(name)


def _read_file(path: str) -> bytes:
    with open(fs.open_to_read(path), "rb") as file:
        return file.read()


_MIN_AGE_NS = 2_100_000_000
"""Some file systems know times to two seconds, the clock may be a little off."""


class _Backend(Protocol):
    """What is needed of the backend."""

    def path_of(self, key: str) -> str: ...

    def perform(self, batch: list[Request]) -> list[Any]: ...


def record_index(backend: _Backend, shard: ShardRef, *, waits: bool) -> Recorded:
    """The reply to `RecordIndex`, blocking.

    A file with a journal is being changed, or was left by a killed writer: not what it will be.
    """
    if waits:
        time.sleep(_MIN_AGE_NS / 1e9)
    path = backend.path_of(shard.key)
    before = state_of(path)
    found: FoundIndex
    (found,) = backend.perform([GetIndex(shard, consistent=True)])
    if before is None or found.decoded is None or os.path.exists(path + JOURNAL_SUFFIX):
        return None
    _, size, mtime_ns = before
    if time.time_ns() - mtime_ns < _MIN_AGE_NS or state_of(path) != before:
        return "young"
    return IndexCopy(found.decoded, mtime_ns // 1_000_000_000, size)
