"""System calls on local files: opening them within the limit of the process, and changing them.

Each call that opens or changes a file is one function. A killed process leaves one of the
states between two of them, or half of a write: a test that stops at each call has seen all states.

Open files: a process has a limit, 1,024 on most Linux, 256 on macOS. Shares of it::

    1/8     shard files that stay open for reads (`cached_files`)
    3/16    shards that stay open for writes, three files each (`open_shards`)
    1/4     files of the reads that are under way, of all threads
    3/16    shards that one asynchronous write changes at a time, three files each

The rest is the user's. The limit may change, so each use asks for it. If there are too many open
files nevertheless, all idle ones are closed.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias, TypeVar

from zarr_shardstore.errors import SpecError

T = TypeVar("T")

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_when_short: list[Callable[[], None]] = []


def max_cached_files() -> int:
    return min(128, _limit() // 8)


def max_shards_of_writers() -> int:
    return min(64, _limit() // 16)


def max_shards_of_a_write() -> int:
    """Return the number of shards that one call changes at a time; each is in memory."""
    return max(1, min(16, _limit() // 16))


def max_files_of_a_read() -> int:
    """Return the number of files that one read has open; all threads may read at a time."""
    return max(2, min(160, _limit() // 4 // threading.active_count()))


def max_shards_of_a_read() -> int:
    """Return the number of shards that one read touches at a time, with room for other files."""
    return max_files_of_a_read() * 4 // 5


def _limit() -> int:
    if resource is None:
        return 512  # of the C library of Windows
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def close_when_short(close_some: Callable[[], None]) -> None:
    """Register a function that closes idle files. It is called when no more can be opened."""
    _when_short.append(close_some)


def opening(open_one: Callable[..., T], *args: Any) -> T:
    """Open files; if too many are open close the idle ones, and try again."""
    try:
        return open_one(*args)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    for close_some in _when_short:
        close_some()
    return open_one(*args)


NOT_FOUND = (FileNotFoundError, NotADirectoryError)
"""Raised where a path leads to nothing."""

NO_FILE = (*NOT_FOUND, IsADirectoryError)
"""Raised where a key has no file."""

_MAX_BUFFERS = 1024
"""Pieces of one system call (IOV_MAX of Linux)."""

_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)

SYSTEM_CALLS = (
    "open_new",
    "open_to_change",
    "open_to_read",
    "renew_time",
    "replace",
    "scan",
    "sync",
    "truncate",
    "unlink",
    "write_at",
)
"""Functions of this module that tests replace, to fail or to stop at each of them."""


def open_new(path: str) -> int:
    """Make a file that must not exist yet."""
    return opening(os.open, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def open_to_read(path: str) -> int:
    """Open a file or a directory, also through a link; never wait for a pipe."""
    return _following(os.open, path, os.O_RDONLY | _NONBLOCK)


def scan(path: str) -> Any:
    return _following(os.scandir, path)


def _following(open_one: Callable[..., T], *args: Any) -> T:
    """Open a path. A link that leads to itself is missing, as one that leads nowhere."""
    try:
        return opening(open_one, *args)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), error.filename) from error


def open_to_change(path: str, *, create: bool = False) -> int:
    """Open a file for reading and writing; `SpecError` if the path is a link."""
    flags = os.O_RDWR | (os.O_CREAT if create else 0) | NOFOLLOW
    return opening_itself(path, os.open, path, flags, 0o666)


def opening_itself(path: str, open_one: Callable[..., T], *args: Any) -> T:
    """Open a file with `NOFOLLOW`, see `open_to_change`."""
    try:
        return opening(open_one, *args)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise SpecError(
                f"{path!r} is a link, and what it leads to is not to be changed: remove the link"
            ) from error
        raise


def read_at(fd: int, start: int, stop: int) -> memoryview:
    """Return bytes of a file, fewer where it ends."""
    data = os.pread(fd, stop - start, start)
    while len(data) < stop - start:  # a signal, a huge read, or a file cut short
        more = os.pread(fd, stop - start - len(data), start + len(data))
        if not more:
            break
        data += more
    return memoryview(data)


def write_at(fd: int, pieces: Sequence[bytes | memoryview], offset: int) -> None:
    """Write all pieces, one behind the other."""
    if len(pieces) == 1 and os.pwrite(fd, pieces[0], offset) == len(pieces[0]):
        return  # otherwise all of it is written again
    for i in range(0, len(pieces), _MAX_BUFFERS):
        some = pieces[i : i + _MAX_BUFFERS]
        wanted = sum(map(len, some))
        written = os.pwritev(fd, some, offset)
        if written < wanted:  # a signal, or a huge write
            rest = memoryview(b"".join(some))[written:]
            while rest:
                rest = rest[os.pwrite(fd, rest, offset + wanted - len(rest)) :]
        offset += wanted


def truncate(fd: int, nbytes: int) -> None:
    os.ftruncate(fd, nbytes)


def renew_time(fd: int, last_ns: int) -> None:
    """Give a changed file a time that no file of its name ever had; the last one was `last_ns`.

    tensorstore tells versions of a file by inode and time of the last write. Before Linux 6.13, and
    on some file systems since, that time comes from a clock that ticks every 1 to 10 ms. And ext4
    gives a new file the inode of one that was just removed.
    """
    new_ns = max(time.time_ns(), last_ns + 1)
    with suppress(PermissionError):  # another user's file: only its owner may set the time
        os.utime(fd, ns=(new_ns, new_ns))


def sync(fd: int) -> None:
    """Wait until a file survives a loss of power."""
    os.fsync(fd)


def replace(source: str, target: str) -> None:
    os.replace(source, target)


def unlink(path: str) -> None:
    os.unlink(path)


FileState: TypeAlias = tuple[int, int, int] | None
"""Inode, size, and time of the last write of a file; ``None``: there is none."""

MIN_AGE_NS = 20_000_000
"""Age at which the time of a file tells its version. The clock ticks every 1 to 10 ms."""


def state_of(file: str | int) -> FileState:
    """Return the state of a file, by its path or its descriptor, now."""
    try:
        status = os.fstat(file) if isinstance(file, int) else os.stat(file)
    except NOT_FOUND:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def new_file(
    path: str, durable_below: str | None = None, written: list[FileState] | None = None
) -> Iterator[int]:
    """Open a new file, which replaces that of `path` in one step when the block has ended.

    Its temporary name ends as that of zarr's ``LocalStore`` and is short, because the name of the
    path may be as long as possible. The file that a killed process leaves is not listed. With
    `durable_below`, a directory above, file and directories survive a loss of power afterwards.
    The state of the file is added to `written`.
    """
    directory = os.path.dirname(path)
    temporary = os.path.join(directory, f".{uuid.uuid4().hex}.partial")
    fds: list[int] = []
    try:
        try:
            fds.append(open_new(temporary))
        except FileNotFoundError:
            os.makedirs(directory, exist_ok=True)
            fds.append(open_new(temporary))
        yield fds[0]
        try:
            last_ns = os.lstat(path).st_mtime_ns
        except NOT_FOUND:
            last_ns = 0
        renew_time(fds[0], last_ns)
        if written is not None:
            written.append(state_of(fds[0]))
        if durable_below is not None:
            sync(fds[0])  # first: otherwise the name may survive, and the bytes not
        os.close(fds.pop())  # once: afterwards the number may be that of another thread's file
        replace(temporary, path)
        if durable_below is not None:
            sync_directories(path, durable_below)
    except BaseException:
        with suppress(OSError):
            if fds:
                os.close(fds.pop())
        with suppress(OSError):
            os.unlink(temporary)
        raise


def sync_file(path: str) -> None:
    """Wait until a file, but not its name, survives a loss of power."""
    fd = open_to_read(path)
    try:
        sync(fd)
    finally:
        os.close(fd)


def sync_directories(path: str, top: str) -> None:
    """Wait until the name of a file survives a loss of power, and the directories up to `top`."""
    path, top = os.path.normpath(path), os.path.normpath(top)
    while path != top:
        path = os.path.dirname(path)
        sync_file(path)
