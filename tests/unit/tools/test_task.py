"""Tasks of conversions: how values are read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from zarr_shardstore import ShardingStore, check_store, shard_store

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no shard is changed in place")

KILLED_IN_A_CHANGE = """
import os, sys
import numpy as np, zarr
from zarr_shardstore import ShardingStore
from zarr_shardstore.io.local import fs, shard_files

store = ShardingStore(sys.argv[1], chunks_per_shard=1024)
z = zarr.create_array(store, name="a", shape=(1024,), chunks=(1,), dtype="u2", compressors=None)
z[:600] = np.arange(1, 601)
z[600] = 601
write_at, writes = fs.write_at, []

def killed(fd, pieces, offset):
    data = b"".join(pieces)
    if os.readlink(f"/proc/self/fd/{fd}").endswith("/c/0"):
        writes.append(offset)
        if len(writes) == int(sys.argv[2]):
            write_at(fd, [data[: len(data) // 2]], offset)
            os._exit(9)
    write_at(fd, pieces, offset)

fs.write_at = killed
if hasattr(shard_files, "write_at"):
    shard_files.write_at = killed
z[601:900] = np.arange(602, 901)
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no system that names open files")
@pytest.mark.parametrize("n_writes", [2, 3])
@pytest.mark.parametrize("how", ["has these shards", "not among the paths"])
def test_copies_of_a_shard_that_a_killed_writer_was_changing(
    tmp_path: Path, n_writes: int, how: str
) -> None:
    """The journal, which undoes the change, is not copied."""
    source, target = tmp_path / "source", tmp_path / "target"
    command = [sys.executable, "-c", KILLED_IN_A_CHANGE, str(source), str(n_writes)]
    assert subprocess.run(command).returncode == 9
    assert (source / "a/c/0.__journal").exists()
    options: dict[str, Any] = {}
    if how != "has these shards":
        zarr.create_array(source, name="b", shape=(4,), chunks=(1,), dtype="u1")[:] = 1
        options = {"paths": "b", "copy_rest": True}
    report = shard_store(source, target, chunks_per_shard=1024, **options)
    assert ("a", "copied") in [(each.path, each.action) for each in report.arrays]
    read: Any = zarr.open_array(ShardingStore(target), path="a", mode="r")
    np.testing.assert_array_equal(read[:601], np.arange(1, 602))
    assert check_store(target, level="decode").is_clean
