"""Requests for values, and the updates of entries that they ask for."""

from __future__ import annotations

import math
from typing import Any

import pytest

from zarr_shardstore.errors import SpecError
from zarr_shardstore.shards.requests import (
    Delete,
    DeleteEntry,
    EntryUpdate,
    Get,
    MapEntry,
    Modify,
    PatchEntry,
    PlainValue,
    Request,
    Set,
    SetEntry,
    SetIfNotExists,
    SetPartial,
    UpdateShard,
    ask,
    check_pieces,
    entry_update,
    nbytes_of,
    relay,
    replaced_first,
)


def same(old: Any) -> Any:
    return old


def placeholder() -> bytes:
    return b"empty"


UPDATES: list[tuple[Request, EntryUpdate, float]] = [
    (Set("k", b"abc"), SetEntry(7, b"abc"), 3),
    (SetIfNotExists("k", b"abc"), SetEntry(7, b"abc", only_if_missing=True), 3),
    (SetPartial("k", ((1, b"ab"), (9, b"c"))), PatchEntry(7, ((1, b"ab"), (9, b"c"))), 3),
    (Modify("k", same, placeholder, may_wait=True), MapEntry(7, same, placeholder, True), math.inf),
    (Delete("k"), DeleteEntry(7), 0),
]


@pytest.mark.parametrize(("request_", "update", "nbytes"), UPDATES)
def test_each_write_is_an_update_of_an_entry(
    request_: Request, update: EntryUpdate, nbytes: float
) -> None:
    made = entry_update(request_, 7)
    assert made == update
    if isinstance(made, MapEntry):
        assert (made.placeholder, made.may_wait) == (placeholder, True)
    assert nbytes_of(update) == nbytes


def test_reads_are_no_updates() -> None:
    with pytest.raises(TypeError, match="a transformer does not perform"):
        entry_update(Get("k"), 0)


def test_what_has_a_value_or_none_whatever_is_stored_is_one_request() -> None:
    wanted: list[tuple[tuple[EntryUpdate, ...], Any]] = [
        ((SetEntry(0, b"x"),), Set("k", b"x")),
        ((DeleteEntry(0),), Delete("k")),
        ((SetEntry(0, b"x", only_if_missing=True),), None),
        ((PatchEntry(0, ((0, b"x"),)),), None),
        ((SetEntry(0, b"x"), DeleteEntry(0)), None),
        ((), None),
    ]
    for updates, expected in wanted:
        assert UpdateShard(PlainValue("k"), updates).as_whole_write() == expected
    shard: Any = "a shard"
    assert UpdateShard(shard, (SetEntry(0, b"x"),)).as_whole_write() is None


def test_the_first_update_of_an_entry_decides_whether_its_value_counts() -> None:
    updates: list[EntryUpdate] = [
        *(SetEntry(0, b"x"), PatchEntry(0, ()), DeleteEntry(1), MapEntry(1, same)),
        *(PatchEntry(2, ()), SetEntry(2, b"x"), SetEntry(3, b"x", only_if_missing=True)),
        MapEntry(4, same),
    ]
    assert replaced_first(updates) == {0: True, 1: True, 2: False, 3: False, 4: False}


def test_below_a_stack_each_write_updates_a_shard_of_one() -> None:
    flow = relay([Get("a"), *(request for request, _, _ in UPDATES)])
    batch = next(flow)
    assert batch == [
        Get("a"),
        *(
            request
            if isinstance(request, SetIfNotExists)
            else UpdateShard(PlainValue("k"), (entry_update(request, 0),))
            for request, _, _ in UPDATES
        ),
    ]
    with pytest.raises(StopIteration) as done:
        flow.send([1, 2])
    assert done.value.value == [1, 2]
    asked = ask((Get("a"),))
    assert next(asked) == [Get("a")]
    assert PlainValue("k").chunk_key(3) == "k"


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
