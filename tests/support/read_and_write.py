"""Processes that read and write chunks side by side, and check all that they read.

A value is a run of blocks, each of which says which chunk and which version it is of::

    │ chunk u32 │ n_blocks u32 │ version u64 │ number of the block u32 │ crc32c u32 │ …

All processes share a `Board`: a writer says there what it is about to store, then that it is
stored. So a reader knows which versions it may see: what it saw last, and what was stored when
it began, or anything later that was begun when it ended.
"""

from __future__ import annotations

import asyncio
import os
import random
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import crc32c
import numpy as np
import zarr
from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import FsspecStore, LocalStore, ObjectStore, WrapperStore

from tests.support.any_size import HEADER, Location, declare, encode
from zarr_shardstore import ShardingMapping, ShardingStore

Found: TypeAlias = int | Literal["present"] | None
"""What was seen of a chunk: its version; that it is there, or is missing."""

MAX_START_S = 300
"""For processes to import everything, on a machine that does other things."""

_BLOCK = struct.Struct("<IIQI")
_CRC = struct.Struct("<I")
BLOCK_NBYTES = _BLOCK.size + _CRC.size


# ------------------------------------------------------------------------ arrays


@dataclass(frozen=True, slots=True)
class Array:
    """Chunks ``first`` to ``first + n_chunks`` of the board."""

    path: str
    first: int
    n_chunks: int
    cps: int
    checksum: str
    location: Location = "end"

    @property
    def is_draft(self) -> bool:
        return self.path.startswith("draft")

    @property
    def chunks(self) -> range:
        """All of them."""
        return range(self.first, self.first + self.n_chunks)

    @property
    def directory(self) -> str:
        """Where the keys of the chunks are."""
        return f"data/root/{self.path}/" if self.is_draft else f"{self.path}/c/"

    def key_of(self, chunk: int) -> str:
        return f"{self.directory}{'c' * self.is_draft}{chunk - self.first}"

    def some(self, rng: random.Random, n: int) -> list[int]:
        """Different chunks, mostly the same few."""
        if rng.random() < 0.9:
            hot = [i * 163 % self.n_chunks for i in range(min(self.n_chunks, 24))]
            return [self.first + i for i in rng.sample(hot, min(n, len(hot)))]
        return rng.sample(self.chunks, min(n, self.n_chunks))


def _arrays() -> list[Array]:
    arrays: list[Array] = []
    kinds: list[tuple[str, int, int, str, Location]] = [
        ("v3-small", 10, 4, "crc32c", "end"),
        ("v3-large", 5000, 4096, "crc32c", "end"),
        ("v3-start", 10, 4, "crc32c", "start"),
        ("v3-plain", 10, 4, "no checksum", "end"),
        ("draft-small", 10, 4, "no checksum", "end"),
        ("draft-large", 5000, 4096, "no checksum", "end"),
    ]
    first = 0
    for path, n_chunks, cps, checksum, location in kinds:
        arrays.append(Array(path, first, n_chunks, cps, checksum, location))
        first += n_chunks
    return arrays


ARRAYS = _arrays()
V3_ARRAYS = [array for array in ARRAYS if not array.is_draft]
N_CHUNKS = sum(array.n_chunks for array in ARRAYS)
CHUNKS_PER_SHARD = {array.path: array.cps for array in ARRAYS if array.is_draft}
"""Draft arrays have no metadata here."""


def create(root: Path) -> None:
    for array in V3_ARRAYS:
        declare(
            root,
            array.path,
            array.n_chunks,
            array.cps,
            checksum=array.checksum,
            location=array.location,
        )


# ------------------------------------------------------------------------ values


def is_erased(version: int) -> bool:
    """Whether a version of a chunk is that it is missing; before the first one it is, too."""
    return version % 4 == 3 or version == 0


def n_blocks_of(chunk: int, version: int) -> int:
    return 400 if (chunk + version) % 23 == 0 else (7 * chunk + 13 * version) % 5


def element_of(chunk: int, version: int) -> bytes:
    n = n_blocks_of(chunk, version) + 1
    blocks = [_BLOCK.pack(chunk, n, version, number) for number in range(n)]
    return b"".join(block + _CRC.pack(crc32c.crc32c(block)) for block in blocks)


def version_in(chunk: int, data: bytes, first: int, n_wanted: int | None) -> int:
    """Version of blocks of a chunk, `n_wanted` of them (or all) from number `first` on."""
    versions = set()
    n_all = 0
    assert len(data) % BLOCK_NBYTES == 0, f"{len(data)} bytes"
    for number in range(len(data) // BLOCK_NBYTES):
        block = data[number * BLOCK_NBYTES : (number + 1) * BLOCK_NBYTES]
        found, n_all, version, found_number = _BLOCK.unpack(block[: _BLOCK.size])
        assert _CRC.pack(crc32c.crc32c(block[: _BLOCK.size])) == block[_BLOCK.size :], block
        assert (found, found_number) == (chunk, first + number)
        versions.add(version)
    assert len(versions) == 1, versions
    stop = n_all if n_wanted is None else min(n_all, first + n_wanted)
    assert len(data) == BLOCK_NBYTES * (stop - first), "a value that is cut off"
    (version,) = versions
    return int(version)


# ------------------------------------------------------------------------- board


class Board:
    """What writers have begun to store, and what is stored: the version of each chunk."""

    def __init__(self, path: Path) -> None:
        fields = np.memmap(path, "u8", "r+", shape=(3, N_CHUNKS))
        self.begun, self.stored, self._marks = fields

    @classmethod
    def create(cls, path: Path) -> Board:
        np.zeros((3, N_CHUNKS), "u8").tofile(path)
        return cls(path)

    def start(self, rank: int, n_processes: int) -> None:
        """Wait until all processes are there."""
        self._marks[rank] = 1
        limit = time.monotonic() + MAX_START_S
        while self._marks[:n_processes].sum() < n_processes:
            assert time.monotonic() < limit
            time.sleep(0.01)


class Observer:
    """Checks what one reader sees."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._seen: dict[int, int] = {}
        self.counts: Counter[str] = Counter()

    def look(self, chunks: Sequence[int]) -> Callable[[str, Iterable[Found]], None]:
        """Begin to read chunks. Then call what this returns with what was found of each."""
        ids = list(chunks)
        before = self._board.stored[ids].tolist()

        def check(what: str, found: Iterable[Found]) -> None:
            after = self._board.begun[ids].tolist()
            for chunk, oldest, newest, version in zip(ids, before, after, found, strict=True):
                self._check(what, chunk, oldest, newest, version)
            self.counts[what] += 1

        return check

    def _check(self, what: str, chunk: int, oldest: int, newest: int, found: Found) -> None:
        oldest = max(oldest, self._seen.get(chunk, 0))
        if isinstance(found, int):
            fits = oldest <= found <= newest and not is_erased(found)
            self._seen[chunk] = found
        else:
            # The oldest version that it may be.
            wanted = (v for v in range(oldest, newest + 1) if is_erased(v) == (found is None))
            version = next(wanted, None)
            fits = version is not None
            self._seen[chunk] = oldest if version is None else version
        assert fits, f"{what}: chunk {chunk} is {found}, not of versions {oldest} to {newest}"


# ----------------------------------------------------------------------- writers


def write(
    root: str, board_path: str, strategy: Literal["append", "rewrite"], seconds: float,
    rank: int, n_writers: int, n_processes: int,
) -> Counter[str]:  # fmt: skip
    """Set, overwrite, and erase chunks of one writer, alone and several at once."""
    board = Board(Path(board_path))
    rng = random.Random(rank)
    m = ShardingMapping(root, chunks_per_shard=CHUNKS_PER_SHARD, strategy=strategy)
    counts: Counter[str] = Counter()
    board.start(rank, n_processes)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        array = rng.choice(ARRAYS)
        n = rng.choice((1, 1, 1, 1, 8, 24, 300))
        chunks = [chunk for chunk in array.some(rng, n) if chunk % n_writers == rank]
        if not chunks:
            continue
        old = board.begun[chunks].tolist()
        erases = rng.random() < 0.15
        new = [next(v for v in range(o + 1, o + 5) if is_erased(v) == erases) for o in old]
        board.begun[chunks] = new
        keys = [array.key_of(chunk) for chunk in chunks]
        if erases:
            m.erase_values(keys)
        elif n == 1:
            m[keys[0]] = encode(element_of(chunks[0], new[0]))
        else:
            elements = map(element_of, chunks, new)
            m.update(zip(keys, map(encode, elements), strict=True))
        board.stored[chunks] = new
        counts[f"{strategy}: {'erase' if erases else 'set'}"] += len(chunks)
        if rng.random() < 0.02:
            m.flush()
            counts["flush"] += 1
    m.flush()
    return counts


# ----------------------------------------------------------------------- readers


def read_mapping(
    root: str, board_path: str, seconds: float, rank: int, n_processes: int
) -> Counter[str]:
    """Read by the blocking interface, on local files; much happens between index and chunk."""
    board = Board(Path(board_path))
    rng = random.Random(rank)
    pread = os.pread

    def read_late(*args: Any) -> bytes:
        if rng.random() < 0.1:
            time.sleep(rng.uniform(0, 0.02))
        return pread(*args)

    os.pread = read_late
    observer = Observer(board)
    m = ShardingMapping(root, chunks_per_shard=CHUNKS_PER_SHARD, read_only=True)
    board.start(rank, n_processes)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        array = rng.choice(ARRAYS)
        kind = rng.choice(("one", "one", "one", "several", "several", "ranges", "in", "list"))
        chunks = array.some(rng, 1 if kind == "one" else rng.choice((2, 8, 24, 100)))
        keys = [array.key_of(chunk) for chunk in chunks]
        if kind == "one":
            check = observer.look(chunks)
            value = m.get(keys[0])
            check("mapping: one", [_whole(chunks[0], value)])
        elif kind == "several":
            check = observer.look(chunks)
            values = m.get_partial_values([(key, (0, None)) for key in keys])
            check("mapping: several", map(_whole, chunks, values))
        elif kind == "ranges":
            check = observer.look(chunks)
            places = [(HEADER.size, BLOCK_NBYTES)] * len(keys)
            values = m.get_partial_values(list(zip(keys, places, strict=True)))
            check("mapping: ranges", map(_first_block, chunks, values))
        elif kind == "in":
            check = observer.look(chunks[:1])
            check("mapping: in", ["present" if keys[0] in m else None])
        else:
            check = observer.look(array.chunks)
            listed = set(m.list_prefix(array.directory))
            check("mapping: list", _presence(array, listed))
    return observer.counts


def read_store(
    root: str, board_path: str, kind: str, seconds: float, rank: int, n_processes: int
) -> Counter[str]:
    """Read by zarr's ``Store`` interface."""
    return asyncio.run(_read_store(root, board_path, kind, seconds, rank, n_processes))


def open_base(root: str, kind: str) -> Any:
    """The same files, by one of several ways."""
    match kind:
        case "fsspec":
            return FsspecStore.from_url(f"file://{root}")
        case "obstore":
            import obstore

            return ObjectStore(obstore.store.LocalStore(root))
        case "wrapped":
            return WrapperStore(LocalStore(root))
        case _:
            return LocalStore(root)


async def _read_store(
    root: str, board_path: str, kind: str, seconds: float, rank: int, n_processes: int
) -> Counter[str]:
    board = Board(Path(board_path))
    rng = random.Random(rank)
    observer = Observer(board)
    store = ShardingStore(open_base(root, kind), chunks_per_shard=CHUNKS_PER_SHARD, read_only=True)
    prototype = default_buffer_prototype()
    board.start(rank, n_processes)
    end = time.monotonic() + seconds

    async def read_some() -> None:
        array = rng.choice(ARRAYS)
        what = rng.choice(("get", "get", "get", "several", "ranges", "exists", "getsize", "list"))
        chunks = array.some(rng, rng.choice((2, 8, 24)) if what in ("several", "ranges") else 1)
        keys = [array.key_of(chunk) for chunk in chunks]
        check = observer.look(chunks)
        found: Iterable[Found]
        if what == "get":
            value = await store.get(keys[0], prototype)
            found = [_whole(chunks[0], _bytes(value))]
        elif what == "several":
            values = await store.get_partial_values(prototype, [(key, None) for key in keys])
            found = map(_whole, chunks, map(_bytes, values))
        elif what == "ranges":
            place = RangeByteRequest(HEADER.size, HEADER.size + BLOCK_NBYTES)
            values = await store.get_partial_values(prototype, [(key, place) for key in keys])
            found = map(_first_block, chunks, map(_bytes, values))
        elif what == "exists":
            found = ["present" if await store.exists(keys[0]) else None]
        elif what == "getsize":
            try:
                n = await store.getsize(keys[0])
            except FileNotFoundError:
                found = [None]
            else:
                assert (n - HEADER.size) % BLOCK_NBYTES == 0
                found = ["present"]
        else:
            check = observer.look(array.chunks)
            listed = {key async for key in store.list_prefix(array.directory)}
            found = _presence(array, listed)
        check(f"store on {kind}: {what}", found)

    while time.monotonic() < end:
        await read_some()
    return observer.counts


def read_arrays(
    root: str, board_path: str, seconds: float, rank: int, n_processes: int
) -> Counter[str]:
    """Read slices of zarr arrays."""
    board = Board(Path(board_path))
    rng = random.Random(rank)
    observer = Observer(board)
    store = ShardingStore(LocalStore(root), read_only=True)
    opened: list[Any] = [zarr.open_array(store, path=a.path, mode="r") for a in V3_ARRAYS]
    board.start(rank, n_processes)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        array, z = rng.choice(list(zip(V3_ARRAYS, opened, strict=True)))
        start = array.some(rng, 1)[0] - array.first
        stop = min(start + rng.choice((1, 1, 3, 10)), array.n_chunks)
        chunks = list(range(array.first + start, array.first + stop))
        check = observer.look(chunks)
        elements = z[start:stop]
        check(
            "zarr array",
            [_whole(c, encode(e) if e else None) for c, e in zip(chunks, elements, strict=True)],
        )
    return observer.counts


def _presence(array: Array, listed: set[str]) -> list[Found]:
    return ["present" if array.key_of(chunk) in listed else None for chunk in array.chunks]


def _bytes(value: Any) -> bytes | None:
    return None if value is None else value.to_bytes()


def _whole(chunk: int, value: bytes | None) -> int | None:
    if value is None:
        return None
    assert encode(value[HEADER.size :]) == value, value[:100]
    return version_in(chunk, value[HEADER.size :], 0, None)


def _first_block(chunk: int, value: bytes | None) -> int | None:
    return None if value is None else version_in(chunk, value, 0, 1)
