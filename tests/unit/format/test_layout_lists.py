"""Layouts whose shards have several lengths."""

from __future__ import annotations

from itertools import product

from zarr_shardstore.format.box_grid import BoxGrid, Side
from zarr_shardstore.format.keys import ChunkKeyEncoding, Coords
from zarr_shardstore.format.layout import ArrayLayout, KeyTable
from zarr_shardstore.format.shard import DRAFT_INDEX, ZEP2_INDEX, IndexFormat, ShardingSpec

DEFAULT = ChunkKeyEncoding("default", "/")


def layout_of(
    *sides: Side, grid: Coords | None = None, index: IndexFormat = ZEP2_INDEX
) -> ArrayLayout:
    boxes = BoxGrid(sides)
    spec = ShardingSpec(boxes.largest, index, boxes.uneven)
    return ArrayLayout("a", "a/", DEFAULT, grid, spec)


def test_each_chunk_has_an_entry_of_its_own() -> None:
    """Of a shard with as many entries as it has chunks; the key table says the same twice."""
    cuts: list[tuple[Side, ...]] = [((2, 1, 3), 2), (2, (3, 1)), ((1, 2), (2, 1, 1))]
    for sides in cuts:
        layout = layout_of(*sides, grid=(6, 5))
        table = KeyTable(layout)
        assert table.spec is None
        seen = set()
        for _, coords in product(range(2), product(range(6), range(5))):
            chunk = layout.chunk(coords)
            assert table.translate(chunk.key) == (chunk.shard.key, chunk.entry_id)
            assert table.shard(chunk.shard.key).spec == chunk.shard.spec
            assert chunk.entry_id < chunk.shard.spec.n_entries
            assert chunk.shard.chunk_key(chunk.entry_id) == chunk.key
            assert chunk.entry_id in chunk.shard.entries_of()
            seen.add((chunk.shard.key, chunk.entry_id))
        assert len(seen) == 30


def test_layouts_with_the_same_entries() -> None:
    short = layout_of((2, 1), grid=(3,))
    assert short.has_same_entries(layout_of((2, 1, 4), grid=(7,)))
    assert not short.has_same_entries(layout_of((2, 2), grid=(4,)))
    assert not short.has_same_entries(layout_of((2, 1), grid=(3,), index=DRAFT_INDEX))
    assert not short.has_same_entries(layout_of((2, 1, 4)))
    assert layout_of((2, 1)).has_same_entries(layout_of((2, 1)))
    regular = layout_of(2, grid=(3,))
    assert KeyTable(regular).spec is regular.spec
