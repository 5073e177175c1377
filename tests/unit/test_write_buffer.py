"""The write buffer, and the flows over it: what is asked of the base store, and when."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from tests.unit.flows import Recorder
from zarr_shardstore.errors import ShardConflictError, SpecError
from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.format.layout import ArrayLayout, ChunkRef, ShardRef
from zarr_shardstore.format.shard import (
    DRAFT_INDEX,
    ZEP2_INDEX,
    ShardingSpec,
    build_shard,
    split_shard,
)
from zarr_shardstore.operations.batch import Batch, LateEntry, WriteBuffer
from zarr_shardstore.operations.buffered import commit_with_buffered, perform_buffered
from zarr_shardstore.shards.read import ReadOptions
from zarr_shardstore.shards.requests import (
    Delete,
    DeleteEntry,
    EntryUpdate,
    Flow,
    MapEntry,
    Modify,
    PatchEntry,
    Request,
    Set,
    SetEntry,
    SetIfNotExists,
    SetPartial,
    UpdateShard,
)
from zarr_shardstore.shards.rewrite import rewrite_shard

DRAFT_SPEC = ShardingSpec((2, 2), DRAFT_INDEX)

KEY = "a/c0/0"
OLD = {0: b"zero", 1: b"one", 3: b"three"}


def shard_of(
    coords: tuple[int, int] = (0, 0), grid: tuple[int, int] = (4, 3), index: object = DRAFT_INDEX
) -> ShardRef:
    spec = ShardingSpec((2, 2), index)  # type: ignore[arg-type]
    return ArrayLayout("a", "a/", ChunkKeyEncoding("draft", "/"), grid, spec).shard(coords)


_blocks: list[Batch] = []
"""Keeps them open: a buffer refers to them weakly."""


def open_buffer(max_nbytes: int = 10**6) -> WriteBuffer:
    buffer = WriteBuffer()
    block = Batch(buffer, None, None, None, max_nbytes)  # type: ignore[arg-type]
    buffer.enter(block)
    _blocks.append(block)
    return buffer


def request_of(shard: ShardRef, update: EntryUpdate) -> Request:
    key = shard.chunk_key(update.entry_id)
    match update:
        case SetEntry(_, value, only_if_missing):
            return SetIfNotExists(key, value) if only_if_missing else Set(key, value)
        case PatchEntry(_, pieces):
            return SetPartial(key, pieces)
        case MapEntry(_, change):
            return Modify(key, change)
    return Delete(key)


def put(
    buffer: WriteBuffer,
    *updates: EntryUpdate,
    recorder: Recorder | None = None,
    shard: ShardRef | None = None,
) -> Recorder:
    recorder = recorder or Recorder({KEY: build_shard(OLD, DRAFT_SPEC)})
    shard = shard or shard_of()
    requests = [request_of(shard, update) for update in updates]
    chunks = [ChunkRef(shard.chunk_key(u.entry_id), shard, u.entry_id) for u in updates]
    recorder.run(perform_buffered(requests, chunks, ReadOptions(), buffer))
    return recorder


def commit(
    buffer: WriteBuffer, groups: Sequence[Sequence[EntryUpdate]] = ((),)
) -> Flow[Sequence[Exception | None]]:
    return commit_with_buffered(shard_of(), groups, partial(rewrite_shard, order="C"), buffer)


def values(buffer: WriteBuffer) -> dict[int, Any]:
    found = {i: buffer.find(shard_of(), i) for i in range(4)}
    return {
        i: bytes(update.value) if isinstance(update, SetEntry) else None
        for i, update in found.items()
        if update is not None
    }


def test_whole_values_ask_for_nothing() -> None:
    """Nor do pieces and conditions on what is buffered already."""
    buffer = open_buffer()
    recorder = put(buffer, SetEntry(0, b"new"), DeleteEntry(1), PatchEntry(0, ((3, b"er"),)))
    put(
        buffer,
        SetEntry(1, b"1", only_if_missing=True),
        PatchEntry(0, ((0, b"N"),)),
        recorder=recorder,
    )
    put(buffer, SetEntry(0, b"!", only_if_missing=True), recorder=recorder)
    assert recorder.batches == []
    assert values(buffer) == {0: b"Newer", 1: b"1"}


@pytest.mark.parametrize(
    ("update", "stored"),
    [
        (PatchEntry(1, ((3, b"!"),)), OLD | {1: b"one!"}),
        (PatchEntry(2, ((0, b"two"),)), OLD | {2: b"two"}),
        (SetEntry(1, b"1", only_if_missing=True), OLD),
        (SetEntry(2, b"2", only_if_missing=True), OLD | {2: b"2"}),
        (MapEntry(3, lambda old: bytes(old or b"")[::-1]), OLD | {3: b"eerht"}),
    ],
)
def test_what_depends_on_a_stored_value_is_committed(
    update: EntryUpdate, stored: dict[int, bytes]
) -> None:
    """The driver gets the update, and takes along what is buffered."""
    buffer = open_buffer()
    recorder = put(buffer, SetEntry(0, b"zero"))
    shard = shard_of()
    chunk = ChunkRef(shard.chunk_key(update.entry_id), shard, update.entry_id)
    flow = perform_buffered([request_of(shard, update)], [chunk], ReadOptions(), buffer)
    (request,) = next(flow)
    assert isinstance(request, UpdateShard)
    recorder.run(commit(buffer, [request.updates]))
    found = split_shard(recorder.objects[KEY], DRAFT_SPEC)
    assert {i: bytes(v) for i, v in found.items()} == stored
    assert values(buffer) == {}


def test_a_group_with_a_bad_piece_is_buffered_in_no_part() -> None:
    """Its error is raised."""
    buffer = open_buffer()
    put(buffer, SetEntry(1, b"one"))
    with pytest.raises(SpecError, match="lies outside"):
        put(buffer, SetEntry(0, b"x"), PatchEntry(1, ((9, b"!"),)))
    assert values(buffer) == {1: b"one"}


def test_a_commit_takes_along_what_is_buffered() -> None:
    """Before its own updates, in the same write."""
    buffer = open_buffer()
    recorder = put(buffer, SetEntry(0, b"buffered"), SetEntry(2, b"buffered"))
    outcomes = recorder.run(commit(buffer, [[SetEntry(2, b"mine")], [PatchEntry(0, ((9, b"?"),))]]))
    assert outcomes[0] is None
    assert isinstance(outcomes[1], SpecError)
    stored = split_shard(recorder.objects[KEY], DRAFT_SPEC)
    assert {i: bytes(v) for i, v in stored.items()} == OLD | {0: b"buffered", 2: b"mine"}
    assert sum(isinstance(r, Set) for batch in recorder.batches for r in batch) == 1
    assert values(buffer) == {}
    assert buffer.nbytes == 0


@pytest.mark.parametrize("newer", [(), (SetEntry(0, b"newer"),)])
def test_a_commit_that_fails_puts_back(newer: Sequence[EntryUpdate]) -> None:
    """Below what was buffered since."""
    buffer = open_buffer()
    put(buffer, SetEntry(0, b"older"), SetEntry(1, b"other"))
    flow = commit(buffer)
    next(flow)
    assert values(buffer) == {0: b"older", 1: b"other"}, "seen while it is committed"
    assert buffer.nbytes == 0
    if newer:
        put(buffer, *newer)
    with pytest.raises(OSError, match="full"):
        flow.throw(OSError("full"))
    assert values(buffer) == {0: b"newer" if newer else b"older", 1: b"other"}
    restored = buffer.get(KEY)
    assert restored is not None
    assert str(restored.error) == "full"
    assert buffer.nbytes == 200


def test_full_shards_are_due_once() -> None:
    """All entries of the array in the shard count; at the edge these are fewer."""
    buffer = open_buffer()
    edge = shard_of((0, 1))
    for i in (0, 2):
        assert buffer.due() == []
        put(buffer, SetEntry(i, b"x"), shard=edge)
    assert buffer.due() == [edge.key]
    assert buffer.due() == []
    assert buffer.nbytes == 200


def test_the_largest_are_due_until_the_rest_fits() -> None:
    """Small values count as the objects that hold them."""
    buffer = open_buffer(2500)
    for j, nbytes in enumerate((1, 900, 1700)):
        put(buffer, SetEntry(0, b"x" * nbytes), shard=shard_of((j, 0), (9, 9)))
    assert buffer.nbytes == 2700
    assert buffer.due() == ["a/c2/0"]
    buffer.take(shard_of((2, 0), (9, 9)))
    assert buffer.due() == []


def test_what_was_dropped_is_not_restored() -> None:
    """The commit that had taken it fails after the last block has ended."""
    buffer = open_buffer()
    put(buffer, SetEntry(0, b"x"))
    flow = commit(buffer)
    next(flow)
    put(buffer, SetEntry(1, b"y"))
    buffer.drop("a/")
    assert values(buffer) == {}
    with pytest.raises(OSError, match="full"):
        flow.throw(OSError("full"))
    assert values(buffer) == {}
    assert buffer.nbytes == 0


def test_values_of_another_layout_are_not_mixed() -> None:
    """A larger grid is the same layout; another form of the index is not."""
    buffer = open_buffer()
    put(buffer, SetEntry(0, b"x"))
    put(buffer, SetEntry(1, b"y"), shard=shard_of(grid=(9, 9)))
    assert values(buffer) == {0: b"x", 1: b"y"}
    other = shard_of(index=ZEP2_INDEX)
    assert buffer.find(other, 0) is None
    assert buffer.take(other) is None
    with pytest.raises(ShardConflictError, match="declared the array again"):
        put(buffer, SetEntry(0, b"z"), shard=other)


def test_a_commit_that_was_cut_off_is_done_again() -> None:
    """Its event loop ended, and nobody told the table."""
    buffer = open_buffer()
    recorder = put(buffer, SetEntry(0, b"buffered"))
    cut_off = commit(buffer)
    next(cut_off)
    recorder.run(commit(buffer))
    assert bytes(split_shard(recorder.objects[KEY], DRAFT_SPEC)[0]) == b"buffered"
    assert values(buffer) == {}
    cut_off.close()
    assert values(buffer) == {}


def test_a_late_entry_counts_when_it_is_encoded_and_only_if_it_is_still_buffered() -> None:
    buffer, shard = open_buffer(), shard_of()
    late = [LateEntry(1, lambda: b"x" * 1000), LateEntry(2, lambda: b"y" * 1000)]
    assert all(buffer.put(shard, entry) for entry in late)
    assert buffer.put(shard, [SetEntry(2, b"newer")])
    before = buffer.nbytes
    for entry in late:
        buffer.encode_late(KEY, entry)
    assert buffer.nbytes == before + 900
    assert [buffer.find(shard, i) for i in (1, 2)] == [
        SetEntry(1, b"x" * 1000),
        SetEntry(2, b"newer"),
    ]
    taken = buffer.take(shard)
    assert taken is not None
    assert (buffer.nbytes, taken.snapshot[1]) == (0, SetEntry(1, b"x" * 1000))
    buffer.encode_late(KEY, late[0])
    assert buffer.nbytes == 0


def test_a_late_entry_that_cannot_be_encoded_fails_the_commit_and_stays() -> None:
    buffer, shard, n_calls = open_buffer(), shard_of(), 0

    def encode() -> bytes:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 1:
            raise MemoryError
        return b"at last"

    buffer.put(shard, LateEntry(0, encode))
    with pytest.raises(MemoryError):
        buffer.take(shard)
    taken = buffer.take(shard)
    assert taken is not None
    assert taken.snapshot == {0: SetEntry(0, b"at last")}
