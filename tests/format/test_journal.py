"""What a journal says of a shard whose last writer was killed, also while it wrote the journal."""

from __future__ import annotations

import pytest

from zarr_shardstore.format.journal import Change, JournalHeader, decode_journal, encode_change

HEADER = JournalHeader(True, 4, 7, index_start=1000, data_end=100).encode()
OLD = bytes(range(16))


def change(data_end: int) -> bytes:
    return encode_change(HEADER, Change(1, 2, data_end, 1000, [(0, OLD), (3, OLD)]))


def test_bytes_of_a_change_that_is_not_known_any_more_are_not_used_again() -> None:
    """A change that is half written hides the one before, whose bytes a reader may still read;
    the header says where the data ended before both."""
    first, second = change(200), change(300)
    journal = decode_journal(HEADER + first)
    assert journal is not None
    assert journal.data_end_at(1000) == 200
    for n in range(1, len(second)):
        journal = decode_journal(HEADER + second[:n] + first[n:])
        assert journal is not None
        known = 200 if second[:n] + first[n:] == first else None
        assert journal.data_end_at(1000) == known, n
    journal = decode_journal(HEADER + second)
    assert journal is not None
    assert journal.data_end_at(1000) == 300


def test_a_journal_that_was_just_begun_knows_where_the_data_ends() -> None:
    journal = decode_journal(HEADER)
    assert journal is not None
    assert journal.data_end_at(1000) == 100
    assert journal.data_end_at(2000) is None


@pytest.mark.parametrize("n", range(0, len(HEADER), 7))
def test_a_header_that_is_half_written_is_none(n: int) -> None:
    assert decode_journal(HEADER[:n]) is None
    assert decode_journal(HEADER[:n] + b"\xff" + HEADER[n + 1 :] + change(200)) is None
