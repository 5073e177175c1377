"""Arrays in files of other formats: where their chunks lie, and their documents of Zarr v3.

Libraries parse the files: h5py HDF5 and NetCDF-4, tifffile TIFF, numpy ``.npy``; the 16 bytes of a
WKW header are read here. No chunk is read.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import Any

import numpy as np
import numpy.typing as npt

from zarr_shardstore.access import chunk_keys, fs, layouts, metadata, shard_format
from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.interop.importing.hdf5 import ChunkTables, Parser
from zarr_shardstore.interop.importing.reference_store import faults_named
from zarr_shardstore.tools.native import data_types
from zarr_shardstore.tools.native.codecs import Chain, v3_array
from zarr_shardstore.tools.native.translate import v3_of_v2

_WKW = struct.Struct("<3xBBBBBQ")
_WKW_TYPES = ("<u1", "<u2", "<u4", "<u8", "<f4", "<f8", "<i1", "<i2", "<i4", "<i8")
_KEYS = chunk_keys.ChunkKeyEncoding("default", "/")
_KEY_ENCODING = {"name": "default", "configuration": {"separator": "/"}}


@dataclass(frozen=True, kw_only=True)
class ForeignArray:
    """An array in a file: its chunks as they lie there."""

    path: str
    """Of the file, absolute and without links."""
    state: fs.FileState
    """Of the file, when it was read."""
    document: Mapping[str, Any]
    """Of Zarr v3, for an array of such chunks without sharding."""
    places: npt.NDArray[np.uint64] = field(repr=False)
    """Offset and nbytes of each chunk in the file, shape ``(n_chunks, 2)``, in C order of the grid;
    both `MISSING` if there is none."""
    row_nbytes: int | None = None
    """Of values that lie in one piece, uncompressed: see `in_slabs`. ``None`` for others."""

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
        """Return the index of a shard that is the file, with an index behind its end."""
        fields = np.full((*chunks_per_shard, 2), shard_format.MISSING, np.uint64)
        box = tuple(slice(n) for n in self.grid_shape)
        fields[box] = self.places.reshape(*self.grid_shape, 2)
        return shard_format.ShardIndex(fields.reshape(-1, 2))

    def in_slabs(self, n_rows: int) -> ForeignArray:
        """Return the same contiguous values in chunks of so many rows, which divide the first
        dimension."""
        places = np.full((self.shape[0] // n_rows, 2), shard_format.MISSING, np.uint64)
        if (offset := int(self.places[0, 0])) != shard_format.MISSING:
            nbytes = n_rows * (self.row_nbytes or 0)
            places[:, 0] = offset + nbytes * np.arange(len(places), dtype=np.uint64)
            places[:, 1] = nbytes
        chunk_shape = [n_rows, *self.shape[1:]]
        grid = {"name": "regular", "configuration": {"chunk_shape": chunk_shape}}
        return replace(self, document={**self.document, "chunk_grid": grid}, places=places)


def read_foreign(path: str | os.PathLike[str], dataset: str | None = None) -> ForeignArray:
    """Find the chunks of an array in a file.

    Parameters
    ----------
    path
        Of a local HDF5, NetCDF-4, TIFF, ``.npy`` or WKW file.
    dataset
        Path of the array in an HDF5 file, or number of the series in a TIFF file. May be left out
        if there is one only.

    Raises
    ------
    SpecError
        If there is no such file or dataset, or there are several; the message names them.
    UnsupportedError
        If the bytes of its chunks are none that readers of Zarr v3 decode. The message names the
        reason.
    """
    real = os.path.realpath(path)
    if not os.path.isfile(real):
        raise SpecError(f"there is no file {os.fspath(path)!r}")
    before = fs.state_of(real)
    try:
        array = _reader_of(real)(real, dataset, before)
        if 0 in array.shape or not array.shape:
            raise UnsupportedError(f"it has the shape {array.shape}, so no chunks")
        if array.row_nbytes is not None:
            array = array.in_slabs(array.shape[0])
        size = before[1] if before is not None else 0
        spec = shard_format.ShardingSpec((len(array.places),), shard_format.ZEP2_INDEX)
        shard_format.ShardIndex(array.places).check_entries(size + spec.index_nbytes, spec)
    except UnsupportedError as error:
        of = "" if dataset is None else f"{dataset!r} of "
        raise UnsupportedError(f"{of}{real!r}: {error}; nothing was written") from error
    except shard_format.IndexDamageError as damage:
        why = f"it has a chunk outside the file: {damage.message}"
        raise UnsupportedError(f"{real!r}: {why}; nothing was written") from damage
    if fs.state_of(real) != before:
        raise SpecError(f"the file {real!r} was changed while it was read: let its writer finish")
    return array


def tiff_references(tif: Any, directory: str, **chosen: Any) -> dict[str, Any]:
    """Return references to tiles or strips, and documents of Zarr v2, as tifffile writes them.

    They are of the first series with all its levels, unless `chosen` names ``series`` and
    ``level``.
    """
    out = StringIO()
    with tif.aszarr(**chosen) as store:
        try:
            # Frames of zstd in TIFF may not tell their size; v3 readers take them.
            store.write_fsspec(out, directory, version=0, compressors={50000: "zstd"})
        except ValueError as error:
            raise UnsupportedError(f"tifffile says that {error}") from error
    found: dict[str, Any] = json.loads(out.getvalue())
    for key, value in found.items():
        if key.endswith(".zarray"):  # no value of TIFF says that it is missing, as 0 would
            found[key] = json.dumps({**json.loads(value), "fill_value": None})
    return found


# ------------------------------------------------------------------------- formats


def _reader_of(path: str) -> Callable[[str, str | None, fs.FileState], ForeignArray]:
    with open(path, "rb") as file:
        head = file.read(2056)
    if any(head[at : at + 8] == b"\x89HDF\r\n\x1a\n" for at in (0, 512, 1024, 2048)):
        return _read_hdf5
    if head[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return _read_tiff
    if head[:6] == b"\x93NUMPY":
        return _read_npy
    if head[:3] == b"WKW":
        return _read_wkw
    raise UnsupportedError("it is none of HDF5, NetCDF-4, TIFF, .npy and WKW")


def _read_hdf5(path: str, dataset: str | None, state: fs.FileState) -> ForeignArray:
    h5py = library("h5py", "hdf5", path)
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        why = f"it cannot be opened: {error}. Close it in the program that writes it"
        raise UnsupportedError(why) from error
    with file, faults_named():
        parser = Parser(h5py, ChunkTables(path), recode=False)
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
        return ForeignArray(
            path=path,
            state=state,
            document=parser.documents[f"{name}/zarr.json"],
            places=np.where(
                ranges[:, 1:] > 0, ranges.astype(np.uint64), np.uint64(shard_format.MISSING)
            ),
            row_nbytes=None if found.chunks else _row_nbytes(found.shape, found.dtype),
        )


def _read_tiff(path: str, dataset: str | None, state: fs.FileState) -> ForeignArray:
    tifffile = library("tifffile", "tiff", path)
    with tifffile.TiffFile(path) as tif:
        chosen = _chosen(path, dataset, [str(i) for i in range(len(tif.series))])
        if not (chosen.isdecimal() and int(chosen) < len(tif.series)):
            raise SpecError(f"there is no series {chosen!r} in {path!r}")
        references = tiff_references(tif, "", series=int(chosen), level=0)
    zarray, zattrs = (json.loads(references.pop(key)) for key in (".zarray", ".zattrs"))
    doc = {**v3_of_v2(zarray, zattrs), "chunk_key_encoding": _KEY_ENCODING}
    places = np.full(
        (*layouts.chunk_grid_shape(zarray["shape"], zarray["chunks"]), 2),
        shard_format.MISSING,
        np.uint64,
    )
    for key, reference in references.items():
        if os.path.basename(reference[0]) != os.path.basename(path):
            raise UnsupportedError(f"it has parts in another file, {reference[0]!r}")
        places[tuple(map(int, key.split(".")))] = reference[1:]
    return ForeignArray(path=path, state=state, document=doc, places=places.reshape(-1, 2))


def _read_npy(path: str, dataset: str | None, state: fs.FileState) -> ForeignArray:
    if dataset is not None:
        raise SpecError(f"a .npy file has one array, and no dataset {dataset!r}")
    try:
        # The header only: with mmap_mode no value is read.
        values = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise UnsupportedError(f"it is no whole .npy file of values: {error}") from error
    shape, dtype = values.shape, values.dtype
    if dtype.fields or dtype.subdtype:
        raise UnsupportedError(f"it has the data type {dtype}, which v3 readers do not know")
    if not values.flags.c_contiguous:
        raise UnsupportedError("it is in Fortran order: save it again in C order")
    chain = Chain(data_types.parse_numpy(dtype.str, str(dtype)), "C")
    return ForeignArray(
        path=path,
        state=state,
        document=v3_array(metadata.Geometry(shape, shape, _KEYS), chain, None, {}),
        places=np.array([[values.offset, values.nbytes]], np.uint64),
        row_nbytes=_row_nbytes(shape, dtype),
    )


def _read_wkw(path: str, dataset: str | None, state: fs.FileState) -> ForeignArray:
    """Read a file of webKnossos: blocks in Morton order, each in Fortran order.

    Source: webknossos-wrap, "WKW Format", "Header", "Data". No library tells offsets.
    """
    if dataset is not None:
        raise SpecError(f"a WKW file has one array, and no dataset {dataset!r}")
    with open(path, "rb") as file:
        header = file.read(_WKW.size)
    version, lengths, kind, voxel, voxel_nbytes, start = _WKW.unpack(header.ljust(_WKW.size, b"\0"))
    if version != 1 or kind != 1 or not 1 <= voxel <= len(_WKW_TYPES):
        raise UnsupportedError("it has compressed blocks or an unknown version: only raw ones map")
    data_type = np.dtype(_WKW_TYPES[voxel - 1])
    if 1 << 3 * (lengths >> 4) > shard_format.MAX_ENTRIES:
        raise UnsupportedError(f"it has more than {shard_format.MAX_ENTRIES} blocks")
    block, n_blocks = 1 << (lengths & 15), 1 << (lengths >> 4)
    coords = np.indices((n_blocks,) * 3, np.uint64).reshape(3, -1)
    rank = np.zeros(n_blocks**3, np.uint64)
    for bit in range(lengths >> 4):
        for dim in range(3):
            rank |= ((coords[dim] >> np.uint64(bit)) & np.uint64(1)) << np.uint64(3 * bit + dim)
    nbytes = block**3 * voxel_nbytes
    n_channels = voxel_nbytes // data_type.itemsize
    channels = (n_channels,) if n_channels > 1 else ()
    geometry = metadata.Geometry(
        (*channels, *(n_blocks * block,) * 3), (*channels, *(block,) * 3), _KEYS
    )
    doc = v3_array(geometry, Chain(data_type, "F"), None, {})
    return ForeignArray(
        path=path,
        state=state,
        document={**doc, "dimension_names": [*(("c",) if channels else ()), "x", "y", "z"]},
        places=np.stack([start + rank * np.uint64(nbytes), np.full_like(rank, nbytes)], axis=1),
    )


# -------------------------------------------------------------------------- values


def _row_nbytes(shape: chunk_keys.Coords, dtype: Any) -> int:
    return math.prod(shape[1:]) * int(dtype.itemsize)


def _chosen(path: str, dataset: str | None, names: list[str]) -> str:
    if dataset is not None:
        return dataset
    if len(names) != 1:
        few = ", ".join(map(repr, names[:20])) or "none"
        raise SpecError(f"choose one of {path!r} by dataset= (--dataset): there are {few}")
    return names[0]


def library(name: str, extra: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{path!r} is read with {name}: pip install zarr-shardstore[{extra}]"
        ) from error
