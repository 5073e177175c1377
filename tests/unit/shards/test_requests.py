"""Requests: equality, shards of one, swaps."""

from __future__ import annotations

from typing import Any

import pytest

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
    relay,
    swap,
)


def same(old: Any) -> Any:
    return old


def placeholder() -> bytes:
    return b"empty"


WRITES: list[Update] = [
    Set("k", b"abc"),
    SetIfNotExists("k", b"abc"),
    SetPartial("k", ((1, b"ab"), (9, b"c"))),
    Modify("k", same, placeholder, may_wait=True),
    Delete("k"),
]


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


def test_below_a_stack_each_write_updates_a_shard_of_one() -> None:
    flow = relay([Get("a"), *WRITES])
    batch = next(flow)
    assert batch == [
        Get("a"),
        *(
            update
            if isinstance(update, SetIfNotExists)
            else UpdateShard(PlainValue("k"), ((0, update),))
            for update in WRITES
        ),
    ]
    with pytest.raises(StopIteration) as done:
        flow.send([1, 2])
    assert done.value.value == [1, 2]
    asked = ask((Get("a"),))
    assert next(asked) == [Get("a")]
