"""The walk: on all golden stores it shows the objects that are stored, however they are found."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.support.kit import tuned
from zarr_shardstore import ShardingMapping, ShardingStore
from zarr_shardstore.errors import ShardStoreError
from zarr_shardstore.operations.walk import ObjectGrid, Stored, Walk, read_stored, walk
from zarr_shardstore.store.base_handle import BaseStoreHandle, open_base
from zarr_shardstore.tools.inspect.find import find_arrays, read_array

GOLDEN = Path(__file__).parents[2] / "golden/v0.1"
STORES = sorted(path.name for path in GOLDEN.iterdir())
N = 4
"""No golden array has more chunks along a dimension."""


def grids_of(name: str) -> list[tuple[BaseStoreHandle, ObjectGrid]]:
    """Return the arrays of a golden store, as files and as a mapping."""
    files = (path for path in sorted((GOLDEN / name).rglob("*")) if path.is_file())
    objects = {str(path.relative_to(GOLDEN / name)): path.read_bytes() for path in files}
    found = []
    for base in (open_base(GOLDEN / name), open_base(objects)):
        for array in find_arrays(base):
            try:
                found.append((base, ObjectGrid.of_array(read_array(array))))
            except ShardStoreError:  # half converted
                continue
    return found


def chunks_in(stored: Stored) -> set[tuple[int, ...]] | str:
    if stored.damage is not None:
        return str(stored.damage)
    out = np.zeros((N, N), bool)
    stored.mark(out, ((0, N), (0, N)))
    return set(zip(*(axis.tolist() for axis in np.nonzero(out)), strict=True))


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize("name", STORES)
def test_each_box_has_its_objects(name: str) -> None:
    """Asked for place by place, or listed, in pages of one key or many: the same."""
    for base, grid in grids_of(name):
        there = [key for key in base.keys("") if grid.coords_inside(key) is not None]
        every = [stored for some in walk(base.run, grid) for stored in some]
        assert [stored.key for stored in every] == sorted(there)
        ranges = list(product(range(3), range(1, N + 1)))
        for rows, columns in product(ranges, ranges):
            box = rows, columns
            places = set(product(*grid.boxes.boxes_of(box)))
            wanted = [stored for stored in every if stored.coords in places]
            expected = {s.key: chunks_in(s) for s in base.run(read_stored(grid, wanted))}
            for max_asked, n_keys in product((0, 99), (1, 1024)):
                with tuned(keys_per_page=n_keys):
                    found = walk(base.run, grid, box, max_asked=max_asked)
                    read = [base.run(read_stored(grid, some)) for some in found]
                    assert {s.key: chunks_in(s) for some in read for s in some} == expected


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize("name", STORES)
def test_sizes_are_those_of_the_objects(name: str) -> None:
    """A size comes with the index, or it is requested."""
    for base, grid in grids_of(name):
        if not grid.below:
            rounds = [*walk(base.run, grid)]
            read = [base.run(read_stored(grid, some, sizes=True)) for some in rounds]
            found = [stored for some in read for stored in some]
            assert [s.nbytes for s in found] == base.sizes([s.key for s in found])


def test_keys_that_are_names_in_one_directory() -> None:
    """Other arrays may lie below it: their keys are no objects of this one."""
    document = (
        b'{"zarr_format": 2, "shape": [4, 4], "chunks": [1, 1], "dtype": "|u1", "order": "C", '
        b'"compressor": null, "filters": null, "fill_value": 0}'
    )
    base = open_base({".zarray": document, "0.1": b"1", "3.3": b"2", "9.9": b"3", "a/0.0": b"4"})
    grid = ObjectGrid.of_array(read_array(find_arrays(base)[0]))
    asked: list[Any] = []
    steps = Walk(grid)
    keys: list[str] = []
    while steps.has_more:
        flow = steps.next_round()
        asked += (batch := next(flow))
        with pytest.raises(StopIteration) as done:
            flow.send(base.perform(batch))
        keys += [stored.key for stored in done.value.value]
    assert keys == ["0.1", "3.3"]
    assert [type(request).__name__ for request in asked] == ["ListPage"]


def test_a_shard_that_grew_since_its_size_was_seen(tmp_path: Path) -> None:
    """The size that comes with an index counts: an older one would make it look damaged."""
    store = ShardingStore(tmp_path, 4, strategy="rewrite")
    z = zarr.create_array(store, shape=(4,), chunks=(1,), dtype="u1", compressors=None)
    z[:] = 1
    base = open_base(tmp_path)
    (array,) = find_arrays(base)
    grid = ObjectGrid.of_array(read_array(array))
    seen = Stored("c/0", (0,), nbytes=3)
    (stored,) = base.run(read_stored(grid, [seen], sizes=True, consistent=True))
    assert stored.damage is None
    assert stored.ids.tolist() == [0, 1, 2, 3]


def test_an_empty_region_reads_nothing(tmp_path: Path) -> None:
    """So it is also answered where a shard is damaged."""
    store = ShardingStore(tmp_path, 4, strategy="rewrite")
    zarr.create_array(store, shape=(8,), chunks=(1,), dtype="u1", compressors=None)[:] = 1
    (tmp_path / "c/0").write_bytes(b"damaged")
    assert ShardingMapping(tmp_path).chunks_initialized("", [slice(1, 1)]).shape == (0,)
