"""Wrap a store that has plain data: the old array stays as it is, new arrays are sharded."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import zarr

from zarr_shardstore import ShardingStore


def files_of(path: Path) -> dict[str, bytes]:
    """Return every file below `path`."""
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def main() -> None:
    values = np.arange(24 * 10, dtype="int32").reshape(24, 10)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.zarr"

        # An existing array of plain zarr: one file a chunk.
        plain = zarr.create_group(path)
        plain.create_array("old", shape=(24, 10), chunks=(2, 5), dtype="int32")[:] = values
        before = files_of(path)
        print(f"old, by plain zarr: {len(files_of(path / 'old' / 'c'))} files for 24 chunks")

        # Through the wrapper it reads as before, and nothing is changed by that.
        group = zarr.open_group(ShardingStore(path, chunks_per_shard=4), mode="r+")
        old = group["old"]
        assert isinstance(old, zarr.Array)
        np.testing.assert_array_equal(np.asarray(old[:]), values)
        assert files_of(path) == before
        print("old, through the wrapper: same values, no file touched")

        # It stays unsharded when it is written to: its metadata says what it is.
        old[0, 0] = -1
        assert files_of(path).keys() == before.keys()
        print("old, written through the wrapper: still one file a chunk")

        # New arrays are sharded. The wrapper shows plain chunks, as of every array.
        new = group.create_array("new", shape=(24, 10), chunks=(2, 5), dtype="int32")
        new[:] = values
        assert new.shards is None
        n_files = len(files_of(path / "new" / "c"))
        assert n_files == 3
        print(f"new, through the wrapper: {n_files} files for {new.nchunks} chunks")

        # Plain zarr reads both; it sees the new one as a sharded array.
        for name in ("old", "new"):
            array = zarr.open_array(path, path=name, mode="r")
            print(f"{name}, by plain zarr: chunks {array.chunks}, shards {array.shards}")
            expected = values.copy()
            if name == "old":
                expected[0, 0] = -1
            np.testing.assert_array_equal(np.asarray(array[:]), expected)


if __name__ == "__main__":
    main()
