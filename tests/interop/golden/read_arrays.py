"""Read arrays with zarr-python 2.18.7: ``python tests/interop/golden/read_arrays.py < REQUESTS``.

Run in its own environment, as `make_golden.py`. REQUESTS is a JSON list of {directory, path,
way, is_draft, selection}, a selection a list of [start, stop] for each dimension. Prints a list
of {values} or {error}, the values flat.
"""
# ruff: noqa: E402 (the environment comes first)

import json
import os
import sys
import warnings

os.environ["ZARR_V3_EXPERIMENTAL_API"] = "1"
os.environ["ZARR_V3_SHARDING"] = "1"
warnings.simplefilter("ignore")

import zarr


def open_array(request):
    directory, path = request["directory"], request["path"]
    store = zarr.DirectoryStoreV3(directory) if request["is_draft"] else directory
    if request["way"] == "consolidated":
        return zarr.open_consolidated(store)[path]
    if request["way"] == "group":
        return zarr.open_group(store, mode="r")[path]
    return zarr.open_array(store, mode="r", path=path)


def read(request):
    try:
        values = open_array(request)[tuple(slice(*s) for s in request["selection"])]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"values": values.ravel().tolist()}


if __name__ == "__main__":
    print(json.dumps([read(request) for request in json.load(sys.stdin)]))
