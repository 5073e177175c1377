"""Bytes of a shard: entries in any order, and their index.

::

    index at the end     ├── entry bytes, any order, any gaps ──┤ index ┤
    index at the start   ├ index ┤── entry bytes, any order, any gaps ──┤

    ┌ entry 0 ────────┬ entry 1 ────────┬ … ┬ entry n-1 ──────┐
    │ offset │ nbytes │ offset │ nbytes │   │ offset │ nbytes │ [crc32c]
    │ u64    │ u64    │ u64    │ u64    │   │ u64    │ u64    │ [u32le]
    └─────────────────┴─────────────────┴ … ┴─────────────────┘

n is the number of entries of a shard in C order, with the entries outside the array.
A missing entry has 2⁶⁴−1 in both fields. An entry of zero bytes is present, and empty.
The writer chooses the order of the entry bytes, which is not part of metadata.

Source: sharding storage transformer draft, "Binary shard format" (little endian, at the end,
no checksum), "Fixed order"; ZEP 2, "Binary shard format" (index_codecs, index_location).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format import checksum
from zarr_shardstore.format.box_grid import BoxGrid, Side
from zarr_shardstore.format.keys import Coords

Bytes: TypeAlias = bytes | memoryview

MISSING = 2**64 - 1
"""Both fields of a missing entry (draft, "Binary shard format")."""

ENTRY_NBYTES = 16
"""Two uint64."""

CHECKSUM_NBYTES = 4
"""A crc32c after the index."""


class IndexDamageError(Exception):
    """Damage of an index or an entry; the caller knows the shard, and raises the public error."""

    def __init__(
        self, message: str, entry_id: int | None = None, byte_range: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.entry_id = entry_id
        self.byte_range = byte_range


@dataclass(frozen=True, slots=True)
class IndexFormat:
    """Form of a stored index: its ``index_codecs`` and its ``index_location``."""

    checksum: bool
    location: Literal["start", "end"] = "end"
    endian: Literal["little", "big"] = "little"


BYTE_ORDERS: dict[str, Literal["<", ">"]] = {"little": "<", "big": ">"}
"""As numpy and `struct` spell them."""

DRAFT_INDEX = IndexFormat(checksum=False)
"""The only form of the draft."""

ZEP2_INDEX = IndexFormat(checksum=True)
"""The form that ZEP 2 recommends, and the default of every native writer."""

MAX_ENTRIES = 2**24
"""Most entries in a shard: an index of 256 MiB. A larger shard is a mistake or an attack."""


def check_chunks_per_shard(value: Sequence[int]) -> Coords:
    """Return `value` as a tuple; `SpecError` for a number below 1, or too many entries."""
    for n in value:
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise SpecError(
                f"chunks_per_shard is a whole number of at least 1 for each dimension, got {n!r} "
                f"in {list(value)!r}"
            )
    if math.prod(value) > MAX_ENTRIES:
        raise SpecError(
            f"chunks_per_shard {list(value)!r} asks for {math.prod(value)} entries in "
            f"a shard, at most {MAX_ENTRIES} are supported"
        )
    return tuple(value)


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """Parameters of the sharding of one array."""

    chunks_per_shard: Coords
    """Entries along each dimension, of the largest shard; ``()`` for a 0-d array."""
    index: IndexFormat
    sides: tuple[Side, ...] | None = None
    """Entries along each dimension of each shard; ``None``: all shards have as many."""
    boxes: BoxGrid = field(init=False, compare=False, repr=False)
    """Cut of the grid of chunks into shards."""
    ndim: int = field(init=False, compare=False, repr=False)
    n_entries: int = field(init=False, compare=False, repr=False)
    """Number of entries in a shard; one for a 0-d array."""
    index_nbytes: int = field(init=False, compare=False, repr=False)
    """Size of the encoded index, in bytes."""

    def __post_init__(self) -> None:
        check_chunks_per_shard(self.chunks_per_shard)
        n_entries = math.prod(self.chunks_per_shard)
        object.__setattr__(self, "boxes", BoxGrid(self.sides or self.chunks_per_shard))
        object.__setattr__(self, "ndim", len(self.chunks_per_shard))
        object.__setattr__(self, "n_entries", n_entries)
        nbytes = n_entries * ENTRY_NBYTES + CHECKSUM_NBYTES * self.index.checksum
        object.__setattr__(self, "index_nbytes", nbytes)

    def of_shard(self, coords: Coords) -> ShardingSpec:
        """Return the sharding of an array that has only shards like this one."""
        return self if self.sides is None else _spec_of(self.boxes.lengths(coords), self.index)


@lru_cache(maxsize=4096)
def _spec_of(chunks_per_shard: Coords, index: IndexFormat) -> ShardingSpec:
    return ShardingSpec(chunks_per_shard, index)


@dataclass(slots=True, eq=False)
class ShardIndex:
    """A decoded shard index."""

    fields: npt.NDArray[np.uint64]
    """Shape ``(n_entries, 2)``, columns offset and nbytes, entries in C order."""

    @classmethod
    def decode(cls, data: bytes | memoryview, spec: ShardingSpec) -> ShardIndex:
        """Decode an index; `IndexDamageError` for a wrong size or checksum."""
        if len(data) != spec.index_nbytes:
            raise IndexDamageError(
                f"the index of {spec.n_entries} entries takes {spec.index_nbytes} bytes, "
                f"there are {len(data)}"
            )
        body = memoryview(data)[: spec.n_entries * ENTRY_NBYTES]
        if spec.index.checksum:
            stored = int.from_bytes(data[len(body) :], "little")
            computed = checksum.crc32c(body)
            if stored != computed:
                raise IndexDamageError(
                    f"the index has the checksum {stored:#010x}, its bytes give {computed:#010x}"
                )
        fields = np.frombuffer(body, f"{BYTE_ORDERS[spec.index.endian]}u8").reshape(-1, 2)
        return cls(fields.astype(np.uint64, copy=False))

    def encode(self, form: IndexFormat) -> bytes:
        body = self.fields.astype(f"{BYTE_ORDERS[form.endian]}u8", copy=False).tobytes()
        if not form.checksum:
            return body
        return body + checksum.crc32c(body).to_bytes(CHECKSUM_NBYTES, "little")

    def without(self, entry_ids: Collection[int]) -> ShardIndex:
        """Return a copy without some entries."""
        fields = self.fields.copy()
        fields[list(entry_ids)] = MISSING
        return ShardIndex(fields)

    def entry(self, entry_id: int) -> tuple[int, int] | None:
        """Return offset and nbytes of an entry, unchecked; ``None`` for a missing entry."""
        offset, nbytes = self.fields[entry_id].tolist()
        return None if offset == nbytes == MISSING else (offset, nbytes)

    def entries(
        self, entry_ids: Sequence[int], shard_nbytes: int | None, spec: ShardingSpec
    ) -> list[tuple[int, int] | None]:
        """Return offset and nbytes of entries as `entry`, checked if `shard_nbytes` is known."""
        start, stop = (0, 0) if shard_nbytes is None else _data_range(shard_nbytes, spec)
        entries: list[tuple[int, int] | None] = []
        pairs = zip(entry_ids, self.fields[entry_ids].tolist(), strict=True)
        for entry_id, (offset, nbytes) in pairs:
            if offset == nbytes == MISSING:
                entries.append(None)
                continue
            if shard_nbytes is not None and (offset < start or offset + nbytes > stop):
                self.check_entry(entry_id, shard_nbytes, spec)
            entries.append((offset, nbytes))
        return entries

    def present_ids(self) -> npt.NDArray[np.intp]:
        """Return the ascending ids of the stored entries."""
        return np.flatnonzero((self.fields != MISSING).any(axis=1))

    def is_packed(self, shard_nbytes: int, spec: ShardingSpec) -> bool:
        """Whether each byte of a shard is of an entry or of the index."""
        nbytes = self.fields[self.present_ids(), 1].sum(dtype=np.float64)
        return spec.index_nbytes + float(nbytes) == shard_nbytes

    def check_entry(self, entry_id: int, shard_nbytes: int, spec: ShardingSpec) -> None:
        """Raise `IndexDamageError` for an entry that leaves the shard or runs into the index."""
        entry = self.entry(entry_id)
        if entry is None:
            return
        offset, nbytes = entry  # ints of Python, whose sum does not wrap
        start, stop = _data_range(shard_nbytes, spec)
        if offset < start or offset + nbytes > stop:
            raise IndexDamageError(
                f"the entry leaves the data of the shard, bytes [{start}, {stop}) "
                f"of {shard_nbytes}",
                entry_id=entry_id,
                byte_range=(offset, offset + nbytes),
            )

    def damaged_ids(self, shard_nbytes: int, spec: ShardingSpec) -> npt.NDArray[np.intp]:
        """Return the ascending ids of the entries that leave the shard or run into the index."""
        start, stop = _data_range(shard_nbytes, spec)
        ids = self.present_ids()
        offsets, nbytes = self.fields[ids].T
        # A sum of uint64 wraps silently, so: nbytes <= stop - offset, never offset + nbytes.
        top = np.uint64(max(stop, 0))
        bad = (offsets < np.uint64(start)) | (offsets > top)
        bad |= nbytes > top - np.minimum(offsets, top)
        bad |= stop < 0  # the shard is shorter than its index
        damaged: npt.NDArray[np.intp] = ids[bad]
        return damaged

    def check_entries(self, shard_nbytes: int, spec: ShardingSpec) -> None:
        """Call `check_entry` for the first damaged entry. Numpy finds it."""
        for entry_id in self.damaged_ids(shard_nbytes, spec)[:1].tolist():
            self.check_entry(entry_id, shard_nbytes, spec)


def _data_range(shard_nbytes: int, spec: ShardingSpec) -> tuple[int, int]:
    """Return the half-open byte range that entries may use."""
    if spec.index.location == "start":
        return spec.index_nbytes, shard_nbytes
    return 0, shard_nbytes - spec.index_nbytes


EntryOrder = Literal["C", "F", "morton"]


def order_entries(
    entry_ids: npt.NDArray[np.intp], chunks_per_shard: Coords, order: EntryOrder
) -> npt.NDArray[np.intp]:
    """Sort entry ids into the order of their bytes. Morton order interleaves the bits of the
    coordinates, dimension 0 lowest; as in zarr-python, a short dimension gives fewer bits."""
    if order == "C" or len(chunks_per_shard) < 2:
        return np.sort(entry_ids)
    coords = np.unravel_index(entry_ids, chunks_per_shard)
    if order == "F":
        rank = np.ravel_multi_index(coords[::-1], chunks_per_shard[::-1])
    else:
        rank = np.zeros(len(entry_ids), dtype=np.intp)
        n_bits = [(n - 1).bit_length() for n in chunks_per_shard]
        position = 0
        for bit in range(max(n_bits)):
            for dim, available in zip(coords, n_bits, strict=True):
                if bit < available:
                    rank |= ((dim >> bit) & 1) << position
                    position += 1
    return entry_ids[np.argsort(rank, kind="stable")]


def build_shard(entries: Mapping[int, Bytes], spec: ShardingSpec, order: EntryOrder = "C") -> bytes:
    """Return a shard without gaps of bytes by entry id. Other entries are missing."""
    return b"".join([piece for _, pieces in lay_out(entries, spec, order) for piece in pieces])


def is_empty_index(value: Bytes) -> bool:
    """Whether an object is the index of a shard without entries, with its checksum."""
    n_entries, left = divmod(len(value) - CHECKSUM_NBYTES, ENTRY_NBYTES)
    is_like = 0 < n_entries <= MAX_ENTRIES and not left and value[0] == 0xFF
    return is_like and value == build_shard({}, ShardingSpec((n_entries,), ZEP2_INDEX))


def lay_out(
    entries: Mapping[int, Bytes], spec: ShardingSpec, order: EntryOrder, gap_nbytes: int = 0
) -> list[tuple[int, Sequence[Bytes]]]:
    """As `build_shard`, in pieces for `SetWithGaps`, with a gap before an index at the end."""
    ids = np.fromiter(entries, dtype=np.intp, count=len(entries))
    ids = order_entries(ids, spec.chunks_per_shard, order)
    values = [entries[i] for i in ids.tolist()]
    nbytes = np.fromiter(map(len, values), dtype=np.uint64, count=len(values))
    index = packed_index(ids, nbytes, spec)
    if spec.index.location == "start":
        return [(0, [index, *values])]
    return [(0, values), (int(nbytes.sum()) + gap_nbytes, [index])]


def packed_index(ids: npt.ArrayLike, nbytes: npt.ArrayLike, spec: ShardingSpec) -> bytes:
    """Encode the index of entries in the order of their bytes, without gaps."""
    at, sizes = np.asarray(ids, dtype=np.intp), np.asarray(nbytes, dtype=np.uint64)
    start = spec.index_nbytes if spec.index.location == "start" else 0
    fields = np.full((spec.n_entries, 2), MISSING, dtype=np.uint64)
    fields[at, 0] = np.cumsum(sizes) - sizes + np.uint64(start)
    fields[at, 1] = sizes
    return ShardIndex(fields).encode(spec.index)


def index_of_shard(shard: Bytes, spec: ShardingSpec) -> ShardIndex:
    """Decode the index of a whole shard, as `ShardIndex.decode`, without a check of entries."""
    start = 0 if spec.index.location == "start" else max(0, len(shard) - spec.index_nbytes)
    return ShardIndex.decode(memoryview(shard)[start : start + spec.index_nbytes], spec)


def split_shard(
    shard: Bytes, spec: ShardingSpec, *, without: Collection[int] = ()
) -> dict[int, memoryview]:
    """Return the bytes of each entry of a whole shard by entry id, uncopied, and `without` some.
    `IndexDamageError` for a damaged index or another damaged entry."""
    index = index_of_shard(shard, spec).without(without)
    index.check_entries(len(shard), spec)
    view = memoryview(shard)
    ids = index.present_ids()
    places = zip(ids.tolist(), index.fields[ids].tolist(), strict=True)
    return {i: view[offset : offset + nbytes] for i, (offset, nbytes) in places}
