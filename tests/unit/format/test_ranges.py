"""Byte ranges and pieces of values: clipped, never into a neighbour; overlaps refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.ranges import (
    ByteRange,
    Range,
    StartFrom,
    Suffix,
    column_of_ranges,
    resolve_range,
)
from zarr_shardstore.shards.requests import SetPartial
from zarr_shardstore.shards.updates import apply_pieces, check_pieces

byte_ranges = st.one_of(
    st.none(),
    st.builds(Range, st.integers(0, 30), st.integers(0, 30)),
    st.builds(StartFrom, st.integers(0, 30)),
    st.builds(Suffix, st.integers(0, 30)),
)


@given(byte_ranges, st.integers(0, 20))
def test_a_range_is_clipped_to_the_value(byte_range: ByteRange | None, nbytes: int) -> None:
    """Law: the resolved range lies in the value, and is what slicing would give."""
    value = bytes(range(nbytes))
    start, stop = resolve_range(byte_range, nbytes)
    assert 0 <= start <= stop <= nbytes
    match byte_range:
        case None:
            expected = value
        case Range(a, b):
            expected = value[a:b]
        case StartFrom(a):
            expected = value[a:]
        case Suffix(n):
            expected = value[max(0, nbytes - n) :]
    assert value[start:stop] == expected


@pytest.mark.parametrize("byte_range", [Range(-1, 3), Range(0, -2), StartFrom(-4), Suffix(-1)])
def test_negative_numbers_are_refused(byte_range: ByteRange) -> None:
    """zarr-python 2.18 let them leak into the neighbouring chunk."""
    with pytest.raises(SpecError, match="negative"):
        resolve_range(byte_range, 10)
    with pytest.raises(SpecError, match="negative"):
        column_of_ranges([None, byte_range])


@pytest.mark.parametrize(
    ("old", "pieces", "new"),
    [
        (b"abcdef", [(0, b"XY")], b"XYcdef"),
        (b"abcdef", [(4, b"XYZ")], b"abcdXYZ"),
        (b"abcdef", [(6, b"g")], b"abcdefg"),
        (b"abcdef", [(-2, b"XYZ")], b"abcdXYZ"),
        (b"abcdef", [(-6, b"")], b""),
        (None, [(0, b"ab")], b"ab"),
        (None, [(0, b"ab"), (2, b"cd")], b"abcd"),
        (b"", [(0, b"")], b""),
        (b"ab", [(0, b"q"), (0, b"")], b"qb"),
        (b"ab", [(4, b"ef"), (2, b"cd")], b"abcdef"),  # the other piece fills the gap
    ],
)
def test_pieces_are_written_over_the_value(
    old: bytes | None, pieces: list[tuple[int, bytes]], new: bytes
) -> None:
    """What the pieces do not reach stays; a missing value counts as empty."""
    assert apply_pieces("k", old, check_pieces("k", pieces)) == new


@pytest.mark.parametrize(
    ("old", "pieces"),
    [
        (b"ab", [(3, b"x")]),
        (None, [(1, b"x")]),
        (b"ab", [(-3, b"x")]),
        (b"", [(0, b"a"), (2, b"")]),
    ],
)
def test_a_piece_outside_the_value_is_refused(
    old: bytes | None, pieces: list[tuple[int, bytes]]
) -> None:
    """A gap would have to be filled with bytes that nobody wrote."""
    with pytest.raises(SpecError, match="outside the value"):
        apply_pieces("k", old, check_pieces("k", pieces))


@pytest.mark.parametrize(
    "pieces", [[(0, b"abc"), (2, b"x")], [(1, b"x"), (1, b"y")], [(-1, b"x"), (0, b"y")]]
)
def test_overlaps_are_refused(pieces: list[tuple[int, bytes]]) -> None:
    """The result would depend on the order of the pieces."""
    with pytest.raises(SpecError):
        check_pieces("k", pieces)


@pytest.mark.parametrize(
    ("pieces", "nbytes"),
    [
        (((0, b"abc"),), 3),
        (((3, b"d"), (0, b"abc")), 4),
        (((1, b"a"),), None),
        (((0, b"a"), (2, b"c")), None),
        (((-1, b"a"),), None),
        (((0, b""),), 0),
    ],
)
def test_what_pieces_cover_from_the_start(
    pieces: tuple[tuple[int, bytes], ...], nbytes: int | None
) -> None:
    """Only pieces without a gap from 0 on say what a value will be."""
    assert SetPartial("k", pieces).nbytes_from_start == nbytes


def test_a_column_of_whole_values_is_none() -> None:
    some = [None, Suffix(0)]
    assert column_of_ranges(some) is some
    assert column_of_ranges([None, None]) is column_of_ranges([]) is None
