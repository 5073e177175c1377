"""The table of held values, and the flows over it: what is asked of the base store, and when."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.flows import Recorder
from zarr_shardstore.errors import ShardConflictError, SpecError
from zarr_shardstore.format.index import DRAFT_INDEX, ZEP2_INDEX
from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.format.layout import ArrayLayout, ShardRef
from zarr_shardstore.format.shard import build_shard, index_of_shard, split_shard
from zarr_shardstore.format.sharding_spec import ShardingSpec
from zarr_shardstore.shards.chunks import (
    hold_updates,
    list_names,
    overlaid_index,
    update_with_held,
)
from zarr_shardstore.shards.pending import PendingShards
from zarr_shardstore.shards.read import ReadOptions
from zarr_shardstore.shards.requests import ListDir, ListPrefix, Set
from zarr_shardstore.shards.updates import DeleteEntry, EntryUpdate, MapEntry, PatchEntry, SetEntry

KEY = "a/c0/0"
OLD = {0: b"zero", 1: b"one", 3: b"three"}


def shard_of(
    coords: tuple[int, int] = (0, 0), grid: tuple[int, int] = (4, 3), index: object = DRAFT_INDEX
) -> ShardRef:
    spec = ShardingSpec((2, 2), index)  # type: ignore[arg-type]
    return ArrayLayout("a", "a/", ChunkKeyEncoding("draft", "/"), grid, spec).shard(coords)


def table(max_nbytes: int | None = 10**6) -> PendingShards:
    pending = PendingShards()
    pending.max_nbytes = max_nbytes
    return pending


def hold(
    pending: PendingShards,
    *updates: EntryUpdate,
    recorder: Recorder | None = None,
    shard: ShardRef | None = None,
) -> Recorder:
    recorder = recorder or Recorder({KEY: build_shard(OLD, (2, 2), DRAFT_INDEX)})
    recorder.run(hold_updates(shard or shard_of(), updates, ReadOptions(), pending))
    return recorder


def values(pending: PendingShards) -> dict[int, bytes | None]:
    return {
        i: bytes(final.value) if isinstance(final, SetEntry) else None
        for i, final in pending.entries(shard_of()).items()
    }


def test_whole_values_ask_for_nothing() -> None:
    """Nor do pieces and conditions on what is held already."""
    pending = table()
    recorder = hold(pending, SetEntry(0, b"new"), DeleteEntry(1), PatchEntry(0, ((3, b"er"),)))
    hold(
        pending,
        SetEntry(1, b"1", only_if_missing=True),
        PatchEntry(0, ((0, b"N"),)),
        recorder=recorder,
    )
    hold(pending, SetEntry(0, b"!", only_if_missing=True), recorder=recorder)
    assert recorder.batches == []
    assert values(pending) == {0: b"Newer", 1: b"1"}


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (PatchEntry(1, ((3, b"!"),)), {1: b"one!"}),
        (PatchEntry(2, ((0, b"two"),)), {2: b"two"}),
        (SetEntry(1, b"1", only_if_missing=True), {}),
        (SetEntry(2, b"2", only_if_missing=True), {2: b"2"}),
        (MapEntry(3, lambda old: bytes(old or b"")[::-1]), {3: b"eerht"}),
    ],
)
def test_what_depends_on_a_stored_value_reads_that(
    update: EntryUpdate, expected: dict[int, bytes]
) -> None:
    """The index and the entry; a second time nothing, if something is held."""
    pending = table()
    recorder = hold(pending, update)
    assert 1 <= len(recorder.batches) <= 2
    assert values(pending) == expected


def test_a_group_with_a_bad_piece_is_held_in_no_part() -> None:
    """Its error is raised."""
    pending = table()
    with pytest.raises(SpecError, match="lies outside"):
        hold(pending, SetEntry(0, b"x"), PatchEntry(1, ((9, b"!"),)))
    assert not pending.pending()


def test_a_value_that_was_published_meanwhile_is_read_again() -> None:
    """Between the read of the old value and its use another writer was faster."""
    pending = table()
    shard = shard_of()
    recorder = Recorder({KEY: build_shard(OLD, (2, 2), DRAFT_INDEX)})

    def another(n: int) -> None:
        if n == 2:
            hold(pending, SetEntry(1, b"theirs"), recorder=recorder)
            recorder.run(update_with_held(shard, [()], pending, order="C"))
            assert not pending.pending()

    recorder._between = another
    hold(pending, PatchEntry(1, ((0, b"T"),)), recorder=recorder)
    assert values(pending) == {1: b"Theirs"}


def test_a_commit_takes_along_what_is_held() -> None:
    """Before its own updates, in the same write."""
    pending = table()
    recorder = hold(pending, SetEntry(0, b"held"), SetEntry(2, b"held"))
    outcomes = recorder.run(
        update_with_held(
            shard_of(), [[SetEntry(2, b"mine")], [PatchEntry(0, ((9, b"?"),))]], pending, order="C"
        )
    )
    assert outcomes[0] is None
    assert isinstance(outcomes[1], SpecError)
    stored = split_shard(recorder.objects[KEY], (2, 2), DRAFT_INDEX)
    assert {i: bytes(v) for i, v in stored.items()} == OLD | {0: b"held", 2: b"mine"}
    assert sum(isinstance(r, Set) for batch in recorder.batches for r in batch) == 1
    assert not pending.pending()
    assert pending.nbytes == 0


@pytest.mark.parametrize("newer", [(), (SetEntry(0, b"newer"),)])
def test_a_commit_that_fails_puts_back(newer: Sequence[EntryUpdate]) -> None:
    """Behind what was held since."""
    pending = table()
    hold(pending, SetEntry(0, b"older"), SetEntry(1, b"other"))
    flow = update_with_held(shard_of(), [()], pending, order="C")
    next(flow)
    assert values(pending) == {0: b"older", 1: b"other"}, "seen while it is committed"
    assert pending.nbytes == 0
    if newer:
        hold(pending, *newer)
    with pytest.raises(OSError, match="full"):
        flow.throw(OSError("full"))
    assert values(pending) == {0: b"newer" if newer else b"older", 1: b"other"}
    assert str(pending.error_of(KEY)) == "full"
    assert pending.nbytes == 200


def test_full_shards_are_due_once() -> None:
    """All entries of the array in the shard count; at the edge these are fewer."""
    pending = table()
    edge = shard_of((0, 1))
    for i in (0, 2):
        assert pending.due() == []
        hold(pending, SetEntry(i, b"x"), shard=edge)
    assert pending.due() == [edge.key]
    assert pending.due() == []
    assert pending.nbytes == 0
    pending.release([edge.key])
    assert pending.nbytes == 200


def test_the_largest_are_due_until_the_rest_fits() -> None:
    """Small values count as the objects that hold them."""
    pending = table(2500)
    for j, nbytes in enumerate((1, 900, 1700)):
        hold(pending, SetEntry(0, b"x" * nbytes), shard=shard_of((j, 0), (9, 9)))
    assert pending.nbytes == 2700
    assert pending.due() == ["a/c2/0"]
    assert pending.nbytes == 1000


def test_what_was_promised_is_not_discarded() -> None:
    """And what is in a commit is seen until that ends, but not put back."""
    pending = table()
    hold(pending, SetEntry(0, b"x"))
    assert pending.promise() == [KEY]
    pending.discard()
    assert values(pending) == {0: b"x"}
    pending.unpromise([KEY])
    flow = update_with_held(shard_of(), [()], pending, order="C")
    next(flow)
    hold(pending, SetEntry(1, b"y"))
    pending.discard()
    assert values(pending) == {0: b"x"}
    flow.close()
    assert not pending.pending()
    assert pending.nbytes == 0


def test_values_of_another_layout_are_not_mixed() -> None:
    """A larger grid is the same layout; another form of the index is not."""
    pending = table()
    hold(pending, SetEntry(0, b"x"))
    hold(pending, SetEntry(1, b"y"), shard=shard_of(grid=(9, 9)))
    assert values(pending) == {0: b"x", 1: b"y"}
    other = shard_of(index=ZEP2_INDEX)
    assert pending.entries(other) == {}
    assert pending.take(other) is None
    with pytest.raises(ShardConflictError, match="declared anew"):
        hold(pending, SetEntry(0, b"z"), shard=other)


def test_an_overlaid_index_has_the_sizes_of_held_values() -> None:
    """``None``, if nothing is left."""
    shard = shard_of()
    index = index_of_shard(build_shard(OLD, (2, 2), DRAFT_INDEX), (2, 2), DRAFT_INDEX)
    overlaid = overlaid_index(shard, index, {0: DeleteEntry(0), 2: SetEntry(2, b"")})
    assert overlaid is not None
    assert overlaid.present_ids().tolist() == [1, 2, 3]
    assert overlaid.entry(2) == (0, 0)
    assert index.present_ids().tolist() == [0, 1, 3]
    assert overlaid_index(shard, index, {i: DeleteEntry(i) for i in range(4)}) is None
    assert overlaid_index(shard, None, {1: DeleteEntry(1)}) is None


def test_names_are_listed_recursively_only_where_a_shard_would_vanish() -> None:
    """Otherwise what is held is added."""
    pending = table()
    recorder = hold(pending, SetEntry(0, b"x"), shard=shard_of((1, 0)))
    assert recorder.run(list_names(["a/"], pending)) == [["c0", "c1"]]
    hold(pending, DeleteEntry(0), recorder=recorder)
    assert recorder.run(list_names(["a/"], pending)) == [["c0", "c1"]]
    hold(pending, DeleteEntry(1), DeleteEntry(3), recorder=recorder)
    assert recorder.run(list_names(["a/"], pending)) == [["c1"]]
    kinds = [type(r) for b in recorder.batches for r in b if isinstance(r, ListDir | ListPrefix)]
    assert kinds == [ListDir, ListDir, ListPrefix]


def test_a_commit_that_was_cut_off_is_done_again() -> None:
    """Its event loop ended, and nobody told the table."""
    pending = table()
    recorder = hold(pending, SetEntry(0, b"held"))
    cut_off = update_with_held(shard_of(), [()], pending, order="C")
    next(cut_off)
    recorder.run(update_with_held(shard_of(), [()], pending, order="C"))
    assert bytes(split_shard(recorder.objects[KEY], (2, 2), DRAFT_INDEX)[0]) == b"held"
    assert not pending.pending()
    cut_off.close()
    assert not pending.pending()
