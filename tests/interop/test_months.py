"""A daily series as monthly shards: converted without decoding, read by xarray, appended to."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore

from zarr_shardstore import ShardingMapping, ShardingStore, check_store, shard_store

xr = pytest.importorskip("xarray")

EPOCH = np.datetime64("1990-01-01")


def month_lengths(n_days: int) -> list[int]:
    """Return the lengths of all months that begin within so many days."""
    last = (EPOCH + np.timedelta64(n_days - 1, "D")).astype("M8[M]")
    months = np.arange(EPOCH.astype("M8[M]"), last + np.timedelta64(2, "M"))
    lengths: list[int] = np.diff(months.astype("M8[D]").astype(int)).tolist()
    return lengths


def append_day(path: str, number: int) -> int:
    """In a process of its own."""
    store = ShardingStore(path)
    values = np.full((1, 3, 4), number, "f4")
    return store.append_arrays({"t2m": values, "time": [number]}, axis="time")


@pytest.mark.parametrize(
    "n_days", [800, pytest.param(10_000, marks=pytest.mark.thorough)], ids=["years", "decades"]
)
def test_months(n_days: int, tmp_path: Path) -> None:
    values = np.arange(n_days * 12, dtype="f4").reshape(n_days, 3, 4)
    base = LocalStore(tmp_path / "daily.zarr")
    group = zarr.create_group(base)
    t2m = group.create_array(
        "t2m", shape=values.shape, chunks=(1, 3, 4), dtype="f4", dimension_names=("time", "y", "x")
    )
    t2m[:] = values
    time = group.create_array(
        "time", shape=(n_days,), chunks=(1000,), dtype="i4", dimension_names=("time",)
    )
    time[:] = np.arange(n_days)
    time.attrs["units"] = "days since 1990-01-01"
    lengths = month_lengths(n_days)
    daily = ShardingMapping(base)
    chunks = {key: daily[key] for key in daily if key.startswith("t2m/c/")}
    report = shard_store(base, shards={"time": lengths}, paths="t2m")
    assert (report.n_chunks, report.n_objects) == (n_days, len(lengths))
    months = ShardingMapping(base)
    assert {key: months[key] for key in months if key.startswith("t2m/c/")} == chunks
    path = str(tmp_path / "daily.zarr")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        rows = sorted(pool.map(append_day, [path] * 2, [n_days, n_days + 1]))
    assert rows == [n_days, n_days + 1]
    n_files = sum(file.is_file() for file in (tmp_path / "daily.zarr" / "t2m" / "c").rglob("*"))
    assert n_files == len(lengths), "a month that is not over takes the days"
    with xr.open_zarr(ShardingStore(path), consolidated=False, chunks=None) as found:
        assert found.t2m.shape == (n_days + 2, 3, 4)
        np.testing.assert_array_equal(found.t2m[:n_days], values)
        days = (found.time.values - EPOCH).astype("m8[D]").astype(int)
        assert sorted(days.tolist()) == [*range(n_days + 2)]
        for row in rows:
            assert (found.t2m[row] == days[row]).all(), "values and time of one day are together"
        february = found.t2m.sel(time="1992-02")
        assert february.shape[0] == 29
    assert check_store(base, level="decode").findings == ()
    grid: Any = json.loads((tmp_path / "daily.zarr" / "t2m" / "zarr.json").read_text())
    assert grid["chunk_grid"]["configuration"]["chunk_shapes"][0][:4] == [31, 28, 31, 30]
    if "rectilinear_chunks" in zarr.config.get("array"):
        with zarr.config.set({"array.rectilinear_chunks": True}):
            plain: Any = zarr.open_array(base, path="t2m")
            assert plain.write_chunk_sizes[0][:-1] == tuple(lengths[:-1])
            np.testing.assert_array_equal(plain[:n_days], values)
