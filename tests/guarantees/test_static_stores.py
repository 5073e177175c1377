"""`static=True` promises that no other *program* writes: all stores of this process may."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import obstore.store
import pytest
import zarr
from zarr.storage import LocalStore, LoggingStore, MemoryStore

from zarr_shardstore import ShardingMapping, ShardingStore, reshard

BASES: dict[str, Callable[[Path], Any]] = {
    "MemoryStore": lambda _: MemoryStore(),
    "dict": lambda _: {},
    "fsspec": lambda _: f"memory://{uuid4().hex}",
    "obstore": lambda _: obstore.store.MemoryStore(),
    "wrapped files": lambda path: LoggingStore(LocalStore(path), log_level="CRITICAL"),
}


@pytest.fixture(params=BASES)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return BASES[request.param](tmp_path)


def opened(base: Any) -> ShardingStore:
    return ShardingStore(base, chunks_per_shard=4, static=True)


def test_what_other_stores_write_is_seen(base: Any) -> None:
    """Also stores that are not static, and stores that are opened later."""
    stores = [opened(base), opened(base), ShardingStore(base, chunks_per_shard=4)]
    options: Any = {"shape": (8,), "chunks": (1,), "dtype": "u1", "compressors": None}
    zarr.create_array(stores[0], name="z", **options)
    arrays: list[Any] = [zarr.open_array(store, path="z") for store in stores]
    expected = np.zeros(8, "u1")
    rng = np.random.default_rng(0)
    for i in range(60):
        writer, chunk, value = arrays[i % 3], int(rng.integers(8)), int(rng.integers(3))
        writer[chunk] = expected[chunk] = value
        if i == 30:
            reshard(base, 8)
            stores = [opened(base), opened(base), ShardingStore(base)]
            arrays = [zarr.open_array(store, path="z") for store in stores]
        assert all(np.array_equal(array[:], expected) for array in arrays)


def test_frames_and_growing_arrays_are_seen(base: Any) -> None:
    """They are written by a part of the store that reads in another way."""
    store = opened(base)
    options: Any = {"chunks": (1,), "dtype": "u1", "compressors": None}
    zarr.create_array(store, name="f", shape=(0,), **options)
    with store.append_frames("f") as writer:
        for i in range(1, 6):
            writer.append(np.uint8(i))
            writer.flush()
            assert np.array_equal(zarr.open_array(store, path="f")[:], range(1, i + 1))
    z: Any = zarr.create_array(store, name="z", shape=(1,), **options)
    z[:] = 1
    with store.batch():
        store.append_arrays({"z": np.array([2, 3], "u1")})
    assert np.array_equal(zarr.open_array(store, path="z")[:], [1, 2, 3])


def test_chunks_that_are_erased_by_their_prefix_are_gone(base: Any) -> None:
    store = opened(base)
    mapping = ShardingMapping(store)
    zarr.create_array(store, name="z", shape=(8,), chunks=(1,), dtype="u1")[:] = 1
    assert "z/c/6" in mapping
    mapping.erase_prefix("z/c/")
    assert "z/c/6" not in mapping
    assert not mapping.locate(["z/c/6"])[0]
