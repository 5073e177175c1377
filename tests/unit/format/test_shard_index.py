"""The shard index: its bytes, and what is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore.format.shard import (
    DRAFT_INDEX,
    MISSING,
    ZEP2_INDEX,
    IndexDamageError,
    IndexFormat,
    ShardIndex,
    ShardingSpec,
)

FORMATS = [
    IndexFormat(checksum, location, endian)
    for checksum in (False, True)
    for location in ("start", "end")
    for endian in ("little", "big")
]


def test_size_of_the_drafts_example() -> None:
    """64 chunks take 16 * 64 = 1024 bytes (the draft's 1014 is a slip)."""
    assert ShardingSpec((64,), DRAFT_INDEX).index_nbytes == 1024


def test_size_of_the_example_of_zep_2() -> None:
    """4 chunks and a crc32c take 68 bytes."""
    assert ShardingSpec((4,), ZEP2_INDEX).index_nbytes == 68


def test_bytes_written_by_hand() -> None:
    """Two entries, the second missing: little endian, offset before nbytes."""
    data = bytes.fromhex("03000000000000000a00000000000000" + "ff" * 16)
    index = ShardIndex.decode(data, ShardingSpec((2,), DRAFT_INDEX))
    assert index.entry(0) == (3, 10)
    assert index.entry(1) is None
    assert index.encode(DRAFT_INDEX) == data


def test_checksum_written_by_hand() -> None:
    """The crc32c (Castagnoli) of 32 bytes of zeros is 0x8a9136aa, stored little endian."""
    index = ShardIndex(np.zeros((2, 2), dtype=np.uint64))
    assert index.encode(ZEP2_INDEX) == b"\0" * 32 + bytes.fromhex("aa36918a")


@given(
    st.lists(st.tuples(st.integers(0, MISSING), st.integers(0, MISSING)), min_size=1),
    st.sampled_from(FORMATS),
)
def test_round_trip(entries: list[tuple[int, int]], form: IndexFormat) -> None:
    """Law: decode(encode(index)) == index, in every form."""
    fields = np.array(entries, dtype=np.uint64)
    data = ShardIndex(fields).encode(form)
    spec = ShardingSpec((len(entries),), form)
    assert len(data) == spec.index_nbytes
    decoded = ShardIndex.decode(data, spec)
    np.testing.assert_array_equal(decoded.fields, fields)
    expected = [None if e == (MISSING, MISSING) else e for e in entries]
    assert [decoded.entry(i) for i in range(len(entries))] == expected
    assert decoded.present_ids().tolist() == [i for i, e in enumerate(expected) if e is not None]


@given(st.data())
def test_any_flipped_bit_of_a_checked_index_is_found(data: st.DataObject) -> None:
    """The checksum covers every bit of the index, and itself."""
    good = ShardIndex(np.arange(6, dtype=np.uint64).reshape(3, 2)).encode(ZEP2_INDEX)
    bit = data.draw(st.integers(0, len(good) * 8 - 1))
    bad = bytearray(good)
    bad[bit // 8] ^= 1 << bit % 8
    with pytest.raises(IndexDamageError, match="checksum"):
        ShardIndex.decode(bytes(bad), ShardingSpec((3,), ZEP2_INDEX))


@pytest.mark.parametrize("n", [0, 1, 15, 31, 33, 48])
def test_wrong_number_of_bytes(n: int) -> None:
    """A shorter or longer index is refused with both numbers."""
    with pytest.raises(IndexDamageError, match=rf"32 bytes, there are {n}"):
        ShardIndex.decode(b"\0" * n, ShardingSpec((2,), DRAFT_INDEX))


def one_entry(offset: int, nbytes: int) -> ShardIndex:
    return ShardIndex.decode(struct.pack("<QQ", offset, nbytes), ShardingSpec((1,), DRAFT_INDEX))


@pytest.mark.parametrize(
    ("offset", "nbytes", "shard_nbytes", "location", "is_sound"),
    [
        (0, 10, 26, "end", True),
        (10, 0, 26, "end", True),  # an empty value, at the very end of the data
        (0, 11, 26, "end", False),  # runs into the index
        (11, 0, 26, "end", False),
        (26, 1, 26, "end", False),
        (2**63, 2**63, 26, "end", False),  # the sum wraps to 0 in uint64
        (2**64 - 1, 1, 26, "end", False),  # the sum wraps to 0 in uint64
        (5, 2**64 - 3, 26, "end", False),  # the sum wraps to 2 in uint64
        (MISSING, 0, 26, "end", False),  # only one field says missing
        (16, 10, 26, "start", True),
        (15, 1, 26, "start", False),  # inside the index
        (16, 11, 26, "start", False),
        (0, 0, 16, "end", True),
        (1, 0, 16, "end", False),
        (0, 0, 15, "end", False),  # the shard is shorter than its index
    ],
)
def test_entry_bounds(
    offset: int, nbytes: int, shard_nbytes: int, location: str, is_sound: bool
) -> None:
    """An entry must lie in the shard and outside the index; the fast check agrees."""
    form = IndexFormat(checksum=False, location=location)  # type: ignore[arg-type]
    spec, index = ShardingSpec((1,), form), one_entry(offset, nbytes)
    if is_sound:
        index.check_entry(0, shard_nbytes, spec)
        index.check_entries(shard_nbytes, spec)
        assert index.damaged_ids(shard_nbytes, spec).tolist() == []
        return
    with pytest.raises(IndexDamageError) as one:
        index.check_entry(0, shard_nbytes, spec)
    with pytest.raises(IndexDamageError) as all_at_once:
        index.check_entries(shard_nbytes, spec)
    assert one.value.byte_range == all_at_once.value.byte_range == (offset, offset + nbytes)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 120) | st.integers(MISSING - 3, MISSING),
            st.integers(0, 120) | st.integers(MISSING - 3, MISSING),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 200),
    st.sampled_from(FORMATS),
)
def test_the_fast_check_finds_what_the_single_one_finds(
    entries: list[tuple[int, int]], shard_nbytes: int, form: IndexFormat
) -> None:
    """Law: check_entries raises if and only if check_entry does for some entry."""
    index = ShardIndex(np.array(entries, dtype=np.uint64))
    spec = ShardingSpec((len(entries),), form)

    def raises(check: object, *args: object) -> bool:
        try:
            check(*args)  # type: ignore[operator]
        except IndexDamageError:
            return True
        return False

    one_by_one = [raises(index.check_entry, i, shard_nbytes, spec) for i in range(len(entries))]
    assert raises(index.check_entries, shard_nbytes, spec) == any(one_by_one)
    found = index.damaged_ids(shard_nbytes, spec).tolist()
    assert found == [i for i, is_damaged in enumerate(one_by_one) if is_damaged]
    ids = list(range(len(entries)))
    assert raises(index.entries, ids, shard_nbytes, spec) == any(one_by_one)
    assert index.entries(ids, None, spec) == [index.entry(i) for i in ids]
