"""A directory that may not be listed: no tool and no listing takes its keys for missing."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import zarr

from zarr_shardstore import ShardingMapping, ShardingStore, check_store, reshard, unshard_store


@pytest.mark.parametrize("convert", ["reshard", "unshard_store", "check_store", "list"])
def test_a_directory_that_may_not_be_listed_is_an_error(
    convert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks are not taken for missing, and nothing is converted without them."""
    path = str(tmp_path / "a.zarr")
    store = ShardingStore(path, chunks_per_shard=4)
    z = zarr.create_array(store, name="b", shape=(2000, 2000), chunks=(1, 1), dtype="u2")
    z[[0, 1000], :4] = 7
    store.close()
    scandir = os.scandir

    def refusing(directory: Any) -> Any:
        if os.fsdecode(directory).rstrip("/").endswith("b/c/250"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), directory)
        return scandir(directory)

    calls: dict[str, Any] = {
        "reshard": lambda: reshard(path, 2),
        "unshard_store": lambda: unshard_store(path),
        "check_store": lambda: check_store(path),
        "list": lambda: ShardingMapping(path).list(),
    }
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refusing)
        with pytest.raises(PermissionError, match="b/c/250"):
            calls[convert]()
    assert (zarr.open_array(ShardingStore(path), path="b")[[0, 1000], :4] == 7).all()
