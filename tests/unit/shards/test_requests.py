"""Requests for values, and updates of values."""

from __future__ import annotations

import math
from typing import Any

import pytest

from zarr_shardstore.errors import SpecError
from zarr_shardstore.shards.requests import (
    Delete,
    EntryUpdate,
    Exists,
    Get,
    GetSize,
    Modify,
    Move,
    PlainValue,
    Set,
    SetIfNotExists,
    SetPartial,
    Update,
    UpdateShard,
    ask,
    check_pieces,
    nbytes_of,
    relay,
    replaced_first,
    swap,
)


def same(old: Any) -> Any:
    return old


def placeholder() -> bytes:
    return b"empty"


UPDATES: list[tuple[Update, float]] = [
    (Set("k", b"abc"), 3),
    (SetIfNotExists("k", b"abc"), 3),
    (SetPartial("k", ((1, b"ab"), (9, b"c"))), 3),
    (Modify("k", same, placeholder, may_wait=True), math.inf),
    (Delete("k"), 0),
]


@pytest.mark.parametrize(("update", "nbytes"), UPDATES)
def test_the_size_of_an_update_is_known_but_for_a_function(update: Update, nbytes: float) -> None:
    assert nbytes_of((7, update)) == nbytes


def test_requests_of_two_kinds_are_never_equal() -> None:
    """Although each is a tuple: a value for another request would be a wrong one."""
    kinds: list[Any] = [Exists("k"), GetSize("k"), Get("k"), Delete("k"), ("k",), PlainValue("k")]
    kinds += [Set("k", b"v"), SetIfNotExists("k", b"v"), Move("k", "v"), ("k", b"v")]
    for i, one in enumerate(kinds):
        assert [one == other for other in kinds] == [i == j for j in range(len(kinds))]
        assert [one != other for other in kinds] == [i != j for j in range(len(kinds))]
    assert len(set(kinds)) == len(kinds)


def test_what_has_a_value_or_none_whatever_is_stored_is_one_request() -> None:
    wanted: list[tuple[tuple[EntryUpdate, ...], Any]] = [
        (((0, Set("k", b"x")),), Set("k", b"x")),
        (((0, Delete("k", placeholder)),), Delete("k")),
        (((0, SetIfNotExists("k", b"x")),), None),
        (((0, SetPartial("k", ((0, b"x"),))),), None),
        (((0, Set("k", b"x")), (0, Delete("k"))), None),
        ((), None),
    ]
    for updates, expected in wanted:
        assert UpdateShard(PlainValue("k"), updates).as_whole_write() == expected
    shard: Any = "a shard"
    assert UpdateShard(shard, ((0, Set("k", b"x")),)).as_whole_write() is None


def test_a_swap_stores_the_new_value_only_in_the_place_of_the_seen_one() -> None:
    update = swap("k", b"seen", b"new", lambda stored: stored, placeholder)
    assert (update.key, update.placeholder) == ("k", placeholder)
    assert update.change(memoryview(b"seen")) == b"new"
    for stored in (b"other", None):
        assert update.change(stored) is stored
    first = swap("k", None, b"new", lambda _: b"merged")
    assert (first.change(None), first.change(b"")) == (b"new", b"merged")


def test_the_first_update_of_an_entry_decides_whether_its_value_counts() -> None:
    write, patch, change = Set("k", b"x"), SetPartial("k", ()), Modify("k", same)
    updates: list[EntryUpdate] = [
        *((0, write), (0, patch), (1, Delete("k")), (1, change), (2, patch), (2, write)),
        *((3, SetIfNotExists("k", b"x")), (4, change)),
    ]
    assert replaced_first(updates) == {0: True, 1: True, 2: False, 3: False, 4: False}


def test_below_a_stack_each_write_updates_a_shard_of_one() -> None:
    flow = relay([Get("a"), *(update for update, _ in UPDATES)])
    batch = next(flow)
    assert batch == [
        Get("a"),
        *(
            update
            if isinstance(update, SetIfNotExists)
            else UpdateShard(PlainValue("k"), ((0, update),))
            for update, _ in UPDATES
        ),
    ]
    with pytest.raises(StopIteration) as done:
        flow.send([1, 2])
    assert done.value.value == [1, 2]
    asked = ask((Get("a"),))
    assert next(asked) == [Get("a")]


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
