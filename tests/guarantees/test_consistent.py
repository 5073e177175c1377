"""Reading a file that somebody changes in its place in that very moment."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import zarr
from zarr.storage import FsspecStore, LocalStore, LoggingStore, ObjectStore, WrapperStore

from tests.support.bases import fsspec_local
from tests.support.kit import forget, system_calls
from tests.support.side_files import JOURNAL_SUFFIX
from zarr_shardstore import ShardingMapping, ShardingStore

N_WRITES = 200
KEYS = [f"data/root/a/c{i}" for i in range(4)]


class _Stopped:
    """A writer in a thread of its own, which stops where it has made the file longer."""

    def __init__(self, write: Any) -> None:
        self.is_longer = threading.Event()
        self.go_on = threading.Event()
        self.is_begun = False
        self._thread = threading.Thread(target=write)

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def write_at(fd: int, pieces: Any, offset: int) -> None:
            size = os.fstat(fd).st_size
            call(fd, pieces, offset)
            if offset > size > 0:  # not the journal, which begins with nothing
                self.is_longer.set()
                assert self.go_on.wait(60)

        return write_at if name == "write_at" else call

    def start(self) -> None:
        self.is_begun = True
        self._thread.start()
        assert self.is_longer.wait(60)
        threading.Timer(0.05, self.go_on.set).start()

    def end(self) -> None:
        self.go_on.set()
        self._thread.join(60)


@pytest.mark.parametrize("is_over", [False, True])
def test_a_writer_comes_while_nobody_holds_the_lock(is_over: bool, tmp_path: Path) -> None:
    """An index without a checksum is read when no writer is there; one that comes before the
    bytes are read, and may be gone afterwards, has made the file longer, which ends in zeros."""
    m = ShardingMapping(tmp_path, chunks_per_shard=4)
    m.update(dict.fromkeys(KEYS, b"old"))

    def write() -> None:
        m[KEYS[1]] = b"new"
        m.flush()

    writer = _Stopped(write)
    pread = os.pread

    def read_late(*args: Any) -> bytes:
        if threading.current_thread() is threading.main_thread() and not writer.is_begun:
            writer.start()
            value = pread(*args)
            if is_over:
                writer.end()
            return value
        return pread(*args)

    with system_calls(writer.wrap), mock.patch.object(os, "pread", read_late):
        values = m.get_partial_values([(key, (0, None)) for key in KEYS])
    writer.end()
    assert values == [b"old", b"new", b"old", b"old"]


@contextmanager
def after_the_index(change: Callable[[], None]) -> Iterator[None]:
    """Make a change once, after a reader has read the index, and before it reads an entry."""
    pread = os.pread
    is_begun = False

    def read_late(fd: int, nbytes: int, offset: int) -> bytes:
        nonlocal is_begun
        is_entry = offset + nbytes < os.fstat(fd).st_size  # the index is the end
        if is_entry and not is_begun:
            is_begun = True
            change()
        return pread(fd, nbytes, offset)

    with mock.patch.object(os, "pread", read_late):
        yield
    assert is_begun


@pytest.mark.parametrize("is_damaged", [False, True])
def test_bytes_that_a_reader_may_still_read_are_not_used_again(
    is_damaged: bool, tmp_path: Path
) -> None:
    """Whoever has read the index finds what it points to, although that was erased since, and
    another process has written: also if the journal does not tell how far the data went."""
    m = ShardingMapping(tmp_path, chunks_per_shard=4)
    m[KEYS[0]] = b"first"
    m[KEYS[1]] = b"second"

    def change() -> None:
        m.erase(KEYS[1])
        forget(tmp_path)  # as if this process were another one
        if is_damaged:
            journal = tmp_path / f"data/root/a/c0{JOURNAL_SUFFIX}"
            journal.write_bytes(journal.read_bytes()[:-1])
        m[KEYS[2]] = b"another"

    with after_the_index(change):
        assert m[KEYS[1]] == b"second"
    assert dict(m) == {KEYS[0]: b"first", KEYS[2]: b"another"}


OTHER_STORES: dict[str, Callable[[Path], Any]] = {
    "wrapped": lambda path: LoggingStore(LocalStore(path), log_level="ERROR"),
    "wrapped fsspec": lambda path: WrapperStore(fsspec_local(path)),
    "wrapped obstore": lambda path: WrapperStore(ObjectStore(obstore_local(path))),
    "fsspec": fsspec_local,
    "obstore": lambda path: obstore_local(path),
}
"""Other stores on local files. Those that wrap do not change them in their place."""


def obstore_local(path: Path) -> Any:
    return pytest.importorskip("obstore.store").LocalStore(str(path))


@pytest.mark.parametrize("kind", OTHER_STORES)
def test_another_store_of_this_process_reads_what_is_being_changed(
    kind: str, tmp_path: Path
) -> None:
    """It waits as stores of other processes do."""
    m = ShardingMapping(tmp_path, chunks_per_shard=4)
    m.update(dict.fromkeys(KEYS[:2], b"old"))
    other = ShardingMapping(OTHER_STORES[kind](tmp_path), chunks_per_shard=4)
    assert other[KEYS[0]] == b"old"
    writer = _Stopped(lambda: m.__setitem__(KEYS[2], bytes(100_000)))
    with system_calls(writer.wrap):
        writer.start()
        assert other[KEYS[0]] == b"old"
        writer.end()
    assert other[KEYS[2]] == bytes(100_000)


def test_who_replaces_a_shard_repairs_it_first(tmp_path: Path) -> None:
    """Other threads of the process read what a killed writer left as it will be then."""
    m = ShardingMapping(tmp_path, chunks_per_shard=4)
    m.update(dict.fromkeys(KEYS[:2], b"---"))
    m[KEYS[0]] = b"old"
    is_dead = False

    def killed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(fd: Any, *args: Any, **options: Any) -> Any:
            nonlocal is_dead
            if name == "write_at" and [len(piece) for piece in args[0]] == [16]:
                is_dead = True
                call(fd, [args[0][0][:8]], args[1])  # half of the entry of the index
            if is_dead:
                raise OSError("killed")
            return call(fd, *args, **options)

        return run

    with system_calls(killed), pytest.raises(OSError, match="killed"):
        m[KEYS[0]] = b"new" * 100
    forget(tmp_path)  # as if that process were killed
    is_begun, go_on = threading.Event(), threading.Event()

    def repair_late(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            is_begun.set()
            assert go_on.wait(60)
            return call(*args, **options)

        return run if name == "write_at" else call

    writer = ShardingMapping(tmp_path, chunks_per_shard=4, locking="none")
    reader = ShardingMapping(tmp_path, chunks_per_shard=4)
    with ThreadPoolExecutor() as threads, system_calls(repair_late):
        written = threads.submit(writer.__setitem__, KEYS[2], b"more")
        assert is_begun.wait(60)
        found = reader[KEYS[0]]
        go_on.set()
        written.result(60)
    assert found == reader[KEYS[0]] == b"old"


@pytest.mark.parametrize("index_codecs", [["bytes"], ["bytes", "crc32c"]])
def test_a_journal_does_nothing_to_a_file_that_was_copied_there(
    index_codecs: list[str], tmp_path: Path
) -> None:
    """A copy of the tree was written elsewhere, and the shard alone comes back."""
    here, copy = tmp_path / "here", tmp_path / "copy"
    options: Any = {"chunks_per_shard": 64, "index_codecs": index_codecs}
    store = ShardingStore(here, **options)
    form: Any = {"shape": (64,), "chunks": (1,), "dtype": "u4", "compressors": None}
    z: Any = zarr.create_array(store, **form)
    z[:2] = [1, 2]
    store.close()
    is_dead = False

    def killed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(fd: Any, *args: Any, **options: Any) -> Any:
            nonlocal is_dead
            is_dead |= name == "write_at" and args[1] > os.fstat(fd).st_size > 0
            if is_dead:  # as it moves the index
                raise OSError("killed")
            return call(fd, *args, **options)

        return run

    with system_calls(killed), pytest.raises(OSError, match="killed"):
        z[2] = 3
    forget(here)  # as if that process were killed
    shutil.copytree(here, copy)
    other = ShardingStore(copy)
    zarr.open_array(other)[2:10] = range(3, 11)
    other.close()
    shutil.copy2(copy / "c/0", here / "c/0")
    assert (here / f"c/0{JOURNAL_SUFFIX}").exists()
    expected = [*range(1, 11)] + [0] * 54
    z = zarr.open_array(ShardingStore(here))
    assert [*z[:]] == expected
    z[20] = expected[20] = 21
    assert [*z[:]] == expected


def test_other_threads_wait_for_who_writes_into_the_file_itself(tmp_path: Path) -> None:
    """fsspec does so when it replaces a shard; and an index without checksum shows no half."""
    m = ShardingMapping(tmp_path, chunks_per_shard=4)
    m.update(dict.fromkeys(KEYS, b"old"))
    m.flush()
    writer = ShardingMapping(WrapperStore(fsspec_local(tmp_path)), chunks_per_shard=4)
    is_begun, go_on = threading.Event(), threading.Event()
    set_value = FsspecStore.set

    async def set_late(store: FsspecStore, key: str, value: Any, *args: Any) -> None:
        is_begun.set()
        await asyncio.to_thread(go_on.wait, 60)
        await set_value(store, key, value, *args)

    with ThreadPoolExecutor() as threads, mock.patch.object(FsspecStore, "set", set_late):
        written = threads.submit(writer.__setitem__, KEYS[0], b"new")
        assert is_begun.wait(60)
        found = threads.submit(m.__getitem__, KEYS[0])
        with pytest.raises(TimeoutError):
            found.result(0.2)
        go_on.set()
        written.result(60)
    assert found.result(60) == b"new"


def test_what_was_written_into_the_file_itself_is_read_again(tmp_path: Path) -> None:
    """Who has read the index would find bytes of another shard where the chunk was."""
    m = ShardingMapping(tmp_path, chunks_per_shard=4)
    m.update(dict(zip(KEYS, (b"first", b"second"), strict=False)))
    m.flush()
    writer = ShardingMapping(WrapperStore(fsspec_local(tmp_path)), chunks_per_shard=4)

    def change() -> None:
        with ThreadPoolExecutor() as threads:
            threads.submit(writer.__setitem__, KEYS[0], b"a longer one").result(60)

    with after_the_index(change):
        assert m[KEYS[1]] == b"second"


def value_of_write(i: int) -> bytes:
    return bytes([i % 256]) * (i % 100)


@pytest.mark.thorough(of=6)
@pytest.mark.parametrize("name", ["files", "link"])
@pytest.mark.parametrize("kind", OTHER_STORES)
def test_stores_of_different_kinds_write_one_shard(kind: str, name: str, tmp_path: Path) -> None:
    """In threads of one process, by the same name or by a link to the directory."""
    (tmp_path / "files").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "files")
    stores = [
        ShardingMapping(tmp_path / "files", chunks_per_shard=4),
        ShardingMapping(OTHER_STORES[kind](tmp_path / name), chunks_per_shard=4),
    ]

    def write(m: ShardingMapping, key: str) -> None:
        for i in range(N_WRITES):
            m[key] = value_of_write(i)
            assert m[key] == value_of_write(i)

    with ThreadPoolExecutor() as threads:
        for done in [threads.submit(write, *pair) for pair in zip(stores, KEYS, strict=False)]:
            done.result()
    assert dict(stores[0]) == dict.fromkeys(KEYS[:2], value_of_write(N_WRITES - 1))
