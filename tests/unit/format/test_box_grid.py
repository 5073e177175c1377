"""Boxes of several lengths, against the list of all places of a grid."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore.format.box_grid import BoxGrid, Side, parse_side, spell_side

LENGTHS = st.integers(1, 5)
SIDES = LENGTHS | st.lists(LENGTHS, min_size=1, max_size=6).map(tuple)


def bounds_along(side: Side, n: int) -> list[tuple[int, int]]:
    """Return the boxes that have one of `n` places: as listed, and then of the largest length."""
    listed = [side] * n if isinstance(side, int) else [*side, *[max(side)] * n]
    ends = [*accumulate(listed)]
    found = [(end - length, end) for length, end in zip(listed, ends, strict=True)]
    return [(start, stop) for start, stop in found if start < n]


@given(st.lists(SIDES, max_size=3), st.data())
def test_boxes_are_those_of_the_listed_lengths(sides: list[Side], data: st.DataObject) -> None:
    grid_shape = tuple(data.draw(st.integers(0, 20)) for _ in sides)
    boxes = BoxGrid(tuple(sides))
    expected = [bounds_along(side, n) for side, n in zip(sides, grid_shape, strict=True)]
    assert boxes.shape(grid_shape) == tuple(map(len, expected))
    assert (boxes.uneven is None) == all(isinstance(s, int) or len({*s}) == 1 for s in sides)
    for dim, along in enumerate(expected):
        for number, (start, stop) in enumerate(along):
            assert boxes.bounds(dim, number) == (start, stop)
            assert {boxes.number(dim, at) for at in range(start, stop)} == {number}
    for coords in np.ndindex(*boxes.shape(grid_shape)):
        whole = tuple(along[i] for along, i in zip(expected, coords, strict=True))
        clipped = tuple((lo, min(hi, n)) for (lo, hi), n in zip(whole, grid_shape, strict=True))
        assert boxes.box(coords) == whole
        assert boxes.box(coords, grid_shape) == clipped
        shape = [hi - lo for lo, hi in whole]
        assert boxes.lengths(coords) == tuple(shape)
        known = [(i, lo, hi) for i, (lo, hi) in zip(coords, whole, strict=True)]
        assert boxes.has_box(coords, known)
        for dim, at in np.ndindex(len(sides), 3):
            other: Any = list(map(list, known))
            other[dim][at] += 1
            assert not boxes.has_box(coords, list(map(tuple, other)))
        for lengths in (boxes.largest, tuple(n + 1 for n in boxes.largest)):
            triples = zip(whole, coords, lengths, strict=True)
            lies = all((i * n, i * n + n) == bounds for bounds, i, n in triples)
            assert boxes.has_box(coords, lengths) == lies
        places = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        inside = places[tuple(slice(0, hi - lo) for lo, hi in clipped)]
        assert boxes.ids_in(coords, clipped).tolist() == inside.reshape(-1).tolist()
        assert boxes.n_in_box(coords, grid_shape) == inside.size
        assert boxes.n_in_box(coords, None) == places.size
        assert boxes.n_in_box(coords, grid_shape, range(len(sides))) == places.size


@given(st.lists(SIDES, min_size=1, max_size=2), st.data())
def test_a_box_has_parts_of_the_boxes_of_its_places(sides: list[Side], data: st.DataObject) -> None:
    boxes = BoxGrid(tuple(sides))
    box: Any = tuple(
        tuple(sorted(data.draw(st.tuples(st.integers(0, 20), st.integers(0, 20))))) for _ in sides
    )
    expected = [
        sorted({boxes.number(dim, at) for at in range(lo, hi)}) for dim, (lo, hi) in enumerate(box)
    ]
    assert list(map(list, boxes.boxes_of(box))) == expected


@given(st.lists(SIDES, max_size=2), st.lists(SIDES, max_size=2), st.data())
def test_two_grids_are_the_same_where_a_grid_reaches(
    mine: list[Side], theirs: list[Side], data: st.DataObject
) -> None:
    if len(mine) != len(theirs):
        assert not BoxGrid(tuple(mine)).has_same_boxes(BoxGrid(tuple(theirs)), (4,) * len(mine))
        return
    shape = [data.draw(st.integers(1, 12)) for _ in mine]
    pairs = list(zip(mine, theirs, shape, strict=True))
    same = all(
        a == b
        if isinstance(a, int) and isinstance(b, int)
        else bounds_along(a, n) == bounds_along(b, n)
        for a, b, n in pairs
    )
    assert BoxGrid(tuple(mine)).has_same_boxes(BoxGrid(tuple(theirs)), shape) == same


def test_numbers_are_of_any_size() -> None:
    boxes = BoxGrid((10**30, (10**30, 3)))
    assert boxes.number(0, 10**31) == 10
    assert boxes.bounds(1, 5) == (3 + 4 * 10**30, 3 + 5 * 10**30)
    assert boxes.number(1, 3 + 4 * 10**30) == 5
    assert boxes.n_in_box((0, 1), (7, 10**30 + 2)) == 14


@given(SIDES)
def test_a_side_is_spelled_and_parsed(side: Side) -> None:
    assert parse_side(spell_side(side)) == side


def test_lengths_that_are_equal_are_one() -> None:
    assert BoxGrid(((4, 4), (4, 3))).sides == (4, (4, 3))
    assert spell_side((31, 31, 31, 28)) == [[31, 3], 28]
    assert spell_side((31, 28)) == [31, 28]


@pytest.mark.parametrize(
    "given_side",
    [0, -1, True, 1.0, "4", None, [], [0], [True], [[4]], [[4, 0]], [[0, 4]], [[4, 2, 1]], [4.0]],
)
def test_what_is_no_side_is_none(given_side: Any) -> None:
    assert parse_side(given_side) is None


def test_too_many_edges_are_refused() -> None:
    assert parse_side([[1, 2**18]]) == (1,) * 2**18
    assert parse_side([[1, 2**18 + 1]]) is None
    assert parse_side([[1, 2**62]]) is None
