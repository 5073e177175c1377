"""dask on a `ShardingStore`: tasks of threads and of processes read and write shards."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import ExitStack
from functools import reduce
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from distributed import Client, LocalCluster

from tests.support.bases import BASES
from tests.support.kit import objects_of
from zarr_shardstore import ShardingStore

RNG = np.random.default_rng(11)
DATA = RNG.integers(1, 30_000, (25, 14), dtype="int32")
CHUNKS = (3, 2)
CHUNKS_PER_SHARD = (2, 3)  # a shard has 6 × 6 elements
N_CHUNKS, N_SHARDS = 9 * 7, 5 * 3
# ``to_zarr`` rechunks to as many whole zarr chunks as this holds: to one, so tasks share shards.
ONE_CHUNK = {"array.chunk-size": 3 * 2 * DATA.itemsize}


@pytest.fixture(params=["memory", "local"])
def base(request: pytest.FixtureRequest) -> Any:
    return BASES[request.param]()


def make_array(base: Any, **options: Any) -> zarr.Array[Any]:
    return zarr.create_array(
        ShardingStore(base, chunks_per_shard=CHUNKS_PER_SHARD),
        name="g/z",
        shape=DATA.shape,
        dtype=DATA.dtype,
        chunks=CHUNKS,
        **options,
    )


def values_of(objects: dict[str, bytes]) -> set[str]:
    return {key for key in objects if not key.endswith("zarr.json")}


def check(base: Any, expected: np.ndarray) -> None:
    """Sharded in the base, chunks above, and every value as expected."""
    store = ShardingStore(base)
    np.testing.assert_array_equal(zarr.open_array(store, path="g/z", mode="r")[:], expected)
    assert len(values_of(objects_of(base))) == N_SHARDS
    assert len(values_of(objects_of(store))) == N_CHUNKS


@pytest.mark.parametrize(
    "chunks", [(6, 6), (3, 2), (5, 3)], ids=["whole shards", "whole chunks", "anyhow"]
)
def test_an_array_is_stored(base: Any, chunks: Any) -> None:
    """dask rechunks to what zarr says are chunks, so many tasks share a shard: none gets lost."""
    z = make_array(base)
    with dask.config.set(ONE_CHUNK, scheduler="threads", num_workers=8):
        da.to_zarr(da.from_array(DATA, chunks=chunks), z)
    check(base, DATA)


@pytest.mark.parametrize("chunks", [(6, 6), (3, 2)], ids=["whole shards", "whole chunks"])
def test_store_without_a_lock(base: Any, chunks: Any) -> None:
    """`dask.array.store` leaves out its lock where dask chunks are whole zarr chunks."""
    z = make_array(base)
    with dask.config.set(scheduler="threads", num_workers=8):
        da.store(da.from_array(DATA, chunks=chunks), z, lock=False)
    check(base, DATA)


def test_chunks_across_chunks_need_the_lock_of_dask(base: Any) -> None:
    """Two tasks may write one chunk; with dask's lock, as for every zarr array, all is kept."""
    z = make_array(base)
    with dask.config.set(scheduler="threads", num_workers=8):
        da.store(da.from_array(DATA, chunks=(4, 5)), z, lock=True)
    check(base, DATA)


@pytest.mark.parametrize("mode", ["w-", "w"])
@pytest.mark.parametrize("zarr_format", [3, 2])
def test_a_store_is_taken(base: Any, mode: str, zarr_format: Any) -> None:
    """``to_zarr(store, component=...)`` creates the array, sharded by the store."""
    store = ShardingStore(base, chunks_per_shard=CHUNKS_PER_SHARD)
    zarr.create_group(store, path="g", zarr_format=zarr_format)
    array = da.from_array(DATA, chunks=CHUNKS)
    da.to_zarr(array, store, component="g/z", mode=mode, zarr_format=zarr_format)
    if mode == "w":
        array = array + 1
        da.to_zarr(array, store, component="g/z", mode=mode, zarr_format=zarr_format)
    z = zarr.open_array(store, path="g/z", mode="r")
    assert (z.chunks, z.metadata.zarr_format) == (CHUNKS, zarr_format)
    np.testing.assert_array_equal(da.from_zarr(store, component="g/z").compute(), array.compute())
    n_stored = [key for key in objects_of(base) if key.rsplit("/", 1)[-1][0].isdigit()]
    assert len(n_stored) == N_SHARDS


# The last of the windows: one dask chunk of one row is no whole zarr chunk, but alone on it.
@pytest.mark.filterwarnings("ignore:The input Dask array will be rechunked along axis 0")
@pytest.mark.parametrize("window", [np.s_[6:18, 6:12], np.s_[3:15, 2:8], np.s_[5:6, :]])
def test_regions(base: Any, window: Any) -> None:
    """Of whole shards, of whole chunks across shards, and within chunks."""
    z = make_array(base, fill_value=0)
    z[:] = DATA
    part = -DATA[window]
    with dask.config.set(ONE_CHUNK, scheduler="threads", num_workers=8):
        da.to_zarr(da.from_array(part, chunks=CHUNKS), z, region=window)
    expected = DATA.copy()
    expected[window] = part
    check(base, expected)


@pytest.mark.parametrize("chunks", [None, (6, 6), (5, 3), (25, 14)])
def test_an_array_is_read(base: Any, chunks: Any) -> None:
    """By chunks of the array if not told otherwise; whole, in parts, and while rechunked."""
    make_array(base)[:] = DATA
    store = ShardingStore(base)
    array = da.from_zarr(store, component="g/z", chunks=chunks)
    assert array.chunksize == (chunks or CHUNKS)
    with dask.config.set(scheduler="threads", num_workers=8):
        np.testing.assert_array_equal(array.compute(), DATA)
        np.testing.assert_array_equal(array[2:20:3, -5:].compute(), DATA[2:20:3, -5:])
        np.testing.assert_array_equal(array.rechunk((25, 1)).sum(axis=0).compute(), DATA.sum(0))


def test_a_shard_is_read_and_written_by_one_graph(base: Any) -> None:
    """What is read and what is written share shards: no task sees a half-written one."""
    z = make_array(base)
    z[:] = DATA
    array = da.from_zarr(z)
    with dask.config.set(scheduler="threads", num_workers=8):
        da.store(array + 1, z, lock=False)  # chunk by chunk, each task its own
    check(base, DATA + 1)


def test_equal_stores_have_equal_names() -> None:
    """dask names a graph by its store: the same data the same name, other data another."""
    bases = [BASES["local"]() for _ in range(2)]
    for number, base in enumerate(bases):
        make_array(base)[:] = number
    names = [da.from_zarr(ShardingStore(base), component="g/z").name for base in [*bases, bases[0]]]
    assert names[0] == names[2] != names[1]
    both = [da.from_zarr(ShardingStore(base), component="g/z").sum() for base in bases]
    assert dask.compute(*both) == (0, DATA.size)


class TestProcesses:
    """Stores travel to other processes; of these only one at a time may write a shard."""

    @pytest.fixture
    def base(self) -> Any:
        return BASES["local"]()

    def test_read(self, base: Any) -> None:
        make_array(base)[:] = DATA
        array = da.from_zarr(ShardingStore(base), component="g/z")
        parts = [array[:12].sum(), array[12:].max()]
        with dask.config.set(scheduler="processes", num_workers=2):
            assert dask.compute(*parts) == (DATA[:12].sum(), DATA[12:].max())

    def test_write_whole_shards(self, base: Any) -> None:
        """dask chunks of whole shards: each shard is written by one task."""
        z = make_array(base)
        with dask.config.set(scheduler="processes", num_workers=2):
            da.store(da.from_array(DATA, chunks=(12, 6)), z, lock=False)
        check(base, DATA)


def test_sums_of_many_arrays_of_one_store(base: Any) -> None:
    """Graphs of several arrays run at once on one store."""
    store = ShardingStore(base, chunks_per_shard=2)
    arrays = [da.from_array(DATA + i, chunks=(5, 5)) for i in range(4)]
    with dask.config.set(scheduler="threads", num_workers=8):
        dask.compute(
            *(
                da.to_zarr(array, store, component=f"z{i}", compute=False)
                for i, array in enumerate(arrays)
            )
        )
        read = [da.from_zarr(store, component=f"z{i}") for i in range(4)]
        np.testing.assert_array_equal(reduce(operator.add, read).compute(), 4 * DATA + 6)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Two processes of two threads."""
    options = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "protocol": "tcp"}
    with LocalCluster(n_workers=2, threads_per_worker=2, **options) as found:
        yield found


@pytest.mark.thorough(of=3)
@pytest.mark.parametrize("chunks_per_shard", [None, CHUNKS_PER_SHARD])
@pytest.mark.parametrize("scheduler", ["threads", "processes"])
def test_blocks_that_fit_no_chunks(
    scheduler: str, chunks_per_shard: Any, tmp_path: Any, request: pytest.FixtureRequest
) -> None:
    """Without a lock: several tasks write parts of one chunk, which is sharded or not."""
    z = zarr.create_array(
        ShardingStore(tmp_path, chunks_per_shard=chunks_per_shard),
        name="z",
        shape=(100, 30),
        dtype="i4",
        chunks=(25, 10),
    )
    data = np.arange(1, 1 + z.size, dtype="i4").reshape(z.shape)
    blocks = da.from_array(data, chunks=(7, 9))
    with ExitStack() as stack:
        if scheduler == "processes":
            stack.enter_context(Client(request.getfixturevalue("cluster")))
        else:
            stack.enter_context(dask.config.set(scheduler="threads", num_workers=8))
        da.store(blocks, z, lock=False)
    np.testing.assert_array_equal(z[:], data)
