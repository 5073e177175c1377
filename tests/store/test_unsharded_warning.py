"""The warning of a new store that shards nothing, because `chunks_per_shard` was left out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zarr

from zarr_shardstore import DraftHierarchyStore, ShardingMapping, ShardingStore, UnshardedWarning


@pytest.fixture(autouse=True)
def as_error() -> Iterator[None]:
    """Each warning is an error, which `pytest.warns` alone expects."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def create(store: Any, name: str = "z", **options: Any) -> Any:
    return zarr.create_array(store, name=name, shape=(8,), chunks=(2,), dtype="u1", **options)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_new_store_says_once_that_it_shards_nothing(zarr_format: Any) -> None:
    """When it creates its first array, whatever groups there are; a second array says nothing."""
    store = ShardingStore({})
    root = zarr.open_group(store, mode="w", zarr_format=zarr_format)
    below = root.create_group("a/b")
    root.create_group("c")
    with pytest.warns(UnshardedWarning, match="'a/b/z'.*chunks_per_shard='auto'") as warned:
        below.create_array("z", shape=(8,), chunks=(2,), dtype="u1")
    assert len(warned) == 1
    create(store, "more", zarr_format=zarr_format)[:] = 1
    np.testing.assert_array_equal(zarr.open_array(store, path="more")[:], [1] * 8)


def test_a_draft_hierarchy_says_so_too() -> None:
    """Its arrays come through a store of the same kind."""
    with pytest.warns(UnshardedWarning, match="'z' is not sharded"):
        create(DraftHierarchyStore({}))
    base: dict[str, bytes] = {}
    create(DraftHierarchyStore(ShardingStore(base, 2)))
    create(DraftHierarchyStore(base), "y")


def test_stores_that_say_nothing() -> None:
    """The option says what is meant, ``None`` too; or the store has arrays, sharded or not."""
    for options in ({"chunks_per_shard": 2}, {"chunks_per_shard": None}, {"native": "passthrough"}):
        create(ShardingStore({}, **options))
    create(ShardingStore(ShardingMapping({}).base, None))
    for given in (2, None):
        base: dict[str, bytes] = {}
        create(ShardingStore(base, given), "there/z")
        store = ShardingStore(base)
        store2 = ShardingStore(base, read_only=True)
        assert zarr.open_array(store2, path="there/z").shape == (8,)
        create(store)
        zarr.open_array(store, path="there/z", mode="r+").resize((12,))
    create(ShardingStore({}, storage_transformers=["crc32c"]))


def test_many_other_names_are_no_new_store() -> None:
    """Nothing is walked for it: a bucket may have a million of names."""
    base = {f"photo{i}.jpg": b"" for i in range(1000)}
    store = ShardingStore(base)
    before = store.stats().requests
    create(store)
    assert store.stats().requests - before < 20
