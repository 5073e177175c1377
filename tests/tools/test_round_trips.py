"""Law: what is sharded, re-sharded and unsharded has the keys and the bytes that it had.

Chunks are garbage that no codec could decode. After each step the shards have exactly the keys
that arithmetic says, and the chunks seen through a store are those of the source.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec

from tests.store.bases import objects_of, put
from tests.tools.hierarchies import (
    BASES,
    KINDS,
    V2,
    V3,
    ArrayOf,
    Coords,
    Kind,
    grid_coords,
    is_document,
    meaning,
    no_staging,
    view,
)
from zarr_shardstore import ShardingMapping
from zarr_shardstore.tools import other_keys, tasks, values
from zarr_shardstore.tools.convert import reshard, shard_store, unshard_store

INDEXES: list[dict[str, Any]] = [
    {},
    {"index_codecs": ["bytes"]},
    {"index_location": "start"},
    {"index_codecs": ["bytes"], "index_location": "start"},
]
ORDERS: Any = ["C", "F", "morton"]


@contextmanager
def batches_of(nbytes: int) -> Iterator[None]:
    """Small batches, so that small data are read in many, and large values in pieces."""
    with (
        mock.patch.object(values, "BATCH_NBYTES", nbytes),
        mock.patch.object(tasks, "BATCH_NBYTES", nbytes),
        mock.patch.object(other_keys, "BATCH_NBYTES", nbytes),
        mock.patch.object(values, "_FIRST_BATCH", 2),
        mock.patch.object(values, "_MAX_BATCH", 5),
        mock.patch.object(values, "_MAX_GAP_NBYTES", min(4, nbytes)),
    ):
        yield


@st.composite
def arrays(draw: st.DrawFn, kind: Kind, max_ndim: int = 4, min_ndim: int = 0) -> ArrayOf:
    """Any geometry with few chunks, and any of them stored."""
    grid = tuple(draw(st.lists(st.integers(0, 3), min_size=min_ndim, max_size=max_ndim)))
    if 0 not in grid and len(grid) > 2:
        grid = tuple(min(n, 2) if i % 2 else n for i, n in enumerate(grid))
    chunk_shape = tuple(draw(st.sampled_from([1, 2, 5])) for _ in grid)
    edge = tuple(draw(st.integers(0, size - 1)) for size in chunk_shape)
    path = draw(st.sampled_from(["a", "g/c", "0", "c/0", ""]))
    array = ArrayOf(kind, path, grid, chunk_shape, edge)
    coords = grid_coords(grid)
    stored = draw(st.sampled_from(["none", "one", "some", "all"])) if coords else "none"
    if stored == "one":
        coords = [draw(st.sampled_from(coords))]
    elif stored == "some":
        coords = draw(st.lists(st.sampled_from(coords), unique=True))
    elif stored == "none":
        coords = []
    value = st.one_of(st.just(b""), st.binary(max_size=5), st.binary(min_size=30, max_size=70))
    array.chunks.update({c: draw(value) for c in coords})
    return array


def cps_for(ndim: int) -> st.SearchStrategy[Coords]:
    """Also more than there are chunks along a dimension."""
    return st.tuples(*[st.integers(1, 4)] * ndim)


@dataclass
class Trip:
    """One store on its way; a step converts it in place, or into another store."""

    array: ArrayOf
    base: Any
    source: dict[str, Any]
    has_shards: bool = False

    @classmethod
    def of(cls, array: ArrayOf, base: Any) -> Trip:
        objects = array.objects()
        for key, value in objects.items():
            put(base, key, value)
        assert view(base) == objects
        return cls(array, base, meaning(objects))

    def step(self, where: str, function: Any, *args: Any, **options: Any) -> Any:
        if where == "in place":
            report = function(self.base, *args, **options)
        else:
            before = objects_of(self.base)
            target = BASES[where]()
            report = function(self.base, *args, destination=target, **options)
            assert objects_of(self.base) == before, "the source is only read"
            self.base = target
        assert no_staging(self.base)
        assert meaning(view(self.base)) == self.source
        return report

    def check_shards(self, cps: Coords) -> None:
        stored = {key for key in objects_of(self.base) if not is_document(key)}
        if self.array.grid == ():
            assert stored == self.array.chunk_objects().keys()
        else:
            assert stored == self.array.shard_keys(cps)

    def check_plain(self) -> None:
        assert meaning(objects_of(self.base)) == self.source


def round_trip(array: ArrayOf, data: st.DataObject, wheres: list[str], base: Any) -> None:
    trip = Trip.of(array, base)
    cps1, cps2 = data.draw(cps_for(len(array.grid))), data.draw(cps_for(len(array.grid)))
    options = dict(data.draw(st.sampled_from(INDEXES)))
    options["order"] = data.draw(st.sampled_from(ORDERS))
    if array.kind.hierarchy == "v3":
        declaration = data.draw(st.sampled_from([None, "codec", "storage_transformers"]))
        options["declaration"] = declaration
    again = dict(data.draw(st.sampled_from(INDEXES)))
    nbytes = data.draw(st.sampled_from([1, 7, 40, 10_000]))
    with batches_of(nbytes):
        report = trip.step(wheres[0], shard_store, chunks_per_shard={"*": cps1}, **options)
        trip.check_shards(cps1)
        assert report.n_objects <= report.n_chunks == len(array.chunks) or array.grid == ()
        trip.step(wheres[1], reshard, {"*": cps2}, **again)
        trip.check_shards(cps2)
        report = trip.step(wheres[2], unshard_store)
        trip.check_plain()
        assert report.n_bytes == sum(map(len, array.chunks.values())) or array.grid == ()


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=40)
@given(data=st.data())
def test_any_geometry(name: str, data: st.DataObject) -> None:
    """For every hierarchy: any grid, any chunks stored, any bytes, in place or to a dict."""
    array = data.draw(arrays(KINDS[name]))
    wheres = data.draw(st.lists(st.sampled_from(["in place", "dict"]), min_size=3, max_size=3))
    round_trip(array, data, wheres, {})


CHAINS = {
    "local, in place": ("local", ["in place"] * 3),
    "obstore, in place": ("obstore", ["in place"] * 3),
    "fsspec, in place": ("fsspec", ["in place"] * 3),
    "fsspec local, in place": ("fsspec local", ["in place"] * 3),
    "mapping, in place": ("mapping", ["in place"] * 3),
    "dict, local, fsspec, obstore": ("dict", ["local", "fsspec", "obstore"]),
    "obstore, memory, fsspec local, mapping": ("obstore", ["memory", "fsspec local", "mapping"]),
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", ["v3 /", "v2 .", "draft /"])
@settings(max_examples=4)
@given(data=st.data())
def test_any_base_store(chain: str, name: str, data: st.DataObject) -> None:
    """The same in stores of every kind, and from each kind to others."""
    first, wheres = CHAINS[chain]
    array = data.draw(arrays(KINDS[name], max_ndim=3, min_ndim=1))
    round_trip(array, data, wheres, BASES[first]())
