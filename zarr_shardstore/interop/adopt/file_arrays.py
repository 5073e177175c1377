"""Arrays in local files: their documents of Zarr v3 and ranges of chunks; files that tile an array.

Libraries parse the files: h5py HDF5 and NetCDF-4, tifffile TIFF, numpy ``.npy``; the 16 bytes of a
WKW header are parsed here. No chunk is read.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.access import chunk_keys, fs, layouts, metadata, shard_format
from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.interop.importing.hdf5 import KEYS, Parser, rows_of_slabs
from zarr_shardstore.interop.importing.references import tiff_references
from zarr_shardstore.interop.importing.source import (
    ChunkTables,
    SourceFiles,
    faults_named,
    format_of,
    library,
)
from zarr_shardstore.tools.native import data_types
from zarr_shardstore.tools.native.codecs import Chain, v3_array
from zarr_shardstore.tools.native.translate import v3_of_v2

_WKW = struct.Struct("<3xBBBBBQ")
_WKW_TYPES = ("<u1", "<u2", "<u4", "<u8", "<f4", "<f8", "<i1", "<i2", "<i4", "<i8")
_ATTRIBUTES = ["units", "calendar", "scale_factor", "add_offset", "_Unsigned"]
_ATTRIBUTES += ["_FillValue", "missing_value"]
"""Attributes of an array that change what its values mean."""
_KEY_ENCODING = {"name": "default", "configuration": {"separator": "/"}}

_Parsed: TypeAlias = tuple[Mapping[str, Any], npt.NDArray[np.uint64], int | None]
"""Document, ranges and row_nbytes of a `FileArray`."""


@dataclass(frozen=True)
class FileArray:
    """An array in a file, and the ranges of its chunks."""

    path: str
    """Path of the file, absolute and without links."""
    state: tuple[int, int, int]
    """State of the file at its read, see `fs.FileState`."""
    document: Mapping[str, Any]
    """Document of Zarr v3, for an array of such chunks without sharding."""
    ranges: npt.NDArray[np.uint64] = field(repr=False)
    """Offset and nbytes of each chunk in the file, shape ``(n_chunks, 2)``, in C order of the grid;
    both `MISSING` for a missing chunk."""
    row_nbytes: int | None = None
    """Bytes of a row, if all values lie in one uncompressed piece, see `in_slabs`."""

    @property
    def shape(self) -> chunk_keys.Coords:
        return tuple(self.document["shape"])

    @property
    def chunk_shape(self) -> chunk_keys.Coords:
        return tuple(self.document["chunk_grid"]["configuration"]["chunk_shape"])

    @property
    def grid_shape(self) -> chunk_keys.Coords:
        return layouts.chunk_grid_shape(self.shape, self.chunk_shape)

    def index(self, chunks_per_shard: chunk_keys.Coords) -> shard_format.ShardIndex:
        """Return the index that makes the file a shard."""
        fields = np.full((*chunks_per_shard, 2), shard_format.MISSING, np.uint64)
        box = tuple(slice(n) for n in self.grid_shape)
        fields[box] = self.ranges.reshape(*self.grid_shape, 2)
        return shard_format.ShardIndex(fields.reshape(-1, 2))

    def in_slabs(self, n_rows: int) -> FileArray:
        """Return the same contiguous values in chunks of `n_rows` rows, a divisor of the shape."""
        ranges = np.full((self.shape[0] // n_rows, 2), shard_format.MISSING, np.uint64)
        if (offset := int(self.ranges[0, 0])) != shard_format.MISSING:
            nbytes = n_rows * (self.row_nbytes or 0)
            ranges[:, 0] = offset + nbytes * np.arange(len(ranges), dtype=np.uint64)
            ranges[:, 1] = nbytes
        chunk_shape = [n_rows, *self.shape[1:]]
        grid = {"name": "regular", "configuration": {"chunk_shape": chunk_shape}}
        return replace(self, document={**self.document, "chunk_grid": grid}, ranges=ranges)


def read_file_array(path: str | os.PathLike[str], dataset: str | None = None) -> FileArray:
    """Find the chunks of an array in a file, with parameters and errors as in `adopt`."""
    real = os.path.realpath(path)
    before = fs.state_of(real)
    if before is None or not os.path.isfile(real):
        raise SpecError(f"there is no file {os.fspath(path)!r}")
    try:
        array = FileArray(real, before, *_parse(real, dataset))
        if 0 in array.shape or not array.shape:
            raise UnsupportedError(f"it has the shape {array.shape}, so no chunks")
        if array.row_nbytes is not None:
            array = array.in_slabs(array.shape[0])
        spec = shard_format.ShardingSpec((len(array.ranges),), shard_format.ZEP2_INDEX)
        shard_format.ShardIndex(array.ranges).check_entries(before[1] + spec.index_nbytes, spec)
    except (UnsupportedError, shard_format.IndexDamageError) as error:
        of, why = "" if dataset is None else f"{dataset!r} of ", str(error)
        if isinstance(error, shard_format.IndexDamageError):
            why = f"it has a chunk outside the file: {error.message}"
        raise UnsupportedError(f"{of}{real!r}: {why}; nothing was written") from error
    if fs.state_of(real) != before:
        raise SpecError(f"the file {real!r} was changed while it was read: let its writer finish")
    return array


def tiles_of(arrays: list[FileArray]) -> list[FileArray]:
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
    if others and len(first.shape) == 4 and first.document["codecs"][0]["name"] == "transpose":
        raise SpecError(f"{first.path!r} has channels before x: such WKW files do not tile along x")
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


def _form(array: FileArray) -> dict[str, Any]:
    """Return what must be the same for all files of an array."""
    doc, attributes = array.document, array.document["attributes"]
    return {
        "number of dimensions": len(array.shape),
        "shape without its first dimension": array.shape[1:],
        "data type": doc["data_type"],
        "chunk shape": array.chunk_shape,
        "list of codecs": doc["codecs"],
        "fill value": doc["fill_value"],
        "list of dimension names": doc.get("dimension_names"),
        **{f"attribute {name!r}": attributes.get(name) for name in _ATTRIBUTES},
    }


def _parse(path: str, dataset: str | None) -> _Parsed:
    kind = format_of(partial(SourceFiles().read, path), os.path.getsize(path))
    parsers = {"hdf5": _parse_hdf5, "tiff": _parse_tiff, "npy": _parse_npy, "wkw": _parse_wkw}
    if kind not in parsers:
        raise UnsupportedError("it is none of HDF5, NetCDF-4, TIFF, .npy and WKW")
    return parsers[kind](path, dataset)


def _parse_hdf5(path: str, dataset: str | None) -> _Parsed:
    h5py = library("h5py", "hdf5", repr(path))
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        why = f"it cannot be opened: {error}. Close it in the program that writes it"
        raise UnsupportedError(why) from error
    with file, faults_named():
        parser = Parser(h5py, ChunkTables(path), partial(SourceFiles().read, path), recode=False)
        if dataset is None:
            parser.find_dimensions(file)
        found = parser.find(file, _chosen(path, dataset, parser.datasets))
        if not isinstance(found, h5py.Dataset):
            raise SpecError(f"there is no dataset {dataset!r} in {path!r}")
        if found.file.filename != path:
            raise UnsupportedError(f"it is in another file, {found.file.filename!r}")
        if file.userblock_size:  # programs that remove or change it would move all chunks
            raise UnsupportedError("it is in a file with a user block: remove it with h5repack")
        if dataset is not None and parser.needs_dimensions(found):
            parser.find_dimensions(file)
        name = found.name.strip("/")
        masks = parser.add_array(found, name)
        if masks.any():  # a chunk that HDF5 writes later would skip none
            raise UnsupportedError(f"its chunks skip filters (filter mask {int(masks.max()):#x})")
        if parser.references.compact:
            raise UnsupportedError("it has no bytes of its own for its values (compact)")
        ranges = parser.references.tables[f"{name}/"].ranges
        missing = np.uint64(shard_format.MISSING)
        return (
            parser.documents[f"{name}/zarr.json"],
            np.where(ranges[:, 1:] > 0, ranges.astype(np.uint64), missing),
            None if found.chunks else _row_nbytes(found.shape, found.dtype),
        )


def _parse_tiff(path: str, dataset: str | None) -> _Parsed:
    tifffile = library("tifffile", "tiff", repr(path))
    with faults_named(), tifffile.TiffFile(path) as tif:
        chosen = _chosen(path, dataset, [str(i) for i in range(len(tif.series))])
        if not (chosen.isdecimal() and int(chosen) < len(tif.series)):
            raise SpecError(f"there is no series {chosen!r} in {path!r}")
        references = tiff_references(tif, "", series=int(chosen), level=0)
    zarray, zattrs = (json.loads(references.pop(key)) for key in (".zarray", ".zattrs"))
    grid_shape = layouts.chunk_grid_shape(zarray["shape"], zarray["chunks"])
    ranges = np.full((*grid_shape, 2), shard_format.MISSING, np.uint64)
    for key, reference in references.items():
        if os.path.basename(reference[0]) != os.path.basename(path):
            raise UnsupportedError(f"it has parts in another file, {reference[0]!r}")
        ranges[tuple(map(int, key.split(".")))] = reference[1:]
    doc = {**v3_of_v2(zarray, zattrs), "chunk_key_encoding": _KEY_ENCODING}
    return doc, ranges.reshape(-1, 2), None


def _parse_npy(path: str, dataset: str | None) -> _Parsed:
    if dataset is not None:
        raise SpecError(f"a .npy file has one array, and no dataset {dataset!r}")
    try:
        values = np.lib.format.open_memmap(path, mode="r")  # it reads the header only
    except ValueError as error:
        raise UnsupportedError(f"it is no whole .npy file of values: {error}") from error
    shape, dtype = values.shape, values.dtype
    if dtype.fields or dtype.subdtype:
        raise UnsupportedError(f"it has the data type {dtype}, which v3 readers do not know")
    if not values.flags.c_contiguous:
        raise UnsupportedError("it is in Fortran order: save it again in C order")
    chain = Chain(data_types.parse_numpy(dtype.str, str(dtype)), "C")
    doc = v3_array(metadata.Geometry(shape, shape, KEYS), chain, None, {})
    ranges = np.array([[values.offset, values.nbytes]], np.uint64)
    return doc, ranges, _row_nbytes(shape, dtype)


def _parse_wkw(path: str, dataset: str | None) -> _Parsed:
    """Parse a file of webKnossos: blocks in Morton order, each in Fortran order.

    Source: webknossos-wrap, "WKW Format", "Header", "Data". No library returns offsets.
    """
    if dataset is not None:
        raise SpecError(f"a WKW file has one array, and no dataset {dataset!r}")
    with open(path, "rb") as file:
        header = file.read(_WKW.size)
    version, lengths, kind, voxel, voxel_nbytes, start = _WKW.unpack(header.ljust(_WKW.size, b"\0"))
    if version != 1 or kind != 1 or not 1 <= voxel <= len(_WKW_TYPES):
        raise UnsupportedError("it has compressed blocks or an unknown version: only raw ones map")
    data_type = np.dtype(_WKW_TYPES[voxel - 1])
    if voxel_nbytes % data_type.itemsize or not voxel_nbytes:
        raise UnsupportedError(f"it has voxels of {voxel_nbytes} bytes, and values of {data_type}")
    if 1 << 3 * (lengths >> 4) > shard_format.MAX_ENTRIES:
        raise UnsupportedError(f"it has more than {shard_format.MAX_ENTRIES} blocks")
    block, n_blocks = 1 << (lengths & 15), 1 << (lengths >> 4)
    ids, nbytes = np.arange(n_blocks**3), block**3 * voxel_nbytes
    ranges = np.full((len(ids), 2), nbytes, np.uint64)
    in_file = shard_format.order_entries(ids, (n_blocks,) * 3, "morton")
    ranges[in_file, 0] = start + nbytes * ids.astype(np.uint64)
    n_channels = voxel_nbytes // data_type.itemsize
    channels = (n_channels,) if n_channels > 1 else ()
    shape, chunk_shape = (*channels, *(n_blocks * block,) * 3), (*channels, *(block,) * 3)
    geometry = metadata.Geometry(shape, chunk_shape, KEYS)
    doc = v3_array(geometry, Chain(data_type, "F"), None, {})
    doc["dimension_names"] = [*(("c",) if channels else ()), "x", "y", "z"]
    return doc, ranges, None


def _row_nbytes(shape: chunk_keys.Coords, dtype: Any) -> int:
    return math.prod(shape[1:]) * int(dtype.itemsize)


def _chosen(path: str, dataset: str | None, names: list[str]) -> str:
    if dataset is not None:
        return dataset
    if len(names) != 1:
        few = ", ".join(map(repr, names[:20])) or "none"
        raise SpecError(f"choose one of {path!r} by dataset= (--dataset): there are {few}")
    return names[0]
