"""Reading a file that somebody changes in its place in that very moment."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from zarr_shardstore import ShardingMapping
from zarr_shardstore.io import file_calls
from zarr_shardstore.io.open_shards import open_shards
from zarr_shardstore.io.settled import OpenFile
from zarr_shardstore.io.shard_files import JOURNAL_SUFFIX
from zarr_shardstore.plan.ranges import Range

KEYS = [f"data/root/a/c{i}" for i in range(4)]


class _Stopped:
    """A writer in a thread of its own, which stops where it has made the file longer."""

    def __init__(self, write: Any) -> None:
        self.is_longer = threading.Event()
        self.go_on = threading.Event()
        self._thread = threading.Thread(target=write)

    def truncate(self, fd: int, nbytes: int, truncate: Any = file_calls.truncate) -> None:
        truncate(fd, nbytes)
        if nbytes:
            self.is_longer.set()
            assert self.go_on.wait(60)

    def start(self) -> None:
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
    read = OpenFile.read

    def read_late(file: OpenFile, *args: Any) -> memoryview:
        if not writer.is_longer.is_set():
            writer.start()
            value = read(file, *args)
            if is_over:
                writer.end()
            return value
        return read(file, *args)

    with (
        mock.patch.object(file_calls, "truncate", writer.truncate),
        mock.patch.object(OpenFile, "read", read_late),
    ):
        values = m.get_partial_values([(key, (0, None)) for key in KEYS])
    writer.end()
    assert values == [b"old", b"new", b"old", b"old"]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_bytes_that_a_reader_may_still_read_are_not_used_again(
    is_damaged: bool, tmp_path: Path
) -> None:
    """Whoever has read the index finds what it points to, although that was erased since, and
    another process has written: also if the journal does not tell how far the data went."""
    m = ShardingMapping(tmp_path, chunks_per_shard=4)
    m[KEYS[0]] = b"first"
    m[KEYS[1]] = b"second"
    read = OpenFile.read
    is_begun = False

    def read_late(file: OpenFile, byte_range: Any, *args: Any) -> memoryview:
        nonlocal is_begun
        if isinstance(byte_range, Range) and not is_begun:
            is_begun = True
            m.erase(KEYS[1])
            open_shards.reset_after_fork()  # as if this process were another one
            if is_damaged:
                journal = tmp_path / f"data/root/a/c0{JOURNAL_SUFFIX}"
                journal.write_bytes(journal.read_bytes()[:-1])
            m[KEYS[2]] = b"another"
        return read(file, byte_range, *args)

    with mock.patch.object(OpenFile, "read", read_late):
        assert m[KEYS[1]] == b"second"
    assert is_begun
    assert dict(m) == {KEYS[0]: b"first", KEYS[2]: b"another"}
