"""Shard files that are changed in their place, kept open between two changes.

::

    c/0/0              the shard
    c/0/0.__journal    what its index was before the last change, until the shard is sealed
    c/0/0.__lock       held by whoever changes the shard; stays while a process has it open

One record for each path, shared by all stores of the process; whoever uses one holds the
shard (`zarr_shardstore.io.commits` lets one thread at a time). What it knows of the index is
valid if the journal says that nobody else has changed the shard since, and the path still
leads to the same file. Otherwise the index is read again.
"""

from __future__ import annotations

import os
import secrets
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, Literal

from zarr_shardstore.format.journal import Repair, decode_journal, find_repair
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.io import file_calls, locks
from zarr_shardstore.io.locks import LOCK_SUFFIX, KeptLock, locked_exclusive
from zarr_shardstore.io.uploads import sync_directories, sync_file
from zarr_shardstore.plan.opened_shard import (
    Barrier,
    FileStep,
    OpenedShard,
    Truncate,
    WriteAt,
)

__all__ = [
    "FIXED",
    "JOURNAL_SUFFIX",
    "ShardFile",
    "end_journal",
    "find_repair_of",
    "open_shards",
    "repair",
]

JOURNAL_SUFFIX = ".__journal"

FIXED = stat.S_ISVTX
"""Mode bit of a file whose entries may be overwritten: who reads it locks it. No system gives
it a meaning for files; whoever opens a file learns it without another call."""

_MAX_OPEN = 64
"""Shards whose files stay open: three files each, of the 1,024 that a process may have."""

_OWNER_OFFSET, _OWNER_NBYTES = 8, 8
"""Where the journal says who changed the shard last."""

_NO_FILE = (FileNotFoundError, NotADirectoryError)


class ShardFile:
    """One shard file and what belongs to it; for whoever holds the shard in this process.

    Parameters
    ----------
    path
        Of the shard.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.owner: Any = None
        self.has_journal = False
        self._lock = KeptLock(path + LOCK_SUFFIX)
        self._token = secrets.randbits(64)
        self._fd: int | None = None
        self._journal: int | None = None
        self._opened: OpenedShard | None = None
        self._is_synced = False

    @property
    def shard(self) -> ShardRef | None:
        """Which shard it is, once it was opened."""
        return None if self._opened is None else self._opened.shard

    # ---------------------------------------------------------------- lock

    def acquire(self) -> None:
        """Take the lock, and take back what a killed writer left unfinished."""
        self._lock.acquire(locks.MAX_WAIT_S)
        try:
            if not self._is_ours():
                self.close()
                self.has_journal = repair(self.path)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give the lock up; its file stays as long as the shard has a journal."""
        try:
            if self._opened is not None and not self._opened.is_valid:
                self.close()
                self._opened = None
                with suppress(OSError):  # then whoever comes next does it
                    repair(self.path)
        finally:  # also if somebody interrupts it
            if self.has_journal:
                self._lock.release()
            else:
                self.close()
                self._lock.remove()

    def close(self) -> None:
        """Close the files, but not that of the lock."""
        fds = self._fd, self._journal
        self._fd = self._journal = None  # also if closing fails: the numbers are free
        with ExitStack() as stack:
            for fd in fds:
                if fd is not None:
                    stack.callback(os.close, fd)

    def close_all(self) -> None:
        """Close the files. If the lock was held, it is not any more."""
        self.close()
        self._lock.close()

    def _is_ours(self) -> bool:
        """Whether nobody else has changed the shard since this process did."""
        if self._opened is None or not self._opened.is_valid or self._journal is None:
            return False
        token = os.pread(self._journal, _OWNER_NBYTES, _OWNER_OFFSET)
        return token == self._token.to_bytes(_OWNER_NBYTES, "little")

    # ------------------------------------------------------------- changes

    def open(self, shard: ShardRef, data_end: int | None = None) -> OpenedShard | None:
        """The shard as it is; ``None`` if there is none.

        Parameters
        ----------
        data_end
            As of `OpenedShard`, if the caller knows.

        Raises
        ------
        IndexDamageError
            If the index cannot be decoded.
        """
        try:
            status = os.stat(self.path)
        except _NO_FILE:
            self.end_journal()
            return None
        opened = self._opened
        if (
            opened is not None
            and opened.is_valid
            and self._fd is not None
            and status.st_size == opened.size
            and os.path.samestat(status, os.fstat(self._fd))
            and opened.shard == shard
        ):
            return opened
        self.close()
        self._fd = file_calls.open_to_change(self.path)
        status = os.fstat(self._fd)
        size = status.st_size
        self._is_synced = data_end is not None  # as its upload was
        spec = shard.layout.spec
        start = 0 if spec.index.location == "start" else max(0, size - spec.index_nbytes)
        index = os.pread(self._fd, spec.index_nbytes, start)
        if data_end is None and self.has_journal:
            journal = decode_journal(_read_file(self.path + JOURNAL_SUFFIX))
            data_end = None if journal is None else journal.data_end_at(start)
        self._opened = OpenedShard(shard, index, size, data_end, self._token)
        self._opened.inode = status.st_ino
        self._opened.is_fixed = bool(status.st_mode & FIXED)
        return self._opened

    def take(self, steps: Sequence[FileStep], *, durable_below: str | None) -> None:
        """Take steps with the files, see `FileStep`.

        Parameters
        ----------
        durable_below
            A directory above the shard. Barriers are some then, and what they protect needs no
            directory that may be lost.
        """
        is_fixed = self._opened is not None and self._opened.is_fixed
        with self._excluding_readers() if is_fixed else nullcontext():
            self._take(steps, durable_below)

    def _excluding_readers(self) -> AbstractContextManager[None]:
        """Wait until nobody reads the opened shard, and let nobody do so."""
        assert self._fd is not None, "only of an opened shard"
        return locked_exclusive(self._fd, self.path)

    def _take(self, steps: Sequence[FileStep], durable_below: str | None) -> None:
        is_durable = durable_below is not None
        if durable_below is not None and not self._is_synced:
            # Whoever wrote before may have been killed, or promised less: the journal, which is
            # about to forget that change, and what is acknowledged now, build upon it.
            assert self._fd is not None, "steps are taken with an opened shard"
            file_calls.sync(self._fd)
            sync_directories(self.path, durable_below)
            self._is_synced = True
        changed: dict[int, None] = {}
        for step in steps:
            match step:
                case WriteAt(name, offset, pieces):
                    fd = self._fd_of(name, is_durable)
                    file_calls.write_at(fd, pieces, offset)
                    changed[fd] = None
                case Truncate("journal") if not self.has_journal:
                    pass
                case Truncate(name, nbytes):
                    fd = self._fd_of(name, is_durable)
                    file_calls.truncate(fd, nbytes)
                    changed[fd] = None
                case Barrier() if is_durable:
                    for fd in changed:
                        file_calls.sync(fd)
                    changed.clear()

    def _fd_of(self, name: Literal["shard", "journal"], is_durable: bool) -> int:
        if name == "shard":
            assert self._fd is not None, "steps are taken with an opened shard"
            return self._fd
        if self._journal is None:
            path = self.path + JOURNAL_SUFFIX
            self._journal = file_calls.open_to_change(path, create=True)
            self.has_journal = True
            if is_durable:
                sync_file(os.path.dirname(path))
        return self._journal

    def end_journal(self, *, is_durable: bool = False) -> None:
        """Remove the journal: the shard is whole. Whoever has it open will read it again."""
        self.close()
        if self.has_journal:
            end_journal(self.path, is_durable)
            self.has_journal = False


class _OpenShards:
    """The shard files of this process that are being changed, or have a journal of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, ShardFile] = {}
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._in_use: dict[str, int] = {}

    def __getitem__(self, path: str) -> ShardFile:
        """The record of a shard that this thread holds."""
        return self._files[path]

    def get(self, path: str) -> ShardFile | None:
        """The record of a shard, if this thread holds it."""
        return self._files.get(path) if self.is_used_here(path) else None

    def forget(self, file: ShardFile) -> None:
        """Drop the record of a shard that is not there any more."""
        with self._lock:
            if file.path not in self._in_use and self._files.pop(file.path, None) is file:
                self._recent.pop(file.path, None)
                file.close_all()

    def below(self, directory: str) -> list[ShardFile]:
        """Records of shards below a directory, a path that ends with a slash."""
        with self._lock:
            return [file for path, file in self._files.items() if path.startswith(directory)]

    def holding(self, path: str) -> AbstractContextManager[None]:
        """Hold a shard to replace it, or to change it in its place."""
        return _Holding(self, path)

    @contextmanager
    def marked(self, path: str) -> Iterator[None]:
        """Say that this thread holds a shard by other means."""
        with self._lock:
            self._in_use[path] = threading.get_ident()
        try:
            yield
        finally:
            with self._lock:
                del self._in_use[path]

    def is_used_here(self, path: str) -> bool:
        """Whether this thread holds a shard."""
        return self._in_use.get(path) == threading.get_ident()

    def is_used(self, path: str) -> bool:
        """Whether this process holds a shard."""
        return path in self._in_use

    def begin_use(self, path: str) -> ShardFile:
        """Make a record of a shard, or take the one there is, for this thread."""
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = ShardFile(path)
            self._in_use[path] = threading.get_ident()
            self._recent[path] = None
            self._recent.move_to_end(path)
            while len(self._recent) > _MAX_OPEN:
                oldest = next((p for p in self._recent if p not in self._in_use), None)
                if oldest is None:
                    break
                del self._recent[oldest]
                with suppress(OSError):  # of another shard than the caller's
                    self._files[oldest].close_all()
        return file

    def end_use(self, file: ShardFile) -> None:
        """Keep the record as long as the shard has a journal."""
        with self._lock:
            del self._in_use[file.path]
            if not file.has_journal:
                del self._files[file.path]
                self._recent.pop(file.path, None)

    def reset_after_fork(self) -> None:
        """The files are the parent's, and its locks would count as ours."""
        self._lock = threading.Lock()
        for file in self._files.values():
            file.close_all()
        self._files.clear()
        self._recent.clear()
        self._in_use.clear()


class _Holding(AbstractContextManager[None]):
    """As a generator it would take 3 µs more, for each write."""

    __slots__ = ("_file", "_path", "_shards")

    def __init__(self, shards: _OpenShards, path: str) -> None:
        self._shards = shards
        self._path = path

    def __enter__(self) -> None:
        self._file = self._shards.begin_use(self._path)
        try:
            self._file.acquire()
        except BaseException:
            self._shards.end_use(self._file)
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._file.release()
        finally:
            self._shards.end_use(self._file)


open_shards = _OpenShards()


def repair(path: str) -> bool:
    """Take back, or finish, what a killed writer did; return whether there is a journal."""
    try:
        fd = file_calls.open_to_change(path + JOURNAL_SUFFIX)
    except _NO_FILE:
        return False
    os.close(fd)
    try:
        fd = file_calls.open_to_change(path)
    except _NO_FILE:
        return True
    try:
        is_fixed = os.fstat(fd).st_mode & FIXED
        with locked_exclusive(fd, path) if is_fixed else nullcontext():
            found = find_repair_of(path, fd)
            if found is not None:
                for offset, data in found.writes:
                    file_calls.write_at(fd, [data], offset)
                if found.size is not None:
                    file_calls.truncate(fd, found.size)
                file_calls.sync(fd)
    finally:
        os.close(fd)
    return True


def find_repair_of(path: str, fd: int) -> Repair | None:
    try:
        journal = decode_journal(_read_file(path + JOURNAL_SUFFIX))
    except _NO_FILE:
        return None
    status = os.fstat(fd)

    def read(offset: int, nbytes: int) -> bytes:
        return os.pread(fd, nbytes, offset)

    return find_repair(journal, status.st_size, read, status.st_ino)


def end_journal(path: str, is_durable: bool) -> None:
    """Remove a journal, and tell whoever has it open."""
    with suppress(*_NO_FILE):
        fd = file_calls.open_to_change(path + JOURNAL_SUFFIX)
        try:
            file_calls.truncate(fd, 0)
            if is_durable:  # it must not come back, for a file that is not there any more
                file_calls.sync(fd)
        finally:
            os.close(fd)
        file_calls.unlink(path + JOURNAL_SUFFIX)


def _read_file(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=open_shards.reset_after_fork)
