"""Work with zarr-python 3 on a hierarchy of the 2022 draft, which zarr-python 3 cannot read."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import zarr
from zarr.codecs import BytesCodec, GzipCodec

from zarr_shardstore import DraftHierarchyStore, ShardingStore, UnsupportedError


def main() -> None:
    values = np.arange(96 * 20, dtype=">i4").reshape(96, 20)
    # zarr may still write the group of an array after its refusal was raised.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "draft.zarr"

        # New arrays are sharded by the ShardingStore below.
        store = DraftHierarchyStore(ShardingStore(path, chunks_per_shard=(32, 2)))
        group = zarr.create_group(store, attributes={"made": "by zarr-python 3"})
        z = group.create_array(
            "foo/baz",
            shape=(96, 20),
            chunks=(1, 1),
            dtype=values.dtype,
            serializer=BytesCodec(endian="big"),
            compressors=GzipCodec(level=1),
        )
        z[:] = values
        z.attrs["units"] = "m"

        # The files are those of the draft: documents, chunk keys, and shards.
        document = json.loads((path / "meta" / "root" / "foo" / "baz.array.json").read_bytes())
        print("data_type:", document["data_type"])
        print("compressor:", document["compressor"]["codec"])
        (transformer,) = document["storage_transformers"]
        print("sharded by:", transformer["configuration"])
        shards = sorted((path / "data" / "root" / "foo" / "baz").rglob("[0-9]*"))
        print(f"{z.nchunks} chunks in {len(shards)} files, the last one {shards[-1].name}")

        # A reader needs no options: the documents say all.
        again = zarr.open_group(DraftHierarchyStore(path), mode="r+")
        baz = again["foo/baz"]
        assert isinstance(baz, zarr.Array)
        np.testing.assert_array_equal(np.asarray(baz[:]), values)
        baz.resize((97, 20))
        baz[96] = 7
        print("read again:", baz.shape, baz.dtype, dict(baz.attrs), int(np.asarray(baz[96, 19])))

        # Metadata that the draft cannot express is refused, and nothing is written.
        try:
            again.create_array("names", shape=(3,), dtype=str)
        except UnsupportedError as error:
            print("refused:", str(error).split(":")[0])


if __name__ == "__main__":
    main()
