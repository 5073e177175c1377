"""Write the golden hierarchies with zarr-python 2.18.7, the draft's only other implementation.

Run in its own environment, never in that of this package::

    python -m venv old && old/bin/pip install "zarr==2.18.7" "numcodecs[msgpack]<0.16" pytest
    old/bin/python tests/interop/golden/make_golden.py tests/interop/golden/zarr218

(zarr 2.18 imports its own tests, hence pytest.) Every array holds ``data_of(shape)``.
"""

import os
import shutil
import sys
import warnings

os.environ["ZARR_V3_EXPERIMENTAL_API"] = "1"
os.environ["ZARR_V3_SHARDING"] = "1"
warnings.simplefilter("ignore")

import numpy as np
import zarr
from zarr._storage.v3_storage_transformers import ShardingStorageTransformer

# path: shape, chunks, chunks_per_shard, separator
ARRAYS = {
    "a/cube": ((5, 3, 2), (1, 1, 1), (3, 1, 2), "/"),
    "a/edge": ((7, 4), (2, 3), (2, 2), "."),
    "line": ((9,), (2,), (3,), "/"),
    "point": ((), (), (), "/"),
    "holes": ((8, 8), (2, 2), (2, 2), "/"),
}


def data_of(shape):
    size = int(np.prod(shape, dtype=int))
    return (np.arange(1, size + 1, dtype="<i4") * 7).reshape(shape)


def make_array(store, path):
    shape, chunks, cps, separator = ARRAYS[path]
    return zarr.create(
        shape=shape,
        chunks=chunks or True,
        dtype="<i4",
        store=store,
        path=path,
        fill_value=0,
        compressor=None,
        zarr_version=3,
        dimension_separator=separator,
        storage_transformers=[ShardingStorageTransformer("indexed", cps)],
    )


def write(directory):
    shutil.rmtree(directory, ignore_errors=True)
    store = zarr.DirectoryStoreV3(directory)
    for path in ARRAYS:
        z = make_array(store, path)
        data = data_of(z.shape)
        if path == "holes":
            z[0:2, 0:2] = data[0:2, 0:2]
            z[6:8, 4:6] = data[6:8, 4:6]
        else:
            z[...] = data


def check(directory):
    """Read every array of `directory` and compare; for hierarchies that others wrote."""
    store = zarr.DirectoryStoreV3(directory)
    for path, (shape, _, _, _) in ARRAYS.items():
        z = zarr.open_array(store, mode="r", path=path, zarr_version=3)
        expected = data_of(shape)
        if path == "holes":
            whole, expected = expected, np.zeros(shape, "<i4")
            expected[0:2, 0:2] = whole[0:2, 0:2]
            expected[6:8, 4:6] = whole[6:8, 4:6]
        np.testing.assert_array_equal(z[...], expected)
        print(path, "equal")


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        check(sys.argv[2])
    else:
        write(sys.argv[1])
