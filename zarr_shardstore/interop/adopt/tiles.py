"""Files that tile one array along its first dimension, each of them a shard."""

from __future__ import annotations

from typing import Any

from zarr_shardstore.errors import SpecError
from zarr_shardstore.interop.importing.foreign import ForeignArray
from zarr_shardstore.interop.importing.hdf5 import rows_of_slabs


def tiles_of(arrays: list[ForeignArray]) -> list[ForeignArray]:
    """Return arrays that tile one along its first dimension, each a shard, or refuse them."""
    if not arrays:
        raise SpecError("name at least one file")
    first, *others = arrays
    paths = [array.path for array in arrays]
    if len(set(paths)) < len(paths):
        raise SpecError("a file is named twice: each is one shard")
    row_nbytes = first.row_nbytes
    if row_nbytes is not None and all(array.row_nbytes == row_nbytes for array in others):
        n_rows = rows_of_slabs(tuple(array.shape[0] for array in arrays), row_nbytes)
        if n_rows is not None:
            first, *others = arrays = [array.in_slabs(n_rows) for array in arrays]
    form = _form(first)
    for array in others:
        name = f"{array.path!r} does not continue {first.path!r}:"
        for what, mine in _form(array).items():
            if mine != form[what]:
                raise SpecError(f"{name} its {what} is {mine}, not {form[what]}")
        is_last = array is arrays[-1]
        if array.shape[0] > first.shape[0] or (array.shape[0] < first.shape[0] and not is_last):
            raise SpecError(f"{name} its shape is {array.shape}, not {first.shape}")
    if others and first.shape[0] % first.chunk_shape[0]:
        raise SpecError(
            f"{first.path!r} has {first.shape[0]} rows in chunks of {first.chunk_shape[0]}: the "
            "next file would begin within a chunk"
        )
    return arrays


def _form(array: ForeignArray) -> dict[str, Any]:
    """Return what must be the same for all files of an array."""
    doc = array.document
    return {
        "number of dimensions": len(array.shape),
        "shape without its first dimension": array.shape[1:],
        "data type": doc["data_type"],
        "chunk shape": array.chunk_shape,
        "list of codecs": doc["codecs"],
        "fill value": doc["fill_value"],
    }
