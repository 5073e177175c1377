"""The write buffer, and the flows over it: what is asked of the base store, and when."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import zarr

from tests.unit.flows import Recorder, delete_entry, map_entry, patch_entry, set_entry
from zarr_shardstore import ShardingStore
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
from zarr_shardstore.operations import write_buffer
from zarr_shardstore.operations.batch import Batch
from zarr_shardstore.operations.write_buffer import (
    WriteBuffer,
    commit_with_buffered,
    perform_buffered,
)
from zarr_shardstore.shards.read import ReadOptions
from zarr_shardstore.shards.requests import (
    EntryUpdate,
    Flow,
    Request,
    Set,
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


def put(
    buffer: WriteBuffer,
    *updates: EntryUpdate,
    recorder: Recorder | None = None,
    shard: ShardRef | None = None,
) -> Recorder:
    recorder = recorder or Recorder({KEY: build_shard(OLD, DRAFT_SPEC)})
    shard = shard or shard_of()
    chunks = [ChunkRef(shard.chunk_key(i), shard, i) for i, _ in updates]
    requests: list[Request] = [
        update._replace(key=chunk.key) for chunk, (_, update) in zip(chunks, updates, strict=True)
    ]
    recorder.run(perform_buffered(list(zip(requests, chunks, strict=True)), ReadOptions(), buffer))
    return recorder


def commit(
    buffer: WriteBuffer,
    groups: Sequence[Sequence[EntryUpdate]] = ((),),
    shard: ShardRef | None = None,
) -> Flow[Sequence[Exception | None]]:
    rewrite = partial(rewrite_shard, order="C")
    return commit_with_buffered(shard or shard_of(), groups, rewrite, buffer)


def values(buffer: WriteBuffer) -> dict[int, Any]:
    found = {i: buffer.find(shard_of(), i) for i in range(4)}
    return {
        i: bytes(update.value) if isinstance(update, Set) else None
        for i, update in found.items()
        if update is not None
    }


def test_whole_values_ask_for_nothing() -> None:
    """Nor do pieces and conditions on what is buffered already."""
    buffer = open_buffer()
    recorder = put(buffer, set_entry(0, b"new"), delete_entry(1), patch_entry(0, ((3, b"er"),)))
    put(
        buffer,
        set_entry(1, b"1", only_if_missing=True),
        patch_entry(0, ((0, b"N"),)),
        recorder=recorder,
    )
    put(buffer, set_entry(0, b"!", only_if_missing=True), recorder=recorder)
    assert recorder.batches == []
    assert values(buffer) == {0: b"Newer", 1: b"1"}


@pytest.mark.parametrize(
    ("update", "stored"),
    [
        (patch_entry(1, ((3, b"!"),)), OLD | {1: b"one!"}),
        (patch_entry(2, ((0, b"two"),)), OLD | {2: b"two"}),
        (set_entry(1, b"1", only_if_missing=True), OLD),
        (set_entry(2, b"2", only_if_missing=True), OLD | {2: b"2"}),
        (map_entry(3, lambda old: bytes(old or b"")[::-1]), OLD | {3: b"eerht"}),
    ],
)
def test_what_depends_on_a_stored_value_is_committed(
    update: EntryUpdate, stored: dict[int, bytes]
) -> None:
    """The driver gets the update, and takes along what is buffered."""
    buffer = open_buffer()
    recorder = put(buffer, set_entry(0, b"zero"))
    shard = shard_of()
    chunk = ChunkRef(shard.chunk_key(update[0]), shard, update[0])
    flow = perform_buffered([(update[1], chunk)], ReadOptions(), buffer)
    (request,) = next(flow)
    assert isinstance(request, UpdateShard)
    recorder.run(commit(buffer, [request.updates]))
    found = split_shard(recorder.objects[KEY], DRAFT_SPEC)
    assert {i: bytes(v) for i, v in found.items()} == stored
    assert values(buffer) == {}


def test_a_group_with_a_bad_piece_is_buffered_in_no_part() -> None:
    """Its error is raised."""
    buffer = open_buffer()
    put(buffer, set_entry(1, b"one"))
    with pytest.raises(SpecError, match="lies outside"):
        put(buffer, set_entry(0, b"x"), patch_entry(1, ((9, b"!"),)))
    assert values(buffer) == {1: b"one"}


def test_a_commit_takes_along_what_is_buffered() -> None:
    """Before its own updates, in the same write."""
    buffer = open_buffer()
    recorder = put(buffer, set_entry(0, b"buffered"), set_entry(2, b"buffered"))
    outcomes = recorder.run(
        commit(buffer, [[set_entry(2, b"mine")], [patch_entry(0, ((9, b"?"),))]])
    )
    assert outcomes[0] is None
    assert isinstance(outcomes[1], SpecError)
    stored = split_shard(recorder.objects[KEY], DRAFT_SPEC)
    assert {i: bytes(v) for i, v in stored.items()} == OLD | {0: b"buffered", 2: b"mine"}
    assert sum(isinstance(r, Set) for batch in recorder.batches for r in batch) == 1
    assert values(buffer) == {}
    assert buffer.nbytes == 0


@pytest.mark.parametrize("newer", [(), (set_entry(0, b"newer"),)])
def test_a_commit_that_fails_puts_back(newer: Sequence[EntryUpdate]) -> None:
    """Below what was buffered since."""
    buffer = open_buffer()
    put(buffer, set_entry(0, b"older"), set_entry(1, b"other"))
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
        put(buffer, set_entry(i, b"x"), shard=edge)
    assert buffer.due() == [edge.key]
    assert buffer.due() == []
    assert buffer.nbytes == 200


def test_the_largest_are_due_until_the_rest_fits() -> None:
    """Small values count as the objects that hold them."""
    buffer = open_buffer(2500)
    for j, nbytes in enumerate((1, 900, 1700)):
        put(buffer, set_entry(0, b"x" * nbytes), shard=shard_of((j, 0), (9, 9)))
    assert buffer.nbytes == 2700
    assert buffer.due() == ["a/c2/0"]
    buffer.take(shard_of((2, 0), (9, 9)))
    assert buffer.due() == []


def test_a_part_that_follows_an_update_beside_the_snapshot_waits_for_its_commit() -> None:
    """The commit of a block that has ended stores both; the part needs the newer value."""
    buffer, shard = open_buffer(), shard_of()
    put(buffer, set_entry(0, b"old"), set_entry(1, b"one"))
    taken = buffer.take(shard, [[patch_entry(0, ((0, b"n"),))]])
    assert taken is not None
    assert not buffer.put(shard, [patch_entry(0, ((2, b"w"),))], {0: b"old"})
    assert buffer.put(shard, [patch_entry(1, ((0, b"O"),))])
    buffer.end_commit(taken)
    assert buffer.put(shard, [patch_entry(0, ((2, b"w"),))], {0: b"nld"})
    assert values(buffer) == {0: b"nlw", 1: b"One"}


def test_what_was_dropped_is_not_restored() -> None:
    """The commit that had taken it fails after the last block has ended."""
    buffer = open_buffer()
    put(buffer, set_entry(0, b"x"))
    flow = commit(buffer)
    next(flow)
    put(buffer, set_entry(1, b"y"))
    buffer.drop("a/")
    assert values(buffer) == {}
    with pytest.raises(OSError, match="full"):
        flow.throw(OSError("full"))
    assert values(buffer) == {}
    assert buffer.nbytes == 0


def test_values_of_another_layout_are_not_mixed() -> None:
    """A larger grid is the same layout; another form of the index is not."""
    buffer = open_buffer()
    put(buffer, set_entry(0, b"x"))
    put(buffer, set_entry(1, b"y"), shard=shard_of(grid=(9, 9)))
    assert values(buffer) == {0: b"x", 1: b"y"}
    other = shard_of(index=ZEP2_INDEX)
    assert buffer.find(other, 0) is None
    assert buffer.take(other) is None
    with pytest.raises(ShardConflictError, match="declared the array again"):
        put(buffer, set_entry(0, b"z"), shard=other)


def test_a_commit_that_was_cut_off_is_done_again() -> None:
    """Its event loop ended, and nobody told the table."""
    buffer = open_buffer()
    recorder = put(buffer, set_entry(0, b"buffered"))
    cut_off = commit(buffer)
    next(cut_off)
    recorder.run(commit(buffer))
    assert bytes(split_shard(recorder.objects[KEY], DRAFT_SPEC)[0]) == b"buffered"
    assert values(buffer) == {}
    cut_off.close()
    assert values(buffer) == {}


@pytest.mark.parametrize("n_shards", [1, 2])
def test_parts_that_are_written_while_the_batch_ends(n_shards: int) -> None:
    """After its last write and before its flush, another thread writes the rest of a chunk."""
    store = ShardingStore({}, chunks_per_shard=2)
    z = zarr.create_array(store, name="z", shape=(8 * n_shards,), chunks=(4,), dtype="u1")
    batch = store.batch()
    with batch:
        z[0:2] = 1
        keys = batch._leave(is_good=True)
        z[2:4] = 2
        batch._run(batch._flush(keys))
    assert np.asarray(z[:4]).tolist() == [1, 1, 2, 2]


def test_a_block_that_is_collected_during_a_write_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The write is not buffered, or it would come back over newer values."""
    buffer = open_buffer()
    nbytes_of = write_buffer._nbytes_of

    def collecting(state: Any) -> int:
        while _blocks and buffer.has_open(_blocks[-1]):
            buffer.end(_blocks.pop())
        return nbytes_of(state)

    monkeypatch.setattr(write_buffer, "_nbytes_of", collecting)
    assert not buffer.put(shard_of(), [set_entry(0, b"new")])
    assert (buffer.is_active, buffer.nbytes, buffer.get(KEY), buffer.due()) == (False, 0, None, [])
