"""Write a v2 hierarchy with zarr-python 2.18.7, and the values that it reads from it.

Run in that environment::

    old/bin/python tests/interop/golden/write_v2.py DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import numcodecs
import numpy as np
import zarr

SHAPE, CHUNKS = (7, 5), (2, 3)
NUMBERS = np.arange(1, 36).reshape(SHAPE)
n = numcodecs
ARRAYS = {
    "numbers": {"dtype": ">i4", "order": "F", "filters": [n.Delta(">i4")]},
    "scaled": {
        "dtype": "<f8",
        "filters": [n.FixedScaleOffset(0, 8, "<f8", "<i2"), n.Shuffle(2)],
        "compressor": n.Zlib(1),
    },
    "flags": {"dtype": "?", "filters": [n.PackBits()], "order": "F"},
    "half": {"dtype": ">f2", "compressor": n.LZMA(), "fill_value": "NaN"},
    "complex": {"dtype": "<c16", "fill_value": 1 - 2j, "compressor": n.BZ2()},
    "times": {"dtype": "<M8[ns]", "dimension_separator": "/"},
    "bytes": {"dtype": "S5", "compressor": n.LZ4()},
    "unicode": {"dtype": ">U4", "order": "F", "compressor": None},
    "no fill value": {"dtype": "<u2", "fill_value": None, "compressor": n.Zstd()},
    "texts": {"dtype": object, "object_codec": n.VLenUTF8(), "order": "F"},
    "byte strings": {"dtype": object, "object_codec": n.VLenBytes(), "fill_value": None},
    "checked": {"dtype": "<i8", "filters": [n.CRC32(), n.Adler32()]},
}


def values_of(path):
    if path == "texts":
        return np.array([f"é{i}" * (i % 4) for i in range(35)], object).reshape(SHAPE)
    if path == "byte strings":
        return np.array([b"\0x" * (i % 4) for i in range(35)], object).reshape(SHAPE)
    dtype = np.dtype(ARRAYS[path]["dtype"])
    if dtype.kind in "SU":
        return NUMBERS.astype("U4").astype(dtype)
    return (NUMBERS % 2 if dtype.kind == "b" else NUMBERS).astype(dtype)


def main(directory):
    store = zarr.storage.DirectoryStore(str(directory / "store"))
    root = zarr.open_group(store, mode="w")
    root.attrs["made by"] = zarr.__version__
    for path, options in ARRAYS.items():
        z = root.create_dataset(f"g/{path}", shape=SHAPE, chunks=CHUNKS, **options)
        z.attrs["path"] = path
        is_whole = path in ("no fill value", "byte strings")
        rows = slice(None) if is_whole else slice(5)
        z[rows] = values_of(path)[rows]
        np.save(directory / f"{path}.npy", z[...], allow_pickle=True)
    zarr.consolidate_metadata(store)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
