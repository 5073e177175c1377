"""Locks between processes: one writer at a time for a shard file.

::

    c/0/0           the shard
    c/0/0.__lock    there while the shard is updated; tensorstore locks files by this name

``"os"``: the lock of the operating system on that file. It ends with its process.
``"lockfile"``: the process that creates the file has the lock, for network file systems without
locks. The user has to remove the file that a killed writer leaves.

tensorstore has the same two modes under the same names, and the same rules:

1. The lock is one on the whole file, of the *open file* (``F_OFD_SETLK``) on Linux, of ``flock``
   elsewhere. On Linux the two do not exclude each other.
2. A lock counts only if the file still has its name when it was taken. tensorstore writes the
   new shard *into the lock file* and renames it: the lock file of one update becomes the shard.
3. Only the process that has the lock removes or renames the file.
4. The file is empty. tensorstore does not truncate the bytes that it finds there. So a writer that
   finds the bytes of a killed one makes a new file.

On Windows ``filelock`` locks the file, also for readers one at a time. Rules 2 and 4 do not apply:
an open file keeps its name. The file is closed before it is removed, which the system refuses if
another process has it open by then. tensorstore's writers are not kept out there.

Source: tensorstore ``kvstore/file/file_key_value_store.cc``, ``internal/os/file_lock.cc`` and
``file_util_posix.cc``.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import islice
from typing import Literal, TypeAlias, get_args
from weakref import WeakSet

from zarr_shardstore.errors import ShardConflictError, UnsupportedError
from zarr_shardstore.io.concurrency import backoff
from zarr_shardstore.io.local import fs
from zarr_shardstore.io.local.fs import IS_POSIX, NOT_FOUND, opening_itself
from zarr_shardstore.synchronized import in_forked_child

try:
    import fcntl
except ImportError:
    from filelock import lock_descriptor, unlock_descriptor

_Kind: TypeAlias = Literal["LOCK_SH", "LOCK_EX", "LOCK_UN"]

Locking: TypeAlias = Literal["os", "lockfile", "none"]

LOCK_SUFFIX = ".__lock"
FRAMES_LOCK = f"frames{LOCK_SUFFIX}"
"""Name of the lock of a writer of frames, beside the chunks of its array."""
_MAX_NAME_NBYTES = 255
MAX_WAIT_S = 120.0  # a commit takes milliseconds: a process that keeps a lock so long hangs
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.00005, 0.002  # commits that append, or rewrite a shard, take that
_BUSY = (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN)
_NO_OFD = (errno.EINVAL, errno.ENOTSUP)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


class KeptLock:
    """The operating system's lock on a file of its own, which stays open between two uses.

    To make and remove the file each time would cost 50 µs instead of 3. A child process does not
    have the lock. A shared lock makes no file.

    Thread safety: for one thread at a time.
    """

    __slots__ = ("__weakref__", "_fds", "_is_shared", "_name")
    _hint = ""

    def __init__(self, name: str, *, is_shared: bool = False) -> None:
        self._name = name
        self._is_shared = is_shared
        self._fds: list[int] = []  # the file, if it is open
        _all_locks.add(self)

    def acquire(self, max_wait_s: float | None = None, message: str | None = None) -> None:
        """Take the lock; make the file and its directory.

        Raises `ShardConflictError`, with `message`, if it is not free within `max_wait_s` seconds,
        or `MAX_WAIT_S`; `UnsupportedError` if the file system has no locks; `FileNotFoundError` if
        the lock is shared and the file is missing.
        """
        limit_s = MAX_WAIT_S if max_wait_s is None else max_wait_s
        try:
            if self._try():
                return
            for pause_s in backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S, limit_s):
                # The file may have lost its name since it was opened: then try with the new one.
                if self._try() or (not self._fds and self._try()):
                    return
                time.sleep(pause_s)
            busy = f"another process holds {self._name!r} for {MAX_WAIT_S:.0f} s and hangs"
            raise ShardConflictError((message or busy) + self._hint.format(self._name))
        except BaseException:
            self.close()
            raise

    def _try(self) -> bool:
        """Take the lock if it is free. Close the file if it has lost its name (rule 2)."""
        is_new = False
        if not self._fds:
            if self._is_shared:
                _open_into(self._name, self._fds, os.O_RDONLY)
            else:
                is_new = not os.path.exists(self._name)
                _make_into(self._fds, self._name, os.O_RDWR)
        try:
            if not _set_lock(self._fds[0], "LOCK_SH" if self._is_shared else "LOCK_EX"):
                return False
            status = os.fstat(self._fds[0])
            if _has_name(status, self._name):
                if self._is_shared or not status.st_size or not IS_POSIX:
                    return True
                os.unlink(self._name)  # rule 4
        except OSError as error:
            if error.errno in _NO_LOCKS:
                if is_new:  # to a store with lock files it would be a lock
                    _unlink(self._fds, self._name)
                message = f"the file system has no locks for {self._name!r} ({error.strerror}); "
                raise UnsupportedError(f"{message}stores take locking='lockfile' there") from error
            if error.errno != errno.ESTALE:  # another host has removed the file
                raise
        self.close()
        return False

    def release(self) -> None:
        """Release the lock; the file stays."""
        try:
            if self._fds:
                _set_lock(self._fds[0], "LOCK_UN")
        except OSError:
            self.close()  # which also releases it
        except BaseException:
            self.close()
            raise

    def remove(self) -> None:
        """Release the lock, and remove its file."""
        # Removed under the lock (rule 3): a process that waits for it then makes a new file.
        try:
            _unlink(self._fds, self._name)
        finally:
            self.close()

    def close(self) -> None:
        """Release the lock, and close the file, which stays."""
        _close(self._fds)

    def __del__(self) -> None:
        # Only if an exception came before the lock was released, or in the constructor.
        if getattr(self, "_fds", None):
            self.close()


class _FileAsLock(KeptLock):
    """A lock by the existence of a file: `close` removes the file, or it would stay locked."""

    __slots__ = ()
    _hint = ", or was killed: then remove {!r}"

    def _try(self) -> bool:
        with suppress(FileExistsError):
            _make_into(self._fds, self._name, os.O_WRONLY | os.O_EXCL)
            return True
        return False

    def remove(self) -> None:
        self.close()

    def close(self) -> None:
        # Not in a ``finally``: if it is interrupted the finalizer must do it again.
        if not IS_POSIX:
            _close_and_unlink(self._fds, self._name)
        _unlink(self._fds, self._name)
        _close(self._fds)


class _ShownFileAsLock(_FileAsLock):
    """A lock by the existence of a file, and by the system as far as that has locks."""

    __slots__ = ()

    def _try(self) -> bool:
        if not super()._try():
            return False
        with suppress(OSError):
            if not _set_lock(self._fds[0], "LOCK_EX"):  # one that asks the system came first
                _close(self._fds)
                return False
        return True


_all_locks: WeakSet[KeptLock] = WeakSet()


@in_forked_child
def reset_after_fork() -> None:
    """Close the files of the parent's locks, which end with the parent."""
    for lock in list(_all_locks):
        _close(lock._fds)


def beside(path: str, suffix: str) -> str:
    """Return the path of a file's lock or journal; a name without room for it is digested."""
    name = os.path.basename(path)
    encoded = os.fsencode(name)
    if len(encoded) + len(suffix) > _MAX_NAME_NBYTES:
        path = path[: -len(name)] + sha256(encoded).hexdigest()[:32]
    return path + suffix


# The descriptor is in a list. Opening and appending is one call of C; so is popping and closing.
# A signal whose handler raises cannot come between: no descriptor is lost, and no lock.


@fs.retried
def _open_into(name: str, fds: list[int], flags: int) -> None:
    # A symbolic link with the name of a lock would lead to another file than the verified one.
    flags |= fs.OF_ITSELF
    opening_itself(name, lambda: fds.extend(map(os.open, [name], [flags], [0o666])))


def _make_into(fds: list[int], name: str, flags: int) -> None:
    """Open a file; make it and its directory if they are missing."""
    while True:
        with suppress(FileNotFoundError):  # also if its directory is removed in this moment
            _open_into(name, fds, flags | os.O_CREAT)
            return
        os.makedirs(os.path.dirname(name), exist_ok=True)


def _close(fds: list[int], n_left: int = 0) -> None:
    list(map(os.close, islice(iter(fds.pop, None), max(0, len(fds) - n_left))))


def _unlink(fds: list[int], name: str) -> None:
    """Remove the open file, unless another file has its name."""
    if fds and not IS_POSIX:
        _close(fds)
        with suppress(OSError):  # another process has it open, and removes it later
            os.unlink(name)
    for _ in range(2):  # an interrupted removal of a lock file would leave it locked
        with suppress(OSError):
            if fds and _has_name(os.fstat(fds[0]), name):
                os.unlink(name)
            return


def _close_and_unlink(fds: list[int], name: str) -> None:
    """Remove a file that is a lock, on Windows; -1 says that a call was interrupted before that."""
    if fds and fds[0] != -1:
        fds.insert(0, -1)
    with suppress(OSError):  # it is closed, and would stay locked
        _close(fds, 1)
    for is_last in (False, True):
        try:
            if fds:
                fs.unlink(name)  # a reader may have it open
            break
        except NOT_FOUND:
            break
        except OSError:
            if is_last:
                raise
    fds.clear()


def _has_name(status: os.stat_result, name: str) -> bool:
    if not IS_POSIX:
        return True
    try:
        return os.path.samestat(status, os.stat(name, follow_symlinks=False))
    except NOT_FOUND:
        return False


_OFD_LOCKS: dict[_Kind, bytes] = {}
if IS_POSIX and hasattr(fcntl, "F_OFD_SETLK") and fs.FULL_SYNC is None:
    # ``struct flock`` of the whole file, as of Linux: type, whence, start, length, process.
    _numbers = {"LOCK_SH": fcntl.F_RDLCK, "LOCK_EX": fcntl.F_WRLCK, "LOCK_UN": fcntl.F_UNLCK}
    _OFD_LOCKS = {
        kind: struct.pack("hhqqi0q", _numbers[kind], os.SEEK_SET, 0, 0, 0)
        for kind in get_args(_Kind)
    }


def _set_lock(fd: int, kind: _Kind) -> bool:
    """Take or release a lock of an open file, of a kind of ``flock``; return whether it did."""
    try:
        if not IS_POSIX:
            if kind != "LOCK_UN":
                return lock_descriptor(fd, blocking=False)
            unlock_descriptor(fd)
            return True
        if _OFD_LOCKS:
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _OFD_LOCKS[kind])
            except OSError as error:
                if error.errno not in _NO_OFD:  # tensorstore also takes ``flock`` then
                    raise
            else:
                return True
        fcntl.flock(fd, getattr(fcntl, kind) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _BUSY:
            raise
        return False
    return True


def lock_kind(locking: Locking, *, is_shown: bool = False) -> type[KeptLock]:
    """Return the kind of locks of a store; one that `is_shown` also keeps other stores out."""
    kind = _ShownFileAsLock if is_shown else _FileAsLock
    return kind if locking == "lockfile" else KeptLock


@contextmanager
def locked(path: str, locking: Locking) -> Iterator[None]:
    """Lock a shard file, which need not exist, blocking; remove the lock's file at the end."""
    if locking == "none":
        yield
        return
    lock = lock_kind(locking)(beside(path, LOCK_SUFFIX))
    try:
        lock.acquire()
        yield
    finally:
        lock.remove()


@contextmanager
def shared(path: str) -> Iterator[bool]:
    """Lock a shard file together with other readers, blocking until no writer has the lock.

    False: there was no lock file, so no writer; one may have come since.
    """
    lock = KeptLock(beside(path, LOCK_SUFFIX), is_shared=True)
    is_locked = True
    try:
        try:
            lock.acquire()
        except NOT_FOUND:
            is_locked = False
        except PermissionError:
            pass  # readers without permission to lock read as they can
        yield is_locked
    finally:
        lock.close()
