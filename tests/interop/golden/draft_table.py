"""Write and read tables of draft arrays with zarr-python 2.18.7.

Run in its own environment, as `make_golden.py`::

    old/bin/python tests/interop/golden/draft_table.py write DIRECTORY TABLE
    old/bin/python tests/interop/golden/draft_table.py read DIRECTORY TABLE

TABLE is a folder with ``table.json``, a list of cases, and ``values/<number>.npy``. Reading
writes ``read/<number>.npy`` and ``read.json`` with what else was seen of each array.
"""
# ruff: noqa: E402 (the environment comes first)

import json
import os
import sys
import warnings
from pathlib import Path

os.environ["ZARR_V3_EXPERIMENTAL_API"] = "1"
os.environ["ZARR_V3_SHARDING"] = "1"
warnings.simplefilter("ignore")

import numcodecs
import numpy as np
import zarr
from zarr._storage.v3_storage_transformers import ShardingStorageTransformer


def write(directory, table):
    store = zarr.DirectoryStoreV3(directory)
    group = zarr.open_group(store, mode="w", zarr_version=3)
    group.attrs["made"] = "by 2.18"
    for i, case in enumerate(json.loads((table / "table.json").read_text())):
        values = np.load(table / "values" / f"{i}.npy")
        cps = case["chunks_per_shard"]
        z = zarr.create(
            shape=values.shape,
            chunks=tuple(case["chunks"]) or True,
            dtype=case["dtype"],
            store=store,
            path=case["path"],
            fill_value=np.load(table / "fills" / f"{i}.npy")[()] if case["has_fill"] else None,
            compressor=case["compressor"] and numcodecs.get_codec(case["compressor"]),
            order=case["order"],
            zarr_version=3,
            dimension_separator=case["separator"],
            storage_transformers=[]
            if cps is None
            else [ShardingStorageTransformer("indexed", cps)],
        )
        if values.ndim:
            z[: case["n_written"]] = values[: case["n_written"]]
        else:
            z[...] = values
        z.attrs["number"] = i


def read(directory, table):
    store = zarr.DirectoryStoreV3(directory)
    (table / "read").mkdir(exist_ok=True)
    seen = []
    for i, case in enumerate(json.loads((table / "table.json").read_text())):
        z = zarr.open_array(store, mode="r", path=case["path"], zarr_version=3)
        np.save(table / "read" / f"{i}.npy", z[...])
        transformers = z._meta.get("storage_transformers", [])
        seen.append(
            {
                "dtype": z.dtype.str,
                "order": z.order,
                "chunks": z.chunks,
                "separator": z._dimension_separator,
                "compressor": z.compressor and z.compressor.get_config(),
                "attributes": z.attrs.asdict(),
                "chunks_per_shard": [t.chunks_per_shard for t in transformers],
            }
        )
    (table / "read.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
