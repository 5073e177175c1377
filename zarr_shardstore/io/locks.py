"""One writer at a time for a shard that is a file, among all processes that write through here.

::

    c/0/0           the shard
    c/0/0.__lock    there while the shard is being updated; tensorstore locks files by this name

``"os"``: the operating system's lock on that file. It ends with the process that holds it.
``"lockfile"``: whoever creates the file holds the lock, for network file systems without locks.
A killed writer leaves the file behind, and somebody has to remove it.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal, TypeAlias

from filelock import SoftFileLock, Timeout

from zarr_shardstore.errors import ShardConflictError

if sys.platform != "win32":  # there, shards on local files cannot be written, others can
    import fcntl

__all__ = [
    "LOCK_SUFFIX",
    "KeptLock",
    "Locking",
    "held",
    "lock_file",
    "shared",
]

Locking: TypeAlias = Literal["os", "lockfile", "none"]

LOCK_SUFFIX = ".__lock"

MAX_WAIT_S = 120.0
"""A commit takes milliseconds: who waits so long waits for a process that hangs."""

_FIRST_PAUSE_S = 0.00005
_MAX_PAUSE_S = 0.002
"""What an appending commit takes, and what one takes that rewrites a shard."""

_BUSY = (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN)


class KeptLock:
    """The operating system's lock on a file of its own, which stays open between two uses.

    Then taking it costs two system calls, 2 µs, instead of the 200 that making and removing
    the file does. For one thread at a time.

    Parameters
    ----------
    name
        Path of the file of the lock.
    """

    __slots__ = ("_fd", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._fd: int | None = None

    def acquire(self, max_wait_s: float, message: str | None = None) -> None:
        """Take the lock; the file and its directory are made.

        Raises
        ------
        ShardConflictError
            With `message`, if it is not free within `max_wait_s` seconds.
        """
        deadline = time.monotonic() + max_wait_s
        while True:
            if self._fd is None:
                self._fd = _open_lock_file(self._name)
            try:
                _lock_by(self._fd, fcntl.LOCK_EX, deadline, self._name, message)
                if os.fstat(self._fd).st_nlink:
                    return
            except BaseException:
                self.close()
                raise
            self.close()  # whoever held it before has removed the file

    def acquire_at_once(self) -> bool:
        """Take the lock if it is free, and its file is open."""
        if self._fd is None or not _try_lock(self._fd, fcntl.LOCK_EX):
            return False
        is_there = False
        try:
            is_there = os.fstat(self._fd).st_nlink > 0
        finally:
            if not is_there:
                self.close()
        return is_there

    def release(self) -> None:
        """Give the lock up; the file stays."""
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def remove(self) -> None:
        """Give the lock up, and remove its file."""
        # While it is held: who waits for the lock of a file that is gone makes a new one.
        with suppress(OSError):
            os.unlink(self._name)
        self.close()

    def close(self) -> None:
        """Give the lock up if it is held, and close the file, which stays."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


def _open_lock_file(name: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    while True:
        with suppress(FileNotFoundError):  # also if its directory is removed in this moment
            return os.open(name, flags, 0o666)
        os.makedirs(os.path.dirname(name), exist_ok=True)


def _lock_by(fd: int, kind: int, deadline: float, name: str, message: str | None = None) -> None:
    for pause in _pauses():
        if _try_lock(fd, kind):
            return
        if time.monotonic() > deadline:
            raise ShardConflictError(message or busy_message(name, "os"))
        time.sleep(pause)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
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
def held(path: str, locking: Locking) -> Iterator[None]:
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
    name = path + LOCK_SUFFIX
    deadline = time.monotonic() + MAX_WAIT_S
    while True:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            yield False
            return
        except PermissionError:  # there is nothing more that we can do
            yield True
            return
        try:
            _lock_by(fd, fcntl.LOCK_SH, deadline, name)
            if os.fstat(fd).st_nlink:
                yield True
                return
        finally:
            os.close(fd)


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
    if locking == "os":
        kept = KeptLock(name)
        kept.acquire(max_wait_s, message)
        try:
            yield
        finally:
            kept.remove()
        return
    lock = SoftFileLock(name, timeout=max_wait_s, thread_local=False)
    while not lock.is_locked:
        os.makedirs(os.path.dirname(name), exist_ok=True)
        try:
            # Not where another process removes the directory in this very moment: once more then.
            with suppress(FileNotFoundError):
                lock.acquire(poll_interval=_MAX_PAUSE_S)
        except Timeout:
            raise ShardConflictError(message) from None
    try:
        yield
    finally:
        mine = _state(name)
        lock.release()
        if mine is not None and _state(name) == mine:
            # The file is the lock, and it could not be removed: nobody else would do it.
            with suppress(OSError):
                os.unlink(name)


def _state(name: str) -> tuple[int, ...] | None:
    """What tells a file from another one that has its name, and perhaps its number, later."""
    try:
        status = os.stat(name)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns, status.st_mtime_ns
