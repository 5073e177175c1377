"""What a shard's index says about keys: those of stored chunks in the array, and no others."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.format.layout import ArrayLayout
from zarr_shardstore.format.shard import DRAFT_INDEX, MISSING, ShardIndex, ShardingSpec
from zarr_shardstore.shards import shard_listing
from zarr_shardstore.shards.shard_listing import ListedKeys

ENCODINGS = [
    ChunkKeyEncoding("draft", "/"),
    ChunkKeyEncoding("draft", "."),
    ChunkKeyEncoding("default", "/"),
    ChunkKeyEncoding("default", "."),
    ChunkKeyEncoding("v2", "/"),
    ChunkKeyEncoding("v2", "."),
]


@given(st.data())
def test_keys_are_those_of_stored_chunks_in_the_grid(data: st.DataObject) -> None:
    """Law: in C order, with the sizes that the index tells, a few at a time, below a prefix."""
    cps = tuple(data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    coords = tuple(data.draw(st.integers(0, 12)) for _ in cps)
    grid = tuple(c * n + data.draw(st.integers(0, n + 1)) for c, n in zip(coords, cps, strict=True))
    encoding = data.draw(st.sampled_from(ENCODINGS))
    known_grid = data.draw(st.sampled_from([grid, None]))
    layout = ArrayLayout("a", "a/", encoding, known_grid, ShardingSpec(cps, DRAFT_INDEX))
    sizes = data.draw(
        st.lists(
            st.none() | st.integers(0, 9),
            min_size=layout.spec.n_entries,
            max_size=layout.spec.n_entries,
        )
    )
    fields = np.array([(MISSING,) * 2 if s is None else (7, s) for s in sizes], np.uint64)
    shard, index = layout.shard(coords), ShardIndex(fields.reshape(-1, 2))
    box = [range(c * n, (c + 1) * n) for c, n in zip(coords, cps, strict=True)]
    expected = [
        ("a/" + encoding.encode(chunk), size)
        for chunk, size in zip(itertools.product(*box), sizes, strict=True)
        if size is not None and layout.has_chunk(chunk)
    ]
    assert list(ListedKeys("", [], [(shard, index)]).sizes()) == expected
    prefix = data.draw(st.sampled_from(["", "a/", "a/c", "a/c/1", "a/c1", "a/1", "b"]))
    expected = [(key, size) for key, size in expected if key.startswith(prefix)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_listing, "_KEYS_AT_ONCE", data.draw(st.integers(1, 40)))
        parts = list(ListedKeys(prefix, [], [(shard, index)]).key_lists())
        assert [key for keys in parts for key in keys] == [key for key, _ in expected]
        assert max(map(len, parts), default=0) <= shard_listing._KEYS_AT_ONCE
    assert list(ListedKeys(prefix, [], [(shard, index)]).sizes()) == expected
