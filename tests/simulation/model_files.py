"""Model of a local file system, and processes whose system calls a scheduler interleaves.

Files are in memory. Each simulated process is a thread with modules of this package of its own:
caches, locks, open files and queues are not shared. One thread runs at a time. It passes the turn
on before each system call, as the scheduler chooses. The model has what real systems do:

- The clock ticks every 4 ms, so two states of a file may have one time; only a scheduler's step,
  or nothing, lets time pass.
- The number of an inode comes back when its file has no name and nobody has it open.
- A process may end before each call, and in the middle of each write; its locks end with it.
- Locks are those of the open file.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import gc
import heapq
import io
import os
import re
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import zarr.registry

from tests.simulation.scheduler import Chooser, Step

__all__ = ["ROOT", "Files", "Killed", "Machine", "Process", "fresh_modules", "installed", "mount"]

ROOT = "/simulated/"
TICK_NS = 4_000_000
PAUSE_NS = 30_000_000
"""Long enough for a file to be cached."""
_FIRST_FD = 1 << 24
_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial$")


class Killed(BaseException):
    """The process has ended: no handler for errors catches it."""


@dataclass(slots=True, eq=False)
class Node:
    """A file or a directory."""

    number: int
    is_directory: bool = False
    data: bytearray = field(default_factory=bytearray)
    mtime_ns: int = 0
    ctime_ns: int = 0
    n_names: int = 1
    n_open: int = 0
    locks: dict[int, str] = field(default_factory=dict)
    """Kind by descriptor."""


class Status(NamedTuple):
    """What ``stat`` tells."""

    st_ino: int
    st_mode: int
    st_size: int
    st_mtime_ns: int
    st_ctime_ns: int
    st_nlink: int
    st_dev: int = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry of a directory."""

    path: str
    node: Node

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    def inode(self) -> int:
        return self.node.number

    def is_dir(self, **_: bool) -> bool:
        return self.node.is_directory

    def is_file(self, **_: bool) -> bool:
        return not self.node.is_directory

    def is_symlink(self) -> bool:
        return False


class Listing:
    """Entries of a directory, as of ``scandir``."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Entry]:
        return self._entries

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> Listing:
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to close."""

    def close(self) -> None:
        """There is nothing to close."""


@dataclass(slots=True, eq=False)
class Open:
    """An open file."""

    node: Node
    path: str
    process: Process | None


class Files:
    """Files by path, and the calls on them; no call waits here."""

    def __init__(self, *, numbers_return: bool = True) -> None:
        self.now_ns = 10_000 * TICK_NS
        self.numbers_return = numbers_return
        self._free: list[int] = []
        self._n_nodes = 0
        self.names: dict[str, Node] = {ROOT.rstrip("/"): self._new_node(is_directory=True)}
        self.open_files: dict[int, Open] = {}
        self._n_fds = _FIRST_FD
        self.n_pauses = 0
        """Outside of a run."""
        self.owner: Process | None = None
        """Process that opens files outside of a run."""

    def _new_node(self, *, is_directory: bool = False) -> Node:
        if self._free and self.numbers_return:
            number = heapq.heappop(self._free)
        else:
            self._n_nodes += 1
            number = self._n_nodes
        node = Node(number, is_directory)
        self._stamp(node)
        return node

    def _stamp(self, node: Node) -> None:
        node.mtime_ns = node.ctime_ns = self.now_ns - self.now_ns % TICK_NS

    def _release(self, node: Node) -> None:
        if not node.n_names and not node.n_open:
            heapq.heappush(self._free, node.number)

    def _named(self, path: str) -> Node:
        node = self.names.get(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return node

    def _in_directory(self, path: str) -> None:
        if not self._named(os.path.dirname(path)).is_directory:
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)

    def _opened(self, fd: int) -> Node:
        found = self.open_files.get(fd)
        if found is None:
            raise OSError(errno.EBADF, "not open")
        return found.node

    def open(self, process: Process | None, path: str, flags: int, mode: int = 0) -> int:
        node = self.names.get(path)
        if node is not None and flags & os.O_CREAT and flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, "there is a file", path)
        if node is None and flags & os.O_CREAT:
            self._in_directory(path)
            node = self.names[path] = self._new_node()
        node = self._named(path)
        node.n_open += 1
        self._n_fds += 1
        self.open_files[self._n_fds] = Open(node, path, process)
        return self._n_fds

    def close(self, fd: int) -> None:
        found = self.open_files.pop(fd, None)
        if found is not None:
            found.node.locks.pop(fd, None)
            found.node.n_open -= 1
            self._release(found.node)

    def pread(self, fd: int, nbytes: int, offset: int) -> bytes:
        return bytes(self._opened(fd).data[offset : offset + nbytes])

    def preadv(self, fd: int, buffers: Sequence[bytearray], offset: int, flags: int = 0) -> int:
        (buffer,) = buffers
        data = self.pread(fd, len(buffer), offset)
        buffer[: len(data)] = data
        return len(data)

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        node = self._opened(fd)
        data = bytes(data)
        if offset > len(node.data):
            node.data += bytes(offset - len(node.data))
        node.data[offset : offset + len(data)] = data
        self._stamp(node)
        return len(data)

    def pwritev(self, fd: int, pieces: Sequence[Any], offset: int, flags: int = 0) -> int:
        return self.pwrite(fd, b"".join(map(bytes, pieces)), offset)

    def ftruncate(self, fd: int, nbytes: int) -> None:
        node = self._opened(fd)
        del node.data[nbytes:]
        node.data += bytes(nbytes - len(node.data))
        self._stamp(node)

    def utime(self, fd: int, *, ns: tuple[int, int]) -> None:
        node = self._opened(fd)
        self._stamp(node)
        node.mtime_ns = ns[1]

    def fsync(self, fd: int) -> None:
        self._opened(fd)

    def _status(self, node: Node) -> Status:
        mode = stat.S_IFDIR | 0o755 if node.is_directory else stat.S_IFREG | 0o644
        times = node.mtime_ns, node.ctime_ns
        return Status(node.number, mode, len(node.data), *times, node.n_names)

    def fstat(self, fd: int) -> Status:
        return self._status(self._opened(fd))

    def stat(self, path: str | int, *, follow_symlinks: bool = True) -> Status:
        return self.fstat(path) if isinstance(path, int) else self._status(self._named(path))

    def lstat(self, path: str) -> Status:
        return self.stat(path)

    def unlink(self, path: str) -> None:
        node = self._named(path)
        if node.is_directory:
            raise IsADirectoryError(errno.EISDIR, "a directory", path)
        del self.names[path]
        node.n_names -= 1
        self._release(node)

    def replace(self, source: str, target: str) -> None:
        node = self._named(source)
        before = self.names.get(target)
        if before is not None and before.is_directory:
            raise IsADirectoryError(errno.EISDIR, "a directory", target)
        self.names[target] = node
        del self.names[source]
        self._stamp_name(node)
        if before is not None:
            before.n_names -= 1
            self._release(before)

    def _stamp_name(self, node: Node) -> None:
        node.ctime_ns = self.now_ns - self.now_ns % TICK_NS

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        if path in self.names:
            raise FileExistsError(errno.EEXIST, "there is a file", path)
        self._in_directory(path)
        self.names[path] = self._new_node(is_directory=True)

    def fcntl(self, fd: int, command: int, argument: bytes) -> bytes:
        """Set or remove a lock of the open file, and do not wait."""
        node = self._opened(fd)
        kind = _LOCKS.get(argument[:2])
        if kind is None:
            node.locks.pop(fd, None)
        elif self.is_locked(fd, argument):
            raise BlockingIOError(errno.EAGAIN, "locked")
        else:
            node.locks[fd] = kind
        return argument

    def is_locked(self, fd: int, argument: bytes) -> bool:
        """Whether another open file keeps a lock from being set."""
        others = [kind for owner, kind in self._opened(fd).locks.items() if owner != fd]
        return "exclusive" in others or (bool(others) and _LOCKS[argument[:2]] == "exclusive")

    def scandir(self, path: str) -> Any:
        """List a directory."""
        directory = path.rstrip("/")
        if not self._named(directory).is_directory:
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)
        found = [name for name in self.names if os.path.dirname(name) == directory]
        return Listing([Entry(name, self.names[name]) for name in found])

    def end_process(self, process: Process) -> None:
        """Release the locks of a process. Its descriptors are closed behind the run."""
        for fd, found in self.open_files.items():
            if found.process is process:
                found.node.locks.pop(fd, None)

    def store(self, path: str, data: bytes) -> None:
        """Store a file, as a program does that ended long ago."""
        directory = os.path.dirname(path)
        missing = []
        while directory not in self.names:
            missing.append(directory)
            directory = os.path.dirname(directory)
        for name in reversed(missing):
            self.mkdir(name)
        self.names[path] = self._new_node()
        self.names[path].data += data


_LOCKS = {
    struct.pack("h", fcntl.F_RDLCK): "shared",
    struct.pack("h", fcntl.F_WRLCK): "exclusive",
}
_READS = {"pread", "preadv", "fstat", "stat", "lstat"}
_WRITES = {"pwrite", "pwritev"}


class Process:
    """A process: a thread, and modules of the package of its own."""

    def __init__(self, number: int) -> None:
        self.name = f"process {number}"
        self.turn = threading.Lock()
        self.turn.acquire()
        self.job: Callable[[], None] | None = None
        self.machine: Machine | None = None
        self.n_calls = 0
        self.next: Step | None = None
        self.is_dead = False
        self.is_done = True
        self.sleeps_until = 0
        """Number of wakes of the machine from which on it goes on."""
        self.wanted: tuple[int, bytes] | None = None
        """The lock that it is about to take. It does not try before the lock is free."""
        self.within = False
        """Whether it ends in the middle of its next call."""
        self.thread = threading.Thread(target=self._live, daemon=True)
        _processes[self.thread] = self
        self.thread.start()

    def _live(self) -> None:
        _mine.process = self
        while True:
            self.turn.acquire()
            job, machine = self.job, self.machine
            if job is None or machine is None:
                return
            machine.run_job(self, job)

    def end(self) -> None:
        """End the thread."""
        self.job = None
        self.turn.release()
        self.thread.join()


_processes: dict[threading.Thread, Process] = {}
_mine = threading.local()


class Machine:
    """One run: processes, files, and the scheduler."""

    def __init__(self, chooser: Chooser, files: Files) -> None:
        self.chooser = chooser
        self.files = files
        self.processes: list[Process] = []
        self.n_kills = 0
        self.n_pauses = 0
        """Times that the clock may still go on."""
        self.n_wakes = 0
        self.strangers: list[tuple[str, str, Callable[[], None]]] = []
        self.schedule: list[tuple[int, Step]] = []
        self.error: BaseException | None = None
        self._end = threading.Lock()
        self._end.acquire()

    def run(self, jobs: Sequence[tuple[Process, Callable[[], None]]]) -> None:
        """Run jobs, each in its process, as the chooser interleaves them."""
        self.processes = [process for process, _ in jobs]
        for process, job in jobs:
            process.job, process.machine = job, self
            process.n_calls, process.sleeps_until = 0, 0
            process.is_dead = process.is_done = process.within = False
            process.wanted = None
            process.next = Step(process.name, 0, "begins")
        self._choose(None)
        self._end.acquire()
        if self.error is not None:
            raise self.error

    def run_job(self, process: Process, job: Callable[[], None]) -> None:
        try:
            if not process.is_dead:
                job()
        except Killed:
            pass
        except BaseException as error:
            self.error = self.error or error
        process.is_done = True
        if process.is_dead:
            self.files.end_process(process)
            self.n_wakes += 1
        self._choose(process)

    def call(self, process: Process, name: str, args: tuple[Any, ...], options: Any) -> Any:
        """Perform a system call of a process when it is its turn."""
        if process.is_dead:
            if name == "close":
                return None
            raise Killed
        path = args[1] if name == "replace" else args[0]
        files = self.files
        if name == "sleep":
            process.sleeps_until = self.n_wakes + 1
            path = ""
        elif isinstance(path, int):
            found = files.open_files.get(path)
            path = "" if found is None else found.path
        process.n_calls += 1
        if name != "close":
            if name == "fcntl":
                name = "lock" if args[2][:2] in _LOCKS else "unlock"
                process.wanted = (args[0], args[2]) if name == "lock" else None
            place = path
            if path.endswith(".partial"):
                place = _PARTIAL.sub(f".{process.name}.partial", path)
            is_read = name in _READS or (name == "open" and not args[1] & os.O_CREAT)
            process.next = Step(process.name, process.n_calls, name, place, is_read)
            self._choose(process)
            process.wanted = None
            if process.is_dead:
                if process.within:
                    fd, pieces, offset = args
                    data = bytes(pieces) if name == "pwrite" else b"".join(map(bytes, pieces))
                    files.pwrite(fd, data[: len(data) // 2], offset)
                raise Killed
        if name == "sleep":
            return None
        if name in ("unlock", "unlink", "replace", "close"):
            self.n_wakes += 1
            process.sleeps_until = 0
        call: Any = files.fcntl if name in ("lock", "unlock") else getattr(files, name)
        return call(process, *args, **options) if name == "open" else call(*args, **options)

    def _choose(self, me: Process | None) -> None:
        """Pass the turn on to the process that the chooser names, perhaps this one."""
        while True:
            alive = [process for process in self.processes if not process.is_done]
            if not alive:
                self._end.release()
                return
            chosen = alive[0]
            if self.error is not None:
                chosen.is_dead = True
            else:
                try:
                    found = self._choose_among(alive)
                except BaseException as error:
                    # With its traceback it would keep the flows of killed processes from their end.
                    self.error = error.with_traceback(None)
                    continue
                if found is None:
                    continue
                chosen = found
            break
        if chosen is me:
            return
        goes_on = me is not None and not me.is_done  # later this may be the state in the next run
        chosen.turn.release()
        if me is not None and goes_on:
            me.turn.acquire()

    def _choose_among(self, alive: list[Process]) -> Process | None:
        awake = [
            process
            for process in alive
            if process.sleeps_until <= self.n_wakes
            and not (process.wanted and self.files.is_locked(*process.wanted))
        ] or alive
        steps = [process.next for process in awake if process.next is not None]
        if not (self.n_kills or self.n_pauses or self.strangers):
            position = self.chooser.choose(steps)
            self.schedule.append((position, steps[position]))
            return awake[position]
        takers: list[tuple[Process | None, Any]] = [(process, None) for process in awake]
        if self.n_kills:
            for process in awake:
                assert process.next is not None
                steps.append(Step(process.name, process.next.number, "killed", "", is_fault=True))
                takers.append((process, "killed"))
                if process.next.name in _WRITES:
                    at = process.next
                    steps.append(
                        Step(at.client, at.number, "killed within", at.place, is_fault=True)
                    )
                    takers.append((process, "within"))
        if self.n_pauses:
            steps.append(Step("clock", self.n_pauses, "goes on", "*", is_fault=True))
            takers.append((None, self._pause))
        for i, (name, place, _) in enumerate(self.strangers):
            steps.append(Step("stranger", i, name, place, is_fault=True))
            takers.append((None, i))
        position = self.chooser.choose(steps)
        self.schedule.append((position, steps[position]))
        taker, how = takers[position]
        if taker is None:
            if callable(how):
                how()
            else:
                self.strangers.pop(how)[2]()
            return None
        if how is not None:
            self.n_kills -= 1
            taker.is_dead = True
            taker.within = how == "within"
        return taker

    def _pause(self) -> None:
        self.n_pauses -= 1
        self.files.now_ns += PAUSE_NS


# ------------------------------------------------------------------------ system calls

_OF_PATHS = ("open", "stat", "lstat", "unlink", "replace", "mkdir", "scandir")
_OF_FILES = (
    *("close", "pread", "preadv", "pwrite", "pwritev", "ftruncate", "utime", "fsync", "fstat"),
)
_current: list[Files] = []
"""The files of the run under way."""


def _caught(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        file = args[0] if args else None
        is_ours = (isinstance(file, int) and file >= _FIRST_FD) or (
            isinstance(file, str) and file.startswith(ROOT[:-1])
        )
        if not is_ours:
            return real(*args, **options)
        process = getattr(_mine, "process", None)
        if process is not None and not process.is_done:
            return process.machine.call(process, name, args, options)
        files = _current[-1]
        first = (files.owner,) if name == "open" else ()
        return getattr(files, name)(*first, *args, **options)

    return call


def _sleep(_: float) -> None:
    process = getattr(_mine, "process", None)
    if process is not None and not process.is_done:
        process.machine.call(process, "sleep", ("",), {})
        return
    files = _current[-1]
    files.n_pauses += 1
    if files.n_pauses > 100:  # what a killed process has locked is left to finalizers
        gc.collect()
    assert files.n_pauses < 200, "a killed process has left a shard locked"


def _time_ns() -> int:
    """The time of the model, also for what is prepared or judged outside of a run."""
    return _current[-1].now_ns


def _open_file(file: Any, *args: Any, **options: Any) -> Any:
    if isinstance(file, int) and file >= _FIRST_FD:
        data = os.pread(file, 1 << 30, 0)
        os.close(file)
        return io.BytesIO(data)
    return _real_open(file, *args, **options)


_real_open = builtins.open


def mount(files: Files) -> None:
    """Let paths below `ROOT` lead to these files, while the model is `installed`."""
    _current[:] = [files]


@contextmanager
def installed() -> Iterator[None]:
    """Let paths below `ROOT` lead to the model."""
    calls: dict[str, Any] = {
        name: _caught(name, getattr(os, name)) for name in (*_OF_PATHS, *_OF_FILES)
    }
    with ExitStack() as patches:
        patches.enter_context(mock.patch.multiple(os, **calls))
        patches.enter_context(mock.patch.object(fcntl, "fcntl", _caught("fcntl", fcntl.fcntl)))
        patches.enter_context(mock.patch.object(time, "sleep", _sleep))
        patches.enter_context(mock.patch.object(time, "time_ns", _time_ns))
        patches.enter_context(mock.patch.object(builtins, "open", _open_file))
        yield


@contextmanager
def fresh_modules(name: str) -> Iterator[None]:
    """Import modules of a package in a block as another process does, while `installed`.

    They do not enter their pipeline at zarr: this process would take it for the one of its own.
    """

    def of_package() -> list[str]:
        return [key for key in sys.modules if key == name or key.startswith(f"{name}.")]

    before = {key: sys.modules.pop(key) for key in of_package()}
    try:
        with mock.patch.object(zarr.registry, "register_pipeline"):
            yield
    finally:
        for key in of_package():
            del sys.modules[key]
        sys.modules.update(before)
