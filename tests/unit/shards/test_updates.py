"""Updates of values: their sizes, their order, their pieces."""

from __future__ import annotations

import math
from typing import Any

import pytest

from zarr_shardstore.errors import SpecError
from zarr_shardstore.shards.requests import (
    Delete,
    EntryUpdate,
    Modify,
    Set,
    SetIfNotExists,
    SetPartial,
    Update,
)
from zarr_shardstore.shards.updates import check_pieces, nbytes_of, new_value, replaced_first


def same(old: Any) -> Any:
    return old


UPDATES: list[tuple[Update, float]] = [
    (Set("k", b"abc"), 3),
    (SetIfNotExists("k", b"abc"), 3),
    (SetPartial("k", ((1, b"ab"), (9, b"c"))), 3),
    (Modify("k", same), math.inf),
    (Delete("k"), 0),
]


@pytest.mark.parametrize(("update", "nbytes"), UPDATES)
def test_the_size_of_an_update_is_known_but_for_a_function(update: Update, nbytes: float) -> None:
    assert nbytes_of((7, update)) == nbytes


def test_the_first_update_of_an_entry_decides_whether_its_value_counts() -> None:
    write, patch, change = Set("k", b"x"), SetPartial("k", ()), Modify("k", same)
    updates: list[EntryUpdate] = [
        *((0, write), (0, patch), (1, Delete("k")), (1, change), (2, patch), (2, write)),
        *((3, SetIfNotExists("k", b"x")), (4, change)),
    ]
    assert replaced_first(updates) == {0: True, 1: True, 2: False, 3: False, 4: False}


def test_pieces_come_in_ascending_order() -> None:
    """Of two at one place the empty one comes first: it covers nothing of the other."""
    assert check_pieces("k", [(2, b"c"), (0, b"ab")]) == ((0, b"ab"), (2, b"c"))
    assert check_pieces("k", [(1, b"b"), (1, b"")]) == ((1, b""), (1, b"b"))
    assert check_pieces("k", [(0, memoryview(b"ab")), (0, b"")])[0] == (0, b"")
    assert check_pieces("k", [(-5, b"b")]) == ((-5, b"b"),)
    with pytest.raises(SpecError, match="key 'k': each start is a whole number"):
        check_pieces("k", [("0", b"x")])  # type: ignore[list-item]
    with pytest.raises(SpecError, match="start -1 counts from the end"):
        check_pieces("k", [(0, b"x"), (-1, b"y")])
    with pytest.raises(SpecError, match=r"the values at 0 \(of 2 bytes\) and at 1 overlap"):
        check_pieces("k", [(1, b"x"), (0, b"xy")])


def test_an_update_makes_a_value_of_the_stored_one() -> None:
    """The very object if it stays."""
    old = memoryview(b"old")
    for update, expected in (
        (Set("k", b"new"), b"new"),
        (SetIfNotExists("k", b"new"), b"old"),
        (SetPartial("k", ((1, b"XX"),)), b"oXX"),
        (Modify("k", same), b"old"),
    ):
        assert new_value(update, old) == expected
    assert new_value(Modify("k", same), old) is old
    assert new_value(SetIfNotExists("k", b"new"), old) is old
    assert new_value(SetIfNotExists("k", b"new"), None) == b"new"
    assert new_value(Delete("k"), old) is None
