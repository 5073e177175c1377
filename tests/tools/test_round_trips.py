"""Law: what is sharded, re-sharded and unsharded has the keys and the bytes that it had.

Chunks are garbage that no codec could decode. After each step the shards have exactly the keys
that arithmetic says, and the chunks seen through a store are those of the source.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec

from tests.support.bases import put
from tests.support.hierarchies import (
    BASES,
    KINDS,
    V2,
    V3,
    ArrayOf,
    Chunks,
    Coords,
    Kind,
    grid_coords,
    is_document,
    meaning,
    no_staging,
    view,
)
from tests.support.kit import objects_of, tuned
from tests.support.rounds import rounds
from zarr_shardstore import ShardingMapping, reshard, shard_store, unshard_store

INDEXES: list[dict[str, Any]] = [
    {},
    {"index_codecs": ["bytes"]},
    {"index_location": "start"},
    {"index_codecs": ["bytes"], "index_location": "start"},
]
ORDERS: Any = ["C", "F", "morton"]


@contextmanager
def batches_of(nbytes: int) -> Iterator[None]:
    """Small rounds, so that small data are read in many, and large values in pieces."""
    with tuned(copy_nbytes=nbytes, copy_values=5, copy_gap_nbytes=min(4, nbytes)):
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
@settings(max_examples=rounds(40))
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


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", ["v3 /", "v2 .", "draft /"])
@settings(max_examples=rounds(4))
@given(data=st.data())
def test_any_base_store(chain: str, name: str, data: st.DataObject) -> None:
    """The same in stores of every kind, and from each kind to others."""
    first, wheres = CHAINS[chain]
    array = data.draw(arrays(KINDS[name], max_ndim=3, min_ndim=1))
    round_trip(array, data, wheres, BASES[first]())


STACK = ["crc32c", "sharding"]


@pytest.mark.parametrize("kind", [V3, V2, KINDS["v3 ."]], ids=["v3", "v2", "v3 ."])
@settings(max_examples=rounds(15))
@given(data=st.data())
def test_stacks_keep_what_is_above_sharding(kind: Kind, data: st.DataObject) -> None:
    """Values are moved with their checksums; without shards, checksums alone are declared."""
    array = data.draw(arrays(kind, max_ndim=3, min_ndim=1))
    cps = data.draw(st.tuples(*[cps_for(len(array.grid))] * 3))
    base: dict[str, bytes] = {}
    mapping = ShardingMapping(base, chunks_per_shard={"*": cps[0]}, storage_transformers=STACK)
    objects = array.objects()
    for key in sorted(objects, key=is_document, reverse=True):
        mapping[key] = objects[key]
    trip = Trip(array, base, meaning(mapping))
    wheres = data.draw(st.lists(st.sampled_from(["in place", "dict"]), min_size=3, max_size=3))
    with batches_of(data.draw(st.sampled_from([7, 10_000]))):
        trip.step(wheres[0], reshard, {"*": cps[1]})
        trip.check_shards(cps[1])
        trip.step(wheres[1], unshard_store)
        stored = objects_of(trip.base)
        for key, value in array.chunk_objects().items():
            assert stored[key] == value + crc32c.crc32c(value).to_bytes(4, "little")
        trip.step(wheres[2], shard_store, chunks_per_shard={"*": cps[2]})
        trip.check_shards(cps[2])


# ---------------------------------------------------------------- native sharding

SHAPE, CHUNKS, CPS = (13, 7, 5), (2, 3, 1), (3, 1, 2)
DATA = np.arange(13 * 7 * 5, dtype="<u2").reshape(SHAPE)
DATA[2:6, 3:] = 0  # chunks that are not stored


def write_by_zarr(path: Path, **options: Any) -> None:
    z = zarr.create_array(
        str(path), name="a", shape=SHAPE, dtype="<u2", compressors=GzipCodec(), **options
    )
    z[...] = DATA


def write_by_codec(path: Path, location: Any, has_checksum: bool) -> None:
    shards = tuple(c * n for c, n in zip(CHUNKS, CPS, strict=True))
    codec = ShardingCodec(
        chunk_shape=CHUNKS,
        codecs=[BytesCodec(), GzipCodec()],
        index_codecs=[BytesCodec(), *([Crc32cCodec()] if has_checksum else [])],
        index_location=location,
    )
    z = zarr.create_array(
        str(path),
        name="a",
        shape=SHAPE,
        chunks=shards,
        dtype="<u2",
        serializer=codec,
        filters=None,
        compressors=None,
    )
    z[...] = DATA


def write_by_tensorstore(path: Path, location: str, has_checksum: bool) -> None:
    ts = pytest.importorskip("tensorstore")
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    configuration = {
        "chunk_shape": list(CHUNKS),
        "codecs": [little, {"name": "gzip", "configuration": {"level": 1}}],
        "index_codecs": [little, *([{"name": "crc32c"}] if has_checksum else [])],
        "index_location": location,
    }
    metadata = {
        "shape": list(SHAPE),
        "data_type": "uint16",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [6, 3, 2]}},
        "codecs": [{"name": "sharding_indexed", "configuration": configuration}],
    }
    spec = {"driver": "zarr3", "kvstore": f"file://{path}/a/", "metadata": metadata}
    ts.open(spec, create=True).result().write(DATA).result()


WRITERS: dict[str, Any] = {
    "zarr shards": lambda path: write_by_zarr(path, chunks=CHUNKS, shards=(6, 3, 2)),
    **{
        f"{name}, index at {location}, {'crc32c' if has_checksum else 'no crc32c'}": (
            lambda path, w=write, loc=location, crc=has_checksum: w(path, loc, crc)
        )
        for name, write in {"zarr": write_by_codec, "tensorstore": write_by_tensorstore}.items()
        for location in ("end", "start")
        for has_checksum in (True, False)
    },
}


def read_natively(base: Any) -> list[Any]:
    ts = pytest.importorskip("tensorstore")
    path = f"file://{Path(base) / 'a'}/"
    by_tensorstore = ts.open({"driver": "zarr3", "kvstore": path}, read=True).result()
    return [zarr.open_array(str(base), path="a", mode="r")[...], by_tensorstore.read().result()]


@pytest.mark.thorough(of=3)
@pytest.mark.parametrize("writer", WRITERS)
def test_native_shards(tmp_path: Path, writer: str) -> None:
    """What others sharded is re-packed; after each step others read it natively."""
    base = tmp_path / "source"
    WRITERS[writer](base)
    chunks = view(base)
    n_chunks = sum(not is_document(key) for key in chunks)
    assert n_chunks < 7 * 3 * 5, "some are missing"
    index = stored_index(base)
    with batches_of(100):
        report = reshard(base, (2, 2, 4))
        assert (report.n_chunks, stored_index(base)) == (n_chunks, index)
        report = unshard_store(base, tmp_path / "plain")
        assert report.n_objects == report.n_chunks == n_chunks
        again = shard_store(tmp_path / "plain", tmp_path / "again", chunks_per_shard=CPS)
        assert again.n_bytes == report.n_bytes
    for path in (base, tmp_path / "plain", tmp_path / "again"):
        assert meaning(view(path)) == meaning(chunks)
        for found in read_natively(path):
            np.testing.assert_array_equal(found, DATA)
    plain = zarr.open_array(str(tmp_path / "plain"), path="a")
    assert (plain.chunks, plain.shards) == (CHUNKS, None)
    z = zarr.open_array(str(tmp_path / "again"), path="a")
    assert (z.chunks, z.shards) == (CHUNKS, (6, 3, 2))


def stored_index(base: Path) -> tuple[str, bool]:
    (codec,) = json.loads((base / "a/zarr.json").read_bytes())["codecs"]
    configuration = codec["configuration"]
    return configuration.get("index_location", "end"), len(configuration["index_codecs"]) == 2


def test_a_native_array_of_no_dimensions(tmp_path: Path) -> None:
    """It has a shard of one chunk; only `unshard_store` changes that."""
    ts = pytest.importorskip("tensorstore")
    configuration = {"chunk_shape": [], "codecs": [{"name": "bytes"}]}
    codecs = [{"name": "sharding_indexed", "configuration": configuration}]
    metadata: dict[str, Any] = {"shape": [], "data_type": "uint8", "codecs": codecs}
    metadata["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": []}}
    spec = {"driver": "zarr3", "kvstore": f"file://{tmp_path}/a/", "metadata": metadata}
    ts.open(spec, create=True).result().write(7).result()
    assert (shard_store(tmp_path).n_skipped, reshard(tmp_path, 3).n_skipped) == (1, 1)
    report = unshard_store(tmp_path)
    assert (report.n_chunks, report.n_bytes) == (1, 1)
    assert (tmp_path / "a/c").read_bytes() == b"\7"
    assert [int(found) for found in read_natively(tmp_path)] == [7, 7]


# ---------------------------------------------------------------- large values

LARGE = 40_000_001


@pytest.mark.thorough(of=2)
@pytest.mark.parametrize("where", ["memory", "local", "obstore"])
def test_values_larger_than_a_batch(where: str) -> None:
    """Two values of 40 MB with small ones around them, in pieces of 8 MiB."""
    large = np.random.default_rng(3).bytes(LARGE)
    chunks: Chunks = {(0, 0): b"first", (0, 2): large, (1, 0): b"", (2, 2): b"last"}
    chunks[1, 1] = large[::-1]
    array = ArrayOf(V3, "a", (3, 3), (7000, 7000), (0, 0), chunks)
    base = BASES["dict"]()
    base.update(array.objects())
    sharded = BASES[where]()
    report = shard_store(base, sharded, chunks_per_shard=(2, 3))
    assert (report.n_chunks, report.n_objects) == (5, 2)
    assert report.n_bytes == sum(map(len, chunks.values()))
    plain: dict[str, bytes] = {}
    unshard_store(sharded, plain)
    assert plain.keys() == base.keys()
    assert all(plain[key] == base[key] for key in array.chunk_objects())
