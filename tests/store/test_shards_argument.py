"""Arrays made with ``shards=`` through a store: addressed by chunks, coordinated, native below."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from zarr import Array, AsyncArray
from zarr.codecs import BytesCodec, GzipCodec, ShardingCodec, TransposeCodec
from zarr.core.sync import sync
from zarr.storage import LocalStore, LoggingStore, MemoryStore

from tests.support.kit import CountingStore, objects_of
from tests.support.pipeline_arrays import THEIRS
from tests.support.rounds import rounds
from zarr_shardstore import ShardingMapping, ShardingStore
from zarr_shardstore.errors import SpecError, UnsupportedError

PIPELINES = [
    f"zarr.core.codec_pipeline.{name}"
    for name in ("BatchedCodecPipeline", "FusedCodecPipeline")
    if hasattr(zarr.core.codec_pipeline, name)
]
NUMBERS = np.arange(1, 257, dtype="u2").reshape(16, 16)


def create(store: Any, **options: Any) -> Any:
    defaults = {"name": "a", "shape": (16, 16), "chunks": (1, 1), "shards": (8, 8), "dtype": "u2"}
    return zarr.create_array(store, **{**defaults, **options})


def reopened(store: Any, path: str = "a") -> Any:
    return zarr.open_array(store, path=path)


def read_by_tensorstore(path: Path) -> Any:
    ts = pytest.importorskip("tensorstore")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/a"}}
    return ts.open(spec).result().read().result()


def write_by_threads(z: Any, n_threads: int) -> None:
    """Each thread writes every n-th element by a call of its own."""

    def write(first: int) -> None:
        for i in range(first, z.size, n_threads):
            at = np.unravel_index(i, z.shape)
            z[at] = i + 1

    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(write, range(n_threads)))


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize("cps", [None, 2, "auto"])
@pytest.mark.parametrize("make", ["create_array", "group", "create", "pickled", "opened"])
def test_no_chunk_is_lost(tmp_path: Path, cps: Any, make: str) -> None:
    """Four threads, chunk by chunk. Plain zarr and tensorstore read the shards that were asked."""
    store = ShardingStore(tmp_path, chunks_per_shard=cps)
    match make:
        case "group":
            group = zarr.group(store)
            z: Any = group.create_array(
                "a", shape=(16, 16), chunks=(1, 1), shards=(8, 8), dtype="u2"
            )
        case "create":
            codecs = [ShardingCodec(chunk_shape=(1, 1), index_location="start")]
            z = zarr.create(
                store=store, path="a", shape=(16, 16), chunks=(8, 8), dtype="u2", codecs=codecs
            )
        case _:
            z = create(store)
    z = pickle.loads(pickle.dumps(z)) if make == "pickled" else z
    z = reopened(ShardingStore(tmp_path, view="shards")) if make == "opened" else z
    assert (z.chunks, z.shards, z.nchunks) == ((1, 1), (8, 8), 256)
    write_by_threads(z, 4)
    for values in (z[:], reopened(store)[:], reopened(tmp_path)[:], read_by_tensorstore(tmp_path)):
        assert_array_equal(values, NUMBERS)
    assert (reopened(tmp_path).chunks, reopened(tmp_path).shards) == ((1, 1), (8, 8))
    assert (reopened(store).chunks, reopened(store).shards) == ((1, 1), None)
    document = json.loads((tmp_path / "a" / "zarr.json").read_text())
    assert "zarr_shardstore" not in document
    location = document["codecs"][0]["configuration"]["index_location"]
    assert location == ("start" if make == "create" else "end")


def test_eight_threads_write_one_shard() -> None:
    """A base store without a file: each commit stores the whole shard."""
    base = MemoryStore()
    write_by_threads(create(ShardingStore(base), shards=(16, 16)), 8)
    assert_array_equal(reopened(base)[:], NUMBERS)


def test_a_chunk_costs_a_chunk(tmp_path: Path) -> None:
    """An update appends; a bulk write stores each shard once, a read takes two rounds."""
    store = ShardingStore(tmp_path)
    z = create(store, compressors=None, chunks=(4, 4), shards=(16, 16))
    z[:4, :4] = 1
    shard = tmp_path / "a" / "c" / "0" / "0"
    before = shard.stat().st_ino
    z[:4, 4:8] = 2
    assert shard.stat().st_ino == before, "the chunk is appended, the shard is not stored again"
    base = CountingStore()
    z = create(ShardingStore(base))
    base.forget()
    z[:] = NUMBERS
    assert sorted(key for _, key in base.writes) == [
        f"a/c/{i}/{j}" for i in range(2) for j in range(2)
    ]


# ------------------------------------------------------------------ the object of zarr


@pytest.mark.parametrize("is_opened", [False, True])
def test_the_object_stays_right(tmp_path: Path, is_opened: bool) -> None:
    """Keys of its shards are spelled like those of chunks; a resize erases no other chunk."""
    store = ShardingStore(tmp_path)
    z = create(store, shape=(40, 12), chunks=(2, 3), shards=(8, 6))
    z = reopened(ShardingStore(tmp_path, view="shards")) if is_opened else z
    data = np.arange(1, 481, dtype="u2").reshape(40, 12)
    z[:] = data
    native = zarr.open_array(ShardingStore(tmp_path, native="passthrough"), path="a")
    assert z.nchunks_initialized == native.nchunks_initialized == 80
    z.attrs["name"] = "x"
    z.resize((20, 12))
    data = data[:20]
    assert_array_equal(z[:], data)
    assert_array_equal(reopened(tmp_path)[:], data)
    assert z.nchunks_initialized == 48, "zarr counts whole shards"
    z.append(np.full((17, 12), 7, "u2"))
    data = np.concatenate([data, np.full((17, 12), 7, "u2")])
    z[25, 3:5] = data[25, 3:5] = 9
    for values in (z[:], reopened(store)[:], reopened(tmp_path)[:]):
        assert_array_equal(values, data)
    assert reopened(tmp_path).attrs["name"] == reopened(store).attrs["name"] == "x"
    assert reopened(tmp_path).shards == z.shards == (8, 6)


def test_an_erased_shard_does_not_come_back() -> None:
    base: dict[str, bytes] = {}
    z = create(ShardingStore(base))
    z[:] = 1
    z.resize((8, 8))
    assert [key for key in base if "/c/" in key] == ["a/c/0/0"]
    z.resize((16, 16))
    assert int(z[:].sum()) == int(reopened(ShardingStore(base))[:].sum()) == 64


@st.composite
def arrays_and_steps(draw: st.DrawFn) -> tuple[Any, ...]:
    ndim = draw(st.integers(1, 3))
    chunks = draw(st.tuples(*[st.integers(1, 3)] * ndim))
    per_shard = draw(st.tuples(*[st.integers(1, 3)] * ndim))
    shape = draw(st.tuples(*[st.integers(1, 10)] * ndim))
    spans = [
        st.builds(
            lambda a, b, step: slice(min(a, b), max(a, b) + 1, step),
            st.integers(0, n - 1),
            st.integers(0, n - 1),
            st.integers(1, 3),
        )
        for n in shape
    ]
    ints = [st.integers(0, n - 1) for n in shape]
    lists = [st.lists(i, min_size=1, max_size=6, unique=True) for i in ints]
    flags = [st.lists(st.booleans(), min_size=n, max_size=n) for n in shape]
    n_points = draw(st.integers(1, 6))
    points = [st.lists(i, min_size=n_points, max_size=n_points) for i in ints]
    ways = {
        "basic": st.tuples(*(st.one_of(*pair) for pair in zip(spans, ints, strict=True))),
        "orthogonal": st.tuples(
            *(st.one_of(*each) for each in zip(spans, ints, lists, flags, strict=True))
        ),
        "points": st.tuples(*points),
        "mask": st.integers(0, 2**20),
    }
    way = st.sampled_from(sorted(ways))
    step = way.flatmap(lambda name: st.tuples(st.just(name), ways[name]))
    what = st.sampled_from(["values", "scalar", "fill", "read"])
    return shape, chunks, per_shard, draw(st.lists(st.tuples(step, what), max_size=6))


@settings(max_examples=rounds(60))
@given(
    given_=arrays_and_steps(),
    separator=st.sampled_from("/."),
    is_start=st.booleans(),
    is_opened=st.booleans(),
)
def test_it_behaves_as_numpy_and_as_plain_zarr_reads_it(
    given_: Any, separator: Any, is_start: bool, is_opened: bool
) -> None:
    """Any shape, shard and selection: slices, numbers, lists, masks, points."""
    shape, chunks, per_shard, steps = given_
    shards = tuple(c * n for c, n in zip(chunks, per_shard, strict=True))
    base = MemoryStore()
    codec = ShardingCodec(chunk_shape=chunks, index_location="start" if is_start else "end")
    z: Any = zarr.create(
        store=ShardingStore(base),
        path="a",
        shape=shape,
        chunks=shards,
        dtype="i4",
        codecs=[codec],
        fill_value=3,
        chunk_key_encoding=("default", separator),
    )
    z = reopened(ShardingStore(base, view="shards")) if is_opened else z
    expected = np.full(shape, 3, "i4")
    for number, ((way, selection), what) in enumerate(steps):
        at, index = selection_of(z, way, selection)
        part = expected[index]
        if what == "read":
            assert_array_equal(at[selection_for(z, way, selection)], part)
            continue
        values = np.arange(part.size, dtype="i4").reshape(part.shape) + 10 * number
        value: Any = {"values": values, "scalar": number, "fill": 3}[what]
        if way == "points" and len(set(zip(*selection, strict=True))) < len(selection[0]):
            value = number  # which of two values for one element counts is undefined
        at[selection_for(z, way, selection)] = value
        expected[index] = value
    plain: Any = zarr.open_array(base, path="a", mode="r")
    assert_array_equal(z[...], expected)
    assert_array_equal(plain[...], expected)
    assert plain.shards == z.shards == shards


def selection_for(z: Any, way: str, selection: Any) -> Any:
    if way == "mask":
        return np.random.default_rng(selection).random(z.shape) < 0.4
    if way == "points":
        return tuple(np.array(numbers) for numbers in selection)
    return tuple(np.array(s) if isinstance(s, list) else s for s in selection)


def selection_of(z: Any, way: str, selection: Any) -> tuple[Any, Any]:
    """The indexer of zarr, and the index of numpy that means the same."""
    index = selection_for(z, way, selection)
    if way in ("mask", "points"):
        return z.vindex, index
    if way == "basic":
        return z, index
    ranges = [
        np.flatnonzero(s) if isinstance(s, np.ndarray) and s.dtype == bool
        else np.arange(n)[s] if isinstance(s, slice) else np.atleast_1d(s)
        for s, n in zip(index, z.shape, strict=True)
    ]  # fmt: skip
    grid = np.ix_(*ranges)
    dropped = tuple(i for i, s in enumerate(index) if isinstance(s, int))
    return z.oindex, tuple(np.squeeze(g, dropped) for g in grid) if dropped else grid


def test_the_object_is_the_same_in_another_process(tmp_path: Path) -> None:
    """Its keys and its document still have their marks: a resize there erases whole shards."""
    z = create(ShardingStore(tmp_path))
    z[:] = NUMBERS
    code = "import pickle, sys; z = pickle.load(sys.stdin.buffer); z.resize((8, 16)); z[0, 0] = 7"
    path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(z), check=True, env=env)
    expected = NUMBERS[:8].copy()
    expected[0, 0] = 7
    for store in (tmp_path, ShardingStore(tmp_path)):
        assert_array_equal(reopened(store)[:], expected)
    assert "zarr_shardstore" not in (tmp_path / "a" / "zarr.json").read_text()


@pytest.mark.parametrize("encoding", [("default", "/"), ("default", "."), ("v2", "/")])
@pytest.mark.parametrize("is_flat", [False, True])
def test_an_array_like_it_has_keys_of_its_own(encoding: Any, is_flat: bool) -> None:
    """`zarr.from_array` copies the chunk key encoding of the metadata object."""
    base, plain, sharded = MemoryStore(), MemoryStore(), MemoryStore()
    key_encoding: Any = {"name": encoding[0], "separator": encoding[1]}
    z = create(ShardingStore(base), chunk_key_encoding=key_encoding)
    z[:] = NUMBERS
    shards: Any = None if is_flat else "keep"
    for store in (plain, ShardingStore(sharded, chunks_per_shard=(8, 8))):
        made: Any = zarr.from_array(store, data=z, name="a", shards=shards)
        made.resize((24, 16))
        made.resize((8, 16))
        assert_array_equal(made[:], NUMBERS[:8])
    for stored in (plain, sharded):
        assert_array_equal(reopened(stored)[:], NUMBERS[:8])
        keys = [key for key in objects_of(stored) if not key.endswith("zarr.json")]
        assert not [key for key in keys if "__shard" in key]
        assert "zarr_shardstore" not in objects_of(stored)["a/zarr.json"].decode()
    z.attrs["x"] = 1
    z.resize((8, 8))
    assert_array_equal(reopened(base)[:], NUMBERS[:8, :8])


def test_what_another_pipeline_makes_of_a_copy_is_refused_by_readers() -> None:
    """Its keys have the mark of shards, and so has its document."""
    z = create(ShardingStore(MemoryStore()))
    z[:] = NUMBERS
    target = MemoryStore()
    with zarr.config.set({"codec_pipeline.path": THEIRS}):
        assert_array_equal(zarr.from_array(target, data=z, name="a")[:], NUMBERS)
    refusals = ValueError, SpecError, UnsupportedError
    for store in (target, ShardingStore(target)):
        with pytest.raises(
            refusals, match=r"zarr_shardstore|keys may be those of shards|addresses shards"
        ):
            reopened(store)


# --------------------------------------------------------------------- other pipelines


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("where", ["memory", "local", "pickled"])
def test_another_pipeline_shards_as_zarr_does(tmp_path: Path, pipeline: str, where: str) -> None:
    """Its shards are taken whole. Nothing is lost while each shard has one writer."""
    base: Any = MemoryStore() if where == "memory" else LocalStore(tmp_path)
    with zarr.config.set({"codec_pipeline.path": pipeline}):
        z = create(ShardingStore(base, chunks_per_shard=2), shape=(64,), chunks=(1,), shards=(16,))
        z = pickle.loads(pickle.dumps(z)) if where == "pickled" else z

        def write(first: int) -> None:
            for i in range(first, first + 16):
                z[i] = i + 1

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(0, 64, 16)))
        assert_array_equal(z[:], np.arange(1, 65))
        z[:] = 7
        z[5] = 8
        assert_array_equal(z[:], [*[7] * 5, 8, *[7] * 58])
        z[:] = 0
        assert [key for key in objects_of(base) if "/c/" in key] == []
    assert reopened(ShardingStore(base)).shards == (16,)


def test_what_was_read_binds_the_write_of_a_part_alone(tmp_path: Path) -> None:
    """Neither reads by others, nor reads of another store, make a write fail or replace a value."""
    with zarr.config.set({"codec_pipeline.path": PIPELINES[-1]}):
        store, copy = (ShardingStore(LocalStore(tmp_path / name)) for name in "ab")
        z = create(store)
        create(copy)
        for n in range(1, 19, 3):  # in threads of which each remembers what it read
            z[:]
            for value in range(n, n + 3):
                z[:] = value

        async def copied() -> bytes:
            for key in ("a/c/0/0", "a/c/0/1"):
                value = await store.get(key)
                assert value is not None
                await store.set_if_not_exists(key, value[:1])
                await copy.set(key, value)
            found = await store.get(key)
            return found.to_bytes() if found is not None else b""

        stored = sync(copied())
    assert (tmp_path / "a/a/c/0/1").read_bytes() == stored
    assert (tmp_path / "b/a/c/0/1").read_bytes() == stored


def test_an_object_that_another_pipeline_takes_over_is_refused() -> None:
    """It would take chunks for shards: nothing is read or written."""
    base: dict[str, bytes] = {}
    z = create(ShardingStore(base))
    z[:] = NUMBERS
    before = dict(base)
    with zarr.config.set({"codec_pipeline.path": THEIRS}):
        other: Any = Array(AsyncArray(metadata=z.metadata, store_path=z.store_path))
    attempts: list[Callable[[], Any]] = [
        lambda: other[0, 0],
        lambda: other[:],
        lambda: other.__setitem__((0, 0), 1),
        lambda: other.__setitem__(slice(None), 1),
    ]
    for attempt in attempts:
        with pytest.raises(SpecError, match="open the array again"):
            attempt()
    assert base == before
    other.resize((8, 16))
    assert_array_equal(reopened(ShardingStore(base))[:], NUMBERS[:8])


def test_a_wrapper_of_zarr_gets_shards_of_zarr() -> None:
    base = MemoryStore()
    z = create(LoggingStore(ShardingStore(base, chunks_per_shard=2), log_level="ERROR"))
    z[:] = NUMBERS
    for store in (base, ShardingStore(base)):
        assert_array_equal(reopened(store)[:], NUMBERS)
        assert reopened(store).shards == (8, 8)


def test_documents_are_not_taken_for_those_of_array_objects() -> None:
    """A copy key by key has shards under the keys of shards; over chunks it is refused."""
    native, target, chunks = MemoryStore(), MemoryStore(), MemoryStore()
    create(native)[:] = NUMBERS
    source = objects_of(native)
    for key in sorted(source, reverse=True):
        ShardingMapping(target)[key] = source[key]
    assert_array_equal(reopened(target)[:], NUMBERS)
    assert_array_equal(reopened(ShardingStore(target))[:], NUMBERS)
    create(ShardingStore(chunks))[:] = NUMBERS
    with pytest.raises(UnsupportedError, match="open the array again"):
        ShardingMapping(chunks)["a/zarr.json"] = source["a/zarr.json"]


@pytest.mark.filterwarnings("ignore:Combining a")
@pytest.mark.parametrize(
    "codecs",
    [
        [ShardingCodec(chunk_shape=(4, 4), codecs=[ShardingCodec(chunk_shape=(1, 1))])],
        [TransposeCodec(order=(1, 0)), ShardingCodec(chunk_shape=(1, 1))],
        [ShardingCodec(chunk_shape=(1, 1), codecs=[BytesCodec()]), GzipCodec()],
    ],
    ids=["nested", "before", "behind"],
)
def test_other_sharding_codecs_stay_those_of_zarr(codecs: Any) -> None:
    base = MemoryStore()
    store = ShardingStore(base)
    z: Any = zarr.create(
        store=store, path="a", shape=(16, 16), chunks=(8, 8), dtype="u2", codecs=codecs
    )
    z[:] = NUMBERS
    z[3, 3] = 1
    for there in (base, store):
        again = reopened(there)
        assert len(again.metadata.codecs) == len(codecs)
        assert again[3, 3] == 1
        assert_array_equal(again[4:], NUMBERS[4:])


@pytest.mark.filterwarnings("ignore:Combining a `sharding_indexed`")
@pytest.mark.parametrize("where", ["around", "nested"])
def test_parts_of_what_is_left_to_zarr_are_all_there(tmp_path: Path, where: str) -> None:
    """Parts of threads in one event loop, and of two event loops that change the same state."""
    inner = ShardingCodec(chunk_shape=(2, 2), codecs=[BytesCodec()])
    nested = ShardingCodec(chunk_shape=(4, 4), codecs=[inner])
    kinds = {"around": (inner, [TransposeCodec(order=(1, 0))]), "nested": (nested, None)}
    serializer, filters = kinds[where]
    options = {"chunks": (8, 8), "shards": None, "compressors": None, "filters": filters}
    store = ShardingStore(LocalStore(tmp_path))
    z = create(store, shape=(8, 8), serializer=serializer, **options)
    write_by_threads(z, 4)
    assert_array_equal(z[:], np.arange(1, 65).reshape(8, 8))

    async def write(value: int) -> None:
        await z.async_array.setitem((value, slice(None)), value)

    loops = ThreadPoolExecutor(2)
    for i in range(4):
        list(loops.map(lambda v: asyncio.run(write(v)), [2 * i, 2 * i + 1]))
    assert_array_equal(z[:], np.repeat(np.arange(8)[:, None], 8, axis=1))


@pytest.mark.filterwarnings("ignore:Combining a `sharding_indexed`")
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_parts_under_other_codecs_are_those_of_zarr(pipeline: str, is_wrapped: bool) -> None:
    """With another pipeline, or a wrapper above: no part of one writer is refused or lost."""
    store: Any = ShardingStore(MemoryStore())
    serializer = ShardingCodec(chunk_shape=(2, 2), codecs=[BytesCodec()])
    options = {"chunks": (8, 8), "shards": None, "compressors": [GzipCodec()]}
    with zarr.config.set({} if is_wrapped else {"codec_pipeline.path": pipeline}):
        store = LoggingStore(store, log_level="ERROR") if is_wrapped else store
        z = create(store, shape=(8, 8), serializer=serializer, **options)
        for i in range(64):
            z[i // 8, i % 8] = i + 1
        assert_array_equal(z[:], np.arange(1, 65).reshape(8, 8))
        z[2:5] = 0
        assert (z[:] == 0).sum() == 24


def test_passthrough_stays_what_it_is() -> None:
    base: dict[str, bytes] = {}
    store = ShardingStore(base, native="passthrough")
    z = create(store)
    z[:] = NUMBERS
    assert reopened(store).shards == (8, 8)
    assert_array_equal(reopened(ShardingStore(base))[:], NUMBERS)


# ------------------------------------------------------------------------- packages


@pytest.mark.parametrize("cps", [None, "auto"])
def test_xarray_asks_for_shards(tmp_path: Path, cps: Any) -> None:
    xr = pytest.importorskip("xarray")
    store = ShardingStore(tmp_path, chunks_per_shard=cps)
    ds = xr.Dataset({"v": (("y", "x"), NUMBERS)}, coords={"x": np.arange(16.0)})
    encoding = {"v": {"shards": (8, 8), "chunks": (2, 2)}}
    ds.to_zarr(store, encoding=encoding, zarr_format=3, consolidated=False)
    region = {"y": slice(0, 8), "x": slice(None)}
    changed = ds.isel(region) + 1
    changed.drop_vars("x").to_zarr(store, region=region, consolidated=False)
    expected = NUMBERS + (np.arange(16)[:, None] < 8)
    for there in (store, tmp_path):
        xr.testing.assert_equal(
            xr.open_zarr(there, consolidated=False).v.load().drop_vars("x"),
            xr.DataArray(expected, dims=("y", "x"), name="v"),
        )
    native = reopened(tmp_path, "v")
    assert (native.chunks, native.shards) == ((2, 2), (8, 8))


@pytest.mark.parametrize("zarr_format", [None, 3])
def test_anndata_asks_for_shards(tmp_path: Path, zarr_format: Any) -> None:
    """By default, in Zarr v3; the default format depends on the version."""
    anndata = pytest.importorskip("anndata")
    if zarr_format:
        anndata.settings.zarr_write_format = zarr_format
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"g": list("ab") * 50}, index=[str(i) for i in range(100)])
    adata = anndata.AnnData(np.arange(2000.0).reshape(100, 20), obs=table)
    adata.write_zarr(ShardingStore(tmp_path, chunks_per_shard="auto"))
    for there in (tmp_path, ShardingStore(tmp_path))[0 if zarr_format else 1 :]:
        assert_array_equal(anndata.io.read_zarr(there).X, adata.X)


def test_ome_zarr_asks_for_shards(tmp_path: Path) -> None:
    pytest.importorskip("ome_zarr")
    from tests.interop.test_ome_zarr import SHARDS, VOLUME, levels_by_ome_zarr, write_by_ome_zarr

    write_by_ome_zarr(ShardingStore(tmp_path), "0.5", shards=SHARDS)
    assert reopened(tmp_path, "s0").shards == SHARDS
    assert_array_equal(levels_by_ome_zarr(ShardingStore(tmp_path))[0], VOLUME)
    assert_array_equal(levels_by_ome_zarr(LocalStore(tmp_path))[0], VOLUME)


def test_hierarchies_that_zarr_writes_at_once() -> None:
    """`create_hierarchy` of zarr 3.1 stores documents before there is an array object."""
    base = MemoryStore()
    nodes = {"h": create(MemoryStore(), name="h").metadata}
    made: Any = dict(zarr.create_hierarchy(store=ShardingStore(base), nodes=nodes))
    made["h"][:] = NUMBERS
    made["h"].attrs["x"] = 1
    for store in (base, ShardingStore(base)):
        assert_array_equal(reopened(store, "h")[:], NUMBERS)
    assert sync(ShardingStore(base).exists("h/zarr.json"))


def test_metadata_of_an_array_object_makes_no_other_array() -> None:
    """The array that has it would address shards of a sharding store."""
    template = create(MemoryStore(), name="h")
    template[:] = NUMBERS
    store = ShardingStore(MemoryStore())
    with pytest.raises(SpecError, match="pass a copy"):
        dict(zarr.create_hierarchy(store=store, nodes={"h": template.metadata}))
    assert_array_equal(template[:], NUMBERS)
    copied = type(template.metadata).from_dict(template.metadata.to_dict())
    store = ShardingStore(MemoryStore())
    made: Any = dict(zarr.create_hierarchy(store=store, nodes={"h": copied}))
    made["h"][:] = template[:]
    assert_array_equal(reopened(store, "h")[:], NUMBERS)
    template[:2] = 0
    assert_array_equal(template[2:], NUMBERS[2:])


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="counts references otherwise")
def test_the_creation_of_an_array_looks_at_no_other_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gc.get_referrers", None)
    store = ShardingStore(MemoryStore())
    a = create(store, name="a")
    options: Any = {"shape": (8,), "chunks": (2,), "shards": (4,), "dtype": "u1"}
    zarr.create_group(store, path="g").create_array("a", **options)
    zarr.from_array(store, name="b", data=a)
