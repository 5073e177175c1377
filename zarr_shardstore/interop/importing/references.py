"""Parser of references of kerchunk, VirtualiZarr and tifffile, by fsspec.

They have documents of Zarr v2. An array whose codecs no v3 reader knows is refused, or all its
chunks are encoded again.

Source: kerchunk, "References specification"; fsspec, ``ReferenceFileSystem``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import replace
from io import StringIO
from os import fspath
from typing import Any

import numpy as np
import zarr
from fsspec.core import url_to_fs
from fsspec.implementations.reference import LazyReferenceMapper, ReferenceFileSystem
from zarr.abc.store import Store
from zarr.storage import FsspecStore

from zarr_shardstore.access import layouts, metadata, resolve
from zarr_shardstore.errors import ShardStoreError, SpecError, UnsupportedError
from zarr_shardstore.interop.importing.hdf5 import ZSTD
from zarr_shardstore.interop.importing.source import (
    RECODED,
    ParsedSource,
    Reference,
    SourceFiles,
    file_path,
    library,
)
from zarr_shardstore.tools.inspect.find import DOCUMENTS
from zarr_shardstore.tools.native.translate import v3_of_v2


def load_references(source: Any, kind: str, files: SourceFiles) -> Any:
    """Return references by key as fsspec reads them, with templates filled in."""
    if kind == "parquet":
        library("fastparquet", "import", repr(fspath(source)))
        fs, root = url_to_fs(fspath(source), **files.remote_options)
        return LazyReferenceMapper(root, fs)
    if kind == "json":
        with files.open(fspath(source)) as file:
            source = json.load(file)
    if isinstance(source, Mapping) and source.get("gen"):
        raise UnsupportedError(
            "the references have a member 'gen': write its references into 'refs'"
        )
    # With "file" fsspec opens no client: it fetches nothing here.
    fs = ReferenceFileSystem(source, remote_protocol="file", skip_instance_cache=True)
    # VirtualiZarr's key of the chunk of an array without dimensions ends in no name.
    return {f"{key}0" if key.endswith("/") else key: ref for key, ref in fs.references.items()}


class _References:
    """References of fsspec by chunk key. Those of arrays that are encoded again are `RECODED`."""

    def __init__(self, files: SourceFiles, found: Mapping[str, Any]) -> None:
        self._files, self._found = files, found
        self.is_mapping = not hasattr(found, "zmetadata")
        self.recoded: dict[str, str] = {}

    def get(self, key: str, /) -> Reference | None:
        try:
            value = self._found[key]
        except (KeyError, ValueError, TypeError) as error:
            if isinstance(error, TypeError) or not isinstance(
                error.__cause__, FileNotFoundError | None
            ):
                raise SpecError(
                    f"the Parquet file with {key!r} is damaged: copy it again"
                ) from error
            return None  # ValueError: the key ends in no chunk, such as a group's
        is_bytes = isinstance(value, str | bytes)
        if not is_bytes and not isinstance(value[0], str):  # NaN in a column of categories
            return None
        url = "" if is_bytes else self._files.url_of(value[0])
        if self.recoded and self._is_recoded(key):
            self._files.note(url)
            return RECODED
        if isinstance(value, str):
            value = value.encode()
        if isinstance(value, bytes):
            text = value.removeprefix(b"base64:")
            return base64.b64decode(text) if len(text) < len(value) else value
        start, nbytes = (0, self._files.size(url)) if len(value) == 1 else map(int, value[1:])
        if min(start, nbytes) < 0:
            raise SpecError(f"the reference {key!r} has a negative offset or size: correct it")
        return url, start, nbytes

    def _is_recoded(self, key: str) -> bool:
        path = key
        while path:  # a chunk of several dimensions may be some directories below its array
            path = path.rpartition("/")[0]
            if path in self.recoded:
                return True
        return False

    def __iter__(self) -> Iterator[str]:
        if self.is_mapping:
            yield from (key for key in self._found if key.rpartition("/")[2] not in DOCUMENTS)
            return
        zmetadata: Any = self._found.zmetadata  # type: ignore[attr-defined]
        for key, doc in zmetadata.items():  # its own iteration has no nested groups
            if key.endswith(".zarray"):
                for coords in np.ndindex(*layouts.chunk_grid_shape(doc["shape"], doc["chunks"])):
                    name = ".".join(map(str, coords)) or "0"
                    if self.get(key.removesuffix(".zarray") + name) is not None:
                        yield key.removesuffix(".zarray") + name


def parse_references(files: SourceFiles, found: Mapping[str, Any], *, recode: bool) -> ParsedSource:
    references = _References(files, found)
    documents: dict[str, Mapping[str, Any]] = {}
    for key in list(getattr(found, "zmetadata", found)):
        if key.rpartition("/")[2] in DOCUMENTS and not key.endswith(".zmetadata"):
            value = references.get(key)
            parsed = metadata.parse_json(value) if isinstance(value, bytes) else None
            if parsed is None:
                raise SpecError(f"the document {key!r} of the references is no JSON object")
            attributes = parsed.pop("attributes", {}) if key.endswith(".zarray") else {}
            if attributes:  # VirtualiZarr also writes them there
                documents.setdefault(f"{key.removesuffix('.zarray')}.zattrs", attributes)
            documents[key] = parsed
    refused: dict[str, str] = {}
    recoded = references.recoded
    for key, doc in list(documents.items()):
        path, _, name = key.rpartition("/")
        if name != ".zarray":
            continue
        attributes = documents.get(f"{key.removesuffix('.zarray')}.zattrs", {})
        try:
            v3_of_v2(doc, attributes)
        except ShardStoreError as error:
            refused[path] = str(error)
            with_zstd = {**doc, "filters": None, "compressor": ZSTD}
            with suppress(ShardStoreError):
                v3_of_v2(with_zstd, attributes)
                if recode:
                    documents[key] = with_zstd
                    recoded[path] = refused.pop(path)
    documents = {k: doc for k, doc in documents.items() if k.rpartition("/")[0] not in refused}
    first = next((v for v in map(references.get, references) if isinstance(v, tuple)), RECODED)
    is_local = file_path(first[0]) is not None

    def decoded() -> AbstractContextManager[Callable[[str], Any]]:
        fs = ReferenceFileSystem(
            found,
            remote_protocol="file" if is_local else None,
            remote_options={**files.remote_options, "asynchronous": True},
            asynchronous=True,
        )
        # In Parquet fsspec takes ``zarr.json`` for the number of a chunk.
        return _arrays_of(FsspecStore(fs, read_only=True, path=""), zarr_format=2)

    return ParsedSource(documents, references, decoded, refused, recoded, is_local=is_local)


def check_keys(parsed: ParsedSource) -> None:
    """Refuse references below an array that spell no chunk, which readers would take for
    missing."""
    arrays = {}
    for key, doc in parsed.documents.items():
        node = metadata.node_of_document(key)
        geometry = node and metadata.plain_geometry(node.hierarchy, doc) if "shape" in doc else None
        if node is not None and geometry is not None:
            arrays[node.chunk_prefix] = geometry.encoding, len(geometry.shape)
    # References in Parquet have the numbers of chunks.
    are_named = getattr(parsed.references, "is_mapping", False)
    for key in parsed.references if are_named else ():
        prefix = f"{key}/"
        while prefix and prefix not in arrays:
            prefix = prefix[: prefix.rfind("/", 0, -1) + 1]
        if prefix not in arrays:
            continue
        encoding, ndim = arrays[prefix]
        if encoding.decode(key[len(prefix) :], ndim) is None:
            first = prefix + encoding.encode((0,) * ndim)
            raise SpecError(
                f"the reference {key!r} is no chunk of its array, whose first chunk is {first!r}, "
                "so readers would miss it: correct `dimension_separator`, or remove the reference"
            )


@contextmanager
def _arrays_of(store: Store, **options: Any) -> Iterator[Callable[[str], Any]]:
    with closing(store):
        yield lambda path: zarr.open_array(store, path=path, mode="r", **options)


# ------------------------------------------------------------------------- TIFF


def parse_tiff(files: SourceFiles, url: str, *, recode: bool) -> ParsedSource:
    """Find the tiles or strips of the first series of a TIFF file, with all its levels."""
    tifffile = library("tifffile", "tiff", repr(url))
    path = file_path(url)
    directory, _, name = (url if path is None else resolve.absolute_path(path)).rpartition("/")
    opened = f"{directory}/{name}"
    files.note(opened)  # before its first read

    def open_file() -> Any:
        return tifffile.TiffFile(files.open(url) if path is None else path, name=name)

    @contextmanager
    def decoded() -> Iterator[Callable[[str], Any]]:
        with open_file() as tif, _arrays_of(tif.aszarr()) as arrays:
            yield arrays

    with open_file() as tif:
        left = [f"{i} of shape {series.shape}" for i, series in enumerate(tif.series)][1:]
        notes = [f"only series 0 was imported, not these: {', '.join(left)}"] if left else []
        try:
            references = tiff_references(tif, directory)
        except UnsupportedError as error:
            if not recode:
                raise UnsupportedError(
                    f"{url!r} cannot be imported as it is, and nothing was written: {error}. "
                    "Pass recode=True (--recode), which encodes it again"
                ) from error
            with tif.aszarr() as store:
                documents, chunks, paths = _recoded_arrays(store)
            recoded = dict.fromkeys(paths, str(error))
            is_local = path is not None
            return ParsedSource(documents, chunks, decoded, {}, recoded, notes, is_local, opened)
    parsed = parse_references(files, references, recode=recode)
    return replace(parsed, decoded=decoded, notes=notes, opened=opened)


def tiff_references(tif: Any, directory: str, **chosen: Any) -> dict[str, Any]:
    """Return references to tiles or strips, and documents of Zarr v2, as tifffile writes them.

    They are of the first series with all its levels, unless `chosen` names ``series`` and
    ``level``.
    """
    out = StringIO()
    with tif.aszarr(**chosen) as store:
        try:
            # Frames of zstd in TIFF may lack their size; v3 readers take them.
            store.write_fsspec(out, directory, version=0, compressors={50000: "zstd"})
        except ValueError as error:
            raise UnsupportedError(f"tifffile says that {error}") from error
    found: dict[str, Any] = json.loads(out.getvalue())
    for key, value in found.items():
        if key.endswith(".zarray"):
            doc = json.loads(value)
            if doc["fill_value"] in (0, [0, 0]):  # no GDAL_NODATA: 0 is a value, none is missing
                found[key] = json.dumps({**doc, "fill_value": None})
    return found


def _recoded_arrays(store: Any) -> tuple[dict[str, Any], dict[str, Reference], list[str]]:
    """Return documents, references and paths of arrays of which all chunks are encoded again."""
    root = zarr.open(store, mode="r")
    arrays = {"": root} if isinstance(root, zarr.Array) else dict(root.arrays())
    documents: dict[str, Any] = {} if "" in arrays else {".zgroup": {"zarr_format": 2}}
    references: dict[str, Reference] = {}
    for path, array in arrays.items():
        prefix = f"{path}/".lstrip("/")
        documents[f"{prefix}.zattrs"] = dict(array.attrs)
        documents[f"{prefix}.zarray"] = {
            "zarr_format": 2,
            "shape": array.shape,
            "chunks": array.chunks,
            "dtype": array.dtype.str,
            "fill_value": None,
            "order": "C",
            "filters": None,
            "compressor": ZSTD,
        }
        for coords in np.ndindex(*layouts.chunk_grid_shape(array.shape, array.chunks)):
            references[prefix + ".".join(map(str, coords))] = RECODED
    return documents, references, list(arrays)
