"""Estimates of dry runs, beside what the same conversion then does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import ObjectStore

from tests.support.kit import CountingStore
from zarr_shardstore import (
    ConversionReport,
    ShardingStore,
    SpecError,
    get_shard_info,
    reshard,
    shard_store,
    unshard_store,
)

CONVERSIONS: dict[str, Any] = {
    "shard": lambda *args, **options: shard_store(*args, chunks_per_shard=(4, 3), **options),
    "reshard": lambda base, to=None, **options: reshard(base, (2, 6), to, **options),
    "unshard": unshard_store,
}


def make(base: Any, conversion: str, *, n: int = 16) -> Any:
    """An array with some missing chunks, plain or in shards."""
    store = ShardingStore(base, None if conversion == "shard" else (4, 4))
    z = zarr.create_array(store, name="z", shape=(n, n), chunks=(1, 1), dtype="u2", fill_value=0)
    z[: n // 2] = 7
    z[n - 1, 3] = 7
    store.close()
    return base


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_a_small_grid_is_counted(conversion: str, elsewhere: bool) -> None:
    """Objects, chunks and bytes are those of the conversion itself, and of its result."""
    base = make({}, conversion)
    to: Any = {} if elsewhere else None
    convert = CONVERSIONS[conversion]
    before = {key: value for key, value in base.items() if "zarr.json" not in key}
    (planned,) = (dry := convert(base, to, dry_run=True, estimate=True)).arrays
    assert (planned.n_objects_before, planned.n_bytes_before) == (
        len(before),
        sum(map(len, before.values())),
    )
    done: ConversionReport = convert(base, to)
    assert (planned.n_chunks, planned.n_objects, planned.n_bytes) == (
        done.n_chunks,
        done.n_objects,
        done.n_bytes,
    )
    result = base if to is None else to
    after = {key: value for key, value in result.items() if "zarr.json" not in key}
    found = dry.estimate
    assert found is not None
    assert found.is_exact
    assert (found.n_objects_after, found.n_bytes_after) == (
        len(after),
        sum(map(len, after.values())),
    )


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_the_room_is_that_of_the_peak(conversion: str, elsewhere: bool) -> None:
    """Of three arrays: in place the objects of one are removed before the next is stored."""
    base, to = Measured(), Measured()
    store = ShardingStore(base, None if conversion == "shard" else (4, 4))
    for name, n in (("a", 128), ("b", 192), ("c", 64)):
        options: Any = {"shape": (n, n), "chunks": (8, 8), "dtype": "u8", "compressors": None}
        zarr.create_array(store, name=name, fill_value=0, **options)[:] = 7
    store.close()
    convert, target = CONVERSIONS[conversion], to if elsewhere else None
    found = convert(base, target, dry_run=True, estimate=True).estimate
    before = base.peak = base.nbytes
    convert(base, target)
    peak = to.peak if elsewhere else base.peak - before
    assert 0 <= peak - found.n_bytes_more < 10_000  # metadata


class Measured(dict[str, bytes]):
    """A mapping that knows the most bytes that it had."""

    nbytes = peak = 0

    def __setitem__(self, key: str, value: bytes) -> None:
        self.nbytes += len(value) - len(self.get(key, b""))
        self.peak = max(self.peak, self.nbytes)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self.nbytes -= len(self[key])
        super().__delitem__(key)


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_requests_are_about_those_of_the_conversion(conversion: str) -> None:
    """Of a full array, counted as an object store would bill them."""
    base, to = CountingStore(), CountingStore()
    store = ShardingStore(base, None if conversion == "shard" else (4, 4))
    z = zarr.create_array(store, shape=(24, 24), chunks=(1, 1), dtype="u2", fill_value=0)
    z[:] = 7
    store.close()
    convert = CONVERSIONS[conversion]
    found = convert(base, to, dry_run=True, estimate=True).estimate
    base.forget()
    to.forget()
    convert(base, to)
    n_reads = len(base.reads) + len(to.reads)
    n_writes = sum(name == "set" for name, _ in to.writes)
    assert n_writes * 0.8 <= found.n_writes <= n_writes * 1.2 + 5, (found, n_writes)
    assert n_reads * 0.56 <= found.n_reads <= n_reads * 1.2, (found, n_reads)


def test_a_large_grid_is_sampled() -> None:
    """A tenth of the requests, and the sum is nearly right."""
    base = CountingStore()
    z = zarr.create_array(base, shape=(100, 100), chunks=(1, 1), dtype="u1", fill_value=0)
    z[:50] = 7
    base.forget()
    found = shard_store(base, {}, chunks_per_shard=10, dry_run=True, estimate=True).estimate
    assert len(base.reads) < 2500
    assert found is not None
    assert not found.is_exact
    assert 4000 < found.n_objects_before < 6000
    assert 50 <= found.n_objects_after <= 100  # it does not know that one half is empty


def test_few_objects_of_a_large_grid_are_listed() -> None:
    """They are counted, not guessed."""
    base: dict[str, bytes] = {}
    z = zarr.create_array(
        ShardingStore(base, None), shape=(10**5, 10**5), chunks=(1, 1), dtype="u1", fill_value=0
    )
    for i in range(5):
        z[1000 * i, 7] = 1
    (planned,) = shard_store(base, {}, chunks_per_shard=10, dry_run=True, estimate=True).arrays
    assert (planned.n_objects_before, planned.n_objects) == (5, 5)


@pytest.mark.parametrize("n", [16, 80])
def test_objects_behind_a_link_are_counted_or_the_estimate_says_so(n: int, tmp_path: Path) -> None:
    """Shards may lie on a bigger disk, and a listing does not go there."""
    base, disk = tmp_path / "z.zarr", tmp_path / "disk"
    z = zarr.create_array(base, shape=(n, n), chunks=(1, 1), dtype="u1", fill_value=0)
    z[:3, :4] = 7
    (base / "c" / "2").rename(disk)
    (base / "c" / "2").symlink_to(disk)
    found = shard_store(base, {}, chunks_per_shard=4, dry_run=True, estimate=True).estimate
    assert found is not None
    assert (found.n_objects_before, found.is_exact) == ((12, True) if n == 16 else (8, False))


def test_without_being_asked_a_dry_run_looks_at_no_object() -> None:
    """The command line asks for the estimate; programs say so."""
    base = make({}, "shard")
    report = shard_store(base, {}, chunks_per_shard=2, dry_run=True)
    assert report.estimate is None
    assert report.as_dict()["estimate"] is None
    with pytest.raises(SpecError, match="goes with dry_run"):
        shard_store(base, {}, chunks_per_shard=2, estimate=True)
    np.testing.assert_array_equal(zarr.open_array(ShardingStore(base), path="z")[0], [7] * 16)


def test_shards_that_are_copied_keep_their_size(tmp_path: Path) -> None:
    options: Any = {"shape": (4000,), "chunks": (1,), "shards": (1000,), "dtype": "u1"}
    zarr.create_array(tmp_path / "n.zarr", **options)[:] = 1
    to: dict[str, bytes] = {}
    found = shard_store(tmp_path / "n.zarr", to, dry_run=True, estimate=True)
    assert [array.action for array in found.arrays] == ["copied"]
    assert found.estimate is not None
    shard_store(tmp_path / "n.zarr", to)
    assert found.estimate.n_bytes_after == sum(len(to[key]) for key in to if key.startswith("c/"))


@pytest.mark.parametrize("separator", ["/", "."])
def test_sizes_come_with_the_listing(separator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an object store `info` and a dry run ask for the size of no chunk."""
    import obstore

    head, keys = obstore.head_async, []

    async def counted(store: Any, key: str) -> Any:
        keys.append(key)
        return await head(store, key)

    base = ObjectStore(obstore.store.MemoryStore())
    key_encoding: Any = {"name": "default", "separator": separator}
    z = zarr.create_array(
        base, name="z", shape=(40, 40), chunks=(1, 1), dtype="u2", chunk_key_encoding=key_encoding
    )
    z[:20] = 7
    monkeypatch.setattr(obstore, "head_async", counted)
    estimate = shard_store(base, {}, chunks_per_shard=8, dry_run=True, estimate=True).estimate
    assert estimate is not None
    assert (estimate.n_objects_before, estimate.is_exact) == (800, True)
    assert get_shard_info(base).n_objects == 800
    assert not [key for key in keys if "z/c" in key]


def test_a_dry_run_looks_at_its_destination() -> None:
    """It is refused where the conversion would be."""
    base, to = make({}, "shard"), make({}, "shard", n=8)
    before = dict(to)
    for dry_run in (True, False):
        with pytest.raises(SpecError, match="the destination has another"):
            shard_store(base, to, chunks_per_shard=2, dry_run=dry_run)
    assert to == before
