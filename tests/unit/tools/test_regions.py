"""Which regions of a grid a conversion visits, and by how many requests it finds them."""

from __future__ import annotations

import math
import sys
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.hierarchies import KINDS, ArrayOf, Coords
from tests.support.rounds import rounds
from tests.support.shard_bytes import build_shard
from tests.tools.test_sparse import sparse
from zarr_shardstore import shard_store
from zarr_shardstore.format.box_grid import BoxGrid
from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.format.shard import ZEP2_INDEX, ShardingSpec
from zarr_shardstore.io.backends.mapping import MappingBackend
from zarr_shardstore.metadata.documents import Node
from zarr_shardstore.operations.walk import ObjectGrid
from zarr_shardstore.shards.requests import ListPage
from zarr_shardstore.store.base_handle import open_base
from zarr_shardstore.tools.convert import regions
from zarr_shardstore.tools.convert.regions import ArrayLocation, regions_to_visit


@pytest.mark.parametrize(("n_samples", "n_pages"), [(64, 0), (0, 5)])
def test_dense_grids_are_walked(n_samples: int, n_pages: int) -> None:
    """Some places tell it, or half of a listing: as soon as that has seen half of what the grid
    may hold, it is given up."""
    asked: list[int] = []
    original = MappingBackend.perform

    def count(self: MappingBackend, batch: list[Any], opened: Any = None) -> list[Any]:
        asked.extend(request.n_keys for request in batch if isinstance(request, ListPage))
        return original(self, batch, opened)

    coords: list[Coords] = [(i, j) for i in range(100) for j in range(100)]
    base = sparse(coords, (100, 100)).objects()
    with (
        mock.patch.object(regions, "_N_SAMPLES", n_samples),
        mock.patch.object(MappingBackend, "perform", count),
    ):
        report = shard_store(base, chunks_per_shard=10)
    assert (sum(0 < n < sys.maxsize for n in asked), asked.count(0)) == (n_pages, n_pages > 0)
    assert (report.n_chunks, report.arrays[0].n_tasks) == (10_000, 100)


@st.composite
def places(draw: st.DrawFn) -> tuple[Coords, Coords, Coords | None, list[Coords]]:
    """A grid, the shape of regions, chunks per shard, and coordinates of chunks."""
    ndim = draw(st.integers(1, 3))
    lengths = st.integers(1, 12) | st.sampled_from([10**4, 2**40, 2**63 + 5])
    grid = tuple(draw(lengths) for _ in range(ndim))
    shape = st.tuples(*[st.integers(1, 5)] * ndim)
    coords = st.tuples(*[st.integers(0, n - 1) for n in grid])
    return grid, draw(shape), draw(st.none() | shape), draw(st.lists(coords, max_size=8))


@given(places(), st.sampled_from(sorted(KINDS)))
@settings(max_examples=rounds(150), deadline=None)
def test_regions_are_those_of_the_stored_values(case: Any, name: str) -> None:
    """Each region that a stored value lies in, in C order, and no other; or all of them.

    A shard that lies in one region is not opened: it counts with or without values.
    """
    grid, region_shape, cps, coords = case
    kind = KINDS[name]
    keys = {kind.key("a", c): b"" for c in coords}
    if cps is not None:
        shards: dict[Coords, dict[int, bytes]] = {}
        for c in coords:
            owner = tuple(i // n for i, n in zip(c, cps, strict=True))
            entry = 0
            for i, n in zip(c, cps, strict=True):
                entry = entry * n + i % n
            shards.setdefault(owner, {})[entry] = b"x"
        n = math.prod(cps)
        keys = {kind.key("a", owner): build_shard(of, n) for owner, of in shards.items()}
    array = sparse([], grid, kind)
    base = {**keys, **dict.fromkeys(["a/c/note", "a/readme", "b/c/0"], b"")}
    place = place_of(array, base, cps)
    with mock.patch.object(regions, "_WALKED", 4):
        found = regions_to_visit([place], BoxGrid(region_shape))
    if found is None:
        return
    assert found == sorted(
        {tuple(i // r for i, r in zip(c, region_shape, strict=True)) for c in coords}
    )


def place_of(array: ArrayOf, base: Any, cps: Coords | None) -> ArrayLocation:
    encoding = ChunkKeyEncoding(array.kind.style, array.kind.separator)  # type: ignore[arg-type]
    prefix = Node(array.kind.hierarchy, "a").chunk_prefix  # type: ignore[arg-type]
    spec = None if cps is None else ShardingSpec(cps, ZEP2_INDEX)
    return ArrayLocation(open_base(base), ObjectGrid.of_keys(prefix, encoding, array.grid, spec))


def test_requests_of_a_sparse_conversion() -> None:
    """Of a grid of a million places with two chunks: the places of two regions."""
    asked = 0
    original = MappingBackend.perform

    def count(self: MappingBackend, batch: list[Any], opened: Any = None) -> list[Any]:
        nonlocal asked
        asked += len(batch)
        return original(self, batch, opened)

    base = sparse([(0, 0), (500, 500)], (1000, 1000)).objects()
    with mock.patch.object(MappingBackend, "perform", count):
        shard_store(base, {}, chunks_per_shard=8)
    assert asked < 64 + 2 * 64 + 100
