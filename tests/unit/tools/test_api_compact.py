"""Compaction of a whole store, by the function of the command line."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr

from tests.tools.test_destinations import EXPECTED, STORES, WORKS, tree, values_in
from zarr_shardstore import ShardingStore
from zarr_shardstore.errors import ShardStoreError, SpecError
from zarr_shardstore.interop.adopt.adopt import adopt
from zarr_shardstore.tools.convert.api import compact_store


@pytest.mark.parametrize("store", STORES)
def test_each_store_is_compacted_or_refused(store: str, tmp_path: Path) -> None:
    """It works through a link, and what cannot be changed is refused unchanged."""
    make, refused = STORES[store]
    base = make(tmp_path, "compact")
    before = tree(tmp_path)
    if refused is WORKS:
        compact_store(base)
        np.testing.assert_array_equal(values_in(base), EXPECTED)
        return
    with pytest.raises(refused) as caught:
        compact_store(base)
    assert isinstance(caught.value, ShardStoreError)
    assert tree(tmp_path) == before


def test_a_dry_run_counts_no_byte_of_an_adopted_file(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(100)
    adopt([tmp_path / "a.h5"], tmp_path / "m.zarr", dataset="x")
    for dry_run in (True, False):
        report = compact_store(tmp_path / "m.zarr", dry_run=dry_run)
        assert (report.n_shards, report.n_compacted) == (1, 0)


def test_a_prefix_of_no_chunk_is_refused() -> None:
    """A misspelled one would look like a store without dead bytes."""
    store = ShardingStore({}, chunks_per_shard=2)
    zarr.create_array(store, name="raw", shape=(4,), chunks=(1,), dtype="u1")[:] = 1
    assert compact_store(store, "raw/").n_shards == 2
    with pytest.raises(SpecError, match="has a key that starts with 'rew'"):
        compact_store(store, "rew")
