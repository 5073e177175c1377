"""`ServedStore` shows plain chunks to its clients, whatever the view of the store is."""

from __future__ import annotations

import json
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
