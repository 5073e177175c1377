"""What cannot be listed, or is odd, in a directory: no tool takes keys for missing."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import zarr

from zarr_shardstore import (
    ShardingMapping,
    ShardingStore,
    check_store,
    reshard,
    shard_store,
    unshard_store,
)


@pytest.mark.parametrize("convert", ["reshard", "unshard_store", "check_store", "list"])
def test_a_directory_that_may_not_be_listed_is_an_error(
    convert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks are not taken for missing, and nothing is converted without them."""
    path = str(tmp_path / "a.zarr")
    store = ShardingStore(path, chunks_per_shard=4)
    z: Any = zarr.create_array(store, name="b", shape=(2000, 2000), chunks=(1, 1), dtype="u2")
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
    z = zarr.open_array(ShardingStore(path), path="b")
    assert (z[[0, 1000], :4] == 7).all()


def test_a_link_to_nothing_hides_no_other_name(tmp_path: Path) -> None:
    """Nor one that leads through a file, or in a circle."""
    root: Any = zarr.open_group(ShardingStore(str(tmp_path / "a"), None), mode="w")
    for name in ("g/a", "g/b"):
        root.create_array(name, shape=(4,), chunks=(1,), dtype="u1")[:] = 1
    for name, target in {"1": "zarr.json/x", "2": "absent", "3": "3"}.items():
        (tmp_path / "a" / "g" / name).symlink_to(target)
    assert sorted(dict(root["g"].members())) == ["a", "b"]
    assert check_store(str(tmp_path / "a")).n_arrays == 2
    report = shard_store(str(tmp_path / "a"), str(tmp_path / "b"), chunks_per_shard=2)
    assert len(report.arrays) == 2
