"""What a `DraftHierarchyStore` refuses writes nothing; and what it is as a store."""

from __future__ import annotations

import json
import pickle
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import Crc32cCodec, GzipCodec, ZstdCodec
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore

from tests.support.draft import (
    PROTOTYPE,
    buffer,
    draft_array,
    listed,
    mixed,
    put,
    take,
)
from tests.support.kit import CountingStore
from zarr_shardstore import (
    DraftHierarchyStore,
    ShardingStore,
    ShardStoreError,
    SpecError,
    UnsupportedError,
)
from zarr_shardstore.errors import ReadOnlyError


def refused(store: DraftHierarchyStore, run: Coroutine[Any, Any, Any], base: Any) -> str:
    """The message of the refusal; nothing may have been written."""
    before = dict(base)
    with pytest.raises(ShardStoreError) as info:
        sync(run)
    assert dict(base) == before
    return str(info.value)


@pytest.mark.filterwarnings("ignore:.*specification")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shards": (4, 4)}, "chunks_per_shard"),
        ({"dtype": str}, "vlen-utf8"),
        ({"dtype": np.dtype([("a", "<i4"), ("b", "<f8")])}, "data type"),
        ({"dtype": "M8[10us]"}, "steps of 1"),
        ({"chunk_key_encoding": {"name": "v2", "separator": "/"}}, "take 'default'"),
        ({"compressors": [GzipCodec(), ZstdCodec()]}, "one compressor"),
        ({"compressors": [Crc32cCodec()]}, "take one of blosc"),
        ({"attributes": {"filters": [{"id": "delta"}]}}, "another name"),
    ],
)
def test_arrays_that_the_draft_cannot_express(options: dict[str, Any], message: str) -> None:
    """The error names the document and says what to do; nothing is written."""
    base: dict[str, bytes] = {}
    store = DraftHierarchyStore(base)
    group = zarr.open_group(store, mode="w")
    before = dict(base)
    arguments: dict[str, Any] = {"shape": (4, 4), "chunks": (2, 2), "dtype": "i4", **options}
    with pytest.raises(UnsupportedError, match=message) as info:
        group.create_array("z", **arguments)
    assert "'z/zarr.json'" in str(info.value)
    assert base == before


def test_a_refusal_of_the_store_below_writes_nothing() -> None:
    """Not the entry point either."""
    base: dict[str, bytes] = {}
    store = DraftHierarchyStore(ShardingStore(base, chunks_per_shard=(2, 2, 2)))
    document = take(mixed()[1], "s/zarr.json")
    assert document is not None
    sync_error = pytest.raises(ShardStoreError)
    policy = ShardingStore(base, chunks_per_shard={"z": (2, 2, 2)})
    with sync_error:
        put(DraftHierarchyStore(policy), "z/zarr.json", document)
    assert not base
    assert store != DraftHierarchyStore(policy)


def test_documents_that_are_none() -> None:
    """Neither JSON, nor a node of v3, nor of v2."""
    base: dict[str, bytes] = {}
    store = DraftHierarchyStore(base)
    assert "no JSON object" in refused(store, store.set("zarr.json", buffer(b"\0")), base)
    assert "node_type" in refused(store, store.set("a/zarr.json", buffer(b"{}")), base)
    for key in (".zgroup", "a/.zarray"):
        assert "zarr_format=3" in refused(store, store.set(key, buffer(b"{}")), base)
    with pytest.raises(UnsupportedError, match="zarr_format=3"):
        zarr.create_group(store, zarr_format=2)
    assert not base


def test_a_v3_hierarchy_is_not_mistaken() -> None:
    """Its ``zarr.json`` is no entry point: reading and writing the hierarchy is refused."""
    base: dict[str, bytes] = {}
    zarr.create_array(ShardingStore(base), name="z", shape=(2,), dtype="u1")
    store = DraftHierarchyStore(base)
    with pytest.raises(SpecError, match="through ShardingStore alone"):
        zarr.open_group(store, mode="r")
    document = take(mixed()[1], "s/zarr.json") or b""
    with pytest.raises(SpecError, match="through ShardingStore alone"):
        put(store, "y/zarr.json", document)
    assert not [key for key in base if key.startswith("meta")]
    for run in (store.clear(), store.delete("zarr.json"), store.delete_dir("")):
        assert "no entry point" in refused(store, run, base)


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ({"attributes": {"filters": [{"id": "delta", "dtype": "<i4"}]}}, "filters"),
        ({"data_type": {"extension": "x", "type": [["a", "<i4"], ["b", "<i4"]]}}, "data type"),
        ({"storage_transformers": [{"extension": "x", "type": "y"}]}, "storage"),
    ],
)
def test_stored_arrays_that_cannot_be_shown(member: dict[str, Any], message: str) -> None:
    """A clear error, never wrong values; the array beside is read."""
    base, store = mixed()
    base["meta/root/bad.array.json"] = json.dumps(
        {**json.loads(draft_array([2], [1])), **member}
    ).encode()
    with pytest.raises(UnsupportedError, match=message):
        zarr.open_array(store, path="bad", mode="r")
    assert take(store, "s/c/0/1") == b"01"
    assert "bad/zarr.json" in listed(store)


@pytest.mark.parametrize("key", ["", "/a", "a/../b", "a//b", "a/", "a\0"])
def test_keys_that_escape(key: str) -> None:
    """They are refused before anything is asked."""
    base, store = mixed()
    for run in (
        store.get(key, PROTOTYPE),
        store.set(key, buffer(b"")),
        store.delete(key),
        store.exists(key),
    ):
        assert "refused" in refused(store, run, base)


def test_read_only() -> None:
    """Every way to write is refused; a writable one is had from it."""
    base, _ = mixed()
    store = DraftHierarchyStore(base, read_only=True)
    assert store.read_only
    for run in (
        store.set("s/c/0/0", buffer(b"x")),
        store.set_if_not_exists("s/c/0/0", buffer(b"x")),
        store._set_many([("s/c/0/0", buffer(b"x"))]),
        store.delete("s/c/0/1"),
        store.delete_dir("s"),
        store.clear(),
    ):
        before = dict(base)
        with pytest.raises(ReadOnlyError):
            sync(run)
        assert base == before
    assert DraftHierarchyStore(ShardingStore(base, read_only=True)).read_only
    writable = store.with_read_only(False)
    put(writable, "s/c/0/0", b"x")
    assert base["data/root/s/c0/0"] == b"x"
    assert writable.with_read_only(True) == store != writable


def test_equality_pickling_repr(tmp_path: Any) -> None:
    """Equal if what is below is equal; pickled without what was learned."""
    inner = ShardingStore(LocalStore(tmp_path), chunks_per_shard=2)
    store = DraftHierarchyStore(inner)
    assert store == DraftHierarchyStore(inner)
    assert store != DraftHierarchyStore(inner, read_only=True)
    assert store != inner
    zarr.create_array(store, name="z", shape=(2,), chunks=(1,), dtype="u1")[:] = 1
    again = pickle.loads(pickle.dumps(store))
    assert again == store
    np.testing.assert_array_equal(zarr.open_array(again, path="z", mode="r")[:], [1, 1])
    assert repr(store) == f"DraftHierarchyStore({inner!r})"
    assert repr(DraftHierarchyStore(inner, read_only=True)).endswith(", read_only=True)")
    assert str(store).startswith("draft+sharding+file://")
    assert store.store is inner


def test_capabilities() -> None:
    """Those of the store below, but no consolidated metadata and no blocking methods."""
    store = DraftHierarchyStore(MemoryStore())
    assert store.supports_writes
    assert store.supports_deletes
    assert store.supports_listing
    assert not store.supports_consolidated_metadata
    assert not hasattr(store, "get_sync")
    zarr.open_group(store, mode="w")
    with pytest.raises((TypeError, ValueError), match="consolidated"):
        zarr.consolidate_metadata(store)


def test_another_process_replaced_an_array() -> None:
    """Reading its document, as opening does, or refresh, tells."""
    base, store = mixed()
    assert take(store, "s/c/0/1") == b"01"
    base["meta/root/s.array.json"] = draft_array([4, 4], [1, 1], ".")
    base["data/root/s/c0.1"] = b"dot"
    take(store, "s/zarr.json")
    assert take(store, "s/c.0.1") == b"dot"
    base["meta/root/s.array.json"] = draft_array([4, 4], [1, 1])
    store.refresh()
    assert take(store, "s/c/0/1") == b"01"


@pytest.mark.parametrize(("cps", "n_reads"), [(None, 1), (2, 2)])
def test_what_a_chunk_costs(cps: int | None, n_reads: int) -> None:
    """What it costs below: nothing is added once the array is known, also for a second store."""
    base = CountingStore()
    store = DraftHierarchyStore(ShardingStore(base, chunks_per_shard=cps))
    z = zarr.create_array(store, name="a/z", shape=(4, 4), chunks=(1, 1), dtype="u1")
    z[:] = 1
    for reader in (store, store.with_read_only(True)):
        base.reads.clear()
        assert take(reader, "a/z/c/1/1") is not None
        assert {key for key, _ in base.reads} == {
            "data/root/a/z/c0/0" if cps else "data/root/a/z/c1/1"
        }
        assert len(base.reads) == n_reads
    fresh = DraftHierarchyStore(ShardingStore(base))
    base.reads.clear()
    base.rounds = 0
    assert sync(fresh.exists("a/z/zarr.json"))
    assert base.rounds == 1
    assert take(fresh, "a/z/c/1/1") is not None
    assert sum(key.startswith("data/") for key, _ in base.reads) == n_reads
