"""xarray on a `ShardingStore`: all that it offers for zarr works, and is stored in shards."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import dask
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from numcodecs import Zlib
from zarr.abc.store import Store
from zarr.codecs import BloscCodec
from zarr.core.buffer import cpu
from zarr.storage import MemoryStore

from tests.support.bases import BASES
from tests.support.kit import objects_of
from zarr_shardstore import ShardingStore

pytestmark = [
    # xarray consolidates by default, and zarr says that this is not in its format 3.
    pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part"),
    # Of U and S dtypes, in some versions of zarr-python.
    pytest.mark.filterwarnings("ignore:The data type .* does not have a Zarr V3 specification"),
]

N_TIMES = 17
CHUNKS_PER_SHARD = 3
ENCODING: dict[str, dict[str, Any]] = {
    "t": {"chunks": (2, 2, 3)},
    "time": {"chunks": (4,), "units": "hours since 2020-01-01", "dtype": "int32"},
    "lat_bounds": {"chunks": (1, 2)},
}
N_SHARDS = {"t": 3 * 1 * 1, "time": 2, "lat_bounds": 2, "lat": 1, "lon": 1, "station": 1}
N_CHUNKS = {"t": 9 * 3 * 2, "time": 5, "lat_bounds": 5, "lat": 1, "lon": 1, "station": 1}


def make_whole() -> xr.Dataset:
    """Sizes that no chunk and no shard divides; names of which one begins with another."""
    rng = np.random.default_rng(5)
    return xr.Dataset(
        {
            "t": (("time", "lat", "lon"), rng.normal(size=(N_TIMES, 5, 4)), {"units": "K"}),
            "lat_bounds": (("lat", "edge"), rng.normal(size=(5, 2))),
        },
        coords={
            "time": pd.date_range("2020-02-25T06:00", periods=N_TIMES, freq="12h"),
            "lat": np.linspace(60, -60, 5),
            "lon": np.arange(4) * 90,
            "station": np.int64(7),
        },
        attrs={"title": "weather"},
    )


WHOLE = make_whole()


@pytest.fixture
def base(request: pytest.FixtureRequest) -> Any:
    """A dict, if a test asks for nothing else."""
    return BASES[getattr(request, "param", "dict")]()


on_each_base = pytest.mark.parametrize("base", ["dict", "memory", "local"], indirect=True)


@pytest.fixture(params=[3, 2], ids=["v3", "v2"])
def zarr_format(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def store(base: Any) -> ShardingStore:
    return ShardingStore(base, chunks_per_shard=CHUNKS_PER_SHARD)


def plain(base: Any) -> Any:
    """The base store as plain zarr opens it."""
    if isinstance(base, Store):
        return base
    return MemoryStore({k: cpu.Buffer.from_bytes(v) for k, v in base.items()})


def n_values(objects: Any) -> dict[str, int]:
    """How many keys each array has besides metadata."""
    names = [k.split("/")[0] for k in objects if "/" in k and is_value(k)]
    return {name: names.count(name) for name in names}


def is_value(key: str) -> bool:
    return key.rsplit("/", 1)[-1] not in {"zarr.json", ".zarray", ".zattrs", ".zgroup"}


def times(start: int, stop: int) -> xr.Dataset:
    """Some of the times, and all that has no time."""
    return WHOLE.isel(time=slice(start, stop))


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize("consolidated", [True, False])
@pytest.mark.parametrize("chunks", [None, {}], ids=["numpy", "dask"])
@on_each_base
def test_what_is_written_is_read(
    base: Any, store: ShardingStore, zarr_format: Any, consolidated: bool, chunks: Any
) -> None:
    """Values, coordinates, dimensions and attributes; chunks above, a few objects below."""
    WHOLE.to_zarr(store, zarr_format=zarr_format, consolidated=consolidated, encoding=ENCODING)
    opened = xr.open_zarr(store, consolidated=consolidated, chunks=chunks)
    assert opened["t"].encoding["chunks"] == (2, 2, 3)
    assert (opened["t"].chunks is None) == (chunks is None)
    if chunks is not None:
        assert opened["t"].chunksizes["time"] == (2,) * 8 + (1,)
    xr.testing.assert_identical(opened.compute(), WHOLE)
    assert n_values(objects_of(store)) == N_CHUNKS
    assert n_values(objects_of(base)) == N_SHARDS


@pytest.mark.parametrize("consolidated", [True, False])
@on_each_base
def test_the_base_is_opened_by_xarray_itself(
    base: Any, store: ShardingStore, consolidated: bool
) -> None:
    """With native sharding; also after an append and a region write through the store."""
    first = times(0, 9)
    first.to_zarr(store, zarr_format=3, consolidated=consolidated, encoding=ENCODING)
    times(9, N_TIMES).to_zarr(store, append_dim="time", consolidated=consolidated)
    changed = WHOLE[["t"]].isel(time=slice(5, 8)).drop_vars("station") * 2
    changed.to_zarr(store, region="auto", consolidated=consolidated)
    native = xr.open_zarr(plain(base), consolidated=consolidated, chunks=None)
    assert native["t"].encoding["shards"] == (6, 6, 9)
    expected = WHOLE.copy(deep=True)
    expected["t"][5:8] *= 2
    xr.testing.assert_identical(native.compute(), expected)


@pytest.mark.parametrize(
    "cuts",
    [(0, 6, 12, N_TIMES), (0, 3, 8, N_TIMES), (0, 1, 2, 3, 4, 5, N_TIMES), (0, 5, 16, N_TIMES)],
    ids=["at shards", "anywhere", "one by one", "across shards"],
)
def test_append(base: Any, store: ShardingStore, zarr_format: Any, cuts: tuple[int, ...]) -> None:
    """Pieces that end within a chunk and within a shard; each array stays in few objects."""
    for start, stop in pairwise(cuts):
        if start == 0:
            times(start, stop).to_zarr(store, zarr_format=zarr_format, encoding=ENCODING)
        else:
            times(start, stop).to_zarr(store, append_dim="time")
        # Consolidated metadata knows the new length.
        xr.testing.assert_identical(xr.open_zarr(store, chunks=None).load(), times(0, stop))
    assert n_values(objects_of(base)) == N_SHARDS


BY_NAME = {"time": 2, "lat": 3}


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        ({"chunks_per_shard": BY_NAME}, {"time": (8,), "lat": (5,), "lat_bounds": (3, 2)}),
        ({"chunks_per_shard": {"*": BY_NAME}}, {"lat": (5,), "lat_bounds": (3, 2)}),
        ({"chunks_per_shard": (2, 3, 1)}, {"time": None, "lat": None, "lat_bounds": None}),
        ({"shard_nbytes": 6 * 96}, {"time": (20,), "lat_bounds": (5, 2)}),
    ],
)
def test_shapes_of_a_dataset_with_coordinates(zarr_format: Any, options: Any, shapes: Any) -> None:
    """Arrays that have the dimensions, or as many as a tuple; the others are plain. Then the first
    steps are written alone, and all others appended: the shards are the same. xarray names the
    dimensions of v2 after the array: no rule by dimension finds them then."""
    if "chunks_per_shard" in options:
        shapes = {**shapes, "t": (4, 6, 3)}
    rule = options.get("chunks_per_shard")
    are_late = zarr_format == 2 and isinstance(rule, dict)
    for n_first in (N_TIMES, 2):
        objects: dict[str, bytes] = {}
        store = ShardingStore(objects, **options)
        first = times(0, n_first)
        warned = pytest.warns(UserWarning, match="stays unsharded") if are_late else nullcontext()
        with warned:
            first.to_zarr(store, zarr_format=zarr_format, consolidated=False, encoding=ENCODING)
        for step in range(n_first, N_TIMES, 5):
            times(step, step + 5).to_zarr(store, append_dim="time", consolidated=False)
        opened = xr.open_zarr(store, consolidated=False, chunks=None).load()
        xr.testing.assert_identical(opened, WHOLE)
        expected = {
            name: shape if not are_late or name in rule else None for name, shape in shapes.items()
        }
        assert {name: store.shard_shape(name) for name in shapes} == expected
        if "t" in shapes and not are_late:
            assert n_values(objects)["t"] == 5 * 1 * 2
        store.close()


@pytest.mark.parametrize("region", ["slice", "auto"])
@pytest.mark.parametrize("consolidated", [True, False])
def test_regions(
    base: Any, store: ShardingStore, zarr_format: Any, consolidated: bool, region: str
) -> None:
    """Written in any order into an array that is only declared; within and across shards."""
    WHOLE.chunk().to_zarr(
        store, zarr_format=zarr_format, consolidated=consolidated, encoding=ENCODING, compute=False
    )
    assert "t" not in n_values(objects_of(base))
    for start, stop in [(11, N_TIMES), (1, 2), (2, 11), (0, 1)]:
        part = times(start, stop).drop_vars(["lat_bounds", "station", "lat", "lon"])
        where: Any = {"time": slice(start, stop)} if region == "slice" else "auto"
        part.to_zarr(store, region=where, consolidated=consolidated)
    WHOLE[["lat_bounds"]].drop_vars("station").to_zarr(
        store, region={"lat": slice(0, 5), "edge": slice(0, 2)}, consolidated=consolidated
    )
    opened = xr.open_zarr(store, consolidated=consolidated, chunks=None).load()
    xr.testing.assert_identical(opened, WHOLE)
    assert n_values(objects_of(base)) == N_SHARDS


def test_xarray_alone_refuses_shards_of_v2(base: Any, store: ShardingStore) -> None:
    """Zarr v2 knows no sharding: an error, and not shards read as chunks."""
    WHOLE.to_zarr(store, zarr_format=2, encoding=ENCODING)
    with pytest.raises(ValueError, match="open it through `ShardingStore`"):
        xr.open_zarr(plain(base), chunks=None).load()


def test_regions_of_two_dimensions(base: Any, store: ShardingStore) -> None:
    """A window that cuts through chunks and shards changes nothing beside it."""
    WHOLE.to_zarr(store, zarr_format=3, encoding=ENCODING)
    window = {"time": slice(5, 14), "lon": slice(2, 4)}
    part = (WHOLE[["t"]].isel(window) * -1).drop_vars(["lat", "station"])
    part.to_zarr(store, region=window)
    expected = WHOLE.copy(deep=True)
    expected["t"][5:14, :, 2:4] *= -1
    xr.testing.assert_identical(xr.open_zarr(store, chunks=None).load(), expected)


def test_dask_chunks_need_not_be_whole_shards(
    base: Any, store: ShardingStore, zarr_format: Any
) -> None:
    """One task a chunk, many tasks a shard, in threads at once: no update is lost.

    xarray asks for dask chunks of whole shards where zarr does the sharding.
    """
    with dask.config.set(scheduler="threads", num_workers=8):
        WHOLE.chunk({"time": 2, "lat": 2, "lon": 3}).to_zarr(
            store, zarr_format=zarr_format, encoding=ENCODING
        )
        opened = xr.open_zarr(store, chunks={}).compute()
    xr.testing.assert_identical(opened, WHOLE)
    assert n_values(objects_of(base)) == N_SHARDS


def test_appending_dask_arrays(base: Any, store: ShardingStore, zarr_format: Any) -> None:
    """The tasks of an append share shards with each other and with what was there."""
    chunked = WHOLE.chunk({"time": 2, "lat": 2, "lon": 3})
    first, second = chunked.isel(time=slice(0, 8)), chunked.isel(time=slice(8, None))
    with dask.config.set(scheduler="threads", num_workers=8):
        first.to_zarr(store, zarr_format=zarr_format, encoding=ENCODING)
        second.to_zarr(store, append_dim="time")
    xr.testing.assert_identical(xr.open_zarr(store, chunks=None).load(), WHOLE)
    assert n_values(objects_of(base)) == N_SHARDS


class TestModes:
    @on_each_base
    def test_w_leaves_nothing_of_what_was_there(
        self, base: Any, store: ShardingStore, zarr_format: Any
    ) -> None:
        """Not a shard: neither of other variables, nor of a larger one of the same name."""
        WHOLE.to_zarr(store, zarr_format=zarr_format, encoding=ENCODING)
        small = WHOLE[["t"]].isel(time=slice(0, 2), lat=slice(0, 2)).drop_vars("station")
        small.to_zarr(
            store, mode="w", zarr_format=zarr_format, encoding={"t": {"chunks": (1,) * 3}}
        )
        xr.testing.assert_identical(xr.open_zarr(store, chunks=None).load(), small)
        assert n_values(objects_of(base)) == {"t": 2, "time": 1, "lat": 1, "lon": 1}

    def test_a_replaces_and_adds_variables(
        self, base: Any, store: ShardingStore, zarr_format: Any
    ) -> None:
        """And leaves alone those whose names only begin alike."""
        WHOLE.to_zarr(store, zarr_format=zarr_format, encoding=ENCODING)
        others = {k: v for k, v in objects_of(base).items() if k.startswith(("lat_bounds", "t/"))}
        change = xr.Dataset({"lat": WHOLE["lat"] * 2, "p": ("lon", [1, 2, 3, 4])})
        change.to_zarr(store, mode="a")
        expected = WHOLE.assign_coords(lat=WHOLE["lat"] * 2).assign(p=("lon", [1, 2, 3, 4]))
        opened = xr.open_zarr(store, chunks=None).load()
        xr.testing.assert_equal(opened, expected)
        assert n_values(objects_of(base)) == {**N_SHARDS, "p": 1}
        assert others.items() <= objects_of(base).items()

    def test_r_plus_writes_into_what_exists(
        self, base: Any, store: ShardingStore, zarr_format: Any
    ) -> None:
        WHOLE.to_zarr(store, zarr_format=zarr_format, encoding=ENCODING)
        (WHOLE * 3).to_zarr(store, mode="r+")
        opened = xr.open_zarr(store, chunks=None).load()
        xr.testing.assert_equal(opened, WHOLE * 3)
        assert n_values(objects_of(base)) == N_SHARDS

    def test_w_minus_refuses(self, store: ShardingStore) -> None:
        times(0, 3).to_zarr(store, zarr_format=3, encoding=ENCODING)
        with pytest.raises(FileExistsError):
            times(3, 5).to_zarr(store, mode="w-", zarr_format=3)
        xr.testing.assert_identical(xr.open_zarr(store, chunks=None).load(), times(0, 3))


def with_strings() -> xr.Dataset:
    names = np.array(["a", "", "Ørsted", "x" * 40, "\u4e2d"], dtype=object)
    return xr.Dataset({"v": ("s", names)}, coords={"s": np.array(list("abcde"))})


def with_times() -> xr.Dataset:
    when = pd.date_range("1969-12-31T23:59:58", periods=5, freq="s").to_numpy().copy()
    when[2] = "NaT"
    return xr.Dataset({"v": ("s", when), "d": ("s", when - when[0])})


def with_gaps() -> xr.Dataset:
    values = np.array([1.5, np.nan, 3.25, np.nan, -2.0])
    return xr.Dataset({"v": ("s", values, {"long_name": "packed"})})


ENCODINGS: dict[str, tuple[Callable[[], xr.Dataset], dict[str, Any], dict[int, dict[str, Any]]]] = {
    # what: dataset, encoding of "v", encoding of "v" in one format only
    "strings": (with_strings, {}, {}),
    "times": (with_times, {"units": "seconds since 1970-01-01", "dtype": "int64"}, {}),
    "packed": (with_gaps, {"scale_factor": 0.25, "dtype": "int16", "_FillValue": -999}, {}),
    "fill values": (with_gaps, {"_FillValue": -7.0}, {}),
    "compressors": (
        with_gaps,
        {},
        {3: {"compressors": (BloscCodec(cname="lz4"),)}, 2: {"compressors": (Zlib(5),)}},
    ),
    "booleans": (lambda: xr.Dataset({"v": ("s", [True, False, False, True, True])}), {}, {}),
    "bytes": (lambda: xr.Dataset({"v": ("s", np.array([b"ab", b"c", b"", b"d", b"e"]))}), {}, {}),
    "a scalar": (lambda: xr.Dataset({"v": ((), 3.5), "w": ("s", [1, 2])}), {}, {}),
}


@pytest.mark.parametrize("what", ENCODINGS)
def test_encodings(base: Any, store: ShardingStore, zarr_format: Any, what: str) -> None:
    """Chunks are opaque, so each way of encoding values comes back as without sharding."""
    make, encoding, by_format = ENCODINGS[what]
    ds = make()
    encoding = {**encoding, **by_format.get(zarr_format, {})}
    if ds["v"].ndim:
        encoding["chunks"] = (1,)
    ds.to_zarr(store, zarr_format=zarr_format, encoding={"v": encoding})
    opened = xr.open_zarr(store, chunks=None)
    unsharded = MemoryStore()
    ds.to_zarr(unsharded, zarr_format=zarr_format, encoding={"v": encoding})
    expected = xr.open_zarr(unsharded, chunks=None)
    assert repr(opened["v"].encoding) == repr(expected["v"].encoding)  # NaN is not NaN
    xr.testing.assert_identical(opened.load(), expected.load())
    xr.testing.assert_equal(opened, ds)
    assert n_values(objects_of(base))["v"] == (2 if ds["v"].ndim else 1)


def test_trees(base: Any, store: ShardingStore, zarr_format: Any) -> None:
    """Groups in groups: written, read, and a node written later."""
    tree = xr.DataTree.from_dict(
        {"/c": WHOLE[["lat_bounds"]], "/c/0": WHOLE, "/c/c": times(2, 9), "/d": times(0, 1)}
    )
    encoding: Any = {"/c/0": ENCODING, "/c/c": ENCODING}
    tree.to_zarr(store, zarr_format=zarr_format, encoding=encoding)
    # Its types name paths and files; it takes what zarr takes.
    with xr.open_datatree(store, engine="zarr", chunks=None) as opened:  # type: ignore[arg-type]
        xr.testing.assert_identical(opened.load(), tree)
    assert len([k for k in objects_of(base) if k.startswith("c/0/t/") and is_value(k)]) == 3
    times(0, 4).to_zarr(store, group="d/e", zarr_format=zarr_format, encoding=ENCODING)
    part = xr.open_zarr(store, group="d/e", chunks=None, consolidated=False).load()
    xr.testing.assert_identical(part, times(0, 4))


def test_unsharded_stores_stay_as_they_are(base: Any, zarr_format: Any) -> None:
    """What xarray wrote without sharding: read, and appended to, as plain chunks."""
    # The base of a dict is a dict, which xarray does not open; so it writes through a store.
    times(0, 9).to_zarr(ShardingStore(base), zarr_format=zarr_format, encoding=ENCODING)
    expected = MemoryStore()
    times(0, 9).to_zarr(expected, zarr_format=zarr_format, encoding=ENCODING)
    times(9, N_TIMES).to_zarr(expected, append_dim="time")
    store = ShardingStore(base, chunks_per_shard=CHUNKS_PER_SHARD)
    times(9, N_TIMES).to_zarr(store, append_dim="time")
    xr.testing.assert_identical(xr.open_zarr(store, chunks=None).load(), WHOLE)
    assert objects_of(base) == objects_of(expected)


def _series(n: int) -> xr.Dataset:
    return xr.Dataset({"v": ("time", np.arange(1, n + 1))}, coords={"time": np.arange(n) * 10})


def _write_regions(where: str, mine: list[int]) -> None:
    store, whole = ShardingStore(where), _series(200).chunk(time=10)
    for start in mine:
        region = slice(start, start + 10)
        whole.isel(time=region).to_zarr(
            store, region={"time": region}, safe_chunks=False, consolidated=False
        )


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as found:
        yield found


@pytest.mark.thorough(of=2)
@pytest.mark.parametrize("chunks_per_shard", [None, 3])
def test_regions_and_appends_that_cut_chunks(
    chunks_per_shard: Any, workers: ProcessPoolExecutor, tmp_path: Any
) -> None:
    """Four processes write regions of 10 values over chunks of 25; then threads append."""
    store = ShardingStore(tmp_path, chunks_per_shard=chunks_per_shard)
    whole = _series(200)
    encoding: Any = {"v": {"chunks": (25,)}, "time": {"chunks": (25,)}}
    whole.chunk().to_zarr(store, compute=False, encoding=encoding, consolidated=False)
    starts = list(range(0, 200, 10))
    list(workers.map(_write_regions, [str(tmp_path)] * 4, [starts[i::4] for i in range(4)]))
    xr.testing.assert_equal(xr.open_zarr(store, consolidated=False).load(), whole)
    longer = _series(307)
    for start in range(200, 307, 47):  # each begins within a chunk
        more = longer.isel(time=slice(start, start + 47)).chunk(time=7)
        with dask.config.set(scheduler="threads", num_workers=4):
            more.to_zarr(store, append_dim="time", safe_chunks=False, consolidated=False)
    xr.testing.assert_equal(xr.open_zarr(store, consolidated=False).load(), longer)
