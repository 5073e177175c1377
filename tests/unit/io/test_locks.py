"""One holder of a lock at a time, whatever became of its file since it was opened."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from zarr_shardstore import (
    ShardConflictError,
    ShardingMapping,
    ShardStoreError,
    SpecError,
    UnsupportedError,
)
from zarr_shardstore.io.local import locks
from zarr_shardstore.io.local.locks import LOCK_SUFFIX, KeptLock, Locking, locked, shared

LOCKINGS: tuple[Locking, ...] = ("os", "lockfile")


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Of a shard that need not exist; its lock lies beside it."""
    return str(tmp_path / "c/0")


@pytest.fixture(autouse=True)
def _short_wait() -> Iterator[None]:
    with mock.patch.object(locks, "MAX_WAIT_S", 0.05):
        yield


def is_free(path: str, locking: Locking = "os") -> bool:
    try:
        with locked(path, locking):
            return True
    except ShardConflictError:
        return False


def open_files(path: str) -> list[str]:
    """Files in the directory of a shard that this process has open."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # the directory that is being listed
            continue
    return [name for name in names if name.startswith(os.path.dirname(path))]


# ------------------------------------------------------------- the file of the lock


def rename(name: str) -> None:
    """As tensorstore publishes what it has written into its lock."""
    os.replace(name, name.removesuffix(LOCK_SUFFIX))


def replace(name: str) -> None:
    os.unlink(name)
    Path(name).touch()


def erase(name: str) -> None:
    os.unlink(name)
    os.rmdir(os.path.dirname(name))


def fill(name: str) -> None:
    """As a writer that was killed leaves its lock."""
    Path(name).write_bytes(b"half of a shard")


WAYS_TO_LOSE_IT: list[Callable[[str], None]] = [rename, os.unlink, replace, erase, fill]


@pytest.mark.parametrize("lose", WAYS_TO_LOSE_IT)
def test_a_kept_lock_is_that_of_its_name(lose: Callable[[str], None], path: str) -> None:
    """Not of a file that had the name when it was opened."""
    with closing(KeptLock(path + LOCK_SUFFIX)) as kept:
        kept.acquire(0)
        kept.release()
        lose(path + LOCK_SUFFIX)
        kept.acquire(0)
        assert not is_free(path)
        assert os.path.getsize(path + LOCK_SUFFIX) == 0
        kept.release()
        kept.acquire(0)
        kept.remove()
    assert not os.path.exists(path + LOCK_SUFFIX)


@pytest.mark.parametrize("lose", WAYS_TO_LOSE_IT)
def test_a_lock_that_is_waited_for_is_that_of_its_name(
    lose: Callable[[str], None], path: str
) -> None:
    """Its file is lost between the moment when it is opened and that when it is locked."""
    with closing(KeptLock(path + LOCK_SUFFIX)) as first:
        first.acquire(0)
        with closing(KeptLock(path + LOCK_SUFFIX)) as second:
            thread = threading.Thread(target=second.acquire, args=(60,))
            thread.start()
            while len(open_files(path)) < 2:
                time.sleep(0.001)
            lose(path + LOCK_SUFFIX)
            first.release()
            thread.join()
            assert not is_free(path)
            assert os.path.getsize(path + LOCK_SUFFIX) == 0


def test_the_lock_of_others_is_not_removed(path: str) -> None:
    """Somebody has erased the directory, and another process has locked a new file."""
    with closing(KeptLock(path + LOCK_SUFFIX)) as first, closing(KeptLock(path + LOCK_SUFFIX)) as b:
        first.acquire(0)
        erase(path + LOCK_SUFFIX)
        b.acquire(0)
        first.remove()
        assert not is_free(path)


@pytest.mark.parametrize("locking", LOCKINGS)
def test_a_link_is_no_lock(locking: Locking, path: str, tmp_path: Path) -> None:
    """What it leads to stays as it is; also if it leads nowhere."""
    (tmp_path / "c").mkdir()
    target = tmp_path / "target"
    os.symlink(target, path + LOCK_SUFFIX)
    with pytest.raises((SpecError, ShardConflictError)), locked(path, locking):
        pass
    assert not target.exists()
    target.write_bytes(b"1")
    with pytest.raises((SpecError, ShardConflictError)), locked(path, locking):
        pass
    assert target.read_bytes() == b"1"


def test_a_lock_file_of_others_is_never_taken_over(path: str) -> None:
    """Whatever is in it: tensorstore's has the new shard, and may wait for the disk."""
    os.mkdir(os.path.dirname(path))
    fill(path + LOCK_SUFFIX)
    with (
        mock.patch.object(locks, "MAX_WAIT_S", 2.5),  # `filelock` takes it over after 2 s
        pytest.raises(ShardConflictError, match="was killed: then remove"),
        locked(path, "lockfile"),
    ):
        pass
    assert os.path.getsize(path + LOCK_SUFFIX)


def test_readers_wait_for_a_writer_and_keep_writers_out(path: str) -> None:
    with shared(path) as is_locked:
        assert not is_locked, "there is no lock"
    with closing(KeptLock(path + LOCK_SUFFIX)) as writer:
        writer.acquire(0)
        with pytest.raises(ShardConflictError), shared(path):
            pass
        writer.release()
        with shared(path) as is_locked, shared(path) as is_locked_twice:
            assert is_locked
            assert is_locked_twice
            with pytest.raises(ShardConflictError):
                writer.acquire(0)
        writer.acquire(0)


def test_readers_do_not_wait_for_what_was_a_lock(path: str) -> None:
    """Its file is a shard now; there is no lock any more."""
    with closing(KeptLock(path + LOCK_SUFFIX)) as writer, ExitStack() as stack:
        writer.acquire(0)
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(stack.enter_context(shared(path))))
        with mock.patch.object(locks, "MAX_WAIT_S", 60.0):
            thread.start()
            while len(open_files(path)) < 2:
                time.sleep(0.001)
            rename(path + LOCK_SUFFIX)
            writer.release()
            thread.join()
        assert seen == [False]


# -------------------------------------------------------------------- the system's locks


def _try_in_another_process(path: str, kind: str, reply: Any) -> None:
    fd = os.open(path + LOCK_SUFFIX, os.O_RDWR)
    try:
        if kind == "fcntl":
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        reply.send(False)
    else:
        reply.send(True)
    os.close(fd)


def other_process_gets(path: str, kind: str) -> bool:
    context = multiprocessing.get_context("spawn")
    reply, theirs = context.Pipe()
    process = context.Process(target=_try_in_another_process, args=(path, kind, theirs))
    process.start()
    process.join()
    return bool(reply.recv())


@contextmanager
def system_call_fails(code: int, *, times: int = 10**9) -> Iterator[None]:
    errors = [OSError(code, os.strerror(code))] * min(times, 100)
    real = fcntl.fcntl

    def call(*args: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(*args)

    with mock.patch.object(fcntl, "fcntl", call):
        yield


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the two exclude each other")
def test_the_lock_is_that_of_fcntl(path: str) -> None:
    """Which tensorstore takes; it takes `flock` where the file system does not have it."""
    with locked(path, "os"):
        assert not other_process_gets(path, "fcntl")
        assert other_process_gets(path, "flock")
    with system_call_fails(errno.EINVAL), locked(path, "os"):
        assert not is_free(path)
        assert not other_process_gets(path, "flock")
    assert is_free(path)


@pytest.mark.skipif(sys.platform != "linux", reason="flock has no such errors")
def test_errors_of_the_system(path: str) -> None:
    """A file system without locks is named; a file that another host has removed is another one;
    other errors come out, and keep nothing open."""
    with (
        system_call_fails(errno.ENOLCK),
        pytest.raises(UnsupportedError, match="lockfile") as caught,
        locked(path, "os"),
    ):
        pass
    assert isinstance(caught.value, ShardStoreError)
    assert not os.path.exists(path + LOCK_SUFFIX), "with lock files it would be a lock"
    with system_call_fails(errno.ESTALE, times=1), locked(path, "os"):
        assert not is_free(path)
    with system_call_fails(errno.EIO), pytest.raises(OSError, match="error"), locked(path, "os"):
        pass
    assert open_files(path) == []
    assert is_free(path)


def test_readers_need_no_locks_where_lock_files_are(tmp_path: Path) -> None:
    """Also beside the file of a killed writer, for an index without a checksum."""
    mapping = ShardingMapping(tmp_path, chunks_per_shard=4, locking="lockfile")
    mapping["data/root/a/c0"] = b"0"
    (tmp_path / f"data/root/a/c0{LOCK_SUFFIX}").touch()
    with system_call_fails(errno.ENOLCK):
        assert ShardingMapping(mapping, locking="lockfile")["data/root/a/c0"] == b"0"


# ------------------------------------------------------------------------------- forks


def _fork_and_wait(path: str, locking: Locking, reply: Any) -> None:
    """Two children of a holder: one leaves the block, one lives on."""
    with locked(path, locking):
        child = os.fork()
        if not child:
            return  # it leaves the block, and ends
        os.waitpid(child, 0)
        child = os.fork()
        reply.send(child or None)
        time.sleep(600)


@pytest.mark.parametrize("locking", LOCKINGS)
def test_children_do_not_have_the_lock(locking: Locking, path: str) -> None:
    """A child cannot give it up; and it ends with its process, if that has children or not."""
    context = multiprocessing.get_context("spawn")
    replies, theirs = context.Pipe()
    holder = context.Process(target=_fork_and_wait, args=(path, locking, theirs))
    holder.start()
    try:
        child = next(pid for pid in iter(replies.recv, "") if pid is not None)
        try:
            assert not is_free(path, locking)
            holder.kill()
            holder.join()
            os.kill(child, 0)  # it lives
            assert is_free(path, locking) == (locking == "os")
        finally:
            os.kill(child, signal.SIGKILL)
    finally:
        holder.kill()
        holder.join()


# -------------------------------------------------------------------------- exceptions


class Interrupted(BaseException):
    """As a signal's handler raises."""


def is_in_del(frame: Any) -> bool:
    """Python prints what a finalizer raises, and goes on."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def interrupted_at(n: int, call: Callable[[], None]) -> bool:
    """Make a call that is interrupted at the n-th line that it runs in the module; whether it
    came so far."""
    n_lines = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal n_lines
        if frame.f_code.co_filename != locks.__file__ or is_in_del(frame):
            return None
        if event == "line":
            n_lines += 1
            if n_lines == n:
                sys.settrace(None)
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


def use_kept(path: str) -> None:
    lock = KeptLock(path + LOCK_SUFFIX)
    lock.acquire(0)
    lock.release()
    rename(path + LOCK_SUFFIX)
    lock.acquire(0)
    lock.remove()


def use_os(path: str) -> None:
    with locked(path, "os"):
        pass


def use_lockfile(path: str) -> None:
    with locked(path, "lockfile"):
        pass


def use_shared(path: str) -> None:
    Path(path + LOCK_SUFFIX).touch()
    with shared(path):
        pass


@pytest.mark.parametrize("use", [use_kept, use_os, use_lockfile, use_shared])
def test_an_interrupt_at_any_line_keeps_nothing(use: Callable[[str], None], path: str) -> None:
    """No lock stays held by nobody, and no file open."""
    os.mkdir(os.path.dirname(path))
    locking: Locking = "lockfile" if use is use_lockfile else "os"
    n = 1
    while interrupted_at(n, lambda: use(path)):
        assert open_files(path) == [], n
        assert is_free(path, locking), n
        n += 1
    assert n > 10
    assert is_free(path, locking)


def test_tensorstore_publishes_no_bytes_of_ours(tmp_path: Path) -> None:
    """It writes into the lock file, and does not cut off what is there: nothing is."""
    ts = pytest.importorskip("tensorstore")
    context = {"file_io_locking": {"mode": "os"}, "file_io_sync": False}
    spec = {"driver": "file", "path": f"{tmp_path}/", "context": context}
    store = ts.KvStore.open(spec).result()
    lock = tmp_path / f"a{LOCK_SUFFIX}"
    lock.write_bytes(bytes(100))  # as one that was killed leaves it
    kept = KeptLock(str(lock))
    kept.acquire(0)
    kept.release()
    store.write("a", b"theirs").result()
    assert (tmp_path / "a").read_bytes() == b"theirs"
    kept.acquire(0)
    kept.remove()
    assert (tmp_path / "a").read_bytes() == b"theirs"
    assert os.listdir(tmp_path) == ["a"]
