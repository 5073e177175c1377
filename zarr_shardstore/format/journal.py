"""Journal of a shard file that is being appended to: it undoes a change that was cut off.

::

    ┌ header ──────────────────────────────────────────────────────────────┬ record ──┐
    │ magic, flags, n_entries │ owner │ index start │ data end │ number │crc│ … │ crc │
    └──────────────────────────────────────────────── state ───────────────┴──────────┘

    change    │ 0, n │ old crc │ new crc │ data end │ n × (entry id, old entry, new entry) │
    move      │ 1, 0 │     crc │     crc │ data end │ new index start                      │

The journal is a file of its own, there from the first change in the shard file until the seal.

1. The record is written before the shard is touched, and its checksum covers the header. When the
   shard is whole again, the state is rewritten with the next number, which ends the record. So a
   record exists only while a change is under way, or if its writer was killed.
2. An index with a right checksum is whole, whatever a record says: the change stays.
3. A change is undone only if each byte of its entries is the old one or the new one. The old bytes
   must give the checksum of the old index. Other bytes come from another writer.
4. A move copies the index to another place, before the gap has any data. Cutting the file after
   the old place undoes the move, and keeps the index there. Without a checksum each byte after the
   old place must be a zero or of the copy. Other bytes come from another writer.
5. A half-written part has a wrong checksum and counts as none. The shard was not touched yet.

Source: SQLite, "Atomic Commit In SQLite", section 3 (the rollback journal). The layout is ours.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from zarr_shardstore.format import checksum
from zarr_shardstore.format.shard import CHECKSUM_NBYTES, ENTRY_NBYTES

_MAGIC = b"zsj"
_VERSION = 2
_FILE = struct.Struct("<3sBIQQ")
_STATE = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_RECORD = struct.Struct("<IIIQ")
_READ_NBYTES = 1 << 20  # of a gap at a time
_IS_MOVE = 1 << 31
"""Flag of a move, in the field that has the number of changed entries of a change."""

_INDEX_START = struct.Struct("<Q")
_CHANGED_ENTRY = struct.Struct(f"<I{ENTRY_NBYTES}s{ENTRY_NBYTES}s")

JOURNAL_STATE_OFFSET = _FILE.size
"""Offset of the state and its checksum."""

JOURNAL_HEADER_NBYTES = _FILE.size + _STATE.size + _CRC.size

ReadAt = Callable[[int, int], bytes]
"""Reader of bytes of the shard at an offset, fewer where the shard ends."""


class JournalHeader(NamedTuple):
    """Form and state of the shard of a journal, and its last writer."""

    has_checksum: bool
    n_entries: int
    owner: int
    """Number of the writer that changed the shard last, and knows its index."""
    index_start: int
    """Offset of the index in the shard, in bytes."""
    data_end: int
    """Offset after the last byte that an entry ever used; the gap begins here."""
    number: int
    """Number of the state of the shard. Each change makes the next one, modulo 2³²."""

    @property
    def index_nbytes(self) -> int:
        """Bytes of the index, without its checksum."""
        return self.n_entries * ENTRY_NBYTES

    @property
    def stored_nbytes(self) -> int:
        """Bytes of the index and its checksum."""
        return self.index_nbytes + CHECKSUM_NBYTES * self.has_checksum

    @property
    def index_end(self) -> int:
        return self.index_start + self.stored_nbytes

    def encode(self) -> bytes:
        """Return the `JOURNAL_HEADER_NBYTES` bytes of the header."""
        version = _VERSION | self.has_checksum << 7
        data = _FILE.pack(_MAGIC, version, self.n_entries, self.owner, self.index_start)
        data += _STATE.pack(self.data_end, self.number)
        return data + _CRC.pack(checksum.crc32c(data))


ChangedEntry: TypeAlias = tuple[int, bytes, bytes]
"""Entry id, and the bytes of the entry in the index before and after."""


class Change(NamedTuple):
    """Record of a change: crc32c of all entries before and after, `data_end` after the change."""

    old_crc: int
    new_crc: int
    data_end: int
    entries: Sequence[ChangedEntry]


class Move(NamedTuple):
    """Record of a move of the index: crc32c of all entries, and the new offset in bytes."""

    crc: int
    index_start: int


class Journal(NamedTuple):
    """A header, and the record of the change that is under way, or was cut off."""

    header: JournalHeader
    record: Change | Move | None

    def data_end_at(self, index_start: int) -> int | None:
        """Return `data_end` of a shard with its index at an offset; ``None`` if unknown."""
        header, record = self.header, self.record
        if isinstance(record, Move) and index_start == record.index_start:
            return header.index_end
        if index_start != header.index_start:
            return None
        # Without a checksum, a reader may have seen the entries of a change that was cut off.
        return record.data_end if isinstance(record, Change) else header.data_end


class Repair(NamedTuple):
    """Writes that make a shard whole after its last change was cut off."""

    writes: Sequence[tuple[int, bytes]] = ()
    """Offset and bytes of each write."""
    size: int | None = None
    """Size in bytes to which the file is cut."""


def encode_record(header: bytes, record: Change | Move) -> bytes:
    """Return the bytes of a record, which counts after this header only."""
    if isinstance(record, Move):
        data = _RECORD.pack(_IS_MOVE, record.crc, record.crc, 0)
        data += _INDEX_START.pack(record.index_start)
    else:
        n, fixed = len(record.entries), (record.old_crc, record.new_crc, record.data_end)
        data = _RECORD.pack(n, *fixed)
        data += b"".join([_CHANGED_ENTRY.pack(*entry) for entry in record.entries])
    return data + _CRC.pack(_checksum_of_record(header, data))


def _checksum_of_record(header: bytes, data: bytes | memoryview) -> int:
    # The header counts without its checksum: bytes that end in their checksum all give one number.
    return checksum.crc32c(data, checksum.crc32c(header[: -_CRC.size]))


def decode_journal(data: bytes) -> Journal | None:
    """Decode a journal; ``None`` for an unfinished header or another version."""
    head = data[:JOURNAL_HEADER_NBYTES]
    if len(head) < JOURNAL_HEADER_NBYTES:
        return None
    magic, version, n_entries, owner, index_start = _FILE.unpack_from(head)
    data_end, number = _STATE.unpack_from(head, JOURNAL_STATE_OFFSET)
    (crc,) = _CRC.unpack(head[-_CRC.size :])
    is_ours = magic == _MAGIC and version & 0x7F == _VERSION
    if not is_ours or crc != checksum.crc32c(head[: -_CRC.size]):
        return None
    header = JournalHeader(bool(version >> 7), n_entries, owner, index_start, data_end, number)
    return Journal(header, _decode_record(head, memoryview(data)[JOURNAL_HEADER_NBYTES:]))


def _decode_record(header: bytes, data: memoryview) -> Change | Move | None:
    if len(data) < _RECORD.size:
        return None
    n_entries, old_crc, new_crc, data_end = _RECORD.unpack_from(data)
    is_move = n_entries == _IS_MOVE
    end = _RECORD.size + (_INDEX_START.size if is_move else n_entries * _CHANGED_ENTRY.size)
    if len(data) < end + _CRC.size:
        return None
    (crc,) = _CRC.unpack_from(data, end)
    if crc != _checksum_of_record(header, data[:end]):
        return None
    if is_move:
        return Move(old_crc, *_INDEX_START.unpack_from(data, _RECORD.size))
    entries = list(_CHANGED_ENTRY.iter_unpack(data[_RECORD.size : end]))
    return Change(old_crc, new_crc, data_end, entries)


def find_repair(journal: Journal | None, size: int, read: ReadAt) -> Repair | None:
    """Return the repair of a shard of `size` bytes whose last change may have been cut off. It
    finishes a change whose entries are all stored, and undoes any other. ``None`` if the shard is
    whole, or has other bytes than the change left."""
    if journal is None or journal.record is None:
        return None
    header, record = journal.header, journal.record
    if isinstance(record, Move):
        return _repair_of_move(header, record, size, read)
    if size < header.index_end or (header.index_start > 0 and size != header.index_end):
        return None
    stored = read(header.index_start, header.stored_nbytes)
    body = bytearray(stored[: header.index_nbytes])
    crc = checksum.crc32c(body)
    if header.has_checksum and stored[len(body) :] == _CRC.pack(crc):
        return None
    writes: list[tuple[int, bytes]] = []
    if crc not in (record.old_crc, record.new_crc):
        for entry_id, old, new in record.entries:
            offset = entry_id * ENTRY_NBYTES
            found = body[offset : offset + ENTRY_NBYTES]
            triples = zip(found, old, new, strict=True)
            if len(found) < ENTRY_NBYTES or any(b not in (o, n) for b, o, n in triples):
                return None  # rule 3
            body[offset : offset + ENTRY_NBYTES] = old
            writes.append((header.index_start + offset, old))
        crc = checksum.crc32c(body)
        if crc != record.old_crc:
            return None
    if header.has_checksum and stored[len(body) :] != _CRC.pack(crc):
        writes.append((header.index_start + len(body), _CRC.pack(crc)))
    return Repair(writes) if writes else None


def _repair_of_move(header: JournalHeader, move: Move, size: int, read: ReadAt) -> Repair | None:
    """Cut the file after the old place of the index, unless the copy is whole."""
    moved_end = move.index_start + header.stored_nbytes
    if not header.index_end < size <= moved_end:
        return None
    index = read(header.index_start, header.stored_nbytes)
    expected = _CRC.pack(move.crc) if header.has_checksum else b""
    if checksum.crc32c(index[: header.index_nbytes]) != move.crc:
        return None
    if index[header.index_nbytes :] != expected:
        return None
    copy = read(move.index_start, header.stored_nbytes)
    if copy == index:
        return None
    if header.has_checksum:  # another program may have written a whole index at the end
        last = read(size - header.stored_nbytes, header.stored_nbytes)
        body = last[: header.index_nbytes]
        if last[len(body) :] == _CRC.pack(checksum.crc32c(body)):
            return None
    elif any(byte not in (0, new) for byte, new in zip(copy, index, strict=False)):
        return None
    else:
        gap_end = min(size, move.index_start)
        for start in range(header.index_end, gap_end, _READ_NBYTES):
            gap = read(start, min(_READ_NBYTES, gap_end - start))
            if gap.count(0) < len(gap):
                return None
    return Repair(size=header.index_end)
