"""Chunks and shards of several lengths: the values are those of a plain array, part by part."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.storage import LocalStore, MemoryStore

from tests.support.bases import s3_through_fsspec
from tests.support.convert_once import open_store
from tests.support.processes import s3_server
from tests.support.rounds import rounds
from zarr_shardstore import (
    ShardingMapping,
    ShardingStore,
    check_store,
    get_shard_info,
    reshard,
    shard_store,
    unshard_store,
)

KNOWS_GRIDS = "rectilinear_chunks" in zarr.config.get("array")
needs_grids = pytest.mark.skipif(not KNOWS_GRIDS, reason="zarr before 3.2 has regular chunks only")

pytestmark = [
    pytest.mark.filterwarnings("ignore:through fsspec nothing keeps"),
    pytest.mark.filterwarnings("ignore:Your installed version of s3fs"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Grid = list[list[int]]

LENGTHS = st.lists(st.sampled_from([1, 1, 2, 3, 5, 7]), min_size=1, max_size=5)
GRIDS: st.SearchStrategy[Grid] = st.lists(LENGTHS, min_size=1, max_size=3)


@pytest.fixture(autouse=True)
def _with_rectilinear_chunks() -> Iterator[None]:
    if not KNOWS_GRIDS:
        yield
        return
    with zarr.config.set({"array.rectilinear_chunks": True}):
        yield


def document(shape: Any, inner: Any, shards: Any) -> dict[str, Any]:
    """Return a document as zarr 3.2 and later write it for shards of several lengths."""
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    codec = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": list(inner),
            "codecs": [little, {"name": "gzip", "configuration": {"level": 1}}],
            "index_codecs": [little, {"name": "crc32c"}],
            "index_location": "end",
        },
    }
    grid = {"kind": "inline", "chunk_shapes": shards}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": "int32",
        "chunk_grid": {"name": "rectilinear", "configuration": grid},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "attributes": {},
        "codecs": [codec],
    }


def array_of_shards(base: Any, lengths: Grid, inner: Any, shape: Any = None) -> Any:
    """Make a native array whose shards have these numbers of chunks; open it by its chunks."""
    shards = [[n * c for n in side] for side, c in zip(lengths, inner, strict=True)]
    full = document(shape or tuple(map(sum, shards)), inner, shards)
    ShardingMapping(base, native="passthrough")["a/zarr.json"] = json.dumps(full).encode()
    return zarr.open_array(ShardingStore(base), path="a")


def write_parts(z: Any, expected: np.ndarray[Any, Any], data: st.DataObject, n: int = 4) -> None:
    """Write boxes at random, in the array and in the model of it."""
    for i in range(n):
        box = []
        for length in expected.shape:
            at = sorted(data.draw(st.tuples(st.integers(0, length), st.integers(0, length))))
            box.append(slice(*at))
        part = expected[tuple(box)]
        values = np.arange(part.size, dtype="i4").reshape(part.shape) + 100 * i
        z[tuple(box)] = values
        expected[tuple(box)] = values


def grown(old: np.ndarray[Any, Any], shape: Any) -> np.ndarray[Any, Any]:
    new = np.zeros(shape, old.dtype)
    both = tuple(slice(min(a, b)) for a, b in zip(old.shape, shape, strict=True))
    new[both] = old[both]
    return new


@given(GRIDS, st.data())
@settings(max_examples=rounds(60), deadline=None)
def test_shards_of_several_lengths(lengths: Grid, data: st.DataObject) -> None:
    """Written part by part, resized, listed, checked, and read by plain zarr."""
    inner = tuple(data.draw(st.integers(1, 3)) for _ in lengths)
    n_cut = [data.draw(st.integers(0, side[-1] * c - 1)) for side, c in zip(lengths, inner)]  # noqa: B905
    shape = tuple(sum(s) * c - cut for s, c, cut in zip(lengths, inner, n_cut, strict=True))
    base = MemoryStore()
    z = array_of_shards(base, lengths, inner, shape)
    expected = np.zeros(shape, "i4")
    assert z.chunks == inner
    write_parts(z, expected, data)
    np.testing.assert_array_equal(z[...], expected)
    np.testing.assert_array_equal(ShardingStore(base).read_array("a"), expected)
    new_shape = tuple(data.draw(st.integers(0, n + 8)) for n in shape)
    z.resize(new_shape)
    expected = grown(expected, new_shape)
    write_parts(z, expected, data, 2)
    z = zarr.open_array(ShardingStore(base), path="a")
    np.testing.assert_array_equal(z[...], expected)
    assert_listed(base, expected, inner)
    assert check_store(base, level="decode").findings == ()
    (array,) = get_shard_info(base).arrays
    assert array.n_errors == 0
    assert array.n_chunks == len(keys_of_chunks(base))
    if KNOWS_GRIDS:
        np.testing.assert_array_equal(zarr.open_array(base, path="a")[...], expected)


@needs_grids
@pytest.mark.parametrize("declaration", ["codec", "storage_transformers"])
@given(GRIDS, st.data())
@settings(max_examples=rounds(30), deadline=None)
def test_arrays_that_are_shown_by_such_shards(
    declaration: Any, lengths: Grid, data: st.DataObject
) -> None:
    """zarr appends a shard of the rest when it makes the array longer: so does the store."""
    inner = tuple(data.draw(st.integers(1, 3)) for _ in lengths)
    shards: Any = [[n * c for n in side] for side, c in zip(lengths, inner, strict=True)]
    shape = tuple(map(sum, shards))
    base = MemoryStore()
    zarr.create_array(base, name="a", shape=shape, chunks=inner, dtype="i4")
    reshard(base, shards=shards, declaration=declaration)
    z: Any = zarr.open_array(ShardingStore(base, view="shards"), path="a")
    expected = np.zeros(shape, "i4")
    assert z.chunks == inner
    assert z.write_chunk_sizes == tuple(map(tuple, shards))
    write_parts(z, expected, data, 2)
    for _ in range(2):
        new_shape = tuple(
            n + c * data.draw(st.integers(0, 3)) for n, c in zip(z.shape, inner, strict=True)
        )
        z.resize(new_shape)
        expected = grown(expected, new_shape)
        write_parts(z, expected, data, 2)
        again: Any = zarr.open_array(ShardingStore(base, view="shards"), path="a")
        assert again.write_chunk_sizes == z.write_chunk_sizes
        for each in (z, again, zarr.open_array(ShardingStore(base), path="a")):
            np.testing.assert_array_equal(each[...], expected)
    assert check_store(base, level="decode").findings == ()


def keys_of_chunks(base: Any) -> list[str]:
    return [key for key in ShardingMapping(base) if key.startswith("a/c/")]


def assert_listed(base: Any, expected: np.ndarray[Any, Any], inner: Any) -> None:
    """Each chunk that has values is listed, in its directory too, and has its own bytes."""
    keys = set(keys_of_chunks(base))
    grid = [range(-(-n // c)) for n, c in zip(expected.shape, inner, strict=True)]
    with_values = set()
    for coords in product(*grid):
        box = tuple(slice(i * c, (i + 1) * c) for i, c in zip(coords, inner, strict=True))
        if expected[box].any():
            with_values.add("/".join(["a/c", *map(str, coords)]))
    assert with_values <= keys
    assert keys <= {"/".join(["a/c", *map(str, coords)]) for coords in product(*grid)}
    mapping = ShardingMapping(base)
    for directory in {key.rpartition("/")[0] + "/" for key in keys}:
        found, prefixes = mapping.list_dir(directory)
        below = {key for key in keys if key.startswith(directory)}
        assert {key for key in below if "/" not in key[len(directory) :]} <= set(found)
        assert len(prefixes) <= len({key[len(directory) :].split("/")[0] for key in below})


@needs_grids
@given(GRIDS, st.data())
@settings(max_examples=rounds(60), deadline=None)
def test_chunks_of_several_lengths(lengths: Grid, data: st.DataObject) -> None:
    """The draft's transformer shards them: it needs no sizes. Equal chunks get the native codec."""
    chunks: Any = lengths
    shape = tuple(map(sum, lengths))
    base = MemoryStore()
    store = ShardingStore(base, chunks_per_shard=data.draw(st.integers(1, 3)))
    z = zarr.create_array(store, name="a", shape=shape, chunks=chunks, dtype="i4")
    expected = np.zeros(shape, "i4")
    write_parts(z, expected, data)
    np.testing.assert_array_equal(z[...], expected)
    has_codec = b"sharding_indexed" in base._store_dict["a/zarr.json"].to_bytes()
    assert has_codec == all(len(set(side)) == 1 for side in lengths)
    new_shape = tuple(data.draw(st.integers(1, n + 8)) for n in shape)
    z.resize(new_shape)  # zarr appends a chunk of the rest
    expected = grown(expected, new_shape)
    write_parts(z, expected, data, 2)
    z = zarr.open_array(ShardingStore(base), path="a")
    np.testing.assert_array_equal(z[...], expected)
    assert check_store(base, level="decode").findings == ()
    n_objects = sum(key.startswith("a/c/") for key in base._store_dict)
    assert get_shard_info(base).arrays[0].n_objects == n_objects
    plain = MemoryStore()
    unshard_store(base, plain)
    np.testing.assert_array_equal(zarr.open_array(plain, path="a")[...], expected)


@needs_grids
def test_an_array_that_grows_by_another_chunk_leaves_the_codec() -> None:
    """Its shards stay as they are: the list of the draft declares them from then on."""
    base = MemoryStore()
    store = ShardingStore(base, chunks_per_shard=2)
    chunks: Any = [[4, 4, 4]]
    z = zarr.create_array(store, name="a", shape=(12,), chunks=chunks, dtype="i4")
    z[:] = np.arange(12)
    assert zarr.open_array(base, path="a").shards == (8,)
    before = base._store_dict["a/c/0"]
    z.resize((15,))
    z[12:] = 7
    assert base._store_dict["a/c/0"] is before
    again: Any = zarr.open_array(ShardingStore(base), path="a")
    assert again[:].tolist() == [*range(12), 7, 7, 7]
    assert again.write_chunk_sizes == ((4, 4, 4, 3),)
    with pytest.raises(Exception, match="zarr_shardstore"):
        zarr.open_array(base, path="a")


@pytest.mark.parametrize("cut", [[8, 2], [[8, 2], 10]])
def test_shards_that_their_chunks_do_not_divide(cut: Any) -> None:
    """The last chunk of each shard is shorter, as zarr-specs proposes it. It is shown so."""
    shards = [[10, 10, 5]] if len(cut) == 2 and cut == [8, 2] else [[10, 5], [4, 4]]
    inner = (8,) if len(shards) == 1 else (8, 3)
    full = document([sum(side) for side in shards], inner, shards)
    base = MemoryStore()
    ShardingMapping(base, native="passthrough")["a/zarr.json"] = json.dumps(full).encode()
    shown = json.loads(ShardingMapping(base)["a/zarr.json"])["chunk_grid"]["configuration"]
    expected = [[8, 2, 8, 2, 5]] if len(shards) == 1 else [[8, 2, 5], [3, 1, 3, 1]]
    assert shown == {"kind": "inline", "chunk_shapes": expected}
    mapping = ShardingMapping(base)
    keys = ["/".join(["a/c", *map(str, c)]) for c in product(*[range(len(e)) for e in expected])]
    for key in keys:
        mapping[key] = key.encode()
    assert {key: ShardingMapping(base)[key] for key in keys} == {k: k.encode() for k in keys}
    assert len(base._store_dict) == 1 + len(list(product(*shards)))


def test_arrays_with_grids_that_are_no_grids_pass() -> None:
    base = MemoryStore()
    grids: list[Any] = [[[4, 2]], [[4, 0, 8]], [[4, "8"]], [[8, 4]], [[4, 8], 3]]
    for shards in grids:
        full = document((12,), (2,), shards)
        if shards == [[8, 4]]:
            full["chunk_grid"]["configuration"]["kind"] = "other"
        stored = json.dumps(full).encode()
        ShardingMapping(base, native="passthrough")["a/zarr.json"] = stored
        mapping = ShardingMapping(base)
        assert mapping["a/zarr.json"] == stored
        mapping["a/c/0"] = b"as it is"
        assert base._store_dict["a/c/0"].to_bytes() == b"as it is"


# ------------------------------------------------------------------ kinds of base stores


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    with s3_server() as where:
        yield where


@pytest.fixture(
    params=[
        "local",
        pytest.param("obstore", marks=pytest.mark.thorough),
        pytest.param("fsspec", marks=pytest.mark.thorough),
    ]
)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "local":
        return LocalStore(tmp_path / "a")
    where = {**request.getfixturevalue("s3"), "prefix": uuid.uuid4().hex}
    return open_store(where) if request.param == "obstore" else s3_through_fsspec(where)


def test_on_each_kind_of_store(base: Any) -> None:
    """Written in parts, mapped, checked, given other shards and back, without decoding."""
    z = array_of_shards(base, [[2, 1, 3], [1, 2]], (2, 5))
    expected = np.zeros((12, 15), "i4")
    values = np.arange(180, dtype="i4").reshape(12, 15)
    for at in ((slice(0, 7), slice(3, 11)), (slice(5, 12), slice(9, 15))):
        z[at] = values[at]
        expected[at] = values[at]
    chunks = {key: ShardingMapping(base)[key] for key in keys_of_chunks(base)}
    assert chunks
    conversions: list[Any] = [
        lambda: reshard(base, (2, 2)),
        lambda: reshard(base, shards=[[2, 10], [5, 10]]),
        lambda: reshard(base, shards_at={0: [4, 8]}),
        lambda: unshard_store(base),
        lambda: shard_store(base, shards=[[4, 2, 6], [5, 10]]),
    ]
    for convert in conversions:
        report = convert()
        assert report.arrays[0].n_chunks == len(chunks)
        z = zarr.open_array(ShardingStore(base), path="a")
        np.testing.assert_array_equal(z[...], expected)
        assert {key: ShardingMapping(base)[key] for key in keys_of_chunks(base)} == chunks
        assert check_store(base, level="decode").findings == ()
    stored = json.loads(ShardingMapping(base, native="passthrough")["a/zarr.json"])
    sides = stored["chunk_grid"]["configuration"]["chunk_shapes"]
    assert sides == [[4, 2, 6], [5, 10]]


def write_rows(path: str, first: int, n_processes: int) -> None:
    """Write each `n_processes`-th row, element by element: each write cuts chunks and shards."""
    z = zarr.open_array(ShardingStore(path), path="a")
    for row in range(first, z.shape[0], n_processes):
        for start in range(0, z.shape[1], 4):
            z[row, start : start + 4] = row + 1


def test_processes_that_write_parts_lose_none(tmp_path: Path) -> None:
    array_of_shards(LocalStore(tmp_path), [[3, 1, 5, 2], [1, 2, 1]], (2, 5))
    with ProcessPoolExecutor(6, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(write_rows, str(tmp_path), i, 6) for i in range(6)]:
            future.result(120)
    found = zarr.open_array(ShardingStore(tmp_path), path="a")[...]
    np.testing.assert_array_equal(found, np.repeat(np.arange(1, 23), 20).reshape(22, 20))


# ------------------------------------------------------------------------ listed shards


@given(GRIDS, st.data())
@settings(max_examples=rounds(40), deadline=None)
def test_conversions_between_any_shards(lengths: Grid, data: st.DataObject) -> None:
    """From regular shards or none to listed ones, to other listed ones, and back."""
    inner = tuple(data.draw(st.integers(1, 3)) for _ in lengths)
    shape = tuple(sum(side) * c for side, c in zip(lengths, inner, strict=True))
    base = MemoryStore()
    z = zarr.create_array(base, name="a", shape=shape, chunks=inner, dtype="i4")
    expected = np.zeros(shape, "i4")
    write_parts(z, expected, data, 3)
    for _ in range(4):
        how = data.draw(st.sampled_from(["listed", "at", "regular", "none"]))
        cuts = [
            sorted(data.draw(st.sets(st.integers(1, max(1, n // c - 1)), max_size=4)))
            for n, c in zip(shape, inner, strict=True)
        ]
        ends = [
            [i * c for i in cut if i * c < n] + [n]
            for cut, n, c in zip(cuts, shape, inner, strict=True)
        ]
        lists = [[b - a for a, b in zip([0, *end], end, strict=False)] for end in ends]
        if how == "listed":
            reshard(base, shards=lists)
        elif how == "at":
            reshard(base, shards_at=dict(enumerate(ends)))
        elif how == "regular":
            reshard(base, tuple(data.draw(st.integers(1, 4)) for _ in shape))
        else:
            unshard_store(base)
        z = zarr.open_array(ShardingStore(base), path="a")
        np.testing.assert_array_equal(z[...], expected)
        if how in ("listed", "at"):
            info = get_shard_info(base).arrays[0]
            assert info.shard_grid_shape == tuple(map(len, lists))
            assert [*accumulate(lists[0])][-1] == shape[0]
    assert check_store(base, level="decode").findings == ()
