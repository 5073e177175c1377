"""A small sharded array in each hierarchy, and a strict reader of its files that is not ours.

The grid has 3 × 5 chunks, a shard 2 × 3, so that no two shards have the same number of chunks::

    0  1  2 │ 3  4          shards   0 │ 1
    5  6  7 │ 8  9                   ──┼──
    ────────┼─────                   2 │ 3
   10 11 12 │ 13 14

Source: ZEP 2, and the draft of the sharding storage transformer, "Binary shard format".
"""

from __future__ import annotations

import json
import os
import random
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import crc32c
import zarr

from tests.support.draft import draft_array
from zarr_shardstore import CorruptShardError, ShardingMapping, ShardingStore

Location: TypeAlias = Literal["start", "end"]
Hierarchy: TypeAlias = Literal["v3", "v2", "draft"]
Model: TypeAlias = dict[int, bytes]
"""Value by number of the chunk; those that are missing are not there."""


@dataclass(frozen=True)
class Damaged:
    """Instead of a value: it cannot be read."""

    why: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Damaged)

    def __hash__(self) -> int:
        return 0


Found: TypeAlias = bytes | Damaged | None

GRID, CPS = (3, 5), (2, 3)
SEED = "ZARR_SHARDSTORE_SEED"
"""Environment variable: which of many cases tests take. Each run takes others."""

N_CHUNKS, N_ENTRIES, N_SHARDS = 15, 6, 4
CHUNK_SHAPE = (2, 16)
CHUNK_NBYTES = 128
"""Of the arrays of zarr: 4 bytes each element. As keys, chunks may have any size."""

MISSING = 2**64 - 1
_CRC = struct.Struct("<I")


@dataclass(frozen=True)
class Form:
    """How the array is declared, and its index stored."""

    hierarchy: Hierarchy
    checksum: bool
    location: Location = "end"

    def __str__(self) -> str:
        crc = "crc32c" if self.checksum else "plain"
        return f"{self.hierarchy}-{crc}-{self.location}"

    @property
    def index_nbytes(self) -> int:
        return 16 * N_ENTRIES + 4 * self.checksum

    @property
    def directory(self) -> str:
        """Prefix of all chunk keys."""
        return {"v3": "z/c/", "v2": "z/", "draft": "data/root/z/"}[self.hierarchy]

    def row(self, row: int) -> str:
        """Prefix of the keys of the chunks of a row, and of no others."""
        return (
            self.directory + {"v3": f"{row}/", "v2": f"{row}.", "draft": f"c{row}/"}[self.hierarchy]
        )

    def key(self, chunk: int) -> str:
        return f"{self.row(chunk // GRID[1])}{chunk % GRID[1]}"

    def shard_key(self, shard: int) -> str:
        return f"{self.row(shard // 2)}{shard % 2}"

    @property
    def metadata_key(self) -> str:
        keys = {"v3": "z/zarr.json", "v2": "z/.zarray", "draft": "meta/root/z.array.json"}
        return keys[self.hierarchy]

    def documents(self) -> Mapping[str, bytes]:
        return _documents(self)


FORMS = {
    str(form): form
    for form in (
        Form("v3", True),
        Form("v3", True, "start"),
        Form("v3", False),
        Form("v3", False, "start"),
        Form("v2", True),
        Form("v2", False),
        Form("draft", False),
    )
}


@cache
def _documents(form: Form) -> Mapping[str, bytes]:
    base: dict[str, bytes] = {}
    if form.hierarchy == "draft":
        shape = [n * c for n, c in zip(GRID, CHUNK_SHAPE, strict=True)]
        m = ShardingMapping(base, chunks_per_shard=CPS)
        m[form.metadata_key] = draft_array(shape, list(CHUNK_SHAPE))
        return base
    store = ShardingStore(
        base,
        chunks_per_shard=CPS,
        index_codecs=["bytes", "crc32c"] if form.checksum else ["bytes"],
        index_location=form.location,
    )
    zarr.create_array(
        store,
        name="z",
        shape=tuple(n * c for n, c in zip(GRID, CHUNK_SHAPE, strict=True)),
        chunks=CHUNK_SHAPE,
        dtype="u4",
        fill_value=0,
        compressors=None,
        filters=None,
        zarr_format=3 if form.hierarchy == "v3" else 2,
    )
    return base


def create(root: Path, form: Form) -> None:
    """Store the metadata of the array."""
    for key, value in form.documents().items():
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(value)


def a_seed(default: int | None = None) -> int:
    """The seed of this run: drawn, unless there is a default. A failing test must say it."""
    given = os.environ.get(SEED)
    return int(given) if given else random.randrange(2**32) if default is None else default


@contextmanager
def in_memory() -> Iterator[Path]:
    """A directory in memory, if there is such a file system: thousands of files come and go."""
    parent = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        yield Path(directory)


# --------------------------------------------------------------------------- chunks


def shard_and_entry(chunk: int) -> tuple[int, int]:
    """Number of the shard of a chunk, and of its entry there."""
    row, column = divmod(chunk, GRID[1])
    shard = row // CPS[0] * 2 + column // CPS[1]
    return shard, row % CPS[0] * CPS[1] + column % CPS[1]


def chunks_of(shard: int) -> dict[int, int]:
    """Number of the entry of each chunk of a shard that lies in the grid."""
    return {
        chunk: entry
        for chunk in range(N_CHUNKS)
        for number, entry in [shard_and_entry(chunk)]
        if number == shard
    }


def value_of(chunk: int, version: int, nbytes: int | None = None) -> bytes:
    """A value that no other chunk has, in no version, and no other part of it."""
    nbytes = 40 + 7 * chunk + 5 * version if nbytes is None else nbytes
    n_blocks = nbytes // 16 + 1
    return b"".join(b"<%03d.%05d.%04d>" % (chunk, version, i) for i in range(n_blocks))[:nbytes]


def described(value: object) -> str:
    """A value in a message."""
    if isinstance(value, bytes):
        return f"{value[:11].decode('latin-1')!r} ({len(value)} bytes)"
    return repr(value)


# ------------------------------------------------------------------------ strict reader


@dataclass(frozen=True)
class Entry:
    """What a strict reader finds of an entry, and where."""

    value: Found
    offset: int = 0


def strict_entries(
    data: bytes | None, n_entries: int, *, checksum: bool, location: Location
) -> list[Entry]:
    """The entries of a shard. Whatever is not as the documents say is damaged."""
    n = 16 * n_entries + 4 * checksum
    if data is None:
        return [Entry(None)] * n_entries
    if len(data) < n:
        return [Entry(Damaged("shorter than its index"))] * n_entries
    start = 0 if location == "start" else len(data) - n
    index = data[start : start + n]
    body = index[: 16 * n_entries]
    if checksum and index[-4:] != _CRC.pack(crc32c.crc32c(body)):
        return [Entry(Damaged("checksum of the index"))] * n_entries
    first, last = (n, len(data)) if location == "start" else (0, start)
    found: list[Entry] = []
    for offset, nbytes in struct.iter_unpack("<QQ", body):
        if offset == nbytes == MISSING:
            found.append(Entry(None))
        elif MISSING not in (offset, nbytes) and first <= offset <= offset + nbytes <= last:
            found.append(Entry(data[offset : offset + nbytes], offset))
        else:
            found.append(
                Entry(Damaged(f"bytes {offset} to {offset + nbytes}, of {first} to {last}"))
            )
    return found


def read_strictly(data: bytes | None, form: Form) -> list[Found]:
    """Values of the entries of a shard of the small array."""
    entries = strict_entries(data, N_ENTRIES, checksum=form.checksum, location=form.location)
    return [entry.value for entry in entries]


def places_in(data: bytes, form: Form) -> list[tuple[int, int]]:
    """Offset and nbytes of each entry, unchecked."""
    start = 0 if form.location == "start" else len(data) - form.index_nbytes
    return list(struct.iter_unpack("<QQ", data[start : start + 16 * N_ENTRIES]))


def index_of(places: Iterable[tuple[int, int]], form: Form) -> bytes:
    body = b"".join(struct.pack("<QQ", *place) for place in places)
    return body + (_CRC.pack(crc32c.crc32c(body)) if form.checksum else b"")


def build(values: Mapping[int, bytes], form: Form, *, gap: int = 0) -> bytes:
    """A shard with entries by their numbers, the last one first, and unused bytes before each."""
    places = [(MISSING, MISSING)] * N_ENTRIES
    data = b""
    base = form.index_nbytes if form.location == "start" else 0
    for entry in sorted(values, reverse=True):
        data += bytes(gap)
        places[entry] = (base + len(data), len(values[entry]))
        data += values[entry]
    index = index_of(places, form)
    return index + data if form.location == "start" else data + index


def build_from(model: Model, shard: int, form: Form, *, gap: int = 0) -> bytes:
    """The shard file of some chunks."""
    entries = chunks_of(shard)
    return build({entries[c]: v for c, v in model.items() if c in entries}, form, gap=gap)


def file_bytes(root: Path, form: Form, shard: int) -> bytes | None:
    try:
        return (root / form.shard_key(shard)).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError:
        return b""


def read_files(root: Path, form: Form) -> list[Found]:
    """All chunks, as a strict reader finds them in the files."""
    found: list[Found] = [None] * N_CHUNKS
    for shard in range(N_SHARDS):
        entries = read_strictly(file_bytes(root, form, shard), form)
        for chunk, entry in chunks_of(shard).items():
            found[chunk] = entries[entry]
    return found


# ------------------------------------------------------------------------- our readers


def open_mapping(root: Path, form: Form, **options: Any) -> ShardingMapping:
    return ShardingMapping(root, **(_draft_options(form) | options))


def open_store(root: Path, form: Form, **options: Any) -> ShardingStore:
    return ShardingStore(root, **(_draft_options(form) | options))


def _draft_options(form: Form) -> dict[str, Any]:
    # What says how arrays of the draft are sharded, where their documents do not.
    return {"chunks_per_shard": CPS} if form.hierarchy == "draft" else {}


def read_one(m: ShardingMapping, form: Form, chunk: int) -> Found:
    try:
        return m.get(form.key(chunk))
    except CorruptShardError as error:
        return Damaged(str(error))


def read_all(
    m: ShardingMapping, form: Form, chunks: Sequence[int] = range(N_CHUNKS)
) -> list[Found]:
    """Chunks one by one: one that is damaged stops no other."""
    return [read_one(m, form, chunk) for chunk in chunks]


def shape_of(root: Path, form: Form) -> tuple[int, ...]:
    """The shape that the metadata says."""
    return tuple(json.loads((root / form.metadata_key).read_bytes())["shape"])
