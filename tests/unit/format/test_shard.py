"""Whole shards: golden bytes written by hand from the draft, orders, round trips."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.arguments import check_choice
from zarr_shardstore.format.shard import (
    DRAFT_INDEX,
    MAX_ENTRIES,
    ZEP2_INDEX,
    EntryOrder,
    IndexDamageError,
    IndexFormat,
    ShardingSpec,
    build_shard,
    index_of_shard,
    is_empty_index,
    lay_out,
    order_entries,
    split_shard,
)

# chunks_per_shard (2, 2): chunk (0, 1) is "bb", (1, 1) is "dddd", (1, 0) is empty, (0, 0) missing.
DATA = b"bb" + b"dddd"
INDEX_AT_END = bytes.fromhex(
    "ffffffffffffffff"
    "ffffffffffffffff"  # (0, 0) missing
    "0000000000000000"
    "0200000000000000"  # (0, 1) at 0, 2 bytes
    "0200000000000000"
    "0000000000000000"  # (1, 0) at 2, empty
    "0200000000000000"
    "0400000000000000"  # (1, 1) at 2, 4 bytes
)
INDEX_AT_START = bytes.fromhex(
    "ffffffffffffffff"
    "ffffffffffffffff"
    "4000000000000000"
    "0200000000000000"  # 0x40: the index is 64 bytes
    "4200000000000000"
    "0000000000000000"
    "4200000000000000"
    "0400000000000000"
)
START = IndexFormat(checksum=False, location="start")
ENTRIES = {1: b"bb", 2: b"", 3: b"dddd"}


def test_golden_index_at_end() -> None:
    """The bytes of the draft's only form."""
    assert build_shard(ENTRIES, ShardingSpec((2, 2), DRAFT_INDEX), "C") == DATA + INDEX_AT_END


def test_golden_index_at_start() -> None:
    """ZEP 2's index_location start: offsets count from the start of the shard."""
    assert build_shard(ENTRIES, ShardingSpec((2, 2), START), "C") == INDEX_AT_START + DATA


def test_golden_big_endian() -> None:
    """A big-endian bytes codec turns each field around, and nothing else."""
    big = np.frombuffer(INDEX_AT_END, "<u8").astype(">u8").tobytes()
    form = IndexFormat(checksum=False, endian="big")
    assert build_shard(ENTRIES, ShardingSpec((2, 2), form), "C") == DATA + big


def test_golden_gaps_and_any_order_are_read() -> None:
    """Unused space and any order are legal: a dead old index between the entries."""
    dead = b"\xee" * 7
    index = bytes.fromhex(
        "0b00000000000000"
        "0200000000000000"  # entry 0 comes last
        "0000000000000000"
        "0400000000000000"
    )
    shard = b"last" + dead + b"xy" + index
    entries = split_shard(shard, ShardingSpec((2,), DRAFT_INDEX))
    assert {i: bytes(v) for i, v in entries.items()} == {0: b"xy", 1: b"last"}


def test_all_missing() -> None:
    """A shard without entries is an index of 2⁶⁴−1."""
    assert build_shard({}, ShardingSpec((3, 1, 2), DRAFT_INDEX)) == b"\xff" * 96
    assert split_shard(b"\xff" * 96, ShardingSpec((3, 1, 2), DRAFT_INDEX)) == {}


@given(
    st.lists(st.integers(1, 4), max_size=3).map(tuple),
    st.sampled_from(["C", "F", "morton"]),
    st.booleans(),
    st.sampled_from(["start", "end"]),
    st.sampled_from(["little", "big"]),
    st.data(),
)
def test_round_trip(
    cps: tuple[int, ...],
    order: str,
    checksum: bool,
    location: str,
    endian: str,
    data: st.DataObject,
) -> None:
    """Law: split(build(entries)) == entries, whatever order, form, or missing entries."""
    n = ShardingSpec(cps, DRAFT_INDEX).n_entries
    form = IndexFormat(checksum, location, endian)  # type: ignore[arg-type]
    entries = data.draw(st.dictionaries(st.integers(0, n - 1), st.binary(max_size=20)))
    spec = ShardingSpec(cps, form)
    shard = build_shard(entries, spec, order)  # type: ignore[arg-type]
    assert len(shard) == sum(map(len, entries.values())) + spec.index_nbytes
    assert {i: bytes(v) for i, v in split_shard(shard, spec).items()} == entries


def test_an_entry_that_is_left_out_may_be_damaged() -> None:
    """Whoever replaces an entry does not need its bytes."""
    shard = bytearray(build_shard({0: b"ab", 1: b"cd"}, ShardingSpec((2,), DRAFT_INDEX)))
    shard[4:12] = (10**9).to_bytes(8, "little")
    with pytest.raises(IndexDamageError):
        split_shard(bytes(shard), ShardingSpec((2,), DRAFT_INDEX))
    kept = split_shard(bytes(shard), ShardingSpec((2,), DRAFT_INDEX), without={0})
    assert {i: bytes(v) for i, v in kept.items()} == {1: b"cd"}


def test_orders_by_hand() -> None:
    """C counts the last dimension fastest, F the first; Morton makes squares."""
    ids = np.arange(8)
    assert order_entries(ids, (2, 4), "C").tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert order_entries(ids, (2, 4), "F").tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    # (0,0) (1,0) (0,1) (1,1), then the same for columns 2 and 3
    assert order_entries(ids, (2, 4), "morton").tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    morton = order_entries(np.arange(16), (4, 4), "morton").tolist()
    assert morton == [0, 4, 1, 5, 8, 12, 9, 13, 2, 6, 3, 7, 10, 14, 11, 15]


@pytest.mark.parametrize("cps", [(4, 4), (3, 1, 2), (5, 3), (2, 3, 4), (1, 7)])
def test_morton_order_is_that_of_zarr(cps: tuple[int, ...]) -> None:
    """zarr-python's sharding codec writes the entries of a shard in the same order."""
    zarr = pytest.importorskip("zarr")
    base = zarr.storage.MemoryStore()
    chunks = (1,) * len(cps)
    z = zarr.create_array(base, shape=cps, chunks=chunks, shards=cps, dtype="u1", fill_value=0)
    z[...] = 1
    (shard,) = [v.to_bytes() for k, v in base._store_dict.items() if k.startswith("c/")]
    offsets = index_of_shard(shard, ShardingSpec(cps, ZEP2_INDEX)).fields[:, 0]
    expected = order_entries(np.arange(len(offsets)), cps, "morton")
    assert np.argsort(offsets).tolist() == expected.tolist()


def test_unknown_order() -> None:
    """A misspelled order is refused when the store is made, not when it writes."""
    with pytest.raises(SpecError, match="'hilbert'"):
        check_choice("order", "hilbert", EntryOrder)


@pytest.mark.parametrize("cps", [(0,), (2, -1), (1.5,), (True,), (2**31, 2**31), (MAX_ENTRIES, 2)])
def test_impossible_chunks_per_shard(cps: tuple[int, ...]) -> None:
    """Refused before any memory is asked for."""
    with pytest.raises(SpecError, match="chunks_per_shard"):
        ShardingSpec(cps, DRAFT_INDEX)


def test_each_order_has_its_name_and_c_is_the_default() -> None:
    spec = ShardingSpec((2, 2), DRAFT_INDEX)
    entries = {i: bytes([i]) for i in range(4)}
    for order, expected in (("C", b"\0\1\2\3"), ("F", b"\0\2\1\3"), ("morton", b"\0\2\1\3")):
        check_choice("order", order, EntryOrder)
        assert build_shard(entries, spec, order)[:4] == expected  # type: ignore[arg-type]
    assert build_shard(entries, spec)[:4] == b"\0\1\2\3"
    assert order_entries(np.arange(12), (3, 4), "F").tolist() == [
        0,
        4,
        8,
        1,
        5,
        9,
        2,
        6,
        10,
        3,
        7,
        11,
    ]


def test_a_shard_in_pieces_has_its_gap_before_the_index() -> None:
    entries: dict[int, bytes | memoryview] = {0: b"a", 1: memoryview(b"bc")}
    at_end, at_start = ShardingSpec((2,), DRAFT_INDEX), ShardingSpec((2,), START)
    index = build_shard(entries, at_end)[3:]
    assert lay_out(entries, at_end, "C", 7) == [(0, [b"a", b"bc"]), (10, [index])]
    assert lay_out(entries, at_end, "C") == [(0, [b"a", b"bc"]), (3, [index])]
    index = build_shard(entries, at_start)[:32]
    assert lay_out(entries, at_start, "C", 7) == [(0, [index, b"a", b"bc"])]


WITHOUT_ENTRIES = bytes(build_shard({}, ShardingSpec((2, 3), ZEP2_INDEX)))


def test_an_index_without_entries() -> None:
    assert is_empty_index(memoryview(WITHOUT_ENTRIES))


@pytest.mark.parametrize(
    "value",
    [
        b"",
        WITHOUT_ENTRIES[:-1],
        WITHOUT_ENTRIES[16:],
        WITHOUT_ENTRIES + b"\xff",
        b"\xff" * len(WITHOUT_ENTRIES),
        build_shard({}, ShardingSpec((2, 3), DRAFT_INDEX)),  # as a chunk of 255 is
        build_shard({0: b"a"}, ShardingSpec((2, 3), ZEP2_INDEX)),
        build_shard({5: b""}, ShardingSpec((2, 3), ZEP2_INDEX)),
    ],
)
def test_objects_that_are_no_index_without_entries(value: bytes) -> None:
    assert not is_empty_index(memoryview(value))
