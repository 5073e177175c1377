"""`ServedStore` shows plain chunks to its clients, whatever the view of the store is."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.sync import sync

from zarr_shardstore import ShardingStore
from zarr_shardstore.interop.serve.served_store import ServedStore


@pytest.mark.parametrize("view", ["chunks", "shards"])
def test_documents_have_plain_chunks(view: Any) -> None:
    store = ShardingStore({}, 2, view=view, read_only=False)
    zarr.create_array(store, name="a", data=np.arange(16), chunks=(2,))
    served = ServedStore(store)
    found = sync(served.read("a/zarr.json", None))
    assert found is not None
    document = json.loads(bytes(found))
    assert document["chunk_grid"]["configuration"]["chunk_shape"] == [2]
    assert document["chunk_key_encoding"]["name"] == "default"
    assert sync(served.find("a/c/7")) == "a/c/7"
    assert zarr.open_array(served.store, path="a").shards is None


@pytest.mark.parametrize("zarr_format", [None, 2, 3])
def test_consolidated_metadata_has_no_array_whose_chunks_are_not_served(zarr_format: Any) -> None:
    store = ShardingStore({}, 2)
    group = zarr.create_group(store)
    for name in ("a", ".b", "g/..c"):
        group.create_array(name, data=np.arange(4), chunks=(1,))
    if zarr_format is None:
        with warnings.catch_warnings(action="ignore"):  # v3 does not specify it
            zarr.consolidate_metadata(store)
    served = ServedStore(store, zarr_format)
    found = sync(served.find(".zmetadata" if zarr_format == 2 else "zarr.json"))
    assert isinstance(found, bytes)
    document = json.loads(found)
    members = document.get("metadata") or document["consolidated_metadata"]["metadata"]
    assert {key.partition("/.z")[0] for key in members} - {".zgroup", ".zattrs"} == {"a", "g"}
