"""Arrays in files of other formats: where their chunks lie, and the codecs of v3 that decode them.

Libraries parse the files: h5py HDF5 and NetCDF-4, tifffile TIFF, numpy ``.npy``; the 16 bytes of a
WKW header are read here. No chunk is read.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.keys import ChunkKeyEncoding, Coords
from zarr_shardstore.format.layout import chunk_grid_shape
from zarr_shardstore.format.shard import (
    MAX_ENTRIES,
    MISSING,
    ZEP2_INDEX,
    IndexDamageError,
    ShardIndex,
    ShardingSpec,
)
from zarr_shardstore.io.local.fs import FileState, state_of
from zarr_shardstore.metadata import codecs, data_types
from zarr_shardstore.metadata.documents import Geometry

_SLAB_NBYTES = 16 * 1024 * 1024
"""Most bytes of a chunk that is a part of contiguous values, if its rows are smaller."""

_MIN_SLAB_NBYTES = 16 * 1024
"""Values whose slabs would be smaller are one chunk."""

_HDF5_NOTES = re.compile(
    "CLASS|NAME|DIMENSION_LIST|REFERENCE_LIST|DIMENSION_LABELS|_Netcdf4Dimid|_Netcdf4Coordinates"
    "|_nc3_strict|_NCProperties|_FillValue"
)
"""Attributes that say in HDF5 what documents of Zarr say elsewhere."""

_NO_VARIABLE = b"This is a netCDF dimension but not a netCDF variable"
_TIFF_ZSTD = 50000
_WKW = struct.Struct("<3xBBBBBQ")
_WKW_TYPES = ("<u1", "<u2", "<u4", "<u8", "<f4", "<f8", "<i1", "<i2", "<i4", "<i8")
_BLOSC_NAMES = ("blosclz", "lz4", "lz4hc", "snappy", "zlib", "zstd")


@dataclass(frozen=True, kw_only=True)
class ForeignArray:
    """An array in a file: its chunks as they lie there."""

    path: str
    """Of the file, absolute and without links."""
    name: str
    """Of the array in its file; ``""`` if that has only one."""
    state: FileState
    """Of the file, when it was read."""
    shape: Coords
    chunk_shape: Coords
    chain: codecs.Chain
    fill_value: Any
    """As Zarr v2 spells it; ``None`` for zero."""
    places: npt.NDArray[np.uint64] = field(repr=False)
    """Offset and nbytes of each chunk in the file, shape ``(n_chunks, 2)``, in C order of the grid;
    both `MISSING` if there is none."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    dimension_names: tuple[str | None, ...] = ()
    is_contiguous: bool = False
    """Whether the values lie in one piece, uncompressed: see `in_slabs`."""

    @property
    def grid_shape(self) -> Coords:
        return chunk_grid_shape(self.shape, self.chunk_shape)

    def document(self, shape: Coords | None = None) -> dict[str, Any]:
        """Return the v3 document of an array of such chunks, without sharding."""
        encoding = ChunkKeyEncoding("default", "/")
        geometry = Geometry(shape or self.shape, self.chunk_shape, encoding)
        doc = codecs.v3_array(geometry, self.chain, self.fill_value, self.attributes)
        if any(self.dimension_names):
            doc["dimension_names"] = list(self.dimension_names)
        return doc

    def index(self, chunks_per_shard: Coords) -> ShardIndex:
        """Return the index of a shard that is the file, with an index behind its end."""
        fields = np.full((*chunks_per_shard, 2), MISSING, np.uint64)
        box = tuple(slice(n) for n in self.grid_shape)
        fields[box] = self.places.reshape(*self.grid_shape, 2)
        return ShardIndex(fields.reshape(-1, 2))

    def in_slabs(self, n_rows: int) -> ForeignArray:
        """Return the same contiguous values in chunks of so many rows, which divide the first
        dimension."""
        ((offset, nbytes),) = self.places.tolist()
        n = self.shape[0] // n_rows
        places = np.full((n, 2), MISSING, np.uint64)
        if offset != MISSING:
            places[:, 1] = nbytes // n
            places[:, 0] = offset + np.arange(n, dtype=np.uint64) * places[:, 1]
        return replace(self, chunk_shape=(n_rows, *self.shape[1:]), places=places)

    def refused(self, why: str) -> UnsupportedError:
        return _refused(self.path, self.name, why)


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
    before = state_of(real)
    array = _reader_of(real)(real, dataset, before)
    if state_of(real) != before:
        raise SpecError(f"the file {real!r} was changed while it was read: let its writer finish")
    if 0 in array.shape or not array.shape:
        raise array.refused(f"has the shape {array.shape}, so no chunks")
    try:
        array.document()
    except UnsupportedError as error:
        raise array.refused(f"has codecs that v3 has not: {error}") from error
    size = before[1] if before is not None else 0
    spec = ShardingSpec((len(array.places),), ZEP2_INDEX)
    try:
        ShardIndex(array.places).check_entries(size + spec.index_nbytes, spec)
    except IndexDamageError as damage:
        raise array.refused(f"has a chunk outside the file: {damage.message}") from damage
    return array


def rows_of_slabs(lengths: Coords, row_nbytes: int) -> int | None:
    """Return the rows of a chunk of contiguous arrays with so many rows each: the most that divide
    all lengths and are at most 16 MiB. ``None``: slabs would be tiny, so each array is a chunk."""
    common = math.gcd(*lengths)
    first = -(-common * row_nbytes // _SLAB_NBYTES)
    counts = range(max(1, first), common * row_nbytes // _MIN_SLAB_NBYTES + 1)
    if row_nbytes > _SLAB_NBYTES:
        return 1
    return next((common // n for n in counts if common % n == 0), None)


# ------------------------------------------------------------------------- formats


def _reader_of(path: str) -> Callable[[str, str | None, FileState], ForeignArray]:
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
    raise _refused(path, "", "is none of HDF5, NetCDF-4, TIFF, .npy and WKW")


def _read_hdf5(path: str, dataset: str | None, state: FileState) -> ForeignArray:
    h5py = library("h5py", "hdf5", path)
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        why = f"cannot be opened: {error}. Close it in the program that writes it"
        raise _refused(path, "", why) from error
    with file:
        names: list[str] = []
        if dataset is None:

            def note(name: str, item: Any) -> None:
                if isinstance(item, h5py.Dataset) and not (
                    bytes(item.attrs.get("NAME", b"")).startswith(_NO_VARIABLE)
                ):
                    names.append(name)

            file.visititems(note)
        found = file.get(_chosen(path, dataset, names))
        if not isinstance(found, h5py.Dataset):
            raise SpecError(f"there is no dataset {dataset!r} in {path!r}")
        return _of_hdf5_dataset(h5py, path, found, state)


def _of_hdf5_dataset(h5py: Any, path: str, dataset: Any, state: FileState) -> ForeignArray:
    name, dtype = dataset.name.strip("/"), dataset.dtype
    properties = dataset.id.get_create_plist()
    layout = properties.get_layout()
    if dataset.is_virtual or dataset.external or layout == h5py.h5d.COMPACT:
        raise _refused(
            path, name, "has no bytes of its own for its values (virtual, external or compact)"
        )
    if dataset.file.filename != path:
        raise _refused(path, name, f"is in another file, {dataset.file.filename!r}")
    if dataset.shape is None or dtype.fields or dtype.subdtype:
        raise _refused(path, name, f"has the data type {dtype}, which v3 readers do not know")
    data_type = _data_type(path, name, dtype)
    canonical = h5py.h5t.py_create(dtype, logical=True)
    if dtype.kind in "biufc" and not dataset.id.get_type().equal(canonical):
        raise _refused(path, name, f"stores {dtype} in a form that numpy does not have")
    filters = []
    for i in range(properties.get_nfilters()):
        config = hdf5_filter(properties.get_filter(i), data_type.itemsize)
        if isinstance(config, str):
            raise _refused(path, name, config)
        filters.append(config)
    attributes = {
        key: _json_of(value)
        for key, value in dataset.attrs.items()
        if not _HDF5_NOTES.fullmatch(key)
    }
    facts: dict[str, Any] = {
        "path": path,
        "name": name,
        "state": state,
        "shape": dataset.shape,
        "chain": _chain(data_type, filters),
        "fill_value": _fill_value(dataset.fillvalue, data_type),
        "attributes": {key: value for key, value in attributes.items() if value is not None},
        "dimension_names": tuple(_dimension_name(each) for each in dataset.dims),
    }
    if dataset.file.userblock_size:  # versions of HDF5 differ about addresses behind it
        raise _refused(path, name, "is in a file with a user block: remove it with h5repack")
    if layout == h5py.h5d.CONTIGUOUS:
        offset = dataset.id.get_offset()
        place = [MISSING, MISSING] if offset is None else [offset, dataset.id.get_storage_size()]
        places = np.array([place], np.uint64)
        return ForeignArray(**facts, chunk_shape=dataset.shape, places=places, is_contiguous=True)
    chunk_shape = dataset.chunks
    grid = chunk_grid_shape(dataset.shape, chunk_shape)
    places = np.full((*grid, 2), MISSING, np.uint64)

    def add(info: Any) -> None:
        at = tuple(c // n for c, n in zip(info.chunk_offset, chunk_shape, strict=True))
        if info.filter_mask:
            raise _refused(
                path,
                name,
                f"stores its chunk {at} without some of its filters "
                f"(filter mask {info.filter_mask:#x}), and a codec is for all chunks",
            )
        places[at] = info.byte_offset, info.size

    if dataset.id.get_num_chunks():
        dataset.id.chunk_iter(add)
    return ForeignArray(**facts, chunk_shape=chunk_shape, places=places.reshape(-1, 2))


def hdf5_filter(
    found: tuple[int, int, tuple[int, ...], bytes], itemsize: int
) -> codecs.Config | str:
    """Return the config of numcodecs for a filter of HDF5: code, flags, values, description; or why
    there is none."""
    code, _, values, text = found
    match code:
        case 1:
            return {"id": "zlib", "level": values[0]}
        case 2:
            return {"id": "shuffle", "elementsize": values[0] if values else itemsize}
        case 3:
            return {"id": "fletcher32"}
        case 307:
            return {"id": "bz2", "level": values[0] if values else 9}
        case 32015:
            return {"id": "zstd", "level": values[0] if values else 0}
        case 32001 if len(values) >= 7 and values[6] < len(_BLOSC_NAMES):
            cname = _BLOSC_NAMES[values[6]]
            return {"id": "blosc", "cname": cname, "clevel": values[4], "shuffle": values[5]}
    name = text.decode(errors="replace")
    return f"has the HDF5 filter {code} ({name}), for which v3 has no codec"


def _dimension_name(dimension: Any) -> str | None:
    if dimension.label:
        return str(dimension.label)
    return str(dimension[0].name).rpartition("/")[2] if len(dimension) else None


def _read_tiff(path: str, dataset: str | None, state: FileState) -> ForeignArray:
    tifffile = library("tifffile", "tiff", path)
    out = io.StringIO()
    with tifffile.TiffFile(path) as tif:
        chosen = _chosen(path, dataset, [str(i) for i in range(len(tif.series))])
        if not (chosen.isdecimal() and int(chosen) < len(tif.series)):
            raise SpecError(f"there is no series {chosen!r} in {path!r}")
        series = tif.series[int(chosen)]
        keyframe = series.keyframe
        if keyframe.predictor != 1:
            why = f"has the TIFF predictor {int(keyframe.predictor)}, for which v3 has no codec"
            raise _refused(path, "", why)
        try:
            with tif.aszarr(series=int(chosen), level=0) as store:
                store.write_fsspec(out, url="", compressors={_TIFF_ZSTD: "zstd"})
        except ValueError as error:
            raise _refused(path, "", f"has a form of TIFF that v3 has not: {error}") from error
        axes = tuple(axis.lower() for axis in series.axes)
    references = json.loads(out.getvalue())
    doc = json.loads(references.pop(".zarray"))
    data_type = _data_type(path, "", np.dtype(doc["dtype"]))
    chunk_shape = tuple(doc["chunks"])
    grid = chunk_grid_shape(doc["shape"], chunk_shape)
    places = np.full((*grid, 2), MISSING, np.uint64)
    for key, reference in references.items():
        if not key.startswith("."):
            if os.path.basename(reference[0]) != os.path.basename(path):
                raise _refused(path, "", f"has parts in another file, {reference[0]!r}")
            places[tuple(map(int, key.split(".")))] = reference[1:]
    compressor = [doc["compressor"]] if doc["compressor"] else []
    return ForeignArray(
        path=path,
        name=chosen if dataset else "",
        state=state,
        shape=tuple(doc["shape"]),
        chunk_shape=chunk_shape,
        chain=_chain(data_type, [*(doc["filters"] or ()), *compressor]),
        fill_value=doc["fill_value"],
        places=places.reshape(-1, 2),
        dimension_names=axes,
    )


def _read_npy(path: str, dataset: str | None, state: FileState) -> ForeignArray:
    if dataset is not None:
        raise SpecError(f"a .npy file has one array, and no dataset {dataset!r}")
    try:
        # The header only: with mmap_mode no value is read.
        values = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise _refused(path, "", f"is no whole .npy file of values: {error}") from error
    shape, dtype, offset = values.shape, values.dtype, values.offset
    if dtype.fields or dtype.subdtype:
        raise _refused(path, "", f"has the data type {dtype}, which v3 readers do not know")
    if not values.flags.c_contiguous:
        raise _refused(path, "", "is in Fortran order: save it again in C order")
    return ForeignArray(
        path=path,
        name="",
        state=state,
        shape=shape,
        chunk_shape=shape,
        chain=_chain(_data_type(path, "", dtype), []),
        fill_value=None,
        places=np.array([[offset, values.nbytes]], np.uint64),
        is_contiguous=True,
    )


def _read_wkw(path: str, dataset: str | None, state: FileState) -> ForeignArray:
    """Read a file of webKnossos: blocks in Morton order, each in Fortran order.

    Source: webknossos-wrap, "WKW Format", "Header", "Data". No library tells offsets.
    """
    if dataset is not None:
        raise SpecError(f"a WKW file has one array, and no dataset {dataset!r}")
    with open(path, "rb") as file:
        header = file.read(_WKW.size)
    version, lengths, kind, voxel, voxel_nbytes, start = _WKW.unpack(header.ljust(_WKW.size, b"\0"))
    if version != 1 or kind != 1 or not 1 <= voxel <= len(_WKW_TYPES):
        raise _refused(path, "", "has compressed blocks or an unknown version: only raw ones map")
    data_type = np.dtype(_WKW_TYPES[voxel - 1])
    if 1 << 3 * (lengths >> 4) > MAX_ENTRIES:
        raise _refused(path, "", f"has more than {MAX_ENTRIES} blocks")
    block, n_blocks = 1 << (lengths & 15), 1 << (lengths >> 4)
    coords = np.indices((n_blocks,) * 3, np.uint64).reshape(3, -1)
    rank = np.zeros(n_blocks**3, np.uint64)
    for bit in range(lengths >> 4):
        for dim in range(3):
            rank |= ((coords[dim] >> np.uint64(bit)) & np.uint64(1)) << np.uint64(3 * bit + dim)
    nbytes = block**3 * voxel_nbytes
    n_channels = voxel_nbytes // data_type.itemsize
    channels = (n_channels,) if n_channels > 1 else ()
    return ForeignArray(
        path=path,
        name="",
        state=state,
        shape=(*channels, *(n_blocks * block,) * 3),
        chunk_shape=(*channels, *(block,) * 3),
        chain=codecs.Chain(data_type, "F"),
        fill_value=None,
        places=np.stack([start + rank * np.uint64(nbytes), np.full_like(rank, nbytes)], axis=1),
        dimension_names=(*(("c",) if channels else ()), "x", "y", "z"),
    )


# -------------------------------------------------------------------------- values


def _chosen(path: str, dataset: str | None, names: list[str]) -> str:
    if dataset is not None:
        return dataset
    if len(names) != 1:
        few = ", ".join(map(repr, names[:20])) or "none"
        raise SpecError(f"choose one dataset of {path!r}: there are {few}")
    return names[0]


def _chain(data_type: data_types.DataType, configs: list[codecs.Config]) -> codecs.Chain:
    # The order of the chain: filters of bytes, then the compressor.
    return codecs.Chain(data_type, "C", configs)


def _data_type(path: str, name: str, dtype: Any) -> data_types.DataType:
    try:
        return data_types.parse_numpy(dtype.str)
    except UnsupportedError as error:
        raise _refused(path, name, f"has no data type of v3: {error}") from error


def _fill_value(value: Any, data_type: data_types.DataType) -> Any:
    """Spell a fill value as Zarr v2."""
    match data_type.kind:
        case "c":
            return [float(value.real), float(value.imag)]
        case "S" | "V" | "U":
            return None
    return None if value is None else np.asarray(value, data_type)[()].item()


def _json_of(value: Any) -> Any:
    """Return the value of an attribute as JSON has it; ``None`` for what it has not."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return None
    return value


def library(name: str, extra: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{path!r} is read with {name}: pip install zarr-shardstore[{extra}]"
        ) from error


def _refused(path: str, name: str, why: str) -> UnsupportedError:
    of = f" of {path!r}" if name else ""
    return UnsupportedError(f"{name or path!r}{of} {why}; nothing was written")
