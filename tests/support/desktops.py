"""Tests as on Windows or macOS: this machine's calls that they lack are taken away.

::

    python -m tests.support.desktops windows [arguments of pytest]
    python -m tests.support.desktops macos [arguments of pytest]

Without arguments pytest runs `FILES`. `SKIPPED` has the tests that cannot run, with reasons. Each
process of the run, also one that a test starts, loses the calls before it imports the package.
What stays that of Linux: case-sensitive names, forward slashes, inode numbers, times of files.

PYTEST_DONT_REWRITE, as each process imports this module before pytest.
"""

from __future__ import annotations

import builtins
import errno
import importlib.abc
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

DESKTOP = "ZARR_SHARDSTORE_DESKTOP"
"""Environment variable with the system that a process is to be like."""

FILES = ("tests/store", "tests/guarantees", "tests/tools", "tests/unit/io/test_files.py")

SKIPPED: dict[str, dict[str, str]] = {
    "windows": {
        "tests/guarantees/test_consistent.py": "of append",
        "tests/guarantees/test_stopped_writes.py": "of append",
        "tests/guarantees/test_few_open_files.py": "Windows does not tell the limit of open files",
        "tests/guarantees/test_stale_indexes.py": "counts reads by kept descriptors",
        "tests/guarantees/test_damaged_shards.py": "of append, among others",
        "tests/store/test_strategies.py": "of append, mostly",
        "tests/guarantees/test_durability.py::test_a_shard_is_synced_before": "syncs directories",
        "tests/guarantees/test_durability.py::test_an_erased_shard_stays": "syncs directories",
        "tests/guarantees/test_durability.py::test_documents_are_synced": "syncs directories",
        "tests/guarantees/test_links.py::test_a_backup_of_what_a_killed_writer_left": "of append",
        "tests/guarantees/test_links.py::test_links_to_what_is_no_file[": "no pipes among files",
        "tests/unit/io/test_files.py::test_links_to_what_is_no_file[": "no pipes among files",
        "tests/guarantees/test_concurrency.py::test_stores_work_in_child_processes[fork]": "fork",
        "tests/store/test_default_pipeline.py::test_bytes_and_keys": "imported at the start here",
        "tests/store/test_shards_argument.py::test_a_chunk_costs": "of append",
        "tests/store/test_state_machines.py": "makes names that Windows has no file of",
        "tests/store/test_batch_blocks.py::test_a_forked_child_has_no_batch": "fork",
    },
    "macos": {},
}
"""Reasons by system and by the beginning of a test's id."""

WARNING = "ignore:strategy='append' needs:UserWarning"
"""Said once in a process, where `append` becomes `rewrite`."""

_O_BINARY = 0x8000
_SHARE_FROM, _SHARE_BYTES = 1 << 40, 1 << 31
"""Bytes of a file whose locks stand for open handles, far behind its end."""


def main(desktop: str, arguments: Sequence[str]) -> int:
    """Run pytest as on a desktop; return its exit code."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.desktops", "-W", WARNING]
    environment = environment_of(desktop, os.environ)
    return subprocess.run([*command, *(arguments or FILES)], env=environment, cwd=ROOT).returncode


def environment_of(desktop: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a Python process that is to be like a desktop."""
    path = [str(Path(__file__).parent / "at_start"), str(ROOT), environment.get("PYTHONPATH", "")]
    told = {"PYTHONPATH": os.pathsep.join(path), "PYTHONWARNINGS": WARNING}
    return {**environment, DESKTOP: desktop, **told}


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Skip what cannot run on this desktop."""
    import pytest

    for item in items:
        for start, reason in SKIPPED[os.environ[DESKTOP]].items():
            if item.nodeid.startswith(start):
                item.add_marker(pytest.mark.skip(reason=reason))


def take_away_at_import() -> None:
    """Take the calls away when the package is imported first, and not before."""
    desktop = os.environ.get(DESKTOP, "linux")
    if desktop == "linux":
        return
    sys.meta_path.insert(0, _Taker(desktop))
    start = subprocess.Popen.__init__

    def start_likewise(process: Any, args: Any, *rest: Any, **options: Any) -> None:
        environment = options.get("env")
        if environment is not None and environment.get(DESKTOP) != "linux":
            options["env"] = environment_of(desktop, environment)
        start(process, args, *rest, **options)

    setattr(subprocess.Popen, "__init__", start_likewise)  # noqa: B010  mypy allows no assignment


class _Taker(importlib.abc.MetaPathFinder):
    def __init__(self, desktop: str) -> None:
        self._desktop = desktop

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "zarr_shardstore":
            sys.meta_path.remove(self)
            {"windows": _to_windows, "macos": _to_macos}[self._desktop]()


def _delete(module: Any, names: str) -> None:
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)


# --------------------------------------------------------------------------- macOS


def _to_macos() -> None:
    import fcntl
    import resource

    import zarr.storage  # noqa: F401  other packages see the calls that they were made for

    _delete(os, "preadv pwritev RWF_NOWAIT posix_fadvise fdatasync copy_file_range")
    _delete(fcntl, "F_OFD_SETLK F_OFD_SETLKW F_OFD_GETLK")
    real_fcntl, full_sync = fcntl.fcntl, 51

    def fcntl_with_full_sync(fd: Any, command: int, *rest: Any) -> Any:
        return os.fsync(fd) if command == full_sync else real_fcntl(fd, command, *rest)

    def small(name: str) -> None:
        real = getattr(os, name)

        def call(fd: int, data: Any, offset: int) -> Any:
            if (data if isinstance(data, int) else len(data)) > 0x7FFFFFFF:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(fd, data, offset)

        setattr(os, name, call)

    small("pread")
    small("pwrite")
    replaced: Any = fcntl
    replaced.F_FULLFSYNC, replaced.fcntl = full_sync, fcntl_with_full_sync
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))


# ------------------------------------------------------------------------- Windows
#
# A file that is open is not replaced or removed, by any process: who opens a file takes a lock of
# its open file on a byte far behind its end, shared with others; to remove it takes all of them.


def _to_windows() -> None:
    import multiprocessing
    import shutil

    import filelock  # noqa: F401
    import zarr.storage._local as zarrs

    real = {name: getattr(os, name) for name in _CALLS}
    _real.update(real, io_open=io.open, fsync=os.fsync, utime=os.utime)
    _delete(
        os,
        "pread pwrite preadv pwritev RWF_NOWAIT posix_fadvise fdatasync sync "
        "register_at_fork O_DIRECTORY O_NOFOLLOW O_NONBLOCK fchmod copy_file_range",
    )
    os.supports_fd.discard(os.utime)
    for name, call in _CALLS.items():
        setattr(os, name, call)
    for module, name, value in (
        (os, "O_BINARY", _O_BINARY),
        (os, "fsync", _fsync),
        (os, "utime", _utime),
        (io, "open", _open_file),
        (builtins, "open", _open_file),
        (zarrs, "_safe_move", _rename),
        (shutil, "_use_fd_functions", False),
    ):
        setattr(module, name, value)
    multiprocessing.set_start_method("spawn", force=True)
    real_import = builtins.__import__

    def import_as_there(name: str, globals: Any = None, *rest: Any, **options: Any) -> Any:
        is_ours = globals and str(globals.get("__name__")).startswith("zarr_shardstore")
        if is_ours and name in ("fcntl", "resource"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real_import(name, globals, *rest, **options)

    builtins.__import__ = import_as_there


_real: dict[str, Callable[..., Any]] = {}
_PLACE = os.path.join(os.path.realpath(tempfile.gettempdir()), "")


def _is_here(path: Any) -> bool:
    """Whether a path is one of the files of tests, and no descriptor."""
    if isinstance(path, int):
        return False
    return os.path.abspath(os.fsdecode(path)).startswith(_PLACE)


def _refusal(path: Any) -> PermissionError:
    return PermissionError(errno.EACCES, "the file is open, or a directory", os.fsdecode(path))


def _share(fd: int, *, alone: bool = False) -> bool:
    """Lock the bytes that stand for open handles: one of them, or all."""
    import fcntl
    import struct

    access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    kind = fcntl.F_RDLCK if access != os.O_WRONLY and not alone else fcntl.F_WRLCK
    start, nbytes = _SHARE_FROM, _SHARE_BYTES if alone else 1
    if kind == fcntl.F_WRLCK and not alone:
        start += 1 + int.from_bytes(os.urandom(4), "little") % (_SHARE_BYTES - 1)
    lock = struct.pack("hhqqi0q", kind, os.SEEK_SET, start, nbytes, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


@contextmanager
def _alone(path: Any) -> Iterator[None]:
    """Keep a file from being opened; `PermissionError` if it is open."""
    if not _is_here(path) or not os.path.isfile(path) or os.path.islink(path):
        yield
        return
    fd = _real["open"](path, os.O_RDWR)
    try:
        if not _share(fd, alone=True):
            raise _refusal(path)
        yield
    finally:
        os.close(fd)


def _open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    fd: int
    if not _is_here(path):
        return _real["open"](path, flags & ~_O_BINARY, mode, dir_fd=dir_fd)  # type: ignore[no-any-return]
    if os.path.isdir(path):
        raise _refusal(path)
    caller = sys._getframe(1).f_globals.get("__name__", "")
    assert flags & _O_BINARY or not caller.startswith("zarr_shardstore"), "text mode"
    fd = _real["open"](path, flags & ~_O_BINARY, mode)
    if not _share(fd):
        os.close(fd)
        raise _refusal(path)
    return fd


def _open_file(file: Any, *args: Any, **options: Any) -> Any:
    for _ in range(1000):  # tests read files, and have no patience of their own
        opened = _real["io_open"](file, *args, **options)
        if not _is_here(file) or not os.path.isfile(file) or _share(opened.fileno()):
            return opened
        opened.close()
        time.sleep(0.001)
    raise _refusal(file)


def _unlink(path: Any, *, dir_fd: int | None = None) -> None:
    if _is_here(path) and os.path.isdir(path) and not os.path.islink(path):
        raise _refusal(path)
    with _alone(path):
        _real["unlink"](path, dir_fd=dir_fd)


def _replace(source: Any, target: Any) -> None:
    if os.path.isdir(target):
        raise PermissionError(
            errno.EACCES, "a directory", os.fsdecode(source), None, os.fsdecode(target)
        )
    with ExitStack() as files:
        try:
            files.enter_context(_alone(source))
            files.enter_context(_alone(target))
        except PermissionError as error:
            names = os.fsdecode(source), None, os.fsdecode(target)
            raise PermissionError(errno.EACCES, "the file is open", *names) from error
        _real["replace"](source, target)


def _rename(source: Any, target: Any) -> None:
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fsdecode(target))
    _replace(source, target)


def _fsync(fd: int) -> None:
    import fcntl

    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    _real["fsync"](fd)


def _utime(path: Any, *args: Any, **options: Any) -> None:
    if isinstance(path, int):
        raise TypeError("utime: path should be string, bytes or os.PathLike, not int")
    _real["utime"](path, *args, **options)


_CALLS: dict[str, Callable[..., Any]] = {
    "open": _open,
    "unlink": _unlink,
    "remove": _unlink,
    "replace": _replace,
    "rename": _rename,
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in SKIPPED:
        sys.exit("usage: python -m tests.support.desktops windows|macos [arguments of pytest]")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
