"""System calls on local files: opening them within the limit of the process, and changing them.

Each call that opens or changes a file is one function. A killed process leaves a state between two
of them, or half of a write: a test that stops at each call has seen all states.

Open files: a process has a limit, 1,024 on most Linux, 256 on macOS. Shares of it::

    1/8     shard files that stay open for reads (`cached_files`)
    3/16    shards that stay open for writes, three files each (`open_shards`)
    1/4     files of the reads that are under way, of all threads
    3/16    shards that one asynchronous write changes at a time, three files each

Each use asks for the limit, which may change. At the limit all idle files are closed.

Windows (`IS_POSIX` is false) does not replace or remove a file that any process has open. So files
are open only while they are read, and these calls are repeated for `MAX_BUSY_S`.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar

from zarr_shardstore.errors import SpecError
from zarr_shardstore.io.concurrency import backoff
from zarr_shardstore.telemetry import warn

T = TypeVar("T")
P = ParamSpec("P")

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

IS_POSIX = fcntl is not None and hasattr(os, "pread") and hasattr(os, "O_DIRECTORY")
"""Whether open files can be replaced and removed, and directories synced: false on Windows."""
FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)
"""Call of macOS, whose ``fsync`` leaves bytes in the cache of the disk."""

_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_when_short: list[Callable[[], None]] = []


def max_cached_files() -> int:
    return min(128, _limit() // 8)


def max_shards_of_writers() -> int:
    return min(64, _limit() // 16)


def max_shards_of_a_write() -> int:
    """Return the most shards that one call changes at a time, all in memory."""
    return max(1, min(16, _limit() // 16))


def max_files_of_a_read() -> int:
    """Return the most files that one read has open; all threads may read at a time."""
    n_shards = max_shards_of_a_read()
    return n_shards + max(1, n_shards // 4)


def max_shards_of_a_read() -> int:
    """Return the most shards that one read touches at a time, with room for other files."""
    return max(1, min(128, _limit() // 5 // threading.active_count()))


def _limit() -> int:
    if resource is None:
        return 512  # of the C library of Windows
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def close_when_short(close_some: Callable[[], None]) -> None:
    """Register a function that closes idle files, for when no more can be opened."""
    _when_short.append(close_some)


def opening(open_one: Callable[..., T], *args: Any) -> T:
    """Open files; if too many are open close the idle ones, and try again."""
    try:
        return open_one(*args)
    except OSError as error:
        if error.errno not in _TOO_MANY:
            raise
    for close_some in _when_short:
        close_some()
    return open_one(*args)


@cache
def warn_of_rewrites() -> None:
    """Warn, once in a process, that shards cannot be changed in place on this system."""
    warn(
        "strategy='append' needs a system that changes a file while others have it open, which "
        "Windows is not: shards are stored again at each write, as by strategy='rewrite'. Write "
        "many chunks in one call, or within batch()",
        stacklevel=2,
    )


NOT_FOUND = (FileNotFoundError, NotADirectoryError)  # a path leads to nothing
NO_FILE = (*NOT_FOUND, IsADirectoryError)  # a key has no file

_MAX_BUFFERS = 1024  # pieces of one system call (IOV_MAX of Linux)
_MAX_NBYTES = 0x7FFFF000  # bytes of one system call on Linux. macOS refuses more than 2 GiB

_COPIED_NBYTES = 8 * 1024 * 1024  # in memory at a time

_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_BINARY = getattr(os, "O_BINARY", 0)  # without it Windows changes the ends of lines
OF_ITSELF = getattr(os, "O_NOFOLLOW", 0) | _BINARY  # flags for `opening_itself`

MAX_BUSY_S = 10.0  # longest repetition of a call that Windows refuses: a read takes 1 ms
_BUSY_PAUSE_S, _MAX_PAUSES = 0.001, 50
_wanted: set[object] = set()  # paths that threads of this process wait for, to change their files

_RESERVED = re.compile(
    r'[\x00-\x1f<>:"\\|?*]|[ .](?:/|$)|'
    r"(?:^|/)(?:con|prn|aux|nul|com\d|lpt\d|conin\$|conout\$)(?:[. /]|$)",
    re.IGNORECASE,
)
"""Names of devices, of streams, and of other files, on Windows."""


def retried(call: Callable[P, T]) -> Callable[P, T]:
    """Return a function that repeats a call while Windows refuses it; elsewhere the call itself.

    The first argument is a path. Other threads of this process wait before they open it, because
    one of many readers would always have it open.
    """
    if IS_POSIX:
        return call

    @wraps(call)
    def repeated(*args: P.args, **options: P.kwargs) -> T:
        for _ in range(_MAX_PAUSES):
            if args[0] in _wanted:
                time.sleep(_BUSY_PAUSE_S)
        path, refusal = "", None
        try:
            for pause_s in backoff(_BUSY_PAUSE_S, _BUSY_PAUSE_S, MAX_BUSY_S):
                try:
                    return call(*args, **options)
                except OSError as error:
                    if not isinstance(error, PermissionError) and error.errno != errno.ENOTEMPTY:
                        raise
                    path, refusal = error.filename2 or error.filename, error
                    if call is not _remove_tree and os.path.isdir(path):
                        raise IsADirectoryError(errno.EISDIR, "a directory", path) from error
                _wanted.add(path)
                time.sleep(pause_s)
            message = f"forbidden, or open in a program, for {MAX_BUSY_S:.0f} s"
            raise PermissionError(refusal and refusal.errno, message, path) from refusal
        finally:
            refusal = None  # or it and this frame would keep each other
            _wanted.discard(path)

    return repeated


def open_new(path: str) -> int:
    """Make a file that must not exist yet."""
    return opening(os.open, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)


@retried
def open_to_read(path: str) -> int:
    """Open a file or a directory, also through a link; never wait for a pipe."""
    try:
        return opening(os.open, path, os.O_RDONLY | _NONBLOCK | _BINARY)
    except OSError as error:
        _check_loop(error)
        raise


def scan(path: str) -> Any:
    try:
        return opening(os.scandir, path)
    except OSError as error:
        _check_loop(error)
        raise


def _check_loop(error: OSError) -> None:
    """Raise `FileNotFoundError` for a link that leads to itself, as for one that leads nowhere."""
    if error.errno == errno.ELOOP:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), error.filename) from error


@retried
def open_to_change(path: str, *, create: bool = False) -> int:
    """Open a file for reading and writing; `SpecError` if the path is a link."""
    flags = os.O_RDWR | (os.O_CREAT if create else 0) | OF_ITSELF
    return opening_itself(path, os.open, path, flags, 0o666)


def opening_itself(path: str, open_one: Callable[..., T], *args: Any) -> T:
    """Open a file with `OF_ITSELF`, see `open_to_change`."""
    try:
        if not IS_POSIX and os.path.islink(path):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        return opening(open_one, *args)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise SpecError(
                f"{path!r} is a link, and what it leads to is not to be changed: remove the link"
            ) from error
        refuse_long(error)
        raise


def refuse_long(error: OSError) -> None:
    """Raise `SpecError` if an error says that a name or a path is too long."""
    if error.errno == errno.ENAMETOOLONG:
        raise SpecError(
            f"{error.filename!r} has a name or a path that is longer than the file system takes"
        ) from error


class _Seeking:
    """``pread`` and ``pwrite`` for systems without: the position of a descriptor is locked."""

    def __init__(self) -> None:
        self._locks = [threading.Lock() for _ in range(64)]

    def pread(self, fd: int, nbytes: int, offset: int) -> bytes:
        with self._locks[fd % 64]:
            os.lseek(fd, offset, os.SEEK_SET)
            return os.read(fd, nbytes)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        with self._locks[fd % 64]:
            os.lseek(fd, offset, os.SEEK_SET)
            return os.write(fd, data)


at_offset: Any = os if IS_POSIX else _Seeking()
"""Object with the functions ``pread`` and ``pwrite``."""


def read_at(fd: int, start: int, stop: int) -> memoryview:
    """Return bytes of a file, fewer where it ends."""
    data = b""  # to which the first bytes are added without a copy
    while len(data) < stop - start:  # again after a signal, a huge read, or a file cut short
        left = min(stop - start - len(data), _MAX_NBYTES)
        more = at_offset.pread(fd, left, start + len(data))
        if not more:
            break
        data += more
    return memoryview(data)


def write_at(fd: int, pieces: Sequence[bytes | memoryview], offset: int) -> None:
    """Write all pieces, one after the other."""
    for i in range(0, len(pieces), _MAX_BUFFERS):
        some = pieces[i : i + _MAX_BUFFERS]
        wanted = sum(map(len, some))
        is_gathered = hasattr(os, "pwritev") and wanted <= _MAX_NBYTES
        written = os.pwritev(fd, some, offset) if is_gathered else 0
        if written < wanted:  # a signal, or a huge write
            rest = memoryview(b"".join(some))[written:]
            while rest:
                start = offset + wanted - len(rest)
                rest = rest[at_offset.pwrite(fd, rest[:_MAX_NBYTES], start) :]
        offset += wanted


def try_flock(fd: int) -> bool:
    """Take HDF5's lock of an open file, until that is closed; return false if it is taken."""
    if fcntl is not None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # the file system has no such locks
            pass
    return True


def in_small_writes(
    pieces: Sequence[bytes | memoryview], nbytes: int = 512 * 1024
) -> Iterator[list[memoryview]]:
    """Cut the pieces of a new file into writes of at most `nbytes`.

    Linux 6.18 looks for large pages of memory for larger ones: 1.1 s a GB, instead of 0.25 s.
    """
    batch: list[memoryview] = []
    left = nbytes
    for piece in pieces:
        for start in range(0, len(piece), nbytes):
            part = memoryview(piece)[start : start + nbytes]
            if len(part) > left or len(batch) == _MAX_BUFFERS:
                yield batch
                batch, left = [], nbytes
            batch.append(part)
            left -= len(part)
    if batch:
        yield batch


def truncate(fd: int, nbytes: int) -> None:
    os.ftruncate(fd, nbytes)


def renew_time(fd: int, last_ns: int) -> None:
    """Give a changed file a time that no file of its name ever had; the last one was `last_ns`.

    tensorstore compares inode and time. The clock of many file systems ticks every 1 to 10 ms. ext4
    gives a new file the inode of one that was just removed.
    """
    if not IS_POSIX:  # NTFS gives each file a number of its own; Windows sets no time
        return
    new_ns = max(time.time_ns(), last_ns + 1)
    with suppress(PermissionError):  # another user's file: only its owner may set the time
        os.utime(fd, ns=(new_ns, new_ns))


def copy(source: int, fd: int) -> None:
    """Give an open new file the bytes of another one, and its permissions where the system can."""
    if hasattr(os, "fchmod"):
        os.fchmod(fd, stat.S_IMODE(os.fstat(source).st_mode))
    offset = 0
    while data := at_offset.pread(source, _COPIED_NBYTES, offset):
        write_at(fd, [data], offset)
        offset += len(data)


def sync(fd: int) -> None:
    """Wait until a file survives a loss of power."""
    if FULL_SYNC is not None:
        with suppress(OSError):  # network file systems have no such call
            fcntl.fcntl(fd, FULL_SYNC)
            return
    os.fsync(fd)


@retried
def replace(source: str, target: str) -> None:
    os.replace(source, target)


def give_new_name(source: str, target: str) -> None:
    """As `replace`; raise ``FileExistsError`` if another file has the name."""
    os.link(source, target)
    with suppress(OSError):
        os.unlink(source)


@retried
def unlink(path: str) -> None:
    os.unlink(path)


def _remove_tree(path: str) -> None:
    shutil.rmtree(path)


remove_tree = retried(_remove_tree)


def is_reserved(key: str) -> bool:
    """Return whether Windows has no file of the name of a key."""
    return _RESERVED.search(key) is not None


def plain_path(path: str) -> str:
    r"""Return a path of Windows without ``\\?\``, after which a slash separates no names."""
    if os.sep == "/" or not path.startswith("\\\\?\\"):
        return path
    is_share = path[4:8].upper() == "UNC\\"
    return "\\\\" + path[8:] if is_share else path[4:]


FileState: TypeAlias = tuple[int, int, int] | None
"""Version of a file: inode, size, and time of the last write; ``None``: there is none."""

MIN_AGE_NS = 20_000_000  # two ticks of most clocks
_MIN_AGE_OF_WHOLE_SECONDS_NS = 2_100_000_000  # on FAT a tick takes 2 s, on HFS+ 1 s
MIN_AGE_OF_CACHED_NS = 0 if IS_POSIX else _MIN_AGE_OF_WHOLE_SECONDS_NS
"""On Windows no open file keeps its number, and FAT has finer times of creation."""


def min_age_ns(time_ns: int) -> int:
    """Return the age from which a time of a file is its version: no later change has the same."""
    if time_ns % 1_000_000_000:
        return MIN_AGE_NS
    return max(MIN_AGE_NS, _MIN_AGE_OF_WHOLE_SECONDS_NS)


def state_of(file: str | int) -> FileState:
    """Return the state of a file, by its path or its descriptor, now."""
    try:
        status = os.fstat(file) if isinstance(file, int) else os.stat(file)
    except NOT_FOUND:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def new_file(
    path: str,
    durable_below: str | None = None,
    written: list[FileState] | None = None,
    give_name: Callable[[str, str], None] | None = None,
) -> Iterator[int]:
    """Open a new file, which replaces the file of `path` in one step when the block has ended.

    Its temporary name is short, ends as in zarr's ``LocalStore``, and is never listed. With
    `durable_below`, a directory above, file and directories then survive a loss of power. The state
    of the file is appended to `written`.
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
        os.close(fds.pop())  # once: afterwards another thread's file may have the number
        (give_name or replace)(temporary, path)
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
    fd = open_to_read(path) if IS_POSIX else open_to_change(path)  # Windows syncs no other
    try:
        sync(fd)
    finally:
        os.close(fd)


def sync_all(paths: Iterable[str]) -> None:
    """Wait until all that was written survives a loss of power; all files are in `paths`."""
    if hasattr(os, "sync"):
        os.sync()
        if FULL_SYNC is None:  # otherwise it did not wait
            return
    for path in paths:
        with suppress(*NOT_FOUND):
            sync_file(path)


def sync_directories(path: str, top: str) -> None:
    """Wait until a file's name, and the directories up to `top`, survive a loss of power.

    Windows syncs no directories: NTFS has a journal of names.
    """
    path, top = os.path.normpath(path), os.path.normpath(top)
    while IS_POSIX and path != top:
        path = os.path.dirname(path)
        sync_file(path)
