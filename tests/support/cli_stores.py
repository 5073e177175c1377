"""The directory in which the tests of the command line work."""

from __future__ import annotations

from pathlib import Path

import pytest
import zarr

from zarr_shardstore import ShardingStore


def enter_directory_with_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a directory with a store of plain chunks and one of shards; no colors are asked for."""
    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, cps in (("volume.zarr", None), ("packed.zarr", (2, 4))):
        root = zarr.open_group(ShardingStore(name, chunks_per_shard=cps), mode="w")
        z = root.create_array("raw", shape=(20, 30), chunks=(2, 3), dtype="u2", compressors=None)
        z[:7] = 3
    return tmp_path
