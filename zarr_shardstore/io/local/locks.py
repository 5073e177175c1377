"""One writer at a time for a shard that is a file, among all processes that write through here.

::

    c/0/0           the shard
    c/0/0.__lock    there while the shard is being updated; tensorstore locks files by this name

``"os"``: the operating system's lock on that file. It ends with the process that holds it.
``"lockfile"``: the process that creates the file holds the lock, for network file systems without
locks. A killed writer leaves the file behind, and somebody has to remove it.

tensorstore has the same two modes under the same names, and its rules hold here:

1. The lock is one on the whole file, of the *open file* (``F_OFD_SETLK``) on Linux, of ``flock``
   elsewhere. On Linux the two do not exclude each other.
2. It counts only if the file still has its name when the lock was taken. tensorstore writes the new
   shard *into the lock file* and renames it: what was a lock yesterday may be the shard today.
3. Only the holder removes or renames the file.
4. The file is empty. tensorstore does not cut off what it finds there: a writer of ours that finds
   what a killed one has left makes a new file.

Source: tensorstore ``kvstore/file/file_key_value_store.cc``, ``internal/os/file_lock.cc`` and
``file_util_posix.cc``.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Literal, TypeAlias
from weakref import WeakSet

from zarr_shardstore.errors import ShardConflictError, UnsupportedError
from zarr_shardstore.io.local.fs import NOFOLLOW, opening_itself

if sys.platform != "win32":  # there, shards on local files cannot be written, others can
    import fcntl


Locking: TypeAlias = Literal["os", "lockfile", "none"]

LOCK_SUFFIX = ".__lock"

MAX_WAIT_S = 120.0
"""A commit takes milliseconds: who waits so long waits for a process that hangs."""

_FIRST_PAUSE_S = 0.00005
_MAX_PAUSE_S = 0.002
"""What an appending commit takes, and what one takes that rewrites a shard."""

_BUSY = (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN)
_NO_FILE = (FileNotFoundError, NotADirectoryError)
_NO_OFD = (errno.EINVAL, errno.ENOTSUP)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)

_Lock: TypeAlias = Literal["shared", "exclusive", "none"]


class KeptLock:
    """The operating system's lock on a file of its own, which stays open between two uses.

    Then taking it and giving it up costs four system calls, 3 µs, instead of the 50 that making
    and removing the file does. For one thread at a time. A child process does not have the lock.

    Parameters
    ----------
    name
        Path of the file of the lock.
    is_shared
        Others may hold the lock at the same time, if theirs is shared, too. Its file is not made.
    """

    __slots__ = ("__weakref__", "_fds", "_is_shared", "_name")

    def __init__(self, name: str, *, is_shared: bool = False) -> None:
        self._name = name
        self._is_shared = is_shared
        self._fds: list[int] = []
        """The file, if it is open."""
        _all_locks.add(self)

    def acquire(self, max_wait_s: float, message: str | None = None) -> None:
        """Take the lock; the file and its directory are made.

        Raises
        ------
        ShardConflictError
            With `message`, if it is not free within `max_wait_s` seconds.
        UnsupportedError
            If the file system has no locks.
        FileNotFoundError
            If the lock is shared, and there is no such file.
        """
        deadline = time.monotonic() + max_wait_s
        try:
            for pause in _pauses():
                # Twice: the first file may be one that has lost its name since it was opened.
                if self._try() or self._try_again():
                    return
                if time.monotonic() > deadline:
                    raise ShardConflictError(message or busy_message(self._name, "os"))
                time.sleep(pause)
        except BaseException:
            self.close()
            raise

    def try_acquire(self) -> bool:
        """Take the lock if it is free, and its file is open."""
        try:
            return bool(self._fds) and self._try()
        except BaseException:
            self.close()
            raise

    def _try(self) -> bool:
        """Take the lock if it is free; close the file if it is not that of the lock."""
        if not self._fds:
            self._open()
        try:
            if not _set_lock(self._fds[0], "shared" if self._is_shared else "exclusive"):
                return False
            if self._is_of_its_name(os.fstat(self._fds[0])):
                return True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                message = f"the file system has no locks for {self._name!r} ({error.strerror}); "
                raise UnsupportedError(f"{message}stores take locking='lockfile' there") from error
            if error.errno != errno.ESTALE:  # another host has removed the file
                raise
        self.close()
        return False

    def _is_of_its_name(self, status: os.stat_result) -> bool:
        """Whether the file is still that of the lock, and may be renamed to be a shard."""
        if not _has_name(status, self._name):
            return False
        if status.st_size and not self._is_shared:
            os.unlink(self._name)  # rule 4
            return False
        return True

    def _try_again(self) -> bool:
        """If the file was closed: with the one that has the name now."""
        return not self._fds and self._try()

    def _open(self) -> None:
        if self._is_shared:
            _open_into(self._fds, self._name, os.O_RDONLY)
        else:
            _make_into(self._fds, self._name, os.O_RDWR)

    def release(self) -> None:
        """Give the lock up; the file stays."""
        try:
            if self._fds:
                _set_lock(self._fds[0], "none")
        except OSError:
            self.close()  # which gives it up, too
        except BaseException:
            self.close()
            raise

    def remove(self) -> None:
        """Give the lock up, and remove its file."""
        # While it is held: who waits for the lock of a file that is gone makes a new one.
        try:
            _unlink(self._fds, self._name)
        finally:
            self.close()

    def close(self) -> None:
        """Give the lock up if it is held, and close the file, which stays."""
        _close(self._fds)

    def __del__(self) -> None:
        # Only if an exception came before its holder could give it up; or in the constructor.
        if getattr(self, "_fds", None):
            self.close()


class _FileAsLock(KeptLock):
    """A file that is the lock itself: closed without being removed, it would stay locked."""

    __slots__ = ()

    def _try(self) -> bool:
        with suppress(FileExistsError):
            _make_into(self._fds, self._name, os.O_WRONLY | os.O_EXCL)
            return True
        return False

    def remove(self) -> None:
        self.close()

    def close(self) -> None:
        # Not in a ``finally``: interrupted, it must be done once more, by the finalizer.
        _unlink(self._fds, self._name)
        _close(self._fds)


_all_locks: WeakSet[KeptLock] = WeakSet()


def reset_after_fork() -> None:
    """The parent's locks end with the parent, also if a child lives longer."""
    for lock in list(_all_locks):
        _close(lock._fds)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=reset_after_fork)


# ------------------------------------------------------------------------------- files
#
# The number of an open file is in a list, and each step with both is one call of C: a signal whose
# handler raises cannot come between, so no open file, and no lock, is lost.


def _open_into(fds: list[int], name: str, flags: int) -> None:
    # A symbolic link by the name of a lock would be another file than the one that is verified.
    flags |= NOFOLLOW
    opening_itself(name, lambda: fds.extend(map(os.open, [name], [flags], [0o666])))


def _make_into(fds: list[int], name: str, flags: int) -> None:
    """Open a file, and make it and its directory if they are not there."""
    while True:
        with suppress(FileNotFoundError):  # also if its directory is removed in this moment
            _open_into(fds, name, flags | os.O_CREAT)
            return
        os.makedirs(os.path.dirname(name), exist_ok=True)


def _close(fds: list[int]) -> None:
    list(map(os.close, islice(iter(fds.pop, None), len(fds))))


def _unlink(fds: list[int], name: str) -> None:
    """Remove the open file, unless its name is another file's."""
    for _ in range(2):  # if it is the lock itself, nobody else would remove it
        with suppress(OSError):
            if fds and _has_name(os.fstat(fds[0]), name):
                os.unlink(name)
            return


def _has_name(status: os.stat_result, name: str) -> bool:
    try:
        return os.path.samestat(status, os.stat(name, follow_symlinks=False))
    except _NO_FILE:
        return False


# ------------------------------------------------------------------------------- locks

if sys.platform == "linux":

    def _whole_file(kind: int) -> bytes:
        """A ``struct flock`` with offsets of 64 bits: type, whence, start, length, process."""
        return struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0)

    _OFD_LOCKS: dict[_Lock, bytes] = {
        "shared": _whole_file(fcntl.F_RDLCK),
        "exclusive": _whole_file(fcntl.F_WRLCK),
        "none": _whole_file(fcntl.F_UNLCK),
    }


def _set_lock(fd: int, lock: _Lock) -> bool:
    """Take a lock of an open file, or give it up; whether it worked."""
    try:
        if sys.platform == "linux":
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _OFD_LOCKS[lock])
            except OSError as error:
                if error.errno not in _NO_OFD:  # then tensorstore takes the other one, too
                    raise
            else:
                return True
        kinds = {"shared": fcntl.LOCK_SH, "exclusive": fcntl.LOCK_EX, "none": fcntl.LOCK_UN}
        fcntl.flock(fd, kinds[lock] | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _BUSY:
            raise
        return False
    return True


def _pauses() -> Iterator[float]:
    """How long to sleep between two looks, in seconds."""
    pause = _FIRST_PAUSE_S
    while True:
        yield pause
        pause = min(2 * pause, _MAX_PAUSE_S)


@contextmanager
def locked(path: str, locking: Locking) -> Iterator[None]:
    """Hold the lock of a file; blocks until it is free.

    Parameters
    ----------
    path
        Of the file, which need not exist; its directory is made.

    Raises
    ------
    ShardConflictError
        If another process holds it for two minutes.
    """
    if locking == "none":
        yield
        return
    name = path + LOCK_SUFFIX
    with lock_file(name, locking, MAX_WAIT_S, busy_message(name, locking)):
        yield


def busy_message(name: str, locking: Locking) -> str:
    """What is wrong if a lock is not free for too long."""
    hint = "" if locking == "os" else ", or was killed: then remove that file"
    return f"another process holds {name!r} for {MAX_WAIT_S:.0f} s and hangs{hint}"


@contextmanager
def shared(path: str) -> Iterator[bool]:
    """Wait until nobody who holds the lock of a file changes it, and keep them out.

    Any number of readers may do so at a time.

    Yields
    ------
    bool
        False: there is no such lock, so nobody changed the file in that moment. Somebody may
        have begun since.

    Raises
    ------
    ShardConflictError
        If another process holds it for two minutes.
    """
    lock = KeptLock(path + LOCK_SUFFIX, is_shared=True)
    is_locked = True
    try:
        try:
            lock.acquire(MAX_WAIT_S)
        except _NO_FILE:
            is_locked = False
        except PermissionError:
            pass  # there is nothing more that we can do
        yield is_locked
    finally:
        lock.close()


@contextmanager
def lock_file(
    name: str, locking: Literal["os", "lockfile"], max_wait_s: float, message: str
) -> Iterator[None]:
    """Hold a lock by a file of its own, which is removed at the end; its directory is made.

    Raises
    ------
    ShardConflictError
        With `message`, if it is not free within `max_wait_s` seconds.
    """
    lock = KeptLock(name) if locking == "os" else _FileAsLock(name)
    try:
        lock.acquire(max_wait_s, message)
        yield
    finally:
        lock.remove()
