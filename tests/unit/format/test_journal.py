"""The journal of a shard that is changed in its place: its bytes, and what it makes whole again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import crc32c
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from zarr_shardstore.format.journal import (
    JOURNAL_HEADER_NBYTES,
    JOURNAL_STATE_OFFSET,
    Change,
    Journal,
    JournalHeader,
    Move,
    Repair,
    decode_journal,
    encode_record,
    find_repair,
)

ENTRY = 16
u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)

headers = st.builds(
    JournalHeader,
    has_checksum=st.booleans(),
    n_entries=u32,
    owner=u64,
    index_start=u64,
    data_end=u64,
    number=u32,
)
entry_bytes = st.binary(min_size=ENTRY, max_size=ENTRY)
changes = st.builds(
    Change,
    old_crc=u32,
    new_crc=u32,
    data_end=u64,
    entries=st.lists(st.tuples(u32, entry_bytes, entry_bytes), max_size=4),
) | st.builds(Move, crc=u32, index_start=u64)


def encode(header: JournalHeader, record: Change | Move) -> tuple[bytes, bytes]:
    head = header.encode()
    return head, encode_record(head, record)


# ----------------------------------------------------------------------------- bytes


def test_bytes_written_by_hand() -> None:
    """As the layout says: little endian, version 2, a checksum after each part."""
    header = JournalHeader(True, 3, 0x0102, 0x30, 0x20, 5)
    head = bytes.fromhex(
        "7a736a 82 03000000 0201000000000000 3000000000000000 2000000000000000 05000000"
    )
    head += crc32c.crc32c(head).to_bytes(4, "little")
    assert header.encode() == head
    assert len(head) == JOURNAL_HEADER_NBYTES
    old, new = b"0123456789abcdef", b"ABCDEFGHIJKLMNOP"
    records: list[tuple[Change | Move, str]] = [
        (
            Change(0xA1, 0xB2, 0x28, [(2, old, new)]),
            f"01000000 a1000000 b2000000 2800000000000000 02000000 {old.hex()} {new.hex()}",
        ),
        (Move(0xA1, 0x90), "00000080 a1000000 a1000000 0000000000000000 9000000000000000"),
    ]
    for made, by_hand in records:
        record = bytes.fromhex(by_hand)
        record += crc32c.crc32c(head[:-4] + record).to_bytes(4, "little")
        assert encode_record(head, made) == record
        assert decode_journal(head + record) == Journal(header, made)


@given(headers, changes, st.binary(max_size=40))
def test_round_trip(header: JournalHeader, change: Change, behind: bytes) -> None:
    """Law: decode(encode(journal)) == journal, whatever an older, longer change left behind it."""
    assert decode_journal(b"".join(encode(header, change)) + behind) == Journal(header, change)


@given(headers, changes, st.data())
def test_a_part_that_is_cut_is_not_there(
    header: JournalHeader, change: Change, data: st.DataObject
) -> None:
    """Any truncation: no header is no journal, no whole change is none."""
    journal = b"".join(encode(header, change))
    length = data.draw(st.integers(0, len(journal) - 1))
    if length < JOURNAL_HEADER_NBYTES:
        assert decode_journal(journal[:length]) is None
    else:
        assert decode_journal(journal[:length]) == Journal(header, None)


@given(headers, changes, st.data())
def test_a_flipped_bit_is_recognised(
    header: JournalHeader, change: Change, data: st.DataObject
) -> None:
    """Any bit: in the header there is no journal then, behind it no change."""
    journal = bytearray(b"".join(encode(header, change)))
    position = data.draw(st.integers(0, len(journal) - 1))
    journal[position] ^= 1 << data.draw(st.integers(0, 7))
    found = decode_journal(bytes(journal))
    assert found == (None if position < JOURNAL_HEADER_NBYTES else Journal(header, None))


@given(headers, changes, headers, changes, st.data())
def test_half_a_journal_over_another(
    old_header: JournalHeader,
    old_change: Change,
    header: JournalHeader,
    change: Change,
    data: st.DataObject,
) -> None:
    """While a header or a change replaces another, there is the old one, the new one, or none."""
    old_head, old_record = encode(old_header, old_change)
    head, record = encode(header, change)
    n = data.draw(st.integers(0, len(head)))
    torn = decode_journal(head[:n] + old_head[n:] + old_record)
    allowed = [None, Journal(old_header, old_change), Journal(header, None)]
    if head == old_head:
        allowed.append(Journal(header, old_change))
    assert torn in allowed

    older = encode_record(head, old_change)
    n = data.draw(st.integers(0, len(record)))
    torn = decode_journal(head + record[:n] + older[n:])
    assert torn is not None
    assert torn.record in (None, old_change, change)


@given(headers, changes, headers)
def test_a_change_behind_another_header_means_nothing(
    header: JournalHeader, change: Change, other: JournalHeader
) -> None:
    """It was about another file."""
    found = decode_journal(other.encode() + encode(header, change)[1])
    assert found == (Journal(other, change) if other == header else Journal(other, None))


@pytest.mark.parametrize("data", [b"", b"zsj", b"\0" * 200, b"zsj\x02" + b"\0" * 32])
def test_no_journal(data: bytes) -> None:
    """Nothing, zeros, another version."""
    assert decode_journal(data) is None


# -------------------------------------------------------------------------- data end


@given(headers, changes, u64)
def test_data_end(header: JournalHeader, record: Change | Move, index_start: int) -> None:
    """What the header says, or beyond: bytes of a change that was cut off may have been seen, and
    an index that moved stays where it was. Of an index in another place nothing is known."""
    ends: dict[int, int] = {header.index_start: header.data_end}
    if isinstance(record, Move):
        ends[record.index_start] = header.index_end
    else:
        ends[header.index_start] = record.data_end
    for place, data_end in ends.items():
        assert Journal(header, record).data_end_at(place) == data_end
    assert Journal(header, None).data_end_at(header.index_start) == header.data_end
    if index_start not in ends:
        assert Journal(header, record).data_end_at(index_start) is None


@given(headers, changes, u64, u32)
def test_a_record_means_nothing_in_the_next_state(
    header: JournalHeader, record: Change | Move, data_end: int, number: int
) -> None:
    """When a change is complete the state is rewritten, and the record is no part of it."""
    head, tail = encode(header, record)
    after = header._replace(data_end=data_end, number=number)
    expected = Journal(after, record if after == header else None)
    assert (
        decode_journal(head[:JOURNAL_STATE_OFFSET] + after.encode()[JOURNAL_STATE_OFFSET:] + tail)
        == expected
    )


# --------------------------------------------------------------------------- repairs


@dataclass
class Case:
    """A shard before and after a change of its index, and the journal of it."""

    journal: Journal
    before: bytes
    after: bytes
    index_start: int
    changed: list[int]

    @property
    def index_end(self) -> int:
        return self.journal.header.index_end

    def index_of(self, shard: bytes) -> bytes:
        return shard[self.index_start : self.index_end]


def stored(body: bytes, has_checksum: bool) -> bytes:
    return body + crc32c.crc32c(body).to_bytes(4, "little") * has_checksum


@st.composite
def cases(draw: st.DrawFn, location: Any = None) -> Case:
    has_checksum = draw(st.booleans())
    n = draw(st.integers(1, 6))
    location = location or draw(st.sampled_from(["start", "end"]))
    old = draw(st.binary(min_size=n * ENTRY, max_size=n * ENTRY))
    changed = draw(st.lists(st.integers(0, n - 1), min_size=1, unique=True))
    new = bytearray(old)
    for i in changed:
        new[i * ENTRY : (i + 1) * ENTRY] = draw(st.binary(min_size=ENTRY, max_size=ENTRY))
    values = draw(st.binary(max_size=20))
    index_start = 0 if location == "start" else len(values)
    data_end = draw(st.integers(0, len(values)))
    header = JournalHeader(has_checksum, n, draw(u64), index_start, data_end, 0)
    places = [(i, slice(i * ENTRY, (i + 1) * ENTRY)) for i in changed]
    entries = [(i, old[place], bytes(new[place])) for i, place in places]
    change = Change(crc32c.crc32c(old), crc32c.crc32c(new), data_end, entries)
    found = decode_journal(b"".join(encode(header, change)))
    assert found is not None

    def shard(body: bytes) -> bytes:
        index = stored(body, has_checksum)
        return index + values if location == "start" else values + index

    return Case(found, shard(old), shard(bytes(new)), index_start, changed)


def repair_of(journal: Journal | None, shard: bytes) -> Repair | None:
    return find_repair(journal, len(shard), lambda at, n: shard[at : at + n])


def repaired(shard: bytes, repair: Repair | None) -> bytes:
    if repair is None:
        return shard
    data = bytearray(shard)
    for offset, new in repair.writes:
        assert offset + len(new) <= len(data)
        data[offset : offset + len(new)] = new
    return bytes(data) if repair.size is None else bytes(data[: repair.size])


def masks(case: Case) -> st.SearchStrategy[list[bool]]:
    n = len(case.index_of(case.before))
    return st.lists(st.booleans(), min_size=n, max_size=n)


def mixed(case: Case, mask: list[bool]) -> bytes:
    """The shard with those bytes of the new index that the mask says."""
    data = bytearray(case.before)
    for i, is_new in enumerate(mask):
        if is_new:
            data[case.index_start + i] = case.after[case.index_start + i]
    return bytes(data)


@given(cases(), st.data())
def test_every_prefix_of_the_index_is_made_whole(case: Case, data: st.DataObject) -> None:
    """Law: after each byte of the new index the repair gives exactly the old or the new one; the
    old one before the first byte, the new one from the last byte of its entries on."""
    n = len(case.index_of(case.before))
    body = case.journal.header.index_nbytes
    for n_new in range(n + 1):
        torn = mixed(case, [True] * n_new + [False] * (n - n_new))
        whole = repaired(torn, repair_of(case.journal, torn))
        assert whole in (case.before, case.after)
        if n_new == 0:
            assert whole == case.before
        if n_new >= body:
            assert whole == case.after


@given(cases(), st.data())
def test_any_bytes_of_the_index_are_made_whole(case: Case, data: st.DataObject) -> None:
    """Also if the power failed, and any of its bytes are old or new."""
    n = len(case.index_of(case.before))
    torn = mixed(case, data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    assert repaired(torn, repair_of(case.journal, torn)) in (case.before, case.after)


@given(cases(), st.data())
def test_a_repair_that_is_cut_off_is_done_again(case: Case, data: st.DataObject) -> None:
    """Law: after any part of a repair, the next one gives what the first would have given."""
    n = len(case.index_of(case.before))
    torn = mixed(case, data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    repair = repair_of(case.journal, torn)
    whole = repaired(torn, repair)
    assert repair_of(case.journal, whole) is None
    if repair is not None:
        n_whole = data.draw(st.integers(0, len(repair.writes) - 1))
        offset, new = repair.writes[n_whole]
        n_bytes = data.draw(st.integers(0, len(new)))
        half = Repair([*repair.writes[:n_whole], (offset, new[:n_bytes])])
        again = repaired(torn, half)
        assert repaired(again, repair_of(case.journal, again)) == whole


@given(cases(), st.data())
def test_another_state_is_left_alone(case: Case, data: st.DataObject) -> None:
    """An index that differs where the change did nothing, a file of another size: nothing is
    done. Nor without a change, nor without a journal."""
    torn = case.after
    assert repair_of(None, torn) is None
    assert repair_of(case.journal._replace(record=None), torn) is None
    others = sorted(set(range(case.journal.header.n_entries)) - set(case.changed))
    if others:
        entry_id = data.draw(st.sampled_from(others))
        shard = bytearray(data.draw(st.sampled_from([case.before, case.after])))
        position = case.index_start + entry_id * ENTRY + data.draw(st.integers(0, ENTRY - 1))
        shard[position] ^= 1 + data.draw(st.integers(0, 254))
        assert repair_of(case.journal, bytes(shard)) is None
    shorter = case.after[: data.draw(st.integers(0, len(case.after) - 1))]
    if case.index_start or len(shorter) < case.index_end:
        assert repair_of(case.journal, shorter) is None
    if case.index_start:
        assert repair_of(case.journal, case.after + b"\0") is None


@given(cases(), st.data())
def test_foreign_bytes_are_left_alone(case: Case, data: st.DataObject) -> None:
    """Where the change would put an entry there are bytes which are neither the old ones nor the
    new ones, or the checksum of the index is right: another program has been there."""
    shard = bytearray(mixed(case, data.draw(masks(case))))
    entry_id = data.draw(st.sampled_from(case.changed))
    position = case.index_start + entry_id * ENTRY + data.draw(st.integers(0, ENTRY - 1))
    foreign = data.draw(st.integers(0, 255))
    if foreign not in (case.before[position], case.after[position]):
        shard[position] = foreign
        assert repair_of(case.journal, bytes(shard)) is None
    header = case.journal.header
    if header.has_checksum:
        end = header.index_start + header.index_nbytes
        shard[end : header.index_end] = stored(bytes(shard[header.index_start : end]), True)[-4:]
        assert repair_of(case.journal, bytes(shard)) is None


# ------------------------------------------------------------------------------ move


@st.composite
def moves(draw: st.DrawFn) -> tuple[Journal, bytes, bytes]:
    """A journal of an index that moves, the shard before and after."""
    case = draw(cases("end"))
    index = case.index_of(case.before)
    after = case.before + b"\0" * draw(st.integers(0, 20)) + index
    crc = crc32c.crc32c(index[: case.journal.header.index_nbytes])
    journal = Journal(case.journal.header, Move(crc, len(after) - len(index)))
    return journal, case.before, after


@given(moves(), st.data())
def test_a_move_is_undone_or_finished(
    move: tuple[Journal, bytes, bytes], data: st.DataObject
) -> None:
    """Law: whatever part of the moved index is there, the repair leaves the index before or after
    the move; both say the same. Also if the power failed, and any bytes are zeros."""
    journal, before, after = move
    assert repair_of(journal, before) is None
    assert repair_of(journal, after) is None
    cut = after[: data.draw(st.integers(len(before) + 1, len(after)))]
    for position in data.draw(st.lists(st.integers(len(before), len(cut) - 1))):
        cut = cut[:position] + b"\0" + cut[position + 1 :]
    assert repaired(cut, repair_of(journal, cut)) in (before, after)


@given(moves(), st.data())
def test_a_move_of_another_state_is_left_alone(
    move: tuple[Journal, bytes, bytes], data: st.DataObject
) -> None:
    """A file of another size, without the old index where it was, or with another whole index."""
    journal, before, after = move
    assert repair_of(journal, after + b"\0") is None
    assert repair_of(journal, before[:-1]) is None
    torn = bytearray(before + b"\0" * (len(after) - len(before)))
    start, nbytes = journal.header.index_start, journal.header.stored_nbytes
    position = start + data.draw(st.integers(0, nbytes - 1))
    other = bytes(torn[:position]) + bytes([torn[position] ^ 0x10]) + bytes(torn[position + 1 :])
    assert repair_of(journal, other) is None
    if journal.header.has_checksum:
        n = journal.header.index_nbytes
        other = bytes(torn[:-nbytes]) + stored(data.draw(st.binary(min_size=n, max_size=n)), True)
        assert repair_of(journal, other) is None


@given(moves(), st.data())
def test_another_file_without_checksum_is_left_alone(
    move: tuple[Journal, bytes, bytes], data: st.DataObject
) -> None:
    """It has the old index where that was, and a byte that is not of the copy after it."""
    journal, before, after = move
    assume(not journal.header.has_checksum)
    other = bytearray(after[: data.draw(st.integers(len(before) + 1, len(after)))])
    at = data.draw(st.integers(len(before), len(other) - 1))
    other[at] = data.draw(st.integers(1, 255).filter(lambda byte: byte != after[at]))
    assert repair_of(journal, bytes(other)) is None


@pytest.mark.parametrize("values", [b"", b"v", b"values"])
@pytest.mark.parametrize("has_checksum", [True, False])
def test_a_torn_change_is_undone_in_a_file_of_its_size_only(
    values: bytes, has_checksum: bool
) -> None:
    """Before an index at the end: another program has appended, or cut the file. An index at the
    start has the values behind it, which may be more."""
    old, new = b"\1" * ENTRY, b"\2" * ENTRY
    header = JournalHeader(has_checksum, 1, 9, len(values), len(values), 0)
    change = Change(crc32c.crc32c(old), crc32c.crc32c(new), len(values), [(0, old, new)])
    journal = decode_journal(b"".join(encode(header, change)))
    torn = values + b"\2" * 7 + stored(old, has_checksum)[7:]
    whole = Repair([(len(values), old)])
    assert repair_of(journal, torn) == whole
    assert repair_of(journal, torn + b"more") == (None if values else whole)
    assert repair_of(journal, torn[:-1]) is None


@pytest.mark.parametrize("has_checksum", [True, False])
@pytest.mark.parametrize("gap", [0, 5])
def test_a_moved_index_is_whole_or_cut_off(has_checksum: bool, gap: int) -> None:
    """Also if the file has its new size already, and bytes of the copy are zeros."""
    body = b"\1" * ENTRY
    index = stored(body, has_checksum)
    header = JournalHeader(has_checksum, 1, 9, 3, 3, 0)
    before = b"abc" + index
    move = Move(crc32c.crc32c(body), len(before) + gap)
    journal = Journal(header, move)
    after = before + bytes(gap) + index
    assert repair_of(journal, after) is None
    cut = Repair(size=len(before))
    for torn in (after[:-1], after[:-1] + b"\0", before + bytes(len(after) - len(before))):
        assert repair_of(journal, torn) == cut
    assert repair_of(journal, after + b"\0") is None
    assert repair_of(journal, before) is None
