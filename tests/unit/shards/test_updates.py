"""Updates of values: their sizes, their order, their pieces."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.flows import Recorder
from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.format.layout import ArrayLayout
from zarr_shardstore.format.shard import ZEP2_INDEX, ShardingSpec
from zarr_shardstore.shards.requests import (
    Delete,
    EntryUpdate,
    Modify,
    Set,
    SetIfNotExists,
    SetPartial,
)
from zarr_shardstore.shards.rewrite import rewrite_shard
from zarr_shardstore.shards.updates import (
    EntryBlock,
    check_pieces,
    new_value,
    replaced_first,
)


def same(old: Any) -> Any:
    return old


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


LAYOUT = ArrayLayout(
    "a", "a/", ChunkKeyEncoding("default", "/"), (7, 5), ShardingSpec((4, 2), ZEP2_INDEX)
)


@pytest.mark.parametrize("box", [((0, 4), (0, 2)), ((4, 7), (4, 5)), ((1, 3), (0, 1))])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("missing", [(), (0,), range(8)])
def test_a_block_is_the_updates_of_its_chunks(box: Any, order: Any, missing: Any) -> None:
    """Whole shards, a shard at the edge, and a part of a shard: the same objects."""
    shard = LAYOUT.shard((box[0][0] // 4, box[1][0] // 2))
    keys = LAYOUT.chunk_keys(box)
    values = [None if i in missing else b"%d" % i * i for i in range(len(keys))]
    block = EntryBlock(shard, box, values)
    chunks = [LAYOUT.chunk_of_key(key) for key in keys]
    updates = [
        (chunk.entry_id, Delete(key) if value is None else Set(key, value))
        for chunk, key, value in zip(chunks, keys, values, strict=True)
        if chunk is not None and chunk.shard == shard
    ]
    assert [*block] == updates
    assert (len(block), block[0], block[-1]) == (len(updates), updates[0], updates[-1])
    for other in ([], [(0, Set("a/c/0/0", b"other"))]):
        stored = []
        for groups in ([block], [updates]):
            objects: dict[str, bytes] = {}
            Recorder(objects).run(rewrite_shard(shard, [updates[::-1][:3]], order=order))
            if other:
                groups = [*groups, other]
            assert not any(Recorder(objects).run(rewrite_shard(shard, groups, order=order)))
            stored.append(objects)
        assert stored[0] == stored[1]
