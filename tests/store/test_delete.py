"""`ShardingMapping.delete`, of the early draft: the value or the directory of that name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import obstore
import pytest
import zarr
from zarr.storage import ObjectStore

from tests.support.bases import BASES
from tests.support.draft import draft_array
from tests.support.kit import objects_of
from zarr_shardstore import ReadOnlyError, ShardingMapping, ShardingStore, SpecError

SHARDING = [{"name": "sharding", "configuration": {"chunks_per_shard": [2, 2]}}]
CHUNKS = [f"data/root/a/c{i}/{j}" for i in range(4) for j in range(4)]
DOCUMENT = "meta/root/a.array.json"


@pytest.fixture(params=BASES, ids=list(BASES))
def m(request: pytest.FixtureRequest) -> ShardingMapping:
    m = ShardingMapping(BASES[request.param]())
    doc = {**json.loads(draft_array([8, 8], [2, 2])), "storage_transformers": SHARDING}
    m.update({DOCUMENT: json.dumps(doc).encode(), "other/x": b"x", "other/y/z": b"z"})
    m.update({key: key.encode() for key in CHUNKS})
    return m


@pytest.mark.parametrize(
    ("key", "gone"),
    [
        ("data/root/a/c0/1", ["data/root/a/c0/1"]),
        ("data/root/a/c0", CHUNKS[:4]),
        ("data/root/a/c0/", CHUNKS[:4]),
        ("data/root/a", CHUNKS),
        ("data", CHUNKS),
        ("other", ["other/x", "other/y/z"]),
        ("other/x", ["other/x"]),
        ("other/x/", []),
        ("missing", []),
        ("data/root/a/c9/9", []),
        ("data/root/a/c", []),
    ],
)
def test_what_is_erased(m: ShardingMapping, key: str, gone: list[str]) -> None:
    """Also chunks whose shard has the key of another chunk that is erased."""
    before = {k: m[k] for k in m}
    m.delete(key)
    assert {k: m[k] for k in m} == {k: v for k, v in before.items() if k not in gone}
    m.delete(key)


@pytest.mark.parametrize("key", ["", "/", "..", "a/../b", "a//", "/a"])
def test_a_key_that_names_nothing_below_the_store(m: ShardingMapping, key: str) -> None:
    before: Any = objects_of(m.base)
    with pytest.raises(SpecError):
        m.delete(key)
    assert objects_of(m.base) == before


def test_a_prefix_that_is_a_value_and_a_slash(m: ShardingMapping) -> None:
    """Nothing is below it, and the value stays; fsspec takes both for the same."""
    before: Any = objects_of(m.base)
    for key in ("other/x", "data/root/a/c0/1", DOCUMENT):
        assert (m.list_prefix(f"{key}/"), m.list_dir(f"{key}/")) == ([], ([], []))
        m.erase_prefix(f"{key}/")
    assert objects_of(m.base) == before


@pytest.mark.parametrize("chunks_per_shard", [2, 4])
@pytest.mark.parametrize("document", [0, -1])
@pytest.mark.parametrize("make", [dict, lambda: ObjectStore(obstore.store.MemoryStore())])
def test_an_array_that_was_erased_key_by_key_leaves_nothing_to_the_next_one(
    make: Callable[[], Any], document: int, chunks_per_shard: int
) -> None:
    """On object stores shards without entries stay, which are as long as the new chunks."""
    options: Any = {"name": "a", "shape": 144, "chunks": 36, "dtype": "u1", "compressors": None}
    store = ShardingStore(make(), 2)
    zarr.create_array(store, **options)[:] = 1
    m = ShardingMapping(store)
    keys = [key for key in m if key != "a/zarr.json"]
    keys.insert(document % (len(keys) + 1), "a/zarr.json")
    for key in keys:
        del m[key]
    store = ShardingStore(store.base, chunks_per_shard)
    z = zarr.create_array(store, fill_value=7, **options)
    assert (np.asarray(z[:]) == 7).all()
    assert store.shard_shape("a") == (36 * chunks_per_shard,)


def test_a_store_that_is_read_only() -> None:
    with pytest.raises(ReadOnlyError):
        ShardingMapping({}, read_only=True).delete("a")
