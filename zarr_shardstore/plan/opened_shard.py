"""A shard file that is being changed in its place, as its writer knows it.

::

    index at the end     ├── entries, dead bytes ──┤ gap ┤ index ┤
    index at the start   ├ index ┤── entries, dead bytes ──┤

Bytes of entries are never overwritten while the file lives, and neither is what entries once
used: whoever read an index finds what it points to, however long ago that was. New entries go
into the gap, which nobody ever used. Where it is full the index moves behind a larger one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import crc32c
import numpy as np

from zarr_shardstore.format.index import (
    CHECKSUM_NBYTES,
    ENTRY_NBYTES,
    MISSING,
    IndexDamageError,
    ShardIndex,
)
from zarr_shardstore.format.journal import (
    JOURNAL_HEADER_NBYTES,
    Change,
    JournalHeader,
    Overwritten,
    encode_change,
)
from zarr_shardstore.format.layout import ShardRef
from zarr_shardstore.format.orders import EntryOrder

__all__ = ["Barrier", "FileStep", "OpenedShard", "Truncate", "WriteAt", "gap_nbytes"]

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


class OpenedShard:
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
        "_entry",
        "_header",
        "body",
        "crc",
        "data_end",
        "has_journal",
        "index_start",
        "inode",
        "is_fixed",
        "is_valid",
        "live_nbytes",
        "n_present",
        "owner",
        "shard",
        "size",
        "slots",
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
        present = decoded.fields[decoded.present_ids()]
        self.n_present = len(present)
        # A damaged entry may have any size: not more than that of the file counts.
        nbytes = np.minimum(present[:, 1], np.uint64(size))
        self.live_nbytes = int(nbytes.sum())
        self.data_end = self._known_data_end(decoded, data_end)
        self.was_sealed = self.gap_nbytes == 0
        self.has_journal = False
        self.is_valid = True
        self.inode = 0
        self.is_fixed = False
        self.slots: tuple[EntryOrder, int] | None = None
        """In which order the entries have slots, and their size; 0: they have none."""
        self._header = b""

    def _known_data_end(self, index: ShardIndex, data_end: int | None) -> int:
        if self._is_at_start:
            return self.size
        if data_end is None or data_end > self.index_start:
            return self.index_start
        try:
            index.check_entries(self.size, self.shard.layout.spec.index)
        except IndexDamageError:
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

    def fits(self, nbytes: int) -> bool:
        """Whether new entries of so many bytes find room."""
        return self._is_at_start or nbytes <= self.gap_nbytes

    def n_present_with(self, values: Mapping[int, Bytes | None]) -> int:
        """Number of entries that there will be with new values, or none, for some."""
        n_gone = sum(self.entry(i) is not None for i in values)
        return self.n_present - n_gone + sum(value is not None for value in values.values())

    # ------------------------------------------------------------- changes

    def change(self, values: Mapping[int, Bytes | None]) -> list[FileStep]:
        """Steps that give entries new values, or none; the file grows if it must.

        Without the steps this is not the state of the file any more: if one of them fails,
        set `is_valid` to false.
        """
        pieces = [value for value in values.values() if value]
        nbytes = sum(map(len, pieces))
        if self.fits(nbytes):
            start, new_index_start = self.data_end, self.index_start
        else:
            start = self.size
            n_left = self.shard.n_grid_entries - self.n_present
            mean = nbytes / len(pieces)
            gap = gap_nbytes(self.shard, n_left, mean, self.live_nbytes)
            new_index_start = start + nbytes + gap
        places: dict[int, tuple[int, int] | None] = {}
        offset = start
        for entry_id, value in values.items():
            places[entry_id] = None if value is None else (offset, len(value))
            offset += 0 if value is None else len(value)
        self.data_end = offset
        if new_index_start == self.index_start:
            return self.change_at(places, [(start, pieces)] if pieces else [])
        old_crc = self.crc
        self._set_entries(places)
        return self._steps_of_growth(old_crc, start, pieces, new_index_start)

    def change_at(
        self,
        places: Mapping[int, tuple[int, int] | None],
        data: Sequence[tuple[int, Sequence[Bytes]]],
        old_data: Sequence[tuple[int, bytes]] = (),
    ) -> list[FileStep]:
        """Steps that put entries at offsets, of so many bytes; ``None``: they will be missing.

        Parameters
        ----------
        data
            Offset and pieces of what is written before the index.
        old_data
            What of it overwrites entries: offset and bytes that are there.
        """
        data_end = self.data_end
        old_crc = self.crc
        old = self._set_entries(places)
        overwritten = None
        if old_data:
            new = {offset: b"".join(pieces) for offset, pieces in data}
            crc = crc32c.crc32c(b"".join(new[at][: len(was)] for at, was in old_data))
            overwritten = Overwritten(self.inode, crc, old_data)
        steps = self.journal_begun(data_end)
        change = Change(old_crc, self.crc, data_end, self.index_start, old, overwritten)
        record = encode_change(self._header, change)
        steps.append(WriteAt("journal", JOURNAL_HEADER_NBYTES, [record]))
        if old_data:
            steps.append(Barrier())
        for offset, pieces in data:
            steps.append(WriteAt("shard", offset, pieces))
            if self._is_at_start:
                self.size = max(self.size, offset + sum(map(len, pieces)))
        steps += [Barrier(), *self._index_writes(sorted(places)), Barrier()]
        if old_data:  # otherwise it would be taken back if another file got this inode
            nothing = Change(self.crc, self.crc, data_end, self.index_start, [])
            record = encode_change(self._header, nothing)
            steps.append(WriteAt("journal", JOURNAL_HEADER_NBYTES, [record]))
        return steps

    def _set_entries(self, places: Mapping[int, tuple[int, int] | None]) -> list[tuple[int, bytes]]:
        """Put places into the index; return what was there."""
        old = []
        body, pack = self.body, self._entry.pack_into
        for entry_id, place in places.items():
            at = entry_id * ENTRY_NBYTES
            before = self.entry(entry_id)
            old.append((entry_id, bytes(body[at : at + ENTRY_NBYTES])))
            if before is not None:
                self.live_nbytes -= before[1]
                self.n_present -= 1
            if place is None:
                pack(body, at, MISSING, MISSING)
                continue
            pack(body, at, *place)
            self.live_nbytes += place[1]
            self.n_present += 1
        self.crc = crc32c.crc32c(body)
        return old

    def _index_writes(self, entry_ids: Sequence[int]) -> list[FileStep]:
        """Writes of changed entries, then of the checksum."""
        runs = [[entry_ids[0], entry_ids[0] + 1]]
        for before, entry_id in pairwise(entry_ids):
            if (entry_id - before) * ENTRY_NBYTES <= _MAX_HOLE_NBYTES:
                runs[-1][1] = entry_id + 1
            else:
                runs.append([entry_id, entry_id + 1])
        steps: list[FileStep] = []
        for first, stop in runs:
            data = bytes(self.body[first * ENTRY_NBYTES : stop * ENTRY_NBYTES])
            steps.append(WriteAt("shard", self.index_start + first * ENTRY_NBYTES, [data]))
        if self._checksum:
            steps.append(WriteAt("shard", self.index_start + len(self.body), [self._checksum]))
        return steps

    def _steps_of_growth(
        self, old_crc: int, start: int, pieces: list[Bytes], new_index_start: int
    ) -> list[FileStep]:
        """The old index is not touched, so that the change can be taken back.

        The file gets its new size first: it ends in zeros then, and never in a value, which
        might itself end in an index, before it ends in the new one.
        """
        steps = self.journal_begun(self.index_start)
        record = encode_change(
            self._header, Change(old_crc, self.crc, self.data_end, new_index_start, [])
        )
        self.index_start = new_index_start
        self.size = new_index_start + len(self.body) + len(self._checksum)
        steps += [
            WriteAt("journal", JOURNAL_HEADER_NBYTES, [record]),
            Barrier(),
            Truncate("shard", self.size),
            WriteAt("shard", start, pieces),
            Barrier(),
            WriteAt("shard", new_index_start, [bytes(self.body), self._checksum]),
            Barrier(),
        ]
        self.has_journal = False  # the next change begins another, for the new place
        return steps

    def journal_begun(self, data_end: int) -> list[FileStep]:
        """Make the journal ours, and about the file as it is."""
        if self.has_journal:
            return []
        spec = self.shard.layout.spec
        self._header = JournalHeader(
            spec.index.checksum, spec.n_entries, self.owner, self.index_start, data_end
        ).encode()
        self.has_journal = True
        return [WriteAt("journal", 0, [self._header]), Barrier()]

    @property
    def _checksum(self) -> bytes:
        form = self.shard.layout.spec.index
        return self.crc.to_bytes(CHECKSUM_NBYTES, "little") if form.checksum else b""

    def trimmed(self) -> list[FileStep]:
        """Steps that end the journal and take away the gap, if it is not smaller than the index.

        A copy of the index is written behind the data, where it is dead bytes; then the file
        is cut there, at once, and ends in that copy.
        """
        # First: a journal that speaks of another place of the index might take it back.
        steps: list[FileStep] = [Truncate("journal", 0), Barrier()]
        self.has_journal = False
        nbytes = self.shard.layout.spec.index_nbytes
        if self.gap_nbytes >= nbytes:
            index = [bytes(self.body), self._checksum]
            self.index_start = self.data_end
            self.size = self.data_end + nbytes
            steps += [
                WriteAt("shard", self.index_start, index),
                Barrier(),
                Truncate("shard", self.size),
                Barrier(),
            ]
        return steps


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
