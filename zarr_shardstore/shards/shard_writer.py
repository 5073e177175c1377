"""A shard file that is being changed in its place, as its writer knows it.

::

    index at the end     ├── entries, dead bytes ──┤ gap ┤ index ┤
    index at the start   ├ index ┤── entries, dead bytes ──┤

Four rules carry it:

1. Bytes that an entry ever used are not written again while the file lives. So a reader finds what
   its index points to, however old that index is. New entries go into the gap, which nothing ever
   used. If the gap is too small the index first moves, as it is, behind a larger one.
2. A shard with a damaged entry is not changed, unless that entry is replaced: otherwise bytes that
   are written later could take the place that the entry points to.
3. What is known of the file is invalid from before it changes in memory until the last step was
   taken. So whatever ends a change at whatever line, the next one reads the index again.
4. An index of up to one page lies within a page, and is written with its checksum at one go.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import crc32c
import numpy as np

from zarr_shardstore.format.grid import n_in_grid_box
from zarr_shardstore.format.index import (
    CHECKSUM_NBYTES,
    ENTRY_NBYTES,
    MISSING,
    ShardIndex,
)
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

Bytes: TypeAlias = bytes | memoryview
_File: TypeAlias = Literal["shard", "journal"]

_MAX_GAP_NBYTES = 64 * 1024 * 1024
"""Of a gap in a small shard; in larger ones it is at most as large as the data."""

_GAP_PER_INDEX = 16
"""A gap is at least so many times the index, so that moving the index costs little beside
what is written into the gap."""

_GAP_PER_EXPECTED = 1.25
"""More than the entries that are missing would take if they were like the others."""

_MAX_HOLE_NBYTES = 512
"""Unchanged bytes of the index that are written along, instead of one more write."""

_MAX_COMPARED_NBYTES = 64 * 1024
"""Of the index, read and compared before each change: this takes 5 µs."""

_PAGE_NBYTES = 4096
"""Systems copy a page at one go: a program that reads meanwhile sees all of it or nothing."""


@dataclass(frozen=True, slots=True)
class WriteAt:
    """Write pieces one behind the other."""

    file: _File
    offset: int
    pieces: Sequence[Bytes]


@dataclass(frozen=True, slots=True)
class Truncate:
    """Cut a file, or make it longer, without bytes that take room on the disk."""

    file: _File
    nbytes: int


@dataclass(frozen=True, slots=True)
class Barrier:
    """What comes before survives a loss of power before anything that comes after is begun,
    where the store promises that."""


FileStep: TypeAlias = WriteAt | Truncate | Barrier
"""What is done with the files of a shard, one step after the other."""


class ShardWriter:
    """What a writer knows of a shard file; valid while nobody else changes it.

    Parameters
    ----------
    shard : ShardRef
        Which shard.
    index : bytes-like
        The index as it is stored, with its checksum.
    size : int
        Of the file, in bytes.
    data_end : int, optional
        From here on nothing up to the index was ever used; ``None``: not known.
    owner : int
        What the journal says as long as nobody else has changed the shard.

    Raises
    ------
    IndexDamageError
        If the index cannot be decoded.
    """

    __slots__ = (
        "_damaged",
        "_entry",
        "_growing",
        "_head",
        "_number",
        "body",
        "crc",
        "data_end",
        "index_start",
        "is_valid",
        "live_nbytes",
        "n_present",
        "owner",
        "shard",
        "size",
        "was_sealed",
    )

    def __init__(
        self, shard: ShardRef, index: bytes, size: int, data_end: int | None, owner: int
    ) -> None:
        spec = shard.layout.spec
        decoded = ShardIndex.decode(index, spec.n_entries, spec.index)
        self.shard = shard
        self.owner = owner
        self.size = size
        self.body = bytearray(index[: spec.n_entries * ENTRY_NBYTES])
        self.crc = crc32c.crc32c(self.body)
        self.index_start = 0 if self._is_at_start else size - spec.index_nbytes
        self._entry = struct.Struct("<QQ" if spec.index.endian == "little" else ">QQ")
        self._damaged = set(decoded.damaged_ids(size, spec.index).tolist())
        present = decoded.fields[decoded.present_ids()]
        self.n_present = len(present)
        # A damaged entry may have any size: not more than that of the file counts.
        nbytes = np.minimum(present[:, 1], np.uint64(size))
        self.live_nbytes = int(nbytes.sum())
        self.data_end = self._known_data_end(decoded, data_end)
        self.was_sealed = self.gap_nbytes == 0
        self.is_valid = True
        self._growing: frozenset[int] = frozenset()
        self._head = b""
        self._number = 0

    def _known_data_end(self, index: ShardIndex, data_end: int | None) -> int:
        if self._is_at_start:
            return self.size
        if data_end is None or data_end > self.index_start or self._damaged:
            return self.index_start
        return max(data_end, int(index.fields[index.present_ids()].sum(axis=1).max(initial=0)))

    @property
    def _is_at_start(self) -> bool:
        return self.shard.layout.spec.index.location == "start"

    @property
    def data_nbytes(self) -> int:
        """Bytes that entries use or once used, without the gap."""
        return self.data_end - (self.shard.layout.spec.index_nbytes if self._is_at_start else 0)

    @property
    def dead_nbytes(self) -> int:
        """Bytes that no entry uses, without the gap. Entries that share bytes hide some."""
        return max(0, self.data_nbytes - self.live_nbytes)

    def dead_with(self, values: Mapping[int, Bytes | None]) -> int:
        """Dead bytes that there will be when entries have new values, or none."""
        replaced = sum(entry[1] for i in values if (entry := self.entry(i)) is not None)
        moved = 0 if self.fits(sum(len(v) for v in values.values() if v is not None)) else 1
        return self.dead_nbytes + replaced + moved * self.shard.layout.spec.index_nbytes

    @property
    def gap_nbytes(self) -> int:
        """Room for new entries that the file has."""
        return 0 if self._is_at_start else self.index_start - self.data_end

    def entry(self, entry_id: int) -> tuple[int, int] | None:
        """Offset and nbytes of an entry, unchecked; ``None`` if it is missing."""
        offset, nbytes = self._entry.unpack_from(self.body, entry_id * ENTRY_NBYTES)
        return None if offset == nbytes == MISSING else (offset, nbytes)

    def index(self) -> ShardIndex:
        """A copy of the index."""
        spec = self.shard.layout.spec
        fields = np.frombuffer(bytes(self.body), spec.index.dtype).reshape(spec.n_entries, 2)
        return ShardIndex(fields.astype(np.uint64, copy=False))

    def check_kept(self, replaced: Container[int]) -> None:
        """Refuse a change that keeps an entry which leaves the data.

        Raises
        ------
        IndexDamageError
            With the first such entry that is not `replaced`.
        """
        for entry_id in sorted(self._damaged):
            if entry_id not in replaced:
                self.index().check_entry(entry_id, self.size, self.shard.layout.spec.index)

    def belongs_to(self, shard: ShardRef) -> bool:
        """Whether this is that shard. Its array may have another shape by now."""
        mine, other = self.shard.layout, shard.layout
        if (self.shard.key, mine.prefix, mine.encoding, mine.spec) != (
            shard.key,
            other.prefix,
            other.encoding,
            other.spec,
        ):
            return False
        if mine.grid_shape != other.grid_shape and mine.grid_shape and other.grid_shape:
            shapes = enumerate(zip(mine.grid_shape, other.grid_shape, strict=True))
            self._growing |= {dim for dim, (before, now) in shapes if now > before}
        self.shard = shard
        return True

    @property
    def is_growing(self) -> bool:
        """Whether the array grew since the shard was opened."""
        return bool(self._growing)

    @property
    def n_full(self) -> int:
        """Number of entries that the array has in this shard when it is complete: in dimensions in
        which the array grew since the shard was opened, as many as the shard can hold."""
        if not self._growing:
            return self.shard.n_grid_entries
        layout = self.shard.layout
        grid, cps = layout.grid_shape, layout.spec.chunks_per_shard
        if grid is not None:
            stops = [(c + 1) * n for c, n in zip(self.shard.coords, cps, strict=True)]
            grid = tuple(
                max(n, stops[dim]) if dim in self._growing else n for dim, n in enumerate(grid)
            )
        return n_in_grid_box(self.shard.coords, cps, grid)

    def fits(self, nbytes: float) -> bool:
        """Whether new entries of so many bytes find room."""
        return self._is_at_start or nbytes <= self.gap_nbytes

    def n_present_with(self, values: Mapping[int, Bytes | None]) -> int:
        """Number of entries that there will be with new values, or none, for some."""
        n_gone = sum(self.entry(i) is not None for i in values)
        return self.n_present - n_gone + sum(value is not None for value in values.values())

    # ------------------------------------------------------------- changes

    def change(self, values: Mapping[int, Bytes | None]) -> list[FileStep]:
        """Steps that give entries new values, or none; the file grows if it must.

        This is not the state of the file until all steps are taken: until then `is_valid` is
        false. `check_kept` comes before.
        """
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
        self._damaged.difference_update(values)
        record = encode_record(self._head, Change(old_crc, self.crc, self.data_end, changed))
        steps.append(WriteAt("journal", JOURNAL_HEADER_NBYTES, [record]))
        if pieces:
            steps.append(WriteAt("shard", start, pieces))
        steps += [Barrier(), *self._index_writes(sorted(places)), Barrier(), self._state_written()]
        return steps

    def _set_entries(self, places: Mapping[int, tuple[int, int] | None]) -> list[ChangedEntry]:
        """Put places into the index; return what was there, and what is now."""
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
        self.crc = crc32c.crc32c(body)
        return changed

    def _index_writes(self, entry_ids: Sequence[int]) -> list[FileStep]:
        """Writes of changed entries and the checksum: what lies in one page is one write."""
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
        """Write the index, as it is, behind a gap for `nbytes` and the entries to come.

        The old one stays where it is, so that the move can be undone by cutting the file.
        """
        start, index = self.size, bytes(self.body) + self._checksum
        gap = gap_nbytes(self.shard, self.n_full - self.n_present, mean_nbytes, self.live_nbytes)
        index_start = page_aligned(start + nbytes + gap, len(index))
        steps = self.journal_begun(self.data_end)
        record = encode_record(self._head, Move(self.crc, index_start))
        self.data_end, self.index_start, self.size = start, index_start, index_start + len(index)
        self._head = b""
        steps += [
            WriteAt("journal", JOURNAL_HEADER_NBYTES, [record]),
            Barrier(),
            WriteAt("shard", index_start, [index]),
            Barrier(),
        ]
        return steps

    def journal_begun(self, data_end: int) -> list[FileStep]:
        """Make the journal ours, and about the file as it is."""
        if self._head:
            return []
        self.is_valid = False
        self._head = self._header(data_end).encode()
        return [WriteAt("journal", 0, [self._head]), Barrier()]

    def _header(self, data_end: int) -> JournalHeader:
        spec = self.shard.layout.spec
        return JournalHeader(
            spec.index.checksum,
            spec.n_entries,
            self.owner,
            self.index_start,
            data_end,
            self._number,
        )

    def _state_written(self) -> FileStep:
        """The shard is whole: the record means nothing any more."""
        self._number = (self._number + 1) % 2**32
        self._head = self._header(self.data_end).encode()
        return WriteAt("journal", JOURNAL_STATE_OFFSET, [self._head[JOURNAL_STATE_OFFSET:]])

    @property
    def _checksum(self) -> bytes:
        form = self.shard.layout.spec.index
        return self.crc.to_bytes(CHECKSUM_NBYTES, "little") if form.checksum else b""

    @property
    def compared_range(self) -> tuple[int, int]:
        """Which bytes of the file show that it is the one that is known: those of the index; of a
        large one only its checksum, if it has one."""
        stop = self.index_start + len(self.body)
        has_checksum = self.shard.layout.spec.index.checksum
        if has_checksum and len(self.body) > _MAX_COMPARED_NBYTES:
            return stop, stop + CHECKSUM_NBYTES
        return self.index_start, stop + CHECKSUM_NBYTES * has_checksum

    def is_same(self, found: bytes) -> bool:
        """Whether the bytes of `compared_range` are those that are known."""
        n = len(found) - len(self._checksum)
        return found[n:] == self._checksum and (n == 0 or found[:n] == self.body)

    def trimmed(self) -> list[FileStep]:
        """Steps that end the journal and take away the gap, if it is not smaller than the index.

        A copy of the index is written behind the data, where it is dead bytes; then the file
        is cut there, in one step, and ends in that copy.
        """
        self.is_valid = False
        # First: a journal that speaks of another place of the index might take it back.
        steps: list[FileStep] = [Truncate("journal", 0), Barrier()]
        self._head = b""
        nbytes = self.shard.layout.spec.index_nbytes
        if self.gap_nbytes >= nbytes:
            index = bytes(self.body) + self._checksum
            self.index_start = self.data_end
            self.size = self.data_end + nbytes
            steps += [
                WriteAt("shard", self.index_start, [index]),
                Barrier(),
                Truncate("shard", self.size),
                Barrier(),
            ]
        return steps


def page_aligned(index_start: int, index_nbytes: int) -> int:
    """The next place where an index lies in as few pages as it can."""
    fits_in_page = index_nbytes <= _PAGE_NBYTES - index_start % _PAGE_NBYTES
    return index_start if fits_in_page else -(-index_start // _PAGE_NBYTES) * _PAGE_NBYTES


def gap_nbytes(shard: ShardRef, n_left: int, mean_nbytes: float, live_nbytes: int) -> int:
    """Size of the gap for entries to come. It takes no room on the disk until it is filled.

    Parameters
    ----------
    n_left
        Entries that are missing.
    mean_nbytes
        Size of an entry, in bytes, as far as it is known.
    live_nbytes
        Of the data, in bytes.
    """
    if shard.layout.spec.index.location == "start":
        return 0
    expected = int(n_left * mean_nbytes * _GAP_PER_EXPECTED)
    least = _GAP_PER_INDEX * shard.layout.spec.index_nbytes
    return max(least, min(expected, max(_MAX_GAP_NBYTES, live_nbytes)))
