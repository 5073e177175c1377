"""How the shards of an array are counted: rounds, races, and ways to find the objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kit import tuned
from tests.support.rounds import rounds
from tests.tools.test_info import GOLDEN, INDEX, info_of, make, shard_of
from zarr_shardstore import ShardingMapping, ShardingStore, get_shard_info
from zarr_shardstore.format.ranges import Suffix
from zarr_shardstore.io.backends.local import LocalBackend
from zarr_shardstore.operations.walk import ObjectGrid, Stored, read_stored
from zarr_shardstore.shards import index_reads
from zarr_shardstore.shards.index_reads import found_index
from zarr_shardstore.shards.requests import Found, FoundIndex, Get, GetIndex, GetSize
from zarr_shardstore.store.base_handle import open_base
from zarr_shardstore.tools.inspect import occupancy
from zarr_shardstore.tools.inspect.find import arrays_at, read_array
from zarr_shardstore.tools.inspect.shard_map import cut_into_panels, shard_map


class FailingBackend(LocalBackend):
    """Refuses to read some files."""

    refused: tuple[str, ...] = ()

    def perform(self, batch: list[Any], opened: Any = None) -> list[Any]:
        for request in batch:
            if isinstance(request, Get | GetIndex) and request.key.endswith(self.refused):
                raise PermissionError(13, "Permission denied", request.key)
        return super().perform(batch, opened)


def test_a_shard_that_the_base_store_refuses_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it refuses all of a round, its error is raised: then it is no matter of shards."""
    z = make(ShardingStore(tmp_path, chunks_per_shard=(2, 3)))
    z[0, :] = 1
    monkeypatch.setattr("zarr_shardstore.io.backends.resolve.LocalBackend", FailingBackend)
    monkeypatch.setattr(FailingBackend, "refused", ("c/0/1",))
    array = info_of(tmp_path)
    assert array.n_errors == 1
    assert "Permission denied" in array.errors[0]
    assert array.n_chunks == 4
    assert np.isnan(shard_map(tmp_path, "a").fill[0, 1])
    monkeypatch.setattr(FailingBackend, "refused", ("c/0/0", "c/0/1", "c/0/2"))
    with pytest.raises(PermissionError):
        get_shard_info(tmp_path)


def test_indexes_alone_are_read_and_in_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many shards: no request for a chunk, and so many at once at most."""
    z = make(ShardingStore(tmp_path, chunks_per_shard=(2, 3)))
    z[:] = 1
    expected = info_of(tmp_path)
    asked: list[Any] = []
    rounds: list[int] = []

    class Recording(LocalBackend):
        def get(self, request: Get, opened: Any) -> Any:
            asked.append(request)
            return super().get(request, opened)

    read_round = occupancy._read_round

    def counted(base: Any, grid: Any, listed: Any) -> Any:
        rounds.append(len(listed))
        return read_round(base, grid, listed)

    monkeypatch.setattr("zarr_shardstore.io.backends.resolve.LocalBackend", Recording)
    monkeypatch.setattr(occupancy, "_read_round", counted)
    monkeypatch.setattr(index_reads, "_SHARDS_PER_ROUND", 4)
    assert info_of(tmp_path) == expected
    assert rounds == [4, 4, 1]
    gets = [r for r in asked if isinstance(r, Get) and r.key.startswith("a/c/")]
    assert [get.byte_range for get in gets] == [Suffix(INDEX)] * 9
    rounds.clear()
    monkeypatch.setattr(index_reads, "_NBYTES_PER_ROUND", 2 * INDEX)
    assert info_of(tmp_path) == expected
    assert rounds == [2, 2, 2, 2, 1], "fewer where indexes are large"


def test_a_shard_that_is_replaced_meanwhile_is_asked_again() -> None:
    """The index of one state and the size of another look like damage; the second look is true."""
    base: dict[str, bytes] = {}
    make(ShardingStore(base, chunks_per_shard=(2, 3)))
    grid = ObjectGrid.of_array(read_array(arrays_at(open_base(base), "a")[0]))
    shard = shard_of({0: (0, 50)}, 50)
    ref = grid.layout.shard_of_key("a/c/0/0")
    assert ref is not None
    index, size = GetIndex(ref, cache=False), GetSize("a/c/0/0")
    flow = read_stored(grid, [Stored("a/c/0/0", (0, 0))], sizes=True)
    assert next(flow) == [index, size]
    found = found_index(index, Found(memoryview(shard)[-INDEX:], None))
    assert flow.send([found, INDEX]) == [index._replace(consistent=True), size]
    with pytest.raises(StopIteration) as done:
        flow.send([found, len(shard)])
    (stored,) = done.value.value
    assert stored.damage is None
    assert occupancy.cell_of(stored) == occupancy.Cell((0, 0), 1, 50, INDEX, 0)


def test_an_object_that_is_erased_meanwhile_is_not_counted() -> None:
    """It was listed, and is not there any more."""
    base: dict[str, bytes] = {}
    make(ShardingStore(base, chunks_per_shard=(2, 3)))
    grid = ObjectGrid.of_array(read_array(arrays_at(open_base(base), "a")[0]))
    flow = read_stored(grid, [Stored("a/c/0/0", (0, 0))], sizes=True)
    next(flow)
    with pytest.raises(StopIteration) as done:
        flow.send([FoundIndex(None, None), None])
    assert done.value.value == []


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, Any]:
    ndim = draw(st.integers(0, 3))
    dims = st.lists(st.integers(1, 5), min_size=ndim, max_size=ndim).map(tuple)
    grid = draw(dims)
    zarr_format = draw(st.sampled_from([2, 3]))
    names = ["v2"] if zarr_format == 2 else ["v2", "default"]
    return {
        "shape": grid,
        "zarr_format": zarr_format,
        "chunk_key_encoding": {
            "name": draw(st.sampled_from(names)),
            "separator": draw(st.sampled_from("./")),
        },
        "chunks_per_shard": draw(st.none() | dims),
        "written": draw(
            st.lists(st.tuples(*(st.integers(0, n - 1) for n in grid)), max_size=12, unique=True)
        ),
        "name": draw(st.sampled_from(["", "g/c"])),
    }


@given(made=arrays(), n_keys=st.sampled_from([1, 2, 1024]))
@settings(max_examples=rounds(60))
def test_counts_and_fill_are_those_of_a_listing(made: dict[str, Any], n_keys: int) -> None:
    """Law: what is counted is what a `ShardingStore` lists, however the objects are found."""
    base: dict[str, bytes] = {}
    cps, written, ndim = made.pop("chunks_per_shard"), made.pop("written"), len(made["shape"])
    store = ShardingStore(base, chunks_per_shard=cps)
    z = zarr.create_array(store, chunks=(1,) * ndim, dtype="u1", compressors=None, **made)
    for coords in written:
        z[coords] = 1
    path = made["name"]
    prefix = f"{path}/" if path else ""
    keys = [
        key
        for key in ShardingMapping(base).list_prefix(prefix)
        if not key.endswith((".zarray", ".zattrs", ".zgroup", "zarr.json"))
    ]
    with tuned(keys_per_page=n_keys):
        array, shards = info_of(base), shard_map(base, path)
    assert array.n_chunks == len(keys) == len(written)
    assert array.chunk_nbytes == len(written)
    assert array.fill == len(written) / max(1, np.prod(made["shape"]))
    assert array.stored_nbytes == array.chunk_nbytes + array.index_nbytes + array.dead_nbytes
    assert array.n_objects == int((shards.fill > 0).sum())
    panels, _ = cut_into_panels(shards, 9, 9, lambda *_: 9)
    assert sum(panel.stored.sum() for panel in panels) == len(keys)


def test_pages_show_the_objects_of_draft_arrays() -> None:
    """Their first component spells a coordinate: ``c0/1``."""
    expected = get_shard_info(GOLDEN)
    with tuned(keys_per_page=1):
        assert get_shard_info(GOLDEN) == expected


@pytest.mark.parametrize("name", ["default", "v2"])
@pytest.mark.parametrize("separator", ["/", "."])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_pages_show_the_objects_of_v3_arrays(name: str, separator: str, ndim: int) -> None:
    """Also where the last component is directly below the array, or below its ``c``."""
    base: dict[str, bytes] = {}
    shape = (4, 3, 5)[:ndim]
    encoding = {"name": name, "separator": separator}
    options: dict[str, Any] = {"shape": shape, "chunks": (1,) * ndim}
    make(ShardingStore(base), **options, chunk_key_encoding=encoding)[...] = 1
    with tuned(keys_per_page=1):
        assert info_of(base).n_chunks == np.prod(shape)
