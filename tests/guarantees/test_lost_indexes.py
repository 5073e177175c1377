"""Shards of real writers whose index is destroyed: chunks come back under their own keys, or not.

Each chunk tells its coordinates and how often it was written. Frames alone do not name a chunk:
appends come in any order, zarrs stores some shards as its threads are ready, and a shard may be of
another program than all the others.
"""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

from tests.support.rounds import rounds
from tests.support.shard_bytes import index_nbytes
from tests.support.small_shards import a_seed
from zarr_shardstore import ShardingMapping, ShardingStore, check_store, repair_store

GRID, CPS, CHUNK = (5, 9), (4, 4), (2, 8)
"""Shards at the end of the grid have fewer chunks: 4, and the last one has 1."""

SHAPE = (GRID[0] * CHUNK[0], GRID[1] * CHUNK[1])
N = CPS[0] * CPS[1]
N_DAMAGES = rounds(1)

V2 = {"zarr_format": 2}
CODECS: dict[str, dict[str, Any]] = {
    "none": {"compressors": None},
    "zstd": {"compressors": ZstdCodec()},
    "blosc": {"compressors": BloscCodec()},
    "gzip": {"compressors": GzipCodec()},
    "lz4": {**V2, "compressors": {"id": "lz4"}},
}


@dataclass
class Written:
    """An array of one or more writers, and what each chunk had and has."""

    root: Path
    location: Any
    codec: str
    rng: random.Random
    values: Any = field(default_factory=lambda: np.zeros(SHAPE, "u2"))
    n_writes: Any = field(default_factory=lambda: np.zeros(GRID, int))

    @property
    def has_checksum(self) -> bool:
        return not V2.items() <= CODECS[self.codec].items()

    def create_natively(self) -> None:
        shards: Any = {"shape": tuple(np.multiply(CPS, CHUNK)), "index_location": self.location}
        zarr.create_array(
            str(self.root),
            shape=SHAPE,
            chunks=CHUNK,
            shards=shards,
            dtype="u2",
            **CODECS[self.codec],
        )

    def create(self, **options: Any) -> Any:
        place = {"index_location": self.location} if self.has_checksum else {}
        store = ShardingStore(self.root, chunks_per_shard=CPS, **place, **options)
        return zarr.create_array(store, shape=SHAPE, chunks=CHUNK, dtype="u2", **CODECS[self.codec])

    def change(self, box: tuple[slice, slice]) -> Any:
        """Return new values for a box of chunks."""
        self.n_writes[box] += 1
        for i, j in np.argwhere(self.n_writes >= 0):
            at = (slice(2 * i, 2 * i + 2), slice(8 * j, 8 * j + 8))
            if box[0].start <= i < box[0].stop and box[1].start <= j < box[1].stop:
                new = np.array([self.rng.randrange(1, 2**16) for _ in range(16)], "u2")
                new[:3] = i + 1, j + 1, self.n_writes[i, j]
                self.values[at] = new.reshape(2, 8)
        return self.values[self.elements(box)]

    @staticmethod
    def elements(box: tuple[slice, slice]) -> tuple[slice, slice]:
        rows, columns = box
        return slice(2 * rows.start, 2 * rows.stop), slice(8 * columns.start, 8 * columns.stop)

    def write(self, array: Any, box: tuple[slice, slice] | None = None) -> None:
        box = box or (slice(0, GRID[0]), slice(0, GRID[1]))
        array[self.elements(box)] = self.change(box)

    def check(self) -> set[tuple[int, int]]:
        """Return the chunks with their last values. No other has those of another chunk."""
        store = ShardingStore(self.root)
        array: Any = zarr.open_array(store, mode="r")
        found = set()
        for i, j in np.ndindex(GRID):
            box = self.elements((slice(i, i + 1), slice(j, j + 1)))
            try:
                chunk = np.asarray(array[box])
            except Exception:
                continue
            at = chunk.ravel()[:3].tolist()
            assert at[:2] in ([i + 1, j + 1], [0, 0]), ((i, j), at)
            assert at[2] <= self.n_writes[i, j], ((i, j), at)
            if at[2] == self.n_writes[i, j]:
                assert (chunk == self.values[box]).all()
                found.add((i, j))
        return found


def a_box(rng: random.Random) -> tuple[slice, slice]:
    starts = [rng.randrange(n) for n in GRID]
    rows, columns = (
        slice(at, rng.randrange(at, n) + 1) for at, n in zip(starts, GRID, strict=True)
    )
    return rows, columns


def by_zarr(written: Written) -> None:
    written.create_natively()
    written.write(zarr.open_array(str(written.root)))
    written.write(zarr.open_array(str(written.root)), a_box(written.rng))


def by_tensorstore(written: Written) -> None:
    written.create_natively()
    ts = pytest.importorskip("tensorstore")
    spec = {"driver": "zarr3", "kvstore": f"file://{written.root}/"}
    array = ts.open(spec).result()
    written.write(array)
    written.write(array, a_box(written.rng))


def by_zarrs(written: Written) -> None:
    pytest.importorskip("zarrs")
    written.create_natively()
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        written.write(zarr.open_array(str(written.root)))
        written.write(zarr.open_array(str(written.root)), a_box(written.rng))


def by_two_programs(written: Written) -> None:
    by_zarr(written)
    ts = pytest.importorskip("tensorstore")
    array = ts.open({"driver": "zarr3", "kvstore": f"file://{written.root}/"}).result()
    written.write(array, (slice(0, 4), slice(4, 8)))


def by_rewrites(written: Written) -> None:
    written.write(written.create(strategy="rewrite"))
    written.write(zarr.open_array(ShardingStore(written.root, strategy="rewrite")))


def by_appends(written: Written) -> None:
    array = written.create(strategy="append")
    chunks = list(np.ndindex(GRID))
    written.rng.shuffle(chunks)
    again = written.rng.sample(chunks, written.rng.choice((0, 3)))
    for i, j in chunks[: written.rng.choice((36, 45))] + again:
        written.write(array, (slice(i, i + 1), slice(j, j + 1)))
    if written.rng.random() < 0.7:
        ShardingMapping(written.root).flush()


WRITERS: dict[str, tuple[Callable[[Written], None], str | None]] = {
    "zarr": (by_zarr, "morton"),
    "rewrite": (by_rewrites, "morton"),
    "tensorstore": (by_tensorstore, "C"),
    "zarrs": (by_zarrs, None),
    "append": (by_appends, None),
    "two programs": (by_two_programs, None),
}
"""How to write an array, and the order in which its shards are then."""

NATIVE = ("zarr", "tensorstore", "zarrs", "two programs")


def destroy(shard: Path, written: Written) -> bool:
    """Blank an index, or cut it off, perhaps with some chunks. Return whether all ends of chunks
    are known; the last one of lz4 is not, if the index is not there."""
    data = bytearray(shard.read_bytes())
    n = index_nbytes(N, checksum=written.has_checksum)
    start, n_cut = 0 if written.location == "start" else len(data) - n, 0
    data[start : start + n] = written.rng.choice((bytes(n), b"\xff" * n, written.rng.randbytes(n)))
    if start and written.rng.random() < 0.4:
        n_cut = n + written.rng.choice((0, written.rng.randrange(start)))
        del data[-n_cut:]
    shard.write_bytes(data)
    return n_cut in (0, n) and not (n_cut and written.codec == "lz4")


def a_case(writer: str, codec: str, root: Path, n: int) -> Written:
    rng = random.Random(f"{a_seed()} {writer} {codec} {n}")
    location = rng.choice(("end", "start")) if codec != "lz4" else "end"
    written = Written(root / str(n), location, codec, rng)
    WRITERS[writer][0](written)
    return written


def shards_of(root: Path) -> list[Path]:
    names = ("zarr.json", ".zarray", ".zattrs")
    files = (p for p in root.rglob("*") if p.is_file() and "quarantine" not in str(p))
    return sorted(p for p in files if p.name not in names and "__" not in p.name)


CASES = [(w, c) for w in WRITERS for c in CODECS if c != "lz4" or w not in NATIVE]


@pytest.mark.thorough(of=5)
@pytest.mark.parametrize(("writer", "codec"), CASES, ids=lambda name: name)
def test_no_chunk_gets_another_key(writer: str, codec: str, tmp_path: Path) -> None:
    """Where all shards are in the order of one writer, the repair names it; if the user gives it,
    all chunks are back. The only chunk of a shard that is not cut comes back by itself."""
    order = WRITERS[writer][1]
    for n in range(N_DAMAGES):
        written = a_case(writer, codec, tmp_path, n)
        before = written.check()
        shards = shards_of(written.root)
        other = shards[1:2] if writer == "two programs" else shards  # that of the second one
        shard = written.rng.choice(other)
        size, is_whole = shard.stat().st_size, destroy(shard, written)
        repaired = repair_store(check_store(written.root, level="decode"), dry_run=False)
        lost = before - written.check()
        if order is None or not is_whole:
            continue
        (action,) = repaired.actions
        if action.did == "rewritten":  # the only chunk that there may be
            assert (action.n_kept, lost) == (1, set())
            continue
        assert (action.did, action.n_unnamed, action.order) == ("left", len(lost), order)
        assert len(lost) > 1 or shard.stat().st_size < size
        assert set(action.lost) == lost
        repair_store(check_store(written.root), order=action.order, dry_run=False)
        assert written.check() == before


def test_the_command_that_assumes_an_order(tmp_path: Path) -> None:
    """fsck prints it; as it is printed, it brings all chunks back, also after a repair."""
    written = Written(tmp_path / "my data", "end", "blosc", random.Random(0))
    by_zarr(written)
    before, shard = written.check(), shards_of(written.root)[0]
    shard.write_bytes(shard.read_bytes()[:-5])  # of the index the first entries are left

    def run(*arguments: str) -> list[list[str]]:
        command = [sys.executable, "-m", "zarr_shardstore", *arguments]
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        lines = [line.partition(": zarr-shardstore ")[2] for line in text.splitlines()]
        return [shlex.split(line) for line in lines if line]

    (assume,) = run("fsck", str(written.root), "--repair")
    restore, again = run("fsck", str(written.root), "--repair", "--yes")
    assert len(before - written.check()) == 1
    assert again == assume
    assert run(*restore) == []
    assert run(*assume) == []
    assert written.check() == before


@pytest.mark.thorough(of=10)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("writer", ["rewrite", "append"])
def test_an_index_from_the_consolidated_one(writer: str, codec: str, tmp_path: Path) -> None:
    """It is that of the shard if the time is the same. Otherwise the places and sizes of all frames
    have to be."""
    written = a_case(writer, codec, tmp_path, 0)
    ShardingMapping(written.root).flush()
    for path in shards_of(written.root):  # times of the last seconds prove nothing
        os.utime(path, ns=(0, 9 * 10**17))
    ShardingMapping(written.root).consolidate_index()
    before, shard = written.check(), written.rng.choice(shards_of(written.root))
    files = {p: p.read_bytes() for p in (shard, *written.root.glob("__shards.index"))}
    n = index_nbytes(N, checksum=written.has_checksum)
    for now in (9 * 10**17, 10**18):
        for path, data in files.items():
            path.write_bytes(data)
        data = files[shard]
        new = bytes(n) + data[n:] if written.location == "start" else data[:-n] + bytes(n)
        shard.write_bytes(new)
        os.utime(shard, ns=(0, now))
        report = check_store(written.root)
        assert not report.is_clean
        (action, *_) = repair_store(report, dry_run=False).actions
        if now == 10**18:
            written.check()
            continue
        assert (action.did, action.lost) == ("rewritten", ())
        assert "comes from the consolidated index" in action.message
        assert written.check() == before
