"""Memory of the batches of a loader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zarr

from zarr_shardstore import ShardingStore, ShardLoader
from zarr_shardstore.interop.loader import loader as module
from zarr_shardstore.interop.loader.frameworks import Converter


def test_memory_that_a_device_may_still_copy_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = ShardingStore({}, chunks_per_shard=2)
    zarr.create_array(store, name="x", shape=(40, 3), chunks=(4, 3), dtype="u1")
    allocated: list[int] = []

    def allocate(nbytes: int) -> Any:
        allocated.append(nbytes)
        return np.empty(nbytes, np.uint8)

    pinned = Converter(np.asarray, None, allocate, reuses_memory=False)
    monkeypatch.setattr(module, "converter_of", lambda *_: pinned)
    for _ in ShardLoader(store, "x", batch_size=4, n_threads=1):
        pass
    assert len(allocated) == 10
