"""Reading a file that somebody begins to change in its place in that very moment."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from zarr_shardstore import ShardingMapping
from zarr_shardstore.io import file_calls
from zarr_shardstore.io.settled import OpenFile

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
