"""The journal of a shard that is changed in its place: what its index was before the last change.

::

    ┌ header ────────────────────────────────────────────────────┬ last change ─────────────┐
    │ magic, flags, n_entries │ owner │ index start │ data end │crc│ … │ old entries │ crc  │
    └────────────────────────────────────────────────────────────┴──────────────────────────┘

It is a file beside the shard, there from the first change in place until the shard is sealed.
Whoever changes the shard first writes here what its index was. A change that was cut off is
found by the checksums of the index before and after, which stand here, too, so that a journal
that belongs to another state of the shard does nothing. Nothing of it is ever removed for a
change that succeeded: it costs one write.

A part that is half written has a wrong checksum and counts as not there; the shard was not
touched yet when it was written.

Source: SQLite, "Atomic Commit In SQLite", section 3 (the rollback journal). The layout is ours.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import crc32c

from zarr_shardstore.format.index import CHECKSUM_NBYTES, ENTRY_NBYTES

__all__ = [
    "JOURNAL_HEADER_NBYTES",
    "Change",
    "Journal",
    "JournalHeader",
    "Overwritten",
    "Repair",
    "decode_journal",
    "encode_change",
    "find_repair",
]

_MAGIC = b"zsj"
_VERSION = 1
_HEADER = struct.Struct("<3sBIQQQ")
_CRC = struct.Struct("<I")
_CHANGE = struct.Struct("<IIIQ")
_MOVES, _OVERWRITES = 1 << 30, 1 << 31
"""Besides the number of old entries: what else there is. A record of neither is written most."""

_INDEX_START = struct.Struct("<Q")
_OLD_ENTRY = struct.Struct(f"<I{ENTRY_NBYTES}s")
_OVERWRITTEN = struct.Struct("<QIQI")
_OLD_DATA = struct.Struct("<QI")

JOURNAL_HEADER_NBYTES = _HEADER.size + _CRC.size

ReadAt = Callable[[int, int], bytes]
"""Bytes of the shard from an offset on, that many; fewer where it ends."""


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """Which shard file a journal is about, and who changed it last.

    Parameters
    ----------
    has_checksum
        Whether four bytes of crc32c follow the index.
    n_entries
        Entries of the shard.
    owner
        Whoever has this number here knows the index of the shard as it is.
    index_start
        Offset of the index in the shard, in bytes.
    data_end
        No byte from here on, up to the index, was ever used by an entry.
    """

    has_checksum: bool
    n_entries: int
    owner: int
    index_start: int
    data_end: int

    @property
    def index_nbytes(self) -> int:
        """Bytes of the index, without its checksum."""
        return self.n_entries * ENTRY_NBYTES

    @property
    def index_end(self) -> int:
        """Where the index and its checksum end."""
        return self.index_start + self.index_nbytes + CHECKSUM_NBYTES * self.has_checksum

    def encode(self) -> bytes:
        """Its bytes, `JOURNAL_HEADER_NBYTES` of them."""
        version = _VERSION | self.has_checksum << 7
        fields = self.n_entries, self.owner, self.index_start, self.data_end
        data = _HEADER.pack(_MAGIC, version, *fields)
        return data + _CRC.pack(crc32c.crc32c(data))


@dataclass(frozen=True, slots=True)
class Overwritten:
    """Bytes of entries that a change overwrites.

    Parameters
    ----------
    inode
        Of the file. The checksum of an index does not tell two files apart that differ in
        their entries only.
    new_crc
        crc32c of all these places, one after the other, after the change.
    old_data
        Offset and bytes of each place before it.
    """

    inode: int
    new_crc: int
    old_data: Sequence[tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class Change:
    """What the index was before a change, and how to recognise it afterwards.

    Parameters
    ----------
    old_crc, new_crc
        crc32c of all bytes of the index, before and after.
    data_end
        As in the header, after the change.
    new_index_start
        Where the index is after the change: elsewhere, if the file grew.
    old_entries
        Number and index bytes of each entry that changes; none if the index moves, because
        the old one stays where it is.
    overwritten
        What is overwritten besides, if anything is.
    """

    old_crc: int
    new_crc: int
    data_end: int
    new_index_start: int
    old_entries: Sequence[tuple[int, bytes]]
    overwritten: Overwritten | None = None


@dataclass(frozen=True, slots=True)
class Journal:
    """A header, and the last change if there was one since.

    Parameters
    ----------
    is_cut
        Whether something is behind the header that is no change of it: half of one, perhaps.
    """

    header: JournalHeader
    change: Change | None
    is_cut: bool = False

    def data_end_at(self, index_start: int) -> int | None:
        """`data_end` of a shard that is whole, and whose index is there; ``None``: not known.

        What the header says is that of the first change. After half of a change, or growth that
        was taken back, nobody knows how many changes there were before.
        """
        if self.is_cut:
            return None
        if self.change is not None:
            is_there = index_start == self.change.new_index_start
            return self.change.data_end if is_there else None
        return self.header.data_end if index_start == self.header.index_start else None


@dataclass(frozen=True, slots=True)
class Repair:
    """What makes a shard whole whose last change was cut off.

    Parameters
    ----------
    writes
        Offset and bytes of each write.
    size
        Size of the file in bytes, if it must be cut.
    """

    writes: Sequence[tuple[int, bytes]] = ()
    size: int | None = None


def encode_change(header: bytes, change: Change) -> bytes:
    """Bytes that follow the header in the journal; they mean nothing behind another one."""
    moves = change.new_index_start != _index_start_of(header)
    flags = _MOVES * moves | _OVERWRITES * (change.overwritten is not None)
    fixed = change.old_crc, change.new_crc, change.data_end
    data = b"".join(
        [
            _CHANGE.pack(len(change.old_entries) | flags, *fixed),
            _INDEX_START.pack(change.new_index_start) if moves else b"",
            *(_OLD_ENTRY.pack(*old) for old in change.old_entries),
            *([] if change.overwritten is None else _encode_overwritten(change.overwritten)),
        ]
    )
    return data + _CRC.pack(_checksum_of_change(header, data))


def _checksum_of_change(header: bytes, data: bytes | memoryview) -> int:
    # From the fields on: the checksum of bytes that end in their own is always the same number.
    return crc32c.crc32c(data, crc32c.crc32c(header[: _HEADER.size]))


def _index_start_of(header: bytes) -> int:
    start: int = _HEADER.unpack(header[: _HEADER.size])[4]
    return start


def _encode_overwritten(overwritten: Overwritten) -> Iterator[bytes]:
    nbytes = sum(_OLD_DATA.size + len(old) for _, old in overwritten.old_data)
    n_places = len(overwritten.old_data)
    yield _OVERWRITTEN.pack(overwritten.inode, overwritten.new_crc, nbytes, n_places)
    for offset, old in overwritten.old_data:
        yield _OLD_DATA.pack(offset, len(old))
        yield old


def decode_journal(data: bytes) -> Journal | None:
    """The journal; ``None`` if it was not begun, or is that of another version."""
    head = data[:JOURNAL_HEADER_NBYTES]
    if len(head) < JOURNAL_HEADER_NBYTES:
        return None
    fields, (crc,) = head[: _HEADER.size], _CRC.unpack(head[_HEADER.size :])
    magic, version, n_entries, owner, index_start, data_end = _HEADER.unpack(fields)
    if magic != _MAGIC or version & 0x7F != _VERSION or crc != crc32c.crc32c(fields):
        return None
    header = JournalHeader(bool(version >> 7), n_entries, owner, index_start, data_end)
    change = _decode_change(head, memoryview(data)[JOURNAL_HEADER_NBYTES:])
    return Journal(header, change, change is None and len(data) > JOURNAL_HEADER_NBYTES)


def _decode_change(header: bytes, data: memoryview) -> Change | None:
    if len(data) < _CHANGE.size:
        return None
    n_old, old_crc, new_crc, data_end = _CHANGE.unpack(data[: _CHANGE.size])
    start = _CHANGE.size
    new_index_start = _index_start_of(header)
    if n_old & _MOVES:
        if len(data) < start + _INDEX_START.size:
            return None
        (new_index_start,) = _INDEX_START.unpack(data[start : start + _INDEX_START.size])
        start += _INDEX_START.size
    end = entries_end = start + (n_old & ~(_MOVES | _OVERWRITES)) * _OLD_ENTRY.size
    if n_old & _OVERWRITES:
        end += _OVERWRITTEN.size
        if len(data) < end:
            return None
        inode, overwritten_crc, nbytes, n_places = _OVERWRITTEN.unpack(data[entries_end:end])
        end += nbytes
    if len(data) < end + _CRC.size:
        return None
    (crc,) = _CRC.unpack(data[end : end + _CRC.size])
    if crc != _checksum_of_change(header, data[:end]):
        return None
    old_entries = list(_OLD_ENTRY.iter_unpack(data[start:entries_end]))
    overwritten = None
    if n_old & _OVERWRITES:
        places = data[entries_end + _OVERWRITTEN.size : end]
        overwritten = Overwritten(inode, overwritten_crc, list(_decode_old_data(places, n_places)))
    return Change(old_crc, new_crc, data_end, new_index_start, old_entries, overwritten)


def _decode_old_data(data: memoryview, n_places: int) -> Iterator[tuple[int, bytes]]:
    for _ in range(n_places):
        offset, nbytes = _OLD_DATA.unpack(data[: _OLD_DATA.size])
        data = data[_OLD_DATA.size :]
        yield offset, bytes(data[:nbytes])
        data = data[nbytes:]


def find_repair(journal: Journal | None, size: int, read: ReadAt, inode: int = 0) -> Repair | None:
    """What is to be done with a shard whose last change may have been cut off.

    A change whose index is stored as a whole is finished, any other taken back.

    Parameters
    ----------
    size
        Size of the shard in bytes.
    inode
        Of its file.

    Returns
    -------
    Repair or None
        ``None`` if the shard is whole, as far as the journal knows.
    """
    if journal is None or journal.change is None:
        return None
    header, change = journal.header, journal.change
    if change.new_index_start != header.index_start:
        return _repair_of_growth(header, change, size, read)
    if size < header.index_end or (header.index_start > 0 and size != header.index_end):
        return None  # another state of the shard
    body = bytearray(read(header.index_start, header.index_nbytes))
    crc = crc32c.crc32c(body)
    writes: list[tuple[int, bytes]] = []
    expected: tuple[int, ...] = (change.old_crc, change.new_crc)
    if change.overwritten is not None:
        if change.overwritten.inode != inode:
            return None
        if not (crc == change.new_crc and _is_overwritten(change.overwritten, read)):
            writes += change.overwritten.old_data
            expected = (change.old_crc,)
    if crc not in expected:
        for entry_id, old in change.old_entries:
            offset = entry_id * ENTRY_NBYTES
            body[offset : offset + ENTRY_NBYTES] = old
            writes.append((header.index_start + offset, old))
        crc = change.old_crc
        if crc32c.crc32c(body) != crc:
            return None  # of another state
    writes += _checksum_write(header, header.index_start, crc, read)
    return Repair(writes) if writes else None


def _is_overwritten(overwritten: Overwritten, read: ReadAt) -> bool:
    """Whether all new bytes are there."""
    crc = 0
    for offset, old in overwritten.old_data:
        crc = crc32c.crc32c(read(offset, len(old)), crc)
    return crc == overwritten.new_crc


def _repair_of_growth(
    header: JournalHeader, change: Change, size: int, read: ReadAt
) -> Repair | None:
    """The old index was not touched: what is behind it is taken away, or the new one valid."""
    grown_size = change.new_index_start + header.index_end - header.index_start
    if not header.index_end < size <= grown_size:
        return None
    if size == grown_size:
        body = read(change.new_index_start, header.index_nbytes)
        if crc32c.crc32c(body) == change.new_crc:
            writes = _checksum_write(header, change.new_index_start, change.new_crc, read)
            return Repair(writes) if writes else None
    if crc32c.crc32c(read(header.index_start, header.index_nbytes)) != change.old_crc:
        return None
    return Repair(size=header.index_end)


def _checksum_write(
    header: JournalHeader, index_start: int, crc: int, read: ReadAt
) -> list[tuple[int, bytes]]:
    """The write of the checksum behind the index, if it is to be written."""
    if not header.has_checksum:
        return []
    offset, checksum = index_start + header.index_nbytes, crc.to_bytes(CHECKSUM_NBYTES, "little")
    return [] if read(offset, CHECKSUM_NBYTES) == checksum else [(offset, checksum)]
