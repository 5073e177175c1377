"""Use a `ShardingStore` as any zarr store: groups, attributes, resize, consolidated metadata."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import numpy as np
import zarr

from zarr_shardstore import ShardingStore


def main() -> None:
    # zarr says this whenever it consolidates v3 metadata.
    warnings.filterwarnings("ignore", message="Consolidated metadata")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "station.zarr"
        store = ShardingStore(path, chunks_per_shard={"raw/*": (4, 2)})

        # 50 × 6 values in 10 × 2 chunks, of which 4 × 2 are one shard.
        root = zarr.create_group(store, attributes={"station": "Zugspitze"})
        raw = root.create_group("raw")
        wind = raw.create_array("wind", shape=(50, 6), chunks=(5, 3), dtype="float32")
        wind.attrs["unit"] = "m/s"
        assert (wind.nchunks, wind.shards) == (20, None)

        # A region that ends within a chunk.
        wind[7:23, 1:5] = 2.5
        expected = np.zeros((50, 6), dtype="float32")
        expected[7:23, 1:5] = 2.5
        np.testing.assert_array_equal(np.asarray(wind[:]), expected)
        print(f"wrote a region: {wind.nchunks_initialized} of {wind.nchunks} chunks stored")

        # Append and cut.
        wind.append(np.ones((4, 6), dtype="float32"), axis=0)
        wind.resize((54, 4))
        expected = np.vstack([expected, np.ones((4, 6), dtype="float32")])[:, :4]
        np.testing.assert_array_equal(np.asarray(wind[:]), expected)
        print(f"appended 4 rows, cut 2 columns: shape {wind.shape}")

        # No rule names this one: it is not sharded.
        root.create_array("calibration", data=np.array([0.5, 1.5]), chunks=(1,))

        zarr.consolidate_metadata(store)
        again = zarr.open_consolidated(store)["raw/wind"]
        assert isinstance(again, zarr.Array)
        assert again.attrs["unit"] == "m/s"
        assert again.shards is None
        print(f"consolidated, through the store: chunks {again.chunks}, shards {again.shards}")

        # The same documents say to other readers that the array is sharded.
        plain = zarr.open_consolidated(str(path))["raw/wind"]
        assert isinstance(plain, zarr.Array)
        assert plain.shards == (20, 6)
        np.testing.assert_array_equal(np.asarray(plain[:]), expected)
        print(f"consolidated, by plain zarr: chunks {plain.chunks}, shards {plain.shards}")

        store.close()  # removes the journals that are stored with shards while they are written to
        print("in the base store:")
        files = {str(file.relative_to(path)): file for file in path.rglob("*") if file.is_file()}
        for name, file in sorted(files.items()):
            print(f"  {file.stat().st_size:>6} bytes  {name}")
        assert sum(name.startswith("raw/wind/c/") for name in files) == 3
        assert sum(name.startswith("calibration/c/") for name in files) == 2


if __name__ == "__main__":
    main()
