"""Names in the code, the configuration and the pickles of users stay where they are."""

from __future__ import annotations

import pickle
from importlib.metadata import entry_points
from pathlib import Path

import fsspec
import numpy as np
import pytest
import zarr
from zarr.abc.store import Store
from zarr.storage import MemoryStore

import zarr_shardstore
from zarr_shardstore import DraftHierarchyStore, ShardingMapping, ShardingStore

PICKLES = Path(__file__).parents[1] / "golden/pickles-0.1"
"""Stores with one array each, pickled by version 0.1 before its files moved."""

NAMES = """
AdoptionReport ArrayContext ArrayReport CheckReport ConversionReport CorruptShardError
CorruptValueError DraftHierarchyStore Finding Progress ReadOnlyError RepairAction RepairReport
ShardConflictError ShardStoreError ShardedCodecPipeline ShardingMapping ShardingStore SpecError
Stats StorageTransformer UnfinishedConversionError UnpublishedError UnshardedWarning
UnsupportedError ValueTransformer __version__ adopt check_store from_native get_shard_info
import_store is_sharded register_storage_transformer repair_store reshard restore_quarantine
set_index_cache_nbytes shard_store stale_references to_native to_references undo_adoption
unshard_store
"""


def test_public_names() -> None:
    assert set(NAMES.split()) <= set(zarr_shardstore.__all__)
    for name in NAMES.split():
        getattr(zarr_shardstore, name)


@pytest.mark.parametrize("name", ["ShardingStore", "ShardingMapping", "DraftHierarchyStore"])
def test_pickles_of_stores(name: str) -> None:
    """A store that an earlier version pickled is the same store with the same values."""
    store = pickle.loads((PICKLES / f"{name}.pickle").read_bytes())
    assert type(store).__name__ == name
    if name == "ShardingMapping":
        store = ShardingStore(store.base)
    np.testing.assert_array_equal(zarr.open_array(store, path="a", mode="r")[:], np.arange(8))


def test_representations(tmp_path: Path) -> None:
    base = MemoryStore()
    stores: list[tuple[object, str]] = [
        (ShardingStore(base, 2), f"ShardingStore({base!r}, chunks_per_shard=2)"),
        (ShardingMapping(base, 2), f"ShardingMapping({base!r}, chunks_per_shard=2)"),
        (
            DraftHierarchyStore(base, chunks_per_shard=2),
            f"DraftHierarchyStore(ShardingStore({base!r}, chunks_per_shard=2))",
        ),
    ]
    assert [(repr(store), text) for store, text in stores if repr(store) != text] == []
    assert str(ShardingStore(str(tmp_path), 2)) == f"sharding+file://{tmp_path}"


def test_entry_points() -> None:
    """Each loads what it always named."""
    found = {
        (point.group, point.name): point.load().__name__
        for group in ("fsspec.specs", "zarr.url_adapters", "zarr.codec_pipeline")
        for point in entry_points(group=group)
        if point.value.startswith("zarr_shardstore")
    }
    assert found == {
        ("fsspec.specs", "shard"): "ShardFileSystem",
        ("zarr.url_adapters", "shard"): "ShardAdapter",
        ("zarr.codec_pipeline", "sharded"): "ShardedCodecPipeline",
    }
    assert fsspec.get_filesystem_class("shard").__name__ == "ShardFileSystem"


def test_the_pipeline_in_the_configuration_of_users() -> None:
    name = "zarr_shardstore.store.pipeline.ShardedCodecPipeline"
    with zarr.config.set({"codec_pipeline.path": name}):
        store: Store = ShardingStore({}, 2)
        z = zarr.create_array(store, shape=(4,), chunks=(1,), dtype="u1")
        z[:] = 1
        pipeline = type(z.async_array.codec_pipeline)
        assert f"{pipeline.__module__}.{pipeline.__qualname__}" == name
        assert (
            pickle.loads(pickle.dumps(z)).async_array.codec_pipeline == z.async_array.codec_pipeline
        )
