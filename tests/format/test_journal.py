"""The journal of a shard that is changed in its place: its bytes, and what it makes whole again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore.format.journal import (
    JOURNAL_HEADER_NBYTES,
    Change,
    Journal,
    JournalHeader,
    Overwritten,
    Repair,
    decode_journal,
    encode_change,
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
)
changes = st.builds(
    Change,
    old_crc=u32,
    new_crc=u32,
    data_end=u64,
    new_index_start=u64,
    old_entries=st.lists(st.tuples(u32, st.binary(min_size=ENTRY, max_size=ENTRY)), max_size=4),
    overwritten=st.none()
    | st.builds(
        Overwritten,
        inode=u64,
        new_crc=u32,
        old_data=st.lists(st.tuples(u64, st.binary(max_size=9)), min_size=1, max_size=3),
    ),
)


def encode(header: JournalHeader, change: Change) -> tuple[bytes, bytes]:
    head = header.encode()
    return head, encode_change(head, change)


# ----------------------------------------------------------------------------- bytes


def test_bytes_written_by_hand() -> None:
    """As the layout says: little endian, version 1, a checksum after each part."""
    header = JournalHeader(True, 3, 0x0102, 0x30, 0x20)
    head = bytes.fromhex(
        "7a736a 81 03000000 0201000000000000 3000000000000000 2000000000000000".replace(" ", "")
    )
    head += crc32c.crc32c(head).to_bytes(4, "little")
    assert header.encode() == head
    assert len(head) == JOURNAL_HEADER_NBYTES
    change = Change(0xA1, 0xB2, 0x28, 0x30, [(2, b"0123456789abcdef")])
    numbers = "a1000000 b2000000 2800000000000000"
    entry = "02000000" + b"0123456789abcdef".hex()
    overwritten = replace(change, overwritten=Overwritten(0x77, 0xC3, [(0x10, b"xyz")]))
    old_data = "7700000000000000 c3000000 0f00000000000000 01000000 1000000000000000 03000000"
    for made, by_hand in [
        (change, f"01000000 {numbers} {entry}"),
        (
            replace(change, new_index_start=0x90),
            f"01000040 {numbers} 9000000000000000 {entry}",
        ),
        (overwritten, f"01000080 {numbers} {entry} {old_data} 78797a"),
    ]:
        record = bytes.fromhex(by_hand)
        record += crc32c.crc32c(head[:-4] + record).to_bytes(4, "little")
        assert encode_change(head, made) == record
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
        is_cut = length > JOURNAL_HEADER_NBYTES
        assert decode_journal(journal[:length]) == Journal(header, None, is_cut)


@given(headers, changes, st.data())
def test_a_flipped_bit_is_recognised(
    header: JournalHeader, change: Change, data: st.DataObject
) -> None:
    """Any bit: in the header there is no journal then, behind it no change."""
    journal = bytearray(b"".join(encode(header, change)))
    position = data.draw(st.integers(0, len(journal) - 1))
    journal[position] ^= 1 << data.draw(st.integers(0, 7))
    found = decode_journal(bytes(journal))
    assert found == (None if position < JOURNAL_HEADER_NBYTES else Journal(header, None, True))


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
    allowed = [None, Journal(old_header, old_change), Journal(header, None, True)]
    if head == old_head:
        allowed.append(Journal(header, old_change))
    assert torn in allowed

    older = encode_change(head, old_change)
    n = data.draw(st.integers(0, len(record)))
    torn = decode_journal(head + record[:n] + older[n:])
    assert torn is not None
    assert torn.change in (None, old_change, change)


@given(headers, changes, headers)
def test_a_change_behind_another_header_means_nothing(
    header: JournalHeader, change: Change, other: JournalHeader
) -> None:
    """It was about another file."""
    found = decode_journal(other.encode() + encode(header, change)[1])
    assert found == (Journal(other, change) if other == header else Journal(other, None, True))


@pytest.mark.parametrize("data", [b"", b"zsj", b"\0" * 200, b"zsj\x02" + b"\0" * 32])
def test_no_journal(data: bytes) -> None:
    """Nothing, zeros, another version."""
    assert decode_journal(data) is None


# -------------------------------------------------------------------------- data end


@given(headers, changes, u64)
def test_data_end(header: JournalHeader, change: Change, index_start: int) -> None:
    """That of the last change; that of the header only as long as there was none. Of an index
    in another place nothing is known, and nothing if a change is cut: there may have been others
    since the header was written."""
    head, record = encode(header, change)

    def data_end(journal: bytes, index_start: int) -> int | None:
        found = decode_journal(journal)
        assert found is not None
        return found.data_end_at(index_start)

    assert data_end(head, header.index_start) == header.data_end
    assert data_end(head + record, change.new_index_start) == change.data_end
    if index_start != header.index_start:
        assert data_end(head, index_start) is None
    if index_start != change.new_index_start:
        assert data_end(head + record, index_start) is None
    for cut in (record[:1], record[:-1]):
        assert data_end(head + cut, header.index_start) is None


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
    header = JournalHeader(has_checksum, n, draw(u64), index_start, data_end)
    old_entries = [(i, old[i * ENTRY : (i + 1) * ENTRY]) for i in changed]
    change = Change(crc32c.crc32c(old), crc32c.crc32c(new), data_end, index_start, old_entries)
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
    assert repair_of(replace(case.journal, change=None), torn) is None
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


# ---------------------------------------------------------------------------- growth


@st.composite
def growths(draw: st.DrawFn) -> tuple[Journal, bytes, bytes]:
    """A journal of an index that moves, the shard before and after."""
    case = draw(cases("end"))
    header = case.journal.header
    assert case.journal.change is not None
    appended = draw(st.binary(min_size=1, max_size=20))
    gap = b"\0" * draw(st.integers(0, 20))
    new_index = case.index_of(case.after)
    after = case.before + appended + gap + new_index
    change = replace(
        case.journal.change,
        new_index_start=len(after) - len(new_index),
        data_end=len(case.before + appended),
        old_entries=[],
    )
    return Journal(header, change), case.before, after


@given(growths(), st.data())
def test_growth_is_taken_back_or_finished(
    growth: tuple[Journal, bytes, bytes], data: st.DataObject
) -> None:
    """The file has its new size at once; then any of the new bytes are there. Without all of
    the new index the file is cut to what it was."""
    journal, before, after = growth
    header, change = journal.header, journal.change
    assert change is not None
    assert repair_of(journal, before) is None
    grown = bytearray(before + b"\0" * (len(after) - len(before)))
    stop = data.draw(st.sampled_from([len(before), change.new_index_start, len(after)]))
    grown[len(before) : stop] = after[len(before) : stop]  # in order, up to here
    for position in data.draw(st.lists(st.integers(stop, len(after)))):
        grown[position : position + 1] = after[position : position + 1]
    shard = bytes(grown)
    whole = repaired(shard, repair_of(journal, shard))
    body = slice(change.new_index_start, change.new_index_start + header.index_nbytes)
    if shard[body] == after[body]:
        assert whole[change.new_index_start :] == after[change.new_index_start :]
        assert len(whole) == len(after)
    else:
        assert whole == before
    assert repair_of(journal, whole) is None


@given(growths(), st.data())
def test_growth_of_another_state_is_left_alone(
    growth: tuple[Journal, bytes, bytes], data: st.DataObject
) -> None:
    """A file of another size, or without the old index where it was."""
    journal, before, after = growth
    assert repair_of(journal, after + b"\0") is None
    assert repair_of(journal, before[:-1]) is None
    shard = bytearray(before + b"\0" * (len(after) - len(before)))
    start, nbytes = journal.header.index_start, journal.header.index_nbytes
    shard[start + data.draw(st.integers(0, nbytes - 1))] ^= 0x10
    change = journal.change
    assert change is not None
    if crc32c.crc32c(shard[change.new_index_start :][:nbytes]) != change.new_crc:
        assert repair_of(journal, bytes(shard)) is None


_SOME_HEADER = JournalHeader(True, 4, 7, index_start=1000, data_end=100).encode()


def _change_to(data_end: int) -> bytes:
    old = [(0, bytes(range(16))), (3, bytes(range(16)))]
    return encode_change(_SOME_HEADER, Change(1, 2, data_end, 1000, old))


def test_bytes_of_a_change_that_is_not_known_any_more_are_not_used_again() -> None:
    """A change that is half written hides the one before, whose bytes a reader may still read;
    the header says where the data ended before both."""
    first, second = _change_to(200), _change_to(300)
    journal = decode_journal(_SOME_HEADER + first)
    assert journal is not None
    assert journal.data_end_at(1000) == 200
    for n in range(1, len(second)):
        journal = decode_journal(_SOME_HEADER + second[:n] + first[n:])
        assert journal is not None
        known = 200 if second[:n] + first[n:] == first else None
        assert journal.data_end_at(1000) == known, n
    journal = decode_journal(_SOME_HEADER + second)
    assert journal is not None
    assert journal.data_end_at(1000) == 300
