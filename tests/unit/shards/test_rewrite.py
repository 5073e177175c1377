"""Write flows against recorded requests: what is read, what is written, what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from tests.unit.flows import Recorder, delete_entry, map_entry, patch_entry, set_entry
from zarr_shardstore.errors import CorruptShardError, SpecError
from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.format.layout import ArrayLayout, ShardRef
from zarr_shardstore.format.ranges import Suffix
from zarr_shardstore.format.shard import DRAFT_INDEX, ShardingSpec, build_shard, split_shard
from zarr_shardstore.shards.requests import (
    Delete,
    EntryUpdate,
    Exists,
    Get,
    GetSize,
    PlainValue,
    Set,
    SetPartial,
)
from zarr_shardstore.shards.rewrite import compact_shard, rewrite_shard, rewrite_value

DRAFT_SPEC = ShardingSpec((2, 2), DRAFT_INDEX)

KEY = "a/c0/0"
OLD = {0: b"zero", 1: b"one", 3: b"three"}


def shard_of(grid: tuple[int, int] = (4, 4)) -> ShardRef:
    spec = DRAFT_SPEC
    return ArrayLayout("a", "a/", ChunkKeyEncoding("draft", "/"), grid, spec).shard((0, 0))


def commit(
    recorder: Recorder, *groups: Sequence[EntryUpdate], grid: tuple[int, int] = (4, 4)
) -> Sequence[Exception | None]:
    return recorder.run(rewrite_shard(shard_of(grid), groups, order="C"))


def stored(recorder: Recorder) -> dict[int, bytes]:
    shard = recorder.objects.get(KEY)
    entries = {} if shard is None else split_shard(shard, DRAFT_SPEC)
    return {i: bytes(v) for i, v in entries.items()}


@pytest.fixture
def recorder() -> Recorder:
    return Recorder({KEY: build_shard(OLD, DRAFT_SPEC)})


def test_a_full_shard_is_one_set_and_no_read(recorder: Recorder) -> None:
    """All entries have a new value: nothing of the old shard matters."""
    commit(recorder, *[[set_entry(i, b"%d" % i)] for i in range(4)])
    assert [[type(r) for r in batch] for batch in recorder.batches] == [[Set]]
    assert stored(recorder) == {i: b"%d" % i for i in range(4)}


def test_at_the_edge_the_entries_in_the_array_are_enough() -> None:
    """Entries outside the array cannot be filled, so they need not be; the shard is new."""
    recorder = Recorder({})
    commit(recorder, [set_entry(0, b"x"), set_entry(2, b"y")], grid=(4, 1))
    assert recorder.batches[0] == [Exists(KEY)]
    assert [[type(r) for r in batch] for batch in recorder.batches[1:]] == [[Set]]


@pytest.mark.parametrize("erase", [False, True])
def test_entries_behind_the_edge_that_is_known_are_kept(recorder: Recorder, erase: bool) -> None:
    """Another store has appended to the array; its chunks are in the shard already."""
    updates: list[EntryUpdate] = (
        [delete_entry(0), delete_entry(2)] if erase else [set_entry(0, b"x"), set_entry(2, b"y")]
    )
    commit(recorder, updates, grid=(4, 1))
    mine = {} if erase else {0: b"x", 2: b"y"}
    assert stored(recorder) == {**mine, 1: b"one", 3: b"three"}


def test_replacing_a_shard_at_the_edge_reads_its_index_only(recorder: Recorder) -> None:
    """Nothing lies behind the edge."""
    commit(recorder, [delete_entry(1), delete_entry(3)])
    recorder.batches.clear()
    commit(recorder, [set_entry(0, b"x"), set_entry(2, b"y")], grid=(4, 1))
    assert recorder.batches[:2] == [[Exists(KEY)], [Get(KEY, Suffix(64), consistent=True)]]
    assert len(recorder.batches) == 3


def test_only_if_missing_in_a_commit_that_covers_the_shard(recorder: Recorder) -> None:
    """Whether it counts depends on what is stored, so the shard is read."""
    commit(
        recorder,
        [set_entry(0, b"no", only_if_missing=True), *[set_entry(i, b"n") for i in (1, 2, 3)]],
    )
    assert stored(recorder) == {0: b"zero", 1: b"n", 2: b"n", 3: b"n"}


def test_pieces_behind_the_start_in_a_commit_that_covers_the_shard(recorder: Recorder) -> None:
    """The same for a piece that leaves the first bytes in place."""
    commit(recorder, [patch_entry(0, ((1, b"E"),))], [set_entry(i, b"n") for i in (1, 2, 3)])
    assert stored(recorder)[0] == b"zEro"


def test_several_pieces_of_one_entry_in_one_commit(recorder: Recorder) -> None:
    """The longest reach from the start decides, not the last and not the sum."""
    rest: list[EntryUpdate] = [set_entry(i, b"n") for i in (0, 1, 2)]
    commit(recorder, [patch_entry(3, ((0, b"abc"),))], [patch_entry(3, ((0, b"AB"),))], rest)
    assert stored(recorder)[3] == b"ABcee"
    recorder.batches.clear()
    commit(recorder, [patch_entry(3, ((0, b"12345"),))], [patch_entry(3, ((0, b"6"),))], rest)
    assert stored(recorder)[3] == b"62345"
    assert recorder.batches[:2] == [[Exists(KEY)], [Get(KEY, Suffix(64), consistent=True)]]
    assert len(recorder.batches) == 3, "nothing but the index was read"


def test_a_piece_is_judged_by_what_is_stored_though_all_is_replaced_later(
    recorder: Recorder,
) -> None:
    """It fits the stored value, so its caller gets no error."""
    full = [set_entry(i, b"n") for i in range(4)]
    assert commit(recorder, [patch_entry(0, ((1, b"E"),))], full) == [None, None]
    assert stored(recorder) == dict.fromkeys(range(4), b"n")


def test_a_piece_is_judged_without_the_failed_group_before_it(recorder: Recorder) -> None:
    """The failed one would have replaced the value; it did not, and the piece still fits."""
    failing: list[EntryUpdate] = [set_entry(0, b""), patch_entry(1, ((99, b"x"),))]
    error, none = commit(recorder, failing, [patch_entry(0, ((4, b"!"),))])
    assert isinstance(error, SpecError)
    assert none is None
    assert stored(recorder) == {**OLD, 0: b"zero!"}


def test_a_damaged_entry_that_is_replaced_first_is_not_needed_later(recorder: Recorder) -> None:
    """The piece goes into the new value."""
    damage(recorder, 1)
    commit(recorder, [set_entry(1, b"new")], [patch_entry(1, ((0, b"N"),))])
    assert stored(recorder) == {**OLD, 1: b"New"}


def test_a_part_is_one_read_and_one_set(recorder: Recorder) -> None:
    """What is not replaced is kept."""
    commit(recorder, [set_entry(2, b"two")], [set_entry(0, b"ZERO")])
    assert recorder.batches[0] == [Get(KEY, consistent=True)]
    assert [type(r) for r in recorder.batches[1]] == [Set]
    assert stored(recorder) == {0: b"ZERO", 1: b"one", 2: b"two", 3: b"three"}


def test_erasing_all_is_one_delete_and_no_read(recorder: Recorder) -> None:
    """The whole shard goes."""
    commit(recorder, [delete_entry(i) for i in range(4)])
    assert [[(type(r), r[0]) for r in batch] for batch in recorder.batches] == [[(Delete, KEY)]]


def test_erasing_the_last_entries_removes_the_shard(recorder: Recorder) -> None:
    """An all-missing shard would be an object for nothing."""
    commit(recorder, [delete_entry(i) for i in (0, 1, 3)])
    assert recorder.objects == {}


def test_erasing_what_is_missing_reads_the_index_and_writes_nothing(recorder: Recorder) -> None:
    """zarr erases each chunk that is all fill value, stored or not."""
    commit(recorder, [delete_entry(2)])
    assert recorder.batches == [[Get(KEY, Suffix(64), consistent=True)]]


def test_erasing_some_keeps_the_rest(recorder: Recorder) -> None:
    """The bytes of the erased entry are gone too."""
    commit(recorder, [delete_entry(1)])
    assert stored(recorder) == {0: b"zero", 3: b"three"}
    assert b"one" not in recorder.objects[KEY]


def test_the_last_update_of_an_entry_counts(recorder: Recorder) -> None:
    """Groups are applied in the order in which they arrived."""
    commit(
        recorder,
        [set_entry(0, b"1")],
        [delete_entry(0)],
        [set_entry(0, b"3"), patch_entry(0, ((1, b"x"),))],
    )
    assert stored(recorder)[0] == b"3x"


def test_only_if_missing(recorder: Recorder) -> None:
    """set_if_not_exists is decided under the shard's lock, also within one commit."""
    commit(
        recorder,
        [set_entry(0, b"no", only_if_missing=True)],
        [set_entry(2, b"first", only_if_missing=True)],
        [set_entry(2, b"second", only_if_missing=True)],
    )
    assert stored(recorder) == {**OLD, 2: b"first"}


def test_nothing_changed_nothing_written(recorder: Recorder) -> None:
    """All were there already."""
    commit(recorder, [set_entry(0, b"no", only_if_missing=True)])
    assert recorder.batches == [[Get(KEY, consistent=True)]]


def test_pieces_from_the_start_of_all_entries_of_a_new_shard_read_nothing() -> None:
    """The draft's set_partial_values of a whole shard: its absence is asked for, not read."""
    recorder = Recorder({})
    commit(recorder, [patch_entry(i, ((0, b"abc"),)) for i in range(4)])
    assert recorder.batches[0] == [Exists(KEY)]
    assert [type(r) for r in recorder.batches[1]] == [Set]
    assert len(recorder.batches) == 2


def test_pieces_from_the_start_keep_the_tail_of_a_longer_value(recorder: Recorder) -> None:
    """The index tells that three is longer, so it is read."""
    commit(recorder, [patch_entry(i, ((0, b"abcd"),)) for i in range(4)])
    assert recorder.batches[:3] == [
        [Exists(KEY)],
        [Get(KEY, Suffix(64), consistent=True)],
        [Get(KEY, consistent=True)],
    ]
    assert stored(recorder) == {0: b"abcd", 1: b"abcd", 2: b"abcd", 3: b"abcde"}


def test_pieces_from_the_start_that_cover_the_values_read_the_index_only(
    recorder: Recorder,
) -> None:
    """No stored byte survives."""
    commit(recorder, [patch_entry(i, ((0, b"abcde"),)) for i in range(4)])
    assert recorder.batches[:2] == [[Exists(KEY)], [Get(KEY, Suffix(64), consistent=True)]]
    assert [type(r) for r in recorder.batches[2]] == [Set]


def test_a_group_with_a_bad_piece_is_left_out_whole(recorder: Recorder) -> None:
    """The others of the commit are not harmed, and what it would have replaced is kept."""
    outcomes = commit(
        recorder,
        [set_entry(2, b"two")],
        [set_entry(0, b"lost?"), patch_entry(1, ((9, b"x"),))],
        [delete_entry(3)],
    )
    assert [type(o) for o in outcomes] == [type(None), SpecError, type(None)]
    assert stored(recorder) == {0: b"zero", 1: b"one", 2: b"two"}


def test_a_bad_group_that_would_have_covered_the_shard_loses_nothing(recorder: Recorder) -> None:
    """It seemed that nothing had to be read; without the bad group that is not so."""
    full = [set_entry(i, b"new") for i in range(4)]
    (error, none) = commit(recorder, [*full, patch_entry(0, ((99, b"x"),))], [set_entry(2, b"two")])
    assert isinstance(error, SpecError)
    assert none is None
    assert stored(recorder) == {**OLD, 2: b"two"}


def damage(recorder: Recorder, entry_id: int) -> bytes:
    shard = bytearray(recorder.objects[KEY])
    at = len(shard) - 64 + 16 * entry_id
    shard[at : at + 8] = (10**6).to_bytes(8, "little")
    recorder.objects[KEY] = bytes(shard)
    return bytes(shard)


def test_a_shard_with_a_damaged_entry_is_not_rewritten(recorder: Recorder) -> None:
    """Rewriting would lose what is left of it; the message says what to do."""
    before = damage(recorder, 1)
    with pytest.raises(CorruptShardError, match=r"a/c0/1.*erase or overwrite this chunk first"):
        commit(recorder, [set_entry(2, b"two")])
    assert recorder.objects[KEY] == before


@pytest.mark.parametrize("update", [set_entry(1, b"new"), delete_entry(1)])
def test_a_damaged_entry_can_be_overwritten_and_erased(
    recorder: Recorder, update: EntryUpdate
) -> None:
    """The way out that the message names works, and keeps the sound entries."""
    damage(recorder, 1)
    commit(recorder, [update])
    expected = {**OLD, 1: b"new"} if isinstance(update[1], Set) else {0: b"zero", 3: b"three"}
    assert stored(recorder) == expected


def test_a_damaged_entry_that_is_needed_first_and_replaced_later(recorder: Recorder) -> None:
    """The piece needs its bytes, so the commit fails as a whole, and nothing is written."""
    before = damage(recorder, 1)
    with pytest.raises(CorruptShardError):
        commit(recorder, [patch_entry(1, ((1, b"x"),))], [set_entry(1, b"new")])
    assert recorder.objects[KEY] == before


@pytest.mark.parametrize("erase", [False, True])
def test_a_truncated_shard_at_the_edge_can_be_replaced_and_erased(erase: bool) -> None:
    """All that the array has in it gets a new value; nothing else in it can be read."""
    recorder = Recorder({KEY: b"torn"})
    commit(
        recorder,
        [delete_entry(0), delete_entry(2)] if erase else [set_entry(0, b"x"), set_entry(2, b"y")],
        grid=(4, 1),
    )
    assert stored(recorder) == ({} if erase else {0: b"x", 2: b"y"})


def test_a_truncated_shard_is_not_rewritten_but_can_be_replaced(recorder: Recorder) -> None:
    """A full write needs nothing of it."""
    recorder.objects[KEY] = b"torn"
    with pytest.raises(CorruptShardError, match="nothing was written"):
        commit(recorder, [set_entry(0, b"x")])
    assert recorder.objects[KEY] == b"torn"
    commit(recorder, [set_entry(i, b"new") for i in range(4)])
    assert stored(recorder) == dict.fromkeys(range(4), b"new")


LIKE_AN_INDEX = {0: b"\xff" * 100, 1: b"\xff" * 90, 3: b"\xff" * 80}


@pytest.mark.parametrize("tells_size", [True, False])
@pytest.mark.parametrize("cut", [{1}, {1, 2, 3}])
def test_a_shard_that_is_cut_off_on_its_way_is_not_rewritten(
    tells_size: bool, cut: set[int]
) -> None:
    """The last of the bytes that came look like an index, of no entries: they are asked for
    again, and at last it is an error."""
    shard = build_shard(LIKE_AN_INDEX, DRAFT_SPEC)
    recorder = Recorder({KEY: shard}, tells_size=tells_size, cut=cut)
    if len(cut) == 1:
        commit(recorder, [set_entry(2, b"new")])
        assert stored(recorder) == LIKE_AN_INDEX | {2: b"new"}
    else:
        with pytest.raises(CorruptShardError, match="334 bytes"):
            commit(recorder, [set_entry(2, b"new")])
        assert recorder.objects == {KEY: shard}


def test_a_shard_that_came_whole_is_not_asked_for_its_size() -> None:
    """Its last entry ends where the index begins."""
    shard = build_shard(LIKE_AN_INDEX, DRAFT_SPEC)
    recorder = Recorder({KEY: shard}, tells_size=False)
    commit(recorder, [set_entry(2, b"new")])
    assert [[type(r) for r in batch] for batch in recorder.batches] == [[Get], [Set]]


@pytest.mark.parametrize("tells_size", [True, False])
def test_an_index_that_is_cut_off_at_the_edge_loses_nothing(tells_size: bool) -> None:
    """There may be entries behind the edge: that there is no index is looked at twice."""
    shard = build_shard(OLD, DRAFT_SPEC)
    recorder = Recorder({KEY: shard}, tells_size=tells_size, cut={2})
    commit(recorder, [set_entry(0, b"x"), set_entry(2, b"y")], grid=(4, 1))
    assert stored(recorder) == OLD | {0: b"x", 2: b"y"}


# ------------------------------------------------------------------- what must not be lost


def test_a_patch_of_nothing_keeps_values_of_any_size() -> None:
    """It covers no byte, so a value of one byte counts."""
    old = {i: bytes([i]) for i in range(4)}
    recorder = Recorder({KEY: build_shard(old, DRAFT_SPEC)})
    commit(recorder, [patch_entry(i, ((0, b""),)) for i in range(4)])
    assert stored(recorder) == old


@pytest.mark.parametrize("kept", [b"", b"1", b"22"])
def test_small_values_behind_the_edge_are_kept(kept: bytes) -> None:
    recorder = Recorder({KEY: build_shard({0: b"old", 1: kept}, DRAFT_SPEC)})
    commit(recorder, [set_entry(0, b"x"), set_entry(2, b"y")], grid=(4, 1))
    assert stored(recorder) == {0: b"x", 1: kept, 2: b"y"}


@pytest.mark.parametrize("tells_size", [True, False])
def test_an_index_that_comes_damaged_twice_may_be_whole_in_the_shard(tells_size: bool) -> None:
    """There may be entries behind the edge: the whole shard is read, and tells."""
    shard = build_shard(OLD, DRAFT_SPEC)
    recorder = Recorder({KEY: shard}, tells_size=tells_size, cut={2, 3})
    commit(recorder, [set_entry(0, b"x"), set_entry(2, b"y")], grid=(4, 1))
    assert stored(recorder) == OLD | {0: b"x", 2: b"y"}
    assert recorder.batches[3] == [Get(KEY, consistent=True)]


def test_a_damaged_index_hides_whether_patches_cover_the_values_behind_it() -> None:
    recorder = Recorder({KEY: b"short"})
    patches = [patch_entry(0, ((0, b"x"),)), patch_entry(2, ((0, b"y"),))]
    with pytest.raises(CorruptShardError, match="there are 5"):
        commit(recorder, patches, grid=(4, 1))
    assert recorder.objects == {KEY: b"short"}


@pytest.mark.parametrize("n", [1, 3])  # before the index, and before the whole shard is read
def test_a_shard_that_vanishes_while_it_is_read_has_nothing_to_lose(n: int) -> None:
    objects = {KEY: b"short"}
    recorder = Recorder(objects, between=lambda batch: objects.clear() if batch == n else None)
    commit(recorder, [set_entry(0, b"x"), set_entry(2, b"y")], grid=(4, 1))
    assert stored(recorder) == {0: b"x", 2: b"y"}


def test_no_update_of_a_shard_outside_the_array_writes_nothing(recorder: Recorder) -> None:
    assert commit(recorder, [], grid=(0, 4)) == [None]
    assert stored(recorder) == OLD


def test_updates_of_one_entry_are_not_updates_of_all(recorder: Recorder) -> None:
    commit(recorder, [set_entry(0, b"%d" % i) for i in range(4)])
    assert stored(recorder) == OLD | {0: b"3"}


def test_a_change_of_a_new_value_reads_nothing(recorder: Recorder) -> None:
    """The value before it is known."""
    change = map_entry(0, lambda old: bytes(old or b"") + b"!")
    commit(
        recorder, [*[set_entry(i, b"n") for i in range(4)], change, patch_entry(1, ((1, b"?"),))]
    )
    assert [[type(r) for r in batch] for batch in recorder.batches] == [[Set]]
    assert stored(recorder) == {0: b"n!", 1: b"n?", 2: b"n", 3: b"n"}


def test_the_errors_say_what_was_written_and_what_helps() -> None:
    shard = bytearray(build_shard(OLD, DRAFT_SPEC))
    shard[-64:-56] = (10**9).to_bytes(8, "little")
    with pytest.raises(CorruptShardError, match="erase or overwrite this chunk first"):
        commit(Recorder({KEY: bytes(shard)}), [set_entry(1, b"x")])
    with pytest.raises(CorruptShardError, match=r"(?m)there are 5; nothing was written$"):
        commit(Recorder({KEY: b"short"}), [set_entry(1, b"x")])
    (error,) = commit(Recorder({}), [(3, SetPartial("a/c1/1", ((1, b"x"),)))])
    assert "key 'a/c1/1'" in str(error)


@pytest.mark.parametrize("order", ["C", "F"])
def test_entries_are_stored_in_the_order_that_was_asked_for(order: Any) -> None:
    recorder = Recorder({})
    values = {i: b"%d" % i for i in range(4)}
    recorder.run(
        rewrite_shard(shard_of(), [[set_entry(i, v) for i, v in values.items()]], order=order)
    )
    assert recorder.objects[KEY] == build_shard(values, DRAFT_SPEC, order)


def test_a_shard_that_is_removed_has_an_empty_one_in_its_place_if_need_be(
    recorder: Recorder,
) -> None:
    """For base stores whose conditions do not protect a removal."""
    commit(recorder, [delete_entry(i) for i in range(4)])
    (delete,) = recorder.batches[-1]
    assert isinstance(delete, Delete)
    assert delete.placeholder is not None
    assert delete.placeholder() == build_shard({}, DRAFT_SPEC)


# ------------------------------------------------------------------- values that are no shards


def change_to(value: Any) -> EntryUpdate:
    return map_entry(0, lambda _: value, placeholder=lambda: b"empty")


@pytest.mark.parametrize(
    ("old", "updates", "expected", "kinds"),
    [
        (b"old", [set_entry(0, b"new")], b"new", [Set]),
        (b"old", [delete_entry(0)], None, [Delete]),
        (None, [delete_entry(0)], None, [Delete]),  # nothing was read
        (b"old", [set_entry(0, b"x"), patch_entry(0, ((1, b"y"),))], b"xy", [Set]),
        (b"old", [patch_entry(0, ((1, b"y"),))], b"oyd", [Get, Set]),
        (b"old", [change_to(b"new")], b"new", [Get, Set]),
        (b"old", [change_to(None)], None, [Get, Delete]),
        (None, [change_to(None)], None, [Get]),
        (b"old", [map_entry(0, lambda old: old)], b"old", [Get]),
        (None, [set_entry(0, b"new", only_if_missing=True)], b"new", [Get, Set]),
        (b"old", [set_entry(0, b"new", only_if_missing=True)], b"old", [Get]),
        (None, [change_to(b""), change_to(None)], None, [Get]),
        (b"old", [], b"old", []),
    ],
)
def test_a_value_is_read_if_it_counts_and_written_if_it_changes(
    old: bytes | None, updates: list[EntryUpdate], expected: bytes | None, kinds: list[type]
) -> None:
    recorder = Recorder({} if old is None else {"k": old})
    assert recorder.run(rewrite_value(PlainValue("k"), [updates])) == [None]
    assert recorder.objects.get("k") == expected
    assert [type(r) for batch in recorder.batches for r in batch] == kinds
    if kinds == [Get, Set]:
        assert recorder.batches[0] == [Get("k", consistent=True)]
    if kinds == [Get, Delete]:
        (delete,) = recorder.batches[-1]
        assert isinstance(delete, Delete)
        assert delete.placeholder is not None
        assert delete.placeholder() == b"empty"


def test_each_group_of_a_value_counts_whole_or_not_at_all() -> None:
    """The failed group came first and would have replaced the value: it is read all the same."""
    recorder = Recorder({"k": b"old"})
    groups: list[list[EntryUpdate]] = [
        [set_entry(0, b"no"), patch_entry(0, ((9, b"far"),))],
        [patch_entry(0, ((3, b"er"),))],
        [],
    ]
    failed, *others = recorder.run(rewrite_value(PlainValue("k"), groups))
    assert isinstance(failed, SpecError)
    assert "key 'k'" in str(failed)
    assert others == [None, None]
    assert recorder.objects["k"] == b"older"


# ------------------------------------------------------------------- compaction


def test_compaction_drops_dead_bytes_and_stores_entries_in_order(recorder: Recorder) -> None:
    recorder.objects[KEY] = b"dead" + build_shard({}, DRAFT_SPEC)
    recorder.run(compact_shard(shard_of(), order="C"))
    assert recorder.objects == {}
    spec, old = DRAFT_SPEC, {**OLD, 2: b"two"}
    orders: list[Any] = ["C", "F"]
    for gap, order in product((b"", b"dead"), orders):
        shard = build_shard(old, spec)[:-64] + gap + build_shard(old, spec)[-64:]
        recorder = Recorder({KEY: shard})
        recorder.run(compact_shard(shard_of(), order=order))
        asked = [type(r) for batch in recorder.batches for r in batch]
        if gap:
            assert asked == [Get, GetSize, Get, Set]
            assert recorder.objects[KEY] == build_shard(old, spec, order)
        else:
            assert asked == [Get, GetSize]
            assert recorder.objects[KEY] == shard


def test_compaction_removes_a_shard_without_entries_and_leaves_a_missing_one() -> None:
    recorder = Recorder({KEY: build_shard({}, DRAFT_SPEC)})
    recorder.run(compact_shard(shard_of(), order="C"))
    assert recorder.objects == {}
    ((removed,),) = recorder.batches[-1:]
    assert isinstance(removed, Delete)
    assert removed.placeholder is not None  # for a store with conditions
    assert removed.placeholder() == build_shard({}, DRAFT_SPEC)
    recorder.run(compact_shard(shard_of(), order="C"))
    assert len(recorder.batches[-1]) == 1
    shard = b"dead" + build_shard({0: b"x"}, DRAFT_SPEC)
    gone = Recorder({KEY: shard}, between=lambda n: gone.objects.clear() if n == 2 else None)
    gone.run(compact_shard(shard_of(), order="C"))
    assert gone.objects == {}


@pytest.mark.parametrize("tells_size", [True, False])
@pytest.mark.parametrize("byte", [b"\xff", b"\0"])
def test_compaction_of_a_shard_that_is_cut_off_on_its_way(byte: bytes, tells_size: bool) -> None:
    """What came of it looks like an index of missing, or of empty, entries."""
    old = {0: byte * 100, 1: byte * 90, 3: byte * 80}
    shard = build_shard(old, DRAFT_SPEC)
    shard = shard[:-64] + b"dead" + shard[-64:]
    recorder = Recorder({KEY: shard}, tells_size=tells_size, cut={3})
    recorder.run(compact_shard(shard_of(), order="C"))
    assert recorder.objects == {KEY: build_shard(old, DRAFT_SPEC, "C")}
