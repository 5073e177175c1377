"""Programs that know nothing of us read beside a writer that appends in place."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.frames import CPS, STREAMS, Stream, failures, read_beside
from tests.support.small_shards import Damaged, Entry, described, in_memory, strict_entries
from tests.support.system_calls import between_calls


@pytest.mark.thorough(of=8)
@pytest.mark.parametrize("stream", STREAMS, ids=str)
def test_readers_of_other_programs(stream: Stream) -> None:
    """zarr-python, tensorstore and this package get each stored frame, right, while others come."""
    with in_memory() as directory:
        counts = read_beside(directory / "root", stream)
    assert not failures(counts), counts
    assert sum(counts.values()) > 50


@dataclass
class Reader:
    """A native reader that looks after each system call of the writer.

    It reads an index, and its entries only later: in the file that it has open, or in the one
    that has the name by then, as programs do that open a file for each read.
    """

    stream: Stream
    root: Path
    n_stored: int = 0
    """Frames that are acknowledged; one more may be there."""
    seen: dict[int, Entry] = field(default_factory=dict)
    """Where each frame was found first."""
    open_files: dict[tuple[int, int], tuple[int, dict[int, Entry]]] = field(default_factory=dict)
    """Number of each file that had the name, and what its index said when it was read."""
    files: dict[int, list[int]] = field(default_factory=dict)
    """Numbers of the files that each shard had."""
    n_looks: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self, call: str) -> None:
        with self.lock:
            self.n_looks += 1
            for shard in range(min(self.n_stored, self.stream.n_frames - 1) // CPS + 1):
                self._look_at(shard, call)

    def _look_at(self, shard: int, call: str) -> None:
        where = f"before {call}, {self.n_stored} frames stored"
        try:
            fd = os.open(self.stream.shard_path(self.root, shard * CPS), os.O_RDONLY)
        except FileNotFoundError:
            assert self.n_stored <= shard * CPS, f"{where}: shard {shard} is gone"
            return
        status = os.fstat(fd)
        data = os.pread(fd, status.st_size, 0)
        entries = strict_entries(
            data, CPS, checksum=self.stream.checksum, location=self.stream.location
        )
        for number, entry in enumerate(entries):
            self._check(shard * CPS + number, entry, data, where)
        key = shard, status.st_ino
        if key in self.open_files:
            os.close(fd)
            fd = self.open_files[key][0]
        else:
            self.files.setdefault(shard, []).append(status.st_ino)
        present = {i: entry for i, entry in enumerate(entries) if entry.value is not None}
        self.open_files[key] = fd, present
        for (number, _), (old, known) in self.open_files.items():
            for i, entry in known.items():
                assert isinstance(entry.value, bytes)
                value = os.pread(old, len(entry.value), entry.offset)
                assert value == entry.value, f"{where}: bytes of frame {number * CPS + i} changed"

    def _check(self, frame: int, entry: Entry, data: bytes, where: str) -> None:
        value = entry.value
        if frame < self.n_stored:
            assert value is not None, f"{where}: frame {frame} is gone"
        elif frame > self.n_stored:
            assert value is None, f"{where}: frame {frame} is {described(value)}"
        if value is None:
            return
        assert not isinstance(value, Damaged), f"{where}: frame {frame}: {value}"
        if not self.stream.compressed and frame < self.stream.n_frames:
            assert value == self.stream.frame(frame).tobytes(), f"{where}: frame {frame}"
        first = self.seen.setdefault(frame, entry)
        assert entry == first, f"{where}: frame {frame} is at {entry.offset}, was at {first.offset}"

    def close(self) -> None:
        for fd, _ in self.open_files.values():
            os.close(fd)


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize("stream", STREAMS, ids=str)
def test_a_published_entry_stays_where_it_is(stream: Stream) -> None:
    """After each system call of the writer the file is a whole shard, whose published entries are
    where they were, and as they were: also when shards grow, are full, and are sealed."""
    stream = _shorter(stream)
    with in_memory() as directory:
        root = directory / "root"
        z = stream.create(root)
        reader = Reader(stream, root)
        with between_calls(root, reader.look):
            for i in range(stream.n_frames):
                stream.write(z, i)
                reader.n_stored = i + 1
            z.store.close()
        reader.look("the end")
        reader.close()
    assert reader.n_looks > 10 * stream.n_frames / 2
    assert {shard: len(files) for shard, files in reader.files.items()} == {0: 1, 1: 1, 2: 1}


def _shorter(stream: Stream) -> Stream:
    return Stream(
        stream.how, stream.n, stream.compressed, stream.checksum, stream.location, n_frames=37
    )
