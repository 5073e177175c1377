"""Plan of each change in a shard file: the steps, and the state of the file.

Layout::

    index at the end     ├── entries, dead bytes ──┤ gap ┤ index ┤
    index at the start   ├ index ┤── entries, dead bytes ──┤

Steps of a change (`ShardWriter.change`)::

    journal │ record │                               shard whole, old values
    shard   │ entries into the gap │                 shard whole, old values
    shard   │ changed entries of the index, crc │    a record repairs the index
    journal │ state │                                shard whole, new values

Steps of a move, if the gap is too small: journal record, a copy of the index after a larger gap;
then the change. Steps of a seal (`trimmed`): empty the journal, write a copy of the index after
the data, cut the file after that copy.

`spec_notes/writes.md` says why: five rules, and what a crash leaves after each step. `is_valid` is
false from before a plan changes this object until its last step was taken. An invalid writer is
thrown away, and the index is read again. So is one whose file another program has changed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from zarr_shardstore.format import checksum
from zarr_shardstore.format.journal import (
    JOURNAL_HEADER_NBYTES,
    JOURNAL_STATE_OFFSET,
    Change,
    ChangedEntry,
    JournalHeader,
    Move,
    encode_record,
)
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.shard import (
    BYTE_ORDERS,
    CHECKSUM_NBYTES,
    ENTRY_NBYTES,
    MISSING,
    Bytes,
    ShardIndex,
)

_File: TypeAlias = Literal["shard", "journal"]

_MAX_GAP_NBYTES = 64 * 1024 * 1024
"""Largest gap in a small shard. In larger shards a gap is at most as large as the data."""

_GAP_PER_INDEX = 16
"""Least ratio of a gap and the index: filling the gap costs more than moving the index."""

_GAP_PER_EXPECTED = 1.25
"""Ratio of a gap and the missing entries, if these were like the others."""

_MAX_HOLE_NBYTES = 512
"""Unchanged bytes of the index between two changed ones that do not cost another write."""

_MAX_COMPARED_NBYTES = 64 * 1024
"""Largest index that is compared as a whole before each change, in 5 µs."""

_PAGE_NBYTES = 4096
"""Systems copy a page in one step: a concurrent reader sees all of a write, or none."""


class WriteAt(NamedTuple):
    """Write pieces one after the other."""

    file: _File
    offset: int
    pieces: Sequence[Bytes]


class Truncate(NamedTuple):
    """Cut a file, or extend it by bytes that take no room on the disk."""

    file: _File
    nbytes: int


class Barrier(NamedTuple):
    """Wait until all steps before survive a loss of power, if the change is to survive one."""


FileStep: TypeAlias = WriteAt | Truncate | Barrier
"""One step with the files of a shard."""


class ShardWriter:
    """Index and size of a shard file that is being changed, and the plans of its changes.

    Pure: it plans steps, and `ShardFile` takes them. `index` is the stored index with its checksum.
    No entry ever used a byte from `data_end` up to the index; ``None``: not known. `owner` names
    this process in the journal. Raise `IndexDamageError` if the index cannot be decoded.
    """

    def __init__(
        self, shard: ShardRef, index: bytes, size: int, data_end: int | None, owner: int
    ) -> None:
        spec = shard.spec
        decoded = ShardIndex.decode(index, spec)
        self.shard = shard
        self.owner = owner
        self.size = size
        self.body = bytearray(index[: spec.n_entries * ENTRY_NBYTES])
        self.crc = checksum.crc32c(self.body)
        self._is_at_start = spec.index.location == "start"
        self.index_start = 0 if self._is_at_start else size - spec.index_nbytes
        self._entry = struct.Struct(f"{BYTE_ORDERS[spec.index.endian]}QQ")
        self.damaged = set(decoded.damaged_ids(size, spec).tolist())
        present = decoded.fields[decoded.present_ids()]
        self.n_present = len(present)
        # A damaged entry may have any size: at most the size of the file counts.
        nbytes = np.minimum(present[:, 1], np.uint64(size))
        self.live_nbytes = int(nbytes.sum())
        self.data_end = self._known_data_end(decoded, data_end)
        self.was_sealed = self.gap_nbytes == 0
        self.is_valid = True
        self.growing: frozenset[int] = frozenset()
        """Dimensions in which the array has grown since the shard was opened."""
        self._head = b""
        self._number = 0

    def _known_data_end(self, index: ShardIndex, data_end: int | None) -> int:
        if self._is_at_start:
            return self.size
        if data_end is None or data_end > self.index_start or self.damaged:
            return self.index_start
        return max(data_end, int(index.fields[index.present_ids()].sum(axis=1).max(initial=0)))

    @property
    def data_nbytes(self) -> int:
        """Bytes that entries use or once used, without the gap."""
        return self.data_end - (self.shard.spec.index_nbytes if self._is_at_start else 0)

    @property
    def dead_nbytes(self) -> int:
        """Bytes that no entry uses, without the gap. Entries that share bytes hide some."""
        return max(0, self.data_nbytes - self.live_nbytes)

    def dead_with(self, values: Mapping[int, Bytes | None]) -> int:
        """Return the dead bytes there will be when entries have new values, or none."""
        replaced = sum(entry[1] for i in values if (entry := self.entry(i)) is not None)
        moved = 0 if self.fits(sum(len(v) for v in values.values() if v is not None)) else 1
        return self.dead_nbytes + replaced + moved * self.shard.spec.index_nbytes

    @property
    def gap_nbytes(self) -> int:
        """Room for new entries in the file."""
        return 0 if self._is_at_start else self.index_start - self.data_end

    def entry(self, entry_id: int) -> tuple[int, int] | None:
        """Return offset and nbytes of an entry, unchecked; ``None`` if it is missing."""
        offset, nbytes = self._entry.unpack_from(self.body, entry_id * ENTRY_NBYTES)
        return None if offset == nbytes == MISSING else (offset, nbytes)

    def index(self) -> ShardIndex:
        """Return a copy of the index."""
        order = BYTE_ORDERS[self.shard.spec.index.endian]
        fields = np.frombuffer(bytes(self.body), f"{order}u8").reshape(-1, 2)
        return ShardIndex(fields.astype(np.uint64, copy=False))

    def belongs_to(self, shard: ShardRef) -> bool:
        """Whether this is that shard; if so, take its shape, which may have changed."""
        if self.shard is shard:
            return True
        mine, other = self.shard.layout, shard.layout
        if self.shard.key != shard.key or not mine.has_same_entries(other):
            return False
        if mine.grid_shape != other.grid_shape and mine.grid_shape and other.grid_shape:
            shapes = enumerate(zip(mine.grid_shape, other.grid_shape, strict=True))
            self.growing |= {dim for dim, (before, now) in shapes if now > before}
        self.shard = shard
        return True

    @property
    def n_full(self) -> int:
        """Number of entries of a full shard; a dimension that has grown since counts whole."""
        coords, layout = self.shard.coords, self.shard.layout
        return layout.spec.boxes.n_in_box(coords, layout.grid_shape, self.growing)

    def fits(self, nbytes: float) -> bool:
        """Whether new entries of so many bytes find room."""
        return self._is_at_start or nbytes <= self.index_start - self.data_end

    # ------------------------------------------------------------- changes

    def change(self, values: Mapping[int, Bytes | None]) -> list[FileStep]:
        """Return the steps that give entries new values, or none, after a check of `damaged`."""
        self.is_valid = False
        pieces = [value for value in values.values() if value]
        nbytes = sum(map(len, pieces))
        steps = [] if self.fits(nbytes) else self._moved(nbytes, nbytes / len(pieces))
        steps += self.journal_begun(self.data_end)
        start = self.data_end
        places: dict[int, tuple[int, int] | None] = {}
        for entry_id, value in values.items():
            places[entry_id] = None if value is None else (self.data_end, len(value))
            self.data_end += 0 if value is None else len(value)
        if self._is_at_start:
            self.size = self.data_end
        old_crc = self.crc
        changed = self._set_entries(places)
        self.damaged.difference_update(values)
        record = encode_record(self._head, Change(old_crc, self.crc, self.data_end, changed))
        steps.append(WriteAt("journal", JOURNAL_HEADER_NBYTES, [record]))
        if pieces:
            steps.append(WriteAt("shard", start, pieces))
        steps += [Barrier(), *self._index_writes(sorted(places)), Barrier()]
        # After this step the shard is whole, and the record has no meaning.
        self._number = (self._number + 1) % 2**32
        self._head = self._header(self.data_end)
        steps.append(WriteAt("journal", JOURNAL_STATE_OFFSET, [self._head[JOURNAL_STATE_OFFSET:]]))
        return steps

    def _set_entries(self, places: Mapping[int, tuple[int, int] | None]) -> list[ChangedEntry]:
        """Put places into the index; return the entries before and after."""
        changed = []
        body, pack = self.body, self._entry.pack_into
        for entry_id, place in places.items():
            at = entry_id * ENTRY_NBYTES
            before, old = self.entry(entry_id), bytes(body[at : at + ENTRY_NBYTES])
            if before is not None:
                self.live_nbytes -= min(before[1], self.size)
                self.n_present -= 1
            if place is None:
                pack(body, at, MISSING, MISSING)
            else:
                pack(body, at, *place)
                self.live_nbytes += place[1]
                self.n_present += 1
            changed.append((entry_id, old, bytes(body[at : at + ENTRY_NBYTES])))
        self.crc = checksum.crc32c(body)
        return changed

    def _index_writes(self, entry_ids: Sequence[int]) -> list[FileStep]:
        """Return writes of changed entries and the checksum: one write for all in a page."""
        start, n_body, checksum = self.index_start, len(self.body), self._checksum
        places = [(i * ENTRY_NBYTES, (i + 1) * ENTRY_NBYTES) for i in entry_ids]
        if checksum:
            places.append((n_body, n_body + CHECKSUM_NBYTES))
        runs: list[tuple[int, int]] = []
        first, stop = places[0]
        for next_first, next_stop in places[1:]:
            is_in_page = (start + first) // _PAGE_NBYTES == (start + next_stop - 1) // _PAGE_NBYTES
            if not is_in_page and next_first - stop > _MAX_HOLE_NBYTES:
                runs.append((first, stop))
                first = next_first
            stop = next_stop
        runs.append((first, stop))
        return [
            WriteAt(
                "shard",
                start + first,
                [bytes(self.body[first:stop]) + (checksum if stop > n_body else b"")],
            )
            for first, stop in runs
        ]

    def _moved(self, nbytes: int, mean_nbytes: float) -> list[FileStep]:
        """Return the steps of a move: after a gap for `nbytes` and the entries to come."""
        start = self.size
        n_left = self.n_full - self.n_present
        index_nbytes = self.shard.spec.index_nbytes
        index_start = start_of_index(
            start + nbytes, index_nbytes, n_left * mean_nbytes, self.live_nbytes
        )
        steps = self.journal_begun(self.data_end)
        record = encode_record(self._head, Move(self.crc, index_start))
        self._head = b""
        self.data_end = start
        return [
            *steps,
            WriteAt("journal", JOURNAL_HEADER_NBYTES, [record]),
            Barrier(),
            *self._index_copied(index_start),
        ]

    def _index_copied(self, index_start: int) -> list[FileStep]:
        """Return the steps that write a copy of the index, with which the file is to end."""
        index = bytes(self.body) + self._checksum
        self.index_start, self.size = index_start, index_start + len(index)
        return [WriteAt("shard", index_start, [index]), Barrier()]

    def journal_begun(self, data_end: int) -> list[FileStep]:
        """Return the steps that make this process the owner of the journal, unless it is."""
        if self._head:
            return []
        self.is_valid = False
        self._head = self._header(data_end)
        return [WriteAt("journal", 0, [self._head]), Barrier()]

    def _header(self, data_end: int) -> bytes:
        spec = self.shard.spec
        place = self.owner, self.index_start, data_end, self._number
        return JournalHeader(spec.index.checksum, spec.n_entries, *place).encode()

    @property
    def _checksum(self) -> bytes:
        form = self.shard.spec.index
        return self.crc.to_bytes(CHECKSUM_NBYTES, "little") if form.checksum else b""

    def has_index_of(self, fd: int, pread: Callable[[int, int, int], bytes]) -> bool:
        """Whether a file has the index that this writer left; of a large one, that checksum."""
        checksum = self._checksum
        if checksum and len(self.body) > _MAX_COMPARED_NBYTES:
            end = self.index_start + len(self.body)
            return pread(fd, CHECKSUM_NBYTES, end) == checksum
        n_body = len(self.body)
        found = pread(fd, n_body + len(checksum), self.index_start)
        return found[n_body:] == checksum and found[:n_body] == self.body

    def trimmed(self) -> list[FileStep]:
        """Return the steps of a seal. A gap that is smaller than the index stays."""
        self.is_valid = False
        # First: a record for another place of the index could undo the change.
        steps: list[FileStep] = [Truncate("journal", 0), Barrier()]
        self._head = b""
        if self.gap_nbytes >= self.shard.spec.index_nbytes:
            steps += [
                *self._index_copied(self.data_end),
                Truncate("shard", self.size),
                Barrier(),
            ]
        return steps


def start_of_index(data_end: int, index_nbytes: int, expected: float, live_nbytes: int) -> int:
    """Return the place of an index after a gap for expected bytes, in as few pages as possible."""
    wanted = min(int(expected * _GAP_PER_EXPECTED), max(_MAX_GAP_NBYTES, live_nbytes))
    start = data_end + max(_GAP_PER_INDEX * index_nbytes, wanted)
    fits_in_page = index_nbytes <= _PAGE_NBYTES - start % _PAGE_NBYTES
    return start if fits_in_page else -(-start // _PAGE_NBYTES) * _PAGE_NBYTES
