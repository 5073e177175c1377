"""Parser of HDF5 and NetCDF-4 files by h5py: documents of Zarr v3, and the places of chunks.

==========================  ==============================================================
HDF5                        Zarr v3
==========================  ==============================================================
chunked layout              the same chunks; a chunk that is not allocated is missing
contiguous layout           one raw chunk, or several where a divisor of the shape allows
compact layout              one raw chunk, its bytes in the reference
deflate, shuffle            ``numcodecs.zlib``, ``numcodecs.shuffle``
zstd, Blosc                 ``zstd``, ``blosc``
fletcher32, bzip2           ``numcodecs.fletcher32``, ``numcodecs.bz2``
fill value                  ``fill_value``; the attribute ``_FillValue`` as xarray has it
``_FillValue`` of texts     ``missing_value``, which xarray can decode
scales, or labels           ``dimension_names``
==========================  ==============================================================

Everything else is refused by name, or decoded by h5py and encoded again: a chunk whose filter mask
skips a filter, other filters, values that h5py converts, texts of variable length.

Source: HDF5 file format 3.0, "Data layout message", "Filter pipeline message"; HDF5 registered
filters; netCDF-4, "Interoperability with HDF5"; HDF5 dimension scales.
"""

from __future__ import annotations

import base64
import ctypes
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from zarr_shardstore.access import chunk_keys, layouts, metadata
from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.interop.importing.hdf5_datasets import check_other_files, configs_of
from zarr_shardstore.interop.importing.source import (
    RECODED,
    ChunkTable,
    ChunkTables,
    ParsedSource,
    SourceFiles,
    faults_named,
    file_path,
    library,
)
from zarr_shardstore.tools.inspect.find import DOCUMENTS
from zarr_shardstore.tools.native import data_types
from zarr_shardstore.tools.native.codecs import Chain, v3_array
from zarr_shardstore.tools.native.translate import to_dimension_names

_SLAB_NBYTES = 16 * 1024 * 1024
"""Maximum of a chunk that is a part of contiguous values, if its rows are smaller."""
_MIN_SLAB_NBYTES = 16 * 1024  # minimum: values in smaller slabs are one chunk

KEYS = chunk_keys.ChunkKeyEncoding("default", "/")
ZSTD = {"id": "zstd", "level": 0}  # compressor of chunks that are encoded again

_OF_SCALES = {"DIMENSION_LABELS", "DIMENSION_LIST", "REFERENCE_LIST"}
_OF_SCALES |= {"_NCProperties", "_Netcdf4Coordinates", "_Netcdf4Dimid", "_nc3_strict"}
"""Attributes for dimension scales of HDF5 and netCDF."""

_NOT_A_VARIABLE = b"This is a netCDF dimension but not a netCDF variable"
_NON_COORDINATE = "_nc4_non_coord_"

_MOST_TEXT_NBYTES = 64 * 1024 * 1024
"""Size of texts of fixed length that are read to compare their bytes."""


def _flush_file_of_this_process(h5py: Any, path: str) -> None:
    """Store what this process has changed through h5py, as h5py would read it."""
    for file in h5py.h5f.get_obj_ids(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE):
        with suppress(OSError):
            is_it = os.path.samefile(os.fsdecode(file.name), path)
            if is_it and file.get_intent() & h5py.h5f.ACC_RDWR:
                h5py.h5f.flush(file)


def parse_hdf5(files: SourceFiles, name: str, *, recode: bool) -> ParsedSource:
    """Find the groups and datasets of a file. Cost: a read of its metadata, not of its chunks."""
    h5py, url = library("h5py", "hdf5", repr(name)), files.url_of(name)
    path = file_path(url)

    def open_file() -> Any:
        if path is not None:
            _flush_file_of_this_process(h5py, path)
        files.size(url)  # notes the state of the file before its first read
        return h5py.File(files.open(url) if path is None else path, "r")

    @contextmanager
    def decoded() -> Iterator[Callable[[str], Any]]:
        def array_at(path: str) -> Any:
            dataset = parser.find(file, path)
            return dataset.asstr() if dataset.dtype.kind == "O" else dataset

        with open_file() as file:
            yield array_at

    with open_file() as file:
        parser = Parser(h5py, ChunkTables(url), partial(files.read, url), recode)
        parser.find_dimensions(file)
        parser.add_group(file, "", ())
        found = parser.documents, parser.references, decoded, parser.refused, parser.recoded
        return ParsedSource(*found, parser.notes, is_local=path is not None, opened=url)


def rows_of_slabs(lengths: chunk_keys.Coords, row_nbytes: int) -> int | None:
    """Return the rows of a chunk of contiguous arrays that have `lengths` rows.

    It is the largest divisor of all lengths up to 16 MiB. ``None``: slabs would be tiny, so each
    array is one chunk.
    """
    common = math.gcd(*lengths)
    first = -(-common * row_nbytes // _SLAB_NBYTES)
    counts = range(max(1, first), common * row_nbytes // _MIN_SLAB_NBYTES + 1)
    if row_nbytes > _SLAB_NBYTES:
        return 1
    return next((common // n for n in counts if common % n == 0), None)


@dataclass
class Parser:
    """Documents and references of the groups and datasets of a file."""

    h5py: Any
    references: ChunkTables
    read: Callable[[int, int], bytes | memoryview]
    """Reads a range of the file, from start to stop."""
    recode: bool
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    recoded: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    datasets: list[str] = field(default_factory=list)
    """Paths in the file of all datasets, set by `find_dimensions`."""
    misplaced: set[str] = field(default_factory=set)
    """Names of datasets of which HDF5 reports wrong places of chunks."""
    is_netcdf: bool = False
    dimensions: dict[int, str] = field(default_factory=dict)
    """Paths of the scales of netCDF dimensions by id."""
    lengths: dict[str, int] = field(default_factory=dict)
    """Lengths of dimensions by the path of their scale."""

    def find_dimensions(self, file: Any) -> None:
        """Find the dimensions of netCDF: each is as long as the longest variable that has it."""
        variables: list[Any] = []
        for item in self._items(file, set()):
            with suppress(Exception):  # `add_array` gets the same fault, and names it
                is_bare = _is_bare_dimension(item)
                if isinstance(item, self.h5py.Dataset) and not is_bare:
                    self.datasets.append(item.name.strip("/"))
                if "_Netcdf4Dimid" in item.attrs and self.h5py.h5ds.is_scale(item.id):
                    self.dimensions[int(item.attrs["_Netcdf4Dimid"])] = item.name
                if getattr(item, "shape", ()) and not (is_bare and len(item.shape) == 1):
                    variables.append(item)
        for item in variables:
            for size, scale in zip(item.shape, self._scales(item), strict=True):
                self.lengths[scale] = max(size, self.lengths.get(scale, 0))
        self.is_netcdf = bool(self.dimensions) or "_NCProperties" in file.attrs

    def _items(self, group: Any, seen: set[Any]) -> Iterator[Any]:
        """Yield each item below a group once, without links and what is damaged."""
        for name in group:
            with suppress(Exception):
                is_link = not isinstance(group.get(name, getlink=True), self.h5py.HardLink)
                item = group if is_link else group[name]
                if item.id not in seen and not is_link:
                    seen.add(item.id)
                    yield item
                    yield from self._items(item, seen) if hasattr(item, "keys") else ()

    def needs_dimensions(self, dataset: Any) -> bool:
        """Whether other datasets describe one: only then `adopt` looks at them.

        An attribute of one number stays a list if only other datasets show that netCDF made them.
        """
        notes = {"CLASS", "DIMENSION_LIST", "_Netcdf4Coordinates"}
        return "_NCProperties" in dataset.file.attrs or not notes.isdisjoint(dataset.attrs)

    def find(self, group: Any, path: str) -> Any:
        """Return the item at a path of HDF5; of two with one path in netCDF, the variable."""
        item, (above, _, name) = group.get(path), path.rpartition("/")
        other = f"{above}/{_NON_COORDINATE}{name}".lstrip("/")
        is_bare = item is not None and _is_bare_dimension(item)
        return group[other] if is_bare and other in group else item

    def _scales(self, dataset: Any) -> list[str]:
        """Return the path of the scale of each dimension; ``""`` without a scale."""
        ndim, own = len(dataset.shape), [""] * len(dataset.shape)
        # A scale with several dimensions also has this attribute.
        ids = np.asarray(dataset.attrs.get("_Netcdf4Coordinates"))
        if ids.shape == (ndim,) and all(i in self.dimensions for i in ids.tolist()):
            own = [self.dimensions[i] for i in ids.tolist()]
        elif ndim == 1 and self.h5py.h5ds.is_scale(dataset.id):
            own = [dataset.name]
        with suppress(Exception):  # an attribute of another form, on which h5py's `dims` crashes
            pairs = zip(dataset.attrs["DIMENSION_LIST"], own, strict=True)
            own = [self._name_of(dataset.file, refs) or other for refs, other in pairs]
        return own

    def _name_of(self, file: Any, refs: Sequence[Any]) -> str:
        """Return the path of the first scale; ``""`` if it was removed, or its name is no text."""
        with suppress(Exception):
            name = file[refs[0]].name
            return name if isinstance(name, str) else ""
        return ""

    def _shape(self, dataset: Any) -> chunk_keys.Coords:
        """Return the shape; in netCDF a variable is as long as its dimensions."""
        if not (self.is_netcdf and dataset.chunks):
            return tuple(dataset.shape)
        named = zip(dataset.shape, self._scales(dataset), strict=True)
        # A scale may have another name, by a link.
        return tuple(max(size, self.lengths.get(scale, 0) if scale else 0) for size, scale in named)

    def add_group(self, group: Any, prefix: str, above: tuple[Any, ...]) -> None:
        doc = {
            "zarr_format": 3,
            "node_type": "group",
            "attributes": self._attributes(group, prefix),
        }
        self.documents[f"{prefix}zarr.json"] = doc
        above = (*above, group)
        for name in group:
            path = f"{prefix}{name}"
            try:
                with faults_named():
                    link = group.get(name, getlink=True)
                    if not isinstance(link, self.h5py.HardLink):
                        self.notes.append(f"{path} is a link: it was not followed")
                        continue
                    chunk_keys.check_key(path)
                    if name in DOCUMENTS:
                        raise UnsupportedError("its name is that of a metadata document")
                    if "\\" in name:
                        raise UnsupportedError("zarr takes the backslash of its name for a slash")
                    item = group[name]
                    plain = name.removeprefix(_NON_COORDINATE)
                    if plain != name and self.find(group, plain) == item:
                        path = f"{prefix}{plain}"
                        self.notes.append(f"{path} is the variable that HDF5 has as {name}")
                    if isinstance(item, self.h5py.Group) and item in above:
                        self.notes.append(f"{path} leads to a group that it is in: it was left out")
                    elif isinstance(item, self.h5py.Group):
                        self.add_group(item, f"{path}/", above)
                    elif isinstance(item, self.h5py.Dataset) and not _is_bare_dimension(item):
                        self.add_array(item, path)
            except (SpecError, UnsupportedError) as error:
                self.refused[path] = str(error)
                self.recoded.pop(path, None)

    def add_array(self, dataset: Any, path: str) -> npt.NDArray[np.int64]:
        """Add a dataset; return the filters that each chunk skips, as bits."""
        dtype, plist = dataset.dtype, dataset.id.get_create_plist()
        is_object = dtype.kind == "O"
        if dataset.shape is None:
            raise UnsupportedError("it is empty: it has no shape")
        is_text = self.h5py.check_string_dtype(dtype) is not None
        if dtype.names or dtype.subdtype or (is_object and not is_text):
            raise UnsupportedError(f"the data type {dtype} has none of Zarr v3 that readers know")
        data_type = None if is_object else data_types.parse_numpy(dtype.str, str(dtype))
        chunk_shape, table, masks = self._find_chunks(dataset, plist, f"{path}/")
        ranges, there = table.ranges, table.ranges[:, 1] > 0
        try:
            filters = configs_of(plist, dtype.itemsize)
            self._check_bytes(dataset, plist)
            skipped = np.unique(masks[there]).tolist()
            if len(skipped) == 1:  # all chunks skip the same filters
                filters = [f for i, f in enumerate(filters) if not skipped[0] >> i & 1]
            elif any(skipped):
                ranges[there & (masks != 0), 0] = RECODED[1]
                mask = max(skipped)
                raise UnsupportedError(f"a chunk or more skips filters (filter mask {mask:#x})")
        except UnsupportedError as error:
            codes = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
            if not self.recode or {5, 6} & {*codes[1:]}:  # HDF5 2.0 decodes those into other memory
                raise
            check_other_files(self.h5py, dataset, is_remote=file_path(self.references.url) is None)
            self.recoded[path] = str(error)
            if not (ranges[:, 0] == RECODED[1]).any():
                self.references.compact.pop(f"{path}/c{'/0' * len(dataset.shape)}", None)
                ranges[there, 0] = RECODED[1]
                filters = [{"id": "vlen-utf8"}, ZSTD] if is_object else [ZSTD]
        attributes = self._attributes(dataset, path)
        fill_value = None
        if plist.fill_value_defined():
            fill_value = _plain(dataset.fillvalue, is_fill_value=not is_object)
        names = self._dimension_names(dataset)
        masked = attributes.get("_FillValue")
        if masked is not None and None not in names:
            as_of_v2 = {"_ARRAY_DIMENSIONS": names}
            with suppress(SpecError):  # no value of the type: it stays as it is
                attributes |= to_dimension_names(as_of_v2, len(names), masked, data_type)[0]
        geometry = metadata.Geometry(self._shape(dataset), chunk_shape, KEYS)
        doc = v3_array(geometry, Chain(data_type, "C", filters), fill_value, attributes)
        if any(names):
            doc["dimension_names"] = names
        self.documents[f"{path}/zarr.json"] = doc
        self.references.tables[f"{path}/"] = table
        return masks

    def _leaves_cut_chunks(self, plist: Any) -> bool:
        """Whether chunks beyond the end skip all filters (``H5Pset_chunk_opts``), which h5py does
        not say."""
        options = ctypes.c_uint()
        with suppress(OSError, AttributeError), self.h5py._objects.phil:
            get = ctypes.CDLL(self.h5py.h5d.__file__).H5Pget_chunk_opts
            get.argtypes = (ctypes.c_int64, ctypes.c_void_p)
            get(plist.id, ctypes.byref(options))
        return bool(options.value & 2)

    def _find_chunks(
        self, dataset: Any, plist: Any, prefix: str
    ) -> tuple[chunk_keys.Coords, ChunkTable, npt.NDArray[np.int64]]:
        """Return the shape of chunks, their places, and the filters that each skips, as bits."""
        shape, itemsize = self._shape(dataset), dataset.dtype.itemsize
        chunk_shape = dataset.chunks
        if chunk_shape is None:
            chunk_shape = tuple(max(size, 1) for size in shape)
            row_nbytes = math.prod(chunk_shape[1:]) * itemsize
            n_rows = rows_of_slabs(chunk_shape[:1], row_nbytes) if shape else None
            chunk_shape = chunk_shape if n_rows is None else (n_rows, *chunk_shape[1:])
        grid_shape = layouts.chunk_grid_shape(shape, chunk_shape)
        ranges = np.zeros((math.prod(grid_shape), 2), np.int64)
        masks = np.zeros(len(ranges), np.int64)
        layout, h5d = plist.get_layout(), self.h5py.h5d
        if layout == h5d.CHUNKED:
            found: list[Any] = []
            dataset.id.chunk_iter(found.append)
            if not self._are_at_their_places(dataset, found):
                ranges[:, 1] = 1  # `_check_bytes` refuses it
                self.misplaced.add(dataset.name)
            elif found:
                offsets = np.array([chunk.chunk_offset for chunk in found])
                at = np.ravel_multi_index((offsets // chunk_shape).T, grid_shape)
                ranges[at] = [(chunk.byte_offset, chunk.size) for chunk in found]
                masks[at] = [chunk.filter_mask for chunk in found]
                are_cut = (offsets + chunk_shape > dataset.shape).any(axis=1)
                if are_cut.any() and self._leaves_cut_chunks(plist):
                    masks[at[are_cut]] = (1 << plist.get_nfilters()) - 1
                if self._leaves_out_block:
                    ranges[at, 0] += dataset.file.userblock_size
        elif layout == h5d.CONTIGUOUS and not plist.get_external_count():
            if dataset.id.get_storage_size():  # after a user block `get_offset` is never None
                nbytes = math.prod(chunk_shape) * itemsize
                ranges[:, 0] = dataset.id.get_offset() + nbytes * np.arange(len(ranges))
                ranges[:, 1] = nbytes
        elif layout == h5d.COMPACT and dataset.dtype.kind != "O":
            ranges[:, 1] = 1
            value = np.ascontiguousarray(dataset[()], dataset.dtype).tobytes()
            self.references.compact[f"{prefix}c{'/0' * len(shape)}"] = value
        else:
            ranges[:, 1] = 1  # somewhere else: `_check_bytes` refuses it
        return chunk_shape, ChunkTable(grid_shape, ranges), masks

    def _are_at_their_places(self, dataset: Any, found: Sequence[Any]) -> bool:
        """Whether the library reports the right places of chunks.

        HDF5 2.0 does not in files of its newest formats, if the only unlimited dimension is not the
        first. Cost: a read of the chunks of such datasets.
        """
        unlimited = [i for i, n in enumerate(dataset.maxshape) if n is None]
        if len(unlimited) != 1 or unlimited == [0]:
            return True
        block = dataset.file.userblock_size if self._leaves_out_block else 0
        for chunk in found:
            start, stored = chunk.byte_offset + block, None
            with suppress(ValueError, OSError, RuntimeError):  # it has no chunk there
                stored = dataset.id.read_direct_chunk(chunk.chunk_offset)[1]
            if stored is None or bytes(self.read(start, start + chunk.size)) != bytes(stored):
                return False
        return True

    @property
    def _leaves_out_block(self) -> bool:
        """Whether this version of HDF5 reports places without the user block."""
        return bool(self.h5py.version.hdf5_version_tuple < (1, 14, 4))

    def _check_bytes(self, dataset: Any, plist: Any) -> None:
        """Refuse values whose bytes in the file differ from the bytes of their v3 data type."""
        h5py, dtype, stored = self.h5py, dataset.dtype, dataset.id.get_type()
        h5t = h5py.h5t
        if dtype.kind == "O":
            raise UnsupportedError("its texts of variable length lie in a heap of the file")
        if dataset.name in self.misplaced:
            raise UnsupportedError(
                f"HDF5 {h5py.version.hdf5_version} reports wrong places of its chunks, because its "
                "only unlimited dimension is not the first: write it again with "
                "h5py.File(…, libver=('earliest', 'v110'))"
            )
        if plist.get_layout() == h5py.h5d.VIRTUAL or plist.get_external_count():
            raise UnsupportedError("its values lie in other files (virtual or external)")
        if isinstance(stored, h5t.TypeStringID):
            is_same = stored.get_strpad() != h5t.STR_SPACEPAD and self._ends_are_zeros(dataset)
        elif isinstance(stored, h5t.TypeEnumID):
            is_same = stored.get_super() == h5t.py_create(
                np.dtype("i1") if dtype.kind == "b" else np.dtype(dtype.str)
            )
        else:
            is_same = dtype.kind not in "iufc" or isinstance(stored, h5t.TypeBitfieldID)
            is_same = is_same or stored == h5t.py_create(dtype)
        if not is_same:
            raise UnsupportedError(f"HDF5 converts its values to {dtype}: its bytes are others")

    def _ends_are_zeros(self, dataset: Any) -> bool:
        """Whether texts have only zeros after the zero that ends them, which HDF5 leaves out."""
        stored = dataset.id.get_type()
        if stored.get_strpad() != self.h5py.h5t.STR_NULLTERM or stored.get_size() == 1:
            return True
        if dataset.nbytes > _MOST_TEXT_NBYTES or not dataset.size:
            return not dataset.size
        raw = np.empty(dataset.shape, f"V{stored.get_size()}")
        dataset.id.read(self.h5py.h5s.ALL, self.h5py.h5s.ALL, raw, mtype=stored)
        return raw.tobytes() == np.ascontiguousarray(dataset[()]).tobytes()

    def _dimension_names(self, dataset: Any) -> list[str | None]:
        """Return the name of the scale of each dimension, or its label, or ``None``."""
        scales, labels = self._scales(dataset), np.asarray(dataset.attrs.get("DIMENSION_LABELS"))
        if labels.dtype.kind != "O" or labels.shape != (len(scales),):  # on which h5py crashes
            labels = np.full(len(scales), None)
        bases = [scale.rpartition("/")[2].removeprefix(_NON_COORDINATE) for scale in scales]
        # A label that is no UTF-8 has surrogates.
        are_texts = [str(label).encode(errors="ignore").decode() == label for label in labels]
        named = zip(bases, labels, are_texts, strict=True)
        return [base or (is_text and label) or None for base, label, is_text in named]

    def _attributes(self, item: Any, path: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        is_scale = _text(item, "CLASS") == b"DIMENSION_SCALE"
        is_text = isinstance(item, self.h5py.Dataset) and item.dtype.kind in "SO"
        for name in item.attrs:
            if name in _OF_SCALES or (is_scale and name in ("CLASS", "NAME")):
                continue
            try:
                value = item.attrs[name]
                is_scalar = self.is_netcdf or name == "_FillValue"  # netCDF has no scalars there
                if is_scalar and getattr(value, "shape", ()) == (1,):
                    value = value[0]
                to = _plain(name, is_fill_value=False)  # bytes if it is no text
                to = "missing_value" if is_text and name == "_FillValue" else to
                found[to] = _plain(value, is_fill_value=to == "_FillValue")
            except Exception as error:
                where = path.rstrip("/") or "the root"
                self.notes.append(f"the attribute {name!r} of {where} was left out: {error}")
        return found


def _plain(value: Any, *, is_fill_value: bool) -> Any:
    """Return a value as JSON: numbers that JSON lacks as texts, bytes of a fill value in base64."""
    match value:
        case bytes():
            return base64.b64encode(value).decode() if is_fill_value else value.decode()
        case np.ndarray() if value.ndim:
            return [_plain(each, is_fill_value=is_fill_value) for each in value]
        case np.void() if is_fill_value:
            return base64.b64encode(value.tobytes()).decode()
        case np.datetime64() | np.timedelta64() if is_fill_value:
            return int(value.astype("i8"))
        case np.ndarray() | np.generic() if value.dtype.kind in "biufcU":
            return _plain(value.item(), is_fill_value=is_fill_value)
        case complex() if is_fill_value:
            return [_plain(part, is_fill_value=True) for part in (value.real, value.imag)]
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case str():
            return value.encode().decode()  # raises for what was no UTF-8
        case bool() | int() | float():
            return value
    raise TypeError(f"JSON has no {type(value).__name__}")


def _is_bare_dimension(item: Any) -> bool:
    """Whether a dataset only keeps the name of a dimension of netCDF."""
    return _text(item, "NAME").startswith(_NOT_A_VARIABLE)


def _text(item: Any, name: str) -> bytes:
    """Return an attribute of fixed length, as attributes of scales are; others count as empty."""
    value = item.attrs.get(name)
    return value if isinstance(value, bytes) else b""
