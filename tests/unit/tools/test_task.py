"""Tasks of conversions: how values are read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from obstore.store import MemoryStore
from zarr.storage import ObjectStore

from tests.support.bases import ALL_BASES
from tests.support.kit import tuned
from zarr_shardstore import (
    ShardConflictError,
    ShardingStore,
    check_store,
    reshard,
    shard_store,
    unshard_store,
)
from zarr_shardstore.shards import requests
from zarr_shardstore.store.base_handle import BaseStoreHandle

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no shard is changed in place")

KILLED_IN_A_CHANGE = """
import os, sys
import numpy as np, zarr
from zarr_shardstore import ShardingStore
from zarr_shardstore.io.local import fs, shard_files

store = ShardingStore(sys.argv[1], chunks_per_shard=1024)
z = zarr.create_array(store, name="a", shape=1024000, chunks=1000, dtype="u2")
z[:60000] = np.repeat(np.arange(1, 61), 1000)
z[60000:61000] = 61
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
z[61000:90000] = np.repeat(np.arange(62, 91), 1000)
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no system that names open files")
@pytest.mark.parametrize("n_writes", [2, 3])
@pytest.mark.parametrize(
    "how", ["has these shards", "not among the paths", "is smaller than its chunks"]
)
def test_copies_of_a_shard_that_a_killed_writer_was_changing(
    tmp_path: Path, n_writes: int, how: str
) -> None:
    """The journal, which undoes the change, is not copied. The change is not in the copy."""
    source, target = tmp_path / "source", tmp_path / "target"
    command = [sys.executable, "-c", KILLED_IN_A_CHANGE, str(source), str(n_writes)]
    assert subprocess.run(command).returncode == 9
    assert (source / "a/c/0.__journal").exists()
    options: dict[str, Any] = {}
    if how == "not among the paths":
        zarr.create_array(source, name="b", shape=(4,), chunks=(1,), dtype="u1")[:] = 1
        options = {"paths": "b", "copy_rest": True}
    with tuned(copy_nbytes=2_000_000 if how == "is smaller than its chunks" else 2**23):
        report = shard_store(source, target, chunks_per_shard=1024, **options)
    assert ("a", "copied") in [(each.path, each.action) for each in report.arrays]
    read: Any = zarr.open_array(ShardingStore(target), path="a", mode="r")
    np.testing.assert_array_equal(read[:61000:1000], np.arange(1, 62))
    assert check_store(target, level="decode").is_clean


ONE = ThreadPoolExecutor(1)  # so that the second read is of the shard that was read first
CONVERSIONS: dict[str, Callable[[Any, Any], Any]] = {
    "unshard": lambda base, _: unshard_store(base, executor=ONE),
    "reshard": lambda base, _: reshard(base, 4, executor=ONE),
    "copy": lambda base, to: shard_store(base, to, chunks_per_shard=8, executor=ONE),
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("name", [*ALL_BASES, "etags"])
def test_a_write_between_two_reads_of_a_shard(
    name: str, conversion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moves the other chunks, and is an error. Nothing is lost; the next run converts all."""
    if conversion == "copy" and name not in ("local", "etags"):
        pytest.skip("a copy in pieces has no index to compare, and these stores have no versions")
    base = ObjectStore(MemoryStore()) if name == "etags" else ALL_BASES[name]()
    to: dict[str, bytes] = {}
    store = ShardingStore(base, 8)
    options: dict[str, Any] = {"shape": 64, "chunks": 8, "dtype": "u8", "compressors": None}
    zarr.create_array(store, name="a", **options)[8:] = values = np.arange(1, 57)
    store.close()
    perform, reads = BaseStoreHandle.perform, list[requests.Get]()

    def write_before_the_second(self: Any, batch: Any) -> Any:
        found = [get for get in batch if isinstance(get, requests.Get) and get.key == "a/c/0"]
        reads.extend(found)
        if found and len(reads) == 2:
            z = zarr.open_array(ShardingStore(base, strategy="rewrite"), path="a")
            z[:8] = 100
        return perform(self, batch)

    monkeypatch.setattr(BaseStoreHandle, "perform", write_before_the_second)
    with tuned(copy_nbytes=128):
        with pytest.raises(ShardConflictError, match="was changed while it was read"):
            CONVERSIONS[conversion](base, to)
        CONVERSIONS[conversion](base, to)
    found: Any = zarr.open_array(ShardingStore(to or base), path="a")
    np.testing.assert_array_equal(found[:], [100] * 8 + values.tolist())
