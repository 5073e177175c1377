"""Layers at run time: zarr's and fsspec's wrappers compose with the store, above and below it.

A layer is no part of what is stored. Above, it handles chunks; below, shards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import numpy as np
import pytest
import zarr
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from zarr.abc.store import Store
from zarr.experimental.cache_store import CacheStore
from zarr.storage import FsspecStore, LocalStore, LoggingStore, MemoryStore, WrapperStore
from zarr.testing.store import LatencyStore

from tests.support.bases import temporary_directory
from tests.support.kit import objects_of
from zarr_shardstore import ShardingStore

RNG = np.random.default_rng(23)
PIPELINES = ["BatchedCodecPipeline"]
if hasattr(zarr.core.codec_pipeline, "FusedCodecPipeline"):
    PIPELINES.append("FusedCodecPipeline")

DATA = RNG.integers(1, 1000, (11, 7), dtype=np.int32)
N_SHARDS = 2 * 2  # of 6 × 4 elements
N_CHUNKS = 6 * 4

Layer = Callable[[Store], Store]

LAYERS: dict[str, Layer] = {
    "WrapperStore": WrapperStore,
    "LoggingStore": lambda store: LoggingStore(store, log_level="CRITICAL"),
    "LatencyStore": lambda store: LatencyStore(store, get_latency=0.0005, set_latency=0.0005),
    "CacheStore": lambda store: CacheStore(store, cache_store=MemoryStore()),
    "small CacheStore": lambda store: CacheStore(store, cache_store=MemoryStore(), max_size=300),
}


ONE_BY_ONE = list(LAYERS.values())


def all_layers(store: Store) -> Store:
    for layer in ONE_BY_ONE:
        store = layer(store)
    return store


LAYERS["all of them"] = all_layers


@pytest.fixture(params=PIPELINES)
def pipeline(request: pytest.FixtureRequest) -> Iterator[Any]:
    with zarr.config.set({"codec_pipeline.path": f"zarr.core.codec_pipeline.{request.param}"}):
        yield request.param


@pytest.fixture
def base(request: pytest.FixtureRequest) -> Store:
    """In memory, if a test asks for nothing else."""
    is_local = getattr(request, "param", "memory") == "local"
    return LocalStore(temporary_directory()) if is_local else MemoryStore()


on_each_base = pytest.mark.parametrize("base", ["memory", "local"], indirect=True)


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> Layer:
    return LAYERS[request.param]


@pytest.fixture(params=["above", "below", "above and below"])
def store(request: pytest.FixtureRequest, base: Store, layer: Layer) -> Store:
    """What a user holds: the sharding store with layers around it."""
    inner = layer(base) if "below" in request.param else base
    sharding = ShardingStore(inner, chunks_per_shard={"g/*": (3, 2), "h": 2})
    return layer(sharding) if "above" in request.param else sharding


def make_array(store: Any, **options: Any) -> zarr.Array[Any]:
    return zarr.create_array(
        store,
        name="g/z",
        shape=DATA.shape,
        dtype=DATA.dtype,
        chunks=(2, 2),
        fill_value=0,
        **options,
    )


def values_of(objects: dict[str, bytes]) -> set[str]:
    return {key for key in objects if not key.endswith("zarr.json")}


def check_base(base: Store, expected: np.ndarray) -> None:
    """Valid shards: what zarr's own sharding reads."""
    native = zarr.open_array(base, path="g/z", mode="r")
    assert (native.chunks, native.shards) == ((2, 2), (6, 4))
    np.testing.assert_array_equal(native[:], expected)


@pytest.mark.thorough(of=5)
@pytest.mark.usefixtures("pipeline")
@on_each_base
def test_written_and_read(base: Store, store: Store) -> None:
    z = make_array(store)
    z[:] = DATA
    np.testing.assert_array_equal(z[:], DATA)
    assert (z.chunks, z.shards) == ((2, 2), None)
    check_base(base, DATA)
    assert len(values_of(objects_of(base))) == N_SHARDS
    assert len(values_of(objects_of(store))) == N_CHUNKS


@pytest.mark.thorough(of=4)
@pytest.mark.usefixtures("pipeline")
def test_updates_are_seen(base: Store, store: Store) -> None:
    """After a read, so that a cache could be stale: parts of chunks, and chunks of fill value."""
    z = make_array(store)
    z[:] = DATA
    expected = DATA.copy()
    changes: list[Any] = [(np.s_[3:9, 1:6], 7), (np.s_[0:2], 0), (np.s_[10, 6], 5), (np.s_[:], 0)]
    for window, value in changes:
        np.testing.assert_array_equal(z[:], expected)
        z[window] = expected[window] = value
        np.testing.assert_array_equal(zarr.open_array(store, path="g/z", mode="r")[:], expected)
        check_base(base, expected)
    assert not values_of(objects_of(base))


@pytest.mark.thorough(of=4)
def test_metadata(base: Store, store: Store) -> None:
    """A resize and attributes are seen above, and keep the sharding below."""
    z = make_array(store)
    z[:] = DATA
    z.resize((4, 9))
    z.attrs["unit"] = "m"
    z[:, 7:] = 3
    again = zarr.open_array(store, path="g/z", mode="r")
    expected = np.concatenate([DATA[:4], np.full((4, 2), 3, DATA.dtype)], axis=1)
    np.testing.assert_array_equal(again[:], expected)
    assert again.attrs["unit"] == "m"
    check_base(base, expected)


@pytest.mark.thorough(of=4)
def test_listing_and_deletion(base: Store, store: Store) -> None:
    group = zarr.create_group(store)
    make_array(store)[:] = DATA
    group.create_array("h", shape=(3,), chunks=(1,), dtype="u1")[:] = 1
    assert set(group.keys()) == {"g", "h"}
    del group["h"]
    assert set(zarr.open_group(store, mode="r").keys()) == {"g"}
    assert not any(key.startswith("h/") for key in objects_of(base))
    check_base(base, DATA)


def test_read_only(base: Store, store: Store) -> None:
    make_array(store)[:] = DATA
    closed = store.with_read_only(True)
    np.testing.assert_array_equal(zarr.open_array(closed, path="g/z", mode="r")[:], DATA)
    with pytest.raises(ValueError, match="read-only"):
        make_array(closed, overwrite=True)
    check_base(base, DATA)


def write_from_threads(stores: list[Store]) -> None:
    """Eight threads write chunks that share shards, each through one of the stores."""
    arrays = [zarr.open_array(store, path="g/z", mode="r+") for store in stores]
    ready = threading.Barrier(8)

    def write(worker: int) -> None:
        ready.wait()
        for number in range(worker, N_CHUNKS, 8):
            row, column = 2 * (number // 4), 2 * (number % 4)
            chunk = slice(row, row + 2), slice(column, column + 2)
            arrays[worker % len(arrays)][chunk] = DATA[chunk]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))


@pytest.mark.parametrize("name", ["WrapperStore", "LoggingStore", "LatencyStore"])
@pytest.mark.parametrize("strategy", ["auto", "rewrite"])
@on_each_base
def test_no_update_is_lost_between_stores(base: Store, name: str, strategy: Any) -> None:
    """One store on the base, others on a layer over it: they know that they share shards.

    Not so with several caches: none of them learns of what is written beside it.
    """
    layer = LAYERS[name]
    make_array(ShardingStore(base, chunks_per_shard=(3, 2)))
    write_from_threads(
        [
            ShardingStore(base, strategy=strategy),
            ShardingStore(layer(base)),
            layer(ShardingStore(base)),
            layer(ShardingStore(layer(base))),
        ]
    )
    check_base(base, DATA)


def test_no_update_is_lost_through_one_layer(base: Store, layer: Layer) -> None:
    """Which may be a cache: several stores and threads on the same one."""
    make_array(ShardingStore(base, chunks_per_shard=(3, 2)))
    shared = layer(base)
    write_from_threads([ShardingStore(shared), ShardingStore(shared), layer(ShardingStore(shared))])
    check_base(base, DATA)


@on_each_base
def test_log_of_requests(base: Store) -> None:
    """A log above names chunks, a log below shards: one read of an index and one of a span."""
    make_array(ShardingStore(base, chunks_per_shard=(3, 2)))[:] = DATA
    below: Any = LoggingStore(base, log_level="CRITICAL")
    above: Any = LoggingStore(ShardingStore(below), log_level="CRITICAL")
    z = zarr.open_array(above, path="g/z", mode="r+")
    time.sleep(0.03)  # the time of a younger file says nothing about its state
    above.counter.clear()
    below.counter.clear()
    np.testing.assert_array_equal(z[6:8, 4:6], DATA[6:8, 4:6])
    assert above.counter["get"] == 1
    reads = {name: n for name, n in below.counter.items() if name.startswith("get")}
    assert sum(reads.values()) == 2, reads


ZARR_KEEPS_STALE = pytest.mark.xfail(
    strict=True, reason="zarr's CacheStore keeps what delete_dir removes"
)


class TestCache:
    """What zarr's cache of values saves: requests, above for chunks and below for shards."""

    def test_above(self, base: Store) -> None:
        """A chunk that was read once is not asked for again."""
        make_array(ShardingStore(base, chunks_per_shard=(3, 2)))[:] = DATA
        log: Any = LoggingStore(base, log_level="CRITICAL")
        store = CacheStore(ShardingStore(log), cache_store=MemoryStore())
        z = zarr.open_array(store, path="g/z", mode="r")
        np.testing.assert_array_equal(z[:], DATA)
        log.counter.clear()
        np.testing.assert_array_equal(z[:], DATA)
        assert not log.counter

    def test_above_keeps_its_bound(self, base: Store) -> None:
        """Chunks are cached, not shards, so a small cache holds some."""
        make_array(ShardingStore(base, chunks_per_shard=(3, 2)))[:] = DATA
        store = CacheStore(ShardingStore(base), cache_store=MemoryStore(), max_size=300)
        z = zarr.open_array(store, path="g/z", mode="r")
        np.testing.assert_array_equal(z[:], DATA)
        np.testing.assert_array_equal(z[4:, 2:], DATA[4:, 2:])
        assert 0 < store.cache_info()["current_size"] <= 300

    @pytest.mark.parametrize(
        "place",
        [
            "below",
            pytest.param("above", marks=ZARR_KEEPS_STALE),
            pytest.param("no sharding", marks=ZARR_KEEPS_STALE),
        ],
    )
    def test_after_an_overwrite(self, base: Store, place: str) -> None:
        """A new array in the place of one that was read: no old value should come back."""
        store: Store = CacheStore(base, cache_store=MemoryStore())
        if place == "below":
            store = ShardingStore(store, chunks_per_shard=(3, 2))
        elif place == "above":
            store = ShardingStore(base, chunks_per_shard=(3, 2))
            store = CacheStore(store, cache_store=MemoryStore())
        z = make_array(store)
        z[:] = DATA
        np.testing.assert_array_equal(z[:], DATA)
        z = make_array(store, overwrite=True)
        np.testing.assert_array_equal(z[:], np.zeros_like(DATA))

    def test_below_after_an_overwrite_and_a_write(self, base: Store) -> None:
        """A part of a shard is written: chunks of the array before must not be stored again."""
        cache = CacheStore(base, cache_store=MemoryStore())
        store = ShardingStore(cache, chunks_per_shard=(3, 2))
        z = make_array(store)
        z[:] = DATA
        np.testing.assert_array_equal(z[:], DATA)
        make_array(store, overwrite=True)[:2, :2] = 3
        expected = np.zeros_like(DATA)
        expected[:2, :2] = 3
        check_base(base, expected)


def caching_store(protocol: str, path: str, **options: Any) -> FsspecStore:
    """Of fsspec: copies of files in a local directory."""
    remote = fsspec.filesystem("memory")
    fs = fsspec.filesystem(protocol, fs=remote, cache_storage=str(temporary_directory()), **options)
    return FsspecStore(AsyncFileSystemWrapper(fs, asynchronous=True), path=path)


@pytest.mark.parametrize("protocol", ["simplecache", "filecache"])
def test_fsspec_caches_below(protocol: str) -> None:
    """For data that does not change: fsspec's caches serve what they copied first."""
    path = f"/{temporary_directory().name}"
    remote = FsspecStore(
        AsyncFileSystemWrapper(fsspec.filesystem("memory"), asynchronous=True), path=path
    )
    make_array(ShardingStore(remote, chunks_per_shard=(3, 2)))[:] = DATA
    store = ShardingStore(caching_store(protocol, path), read_only=True)
    z = zarr.open_array(store, path="g/z", mode="r")
    # A thread of fsspec may find the file that another one is copying, half of it or empty.
    with zarr.config.set({"async.concurrency": 1}):
        np.testing.assert_array_equal(z[3:9, 1:6], DATA[3:9, 1:6])
        np.testing.assert_array_equal(z[:], DATA)
    check_base(remote, DATA)
