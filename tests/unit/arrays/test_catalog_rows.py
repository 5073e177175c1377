"""Keys of arrays that were met: the same answer in rows and in columns."""

from __future__ import annotations

import zarr
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore import ShardingMapping, ShardingStore
from zarr_shardstore.format.ranges import ByteRange, Range, Suffix

KEYS = [f"{path}/c/{i}/{j}" for path in "ab" for i in range(4) for j in range(5)]
OTHERS = ["a/zarr.json", "a/c/9/9", "a/c/0", "a/c/00/0", "other/c/0/0", ""]
RANGES: list[ByteRange | None] = [None, Range(1, 3), Suffix(2)]

wanted = st.lists(st.tuples(st.sampled_from(KEYS + OTHERS), st.sampled_from(RANGES)))


@given(wanted, st.booleans())
def test_columns_say_what_rows_say(pairs: list[tuple[str, ByteRange | None]], whole: bool) -> None:
    """`reads_by_shard` has each chunk that `chunk_of` finds, once for each time that it is asked
    for, with the range that was asked for, and each shard once."""
    store = ShardingStore({}, chunks_per_shard=(2, 3))
    for path in "ab":
        zarr.create_array(store, name=path, shape=(8, 10), chunks=(2, 2), dtype="u1")
    m = ShardingMapping(store)
    assert m.get("a/c/0/0") is None
    assert m.get("b/c/0/0") is None
    generation = store._engine.operations.arrays.current()
    keys, byte_ranges = [key for key, _ in pairs], [byte_range for _, byte_range in pairs]
    groups = generation.reads_by_shard(keys, None if whole else byte_ranges)
    assert len({reads.shard.key for reads in groups}) == len(groups)
    found = {}
    for reads in groups:
        columns = reads.byte_ranges() or [None] * len(reads.positions)
        for i, entry_id, byte_range in zip(reads.positions, reads.entry_ids, columns, strict=True):
            found[i] = reads.shard, entry_id, byte_range
    chunks = generation.chunks_of(keys)
    assert found == {
        i: (chunk.shard, chunk.entry_id, None if whole else byte_ranges[i])
        for i, chunk in enumerate(chunks)
        if chunk is not None
    }
    assert {keys[i] for i in found} == set(keys) & set(KEYS)
