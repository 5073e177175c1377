"""import_store: chunks in files of other formats become shards, and are never decoded.

Parsers of others find where chunks lie: h5py, tifffile, fsspec for the references of kerchunk and
VirtualiZarr. `ReferenceStore` shows that as a store, and a conversion reads it as any other. What
is a zarr store already (a zip, icechunk, VirtualiZarr's ``ManifestStore``) needs no parser.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import lru_cache
from os import fspath
from os.path import abspath, isdir
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from fsspec.core import url_to_fs
from fsspec.implementations.reference import LazyReferenceMapper, ReferenceFileSystem
from zarr.abc.store import Store
from zarr.storage import FsspecStore

from zarr_shardstore.access import StoreLike, layouts, metadata, policies
from zarr_shardstore.errors import ShardStoreError, SpecError, UnsupportedError
from zarr_shardstore.interop.importing.foreign import library, tiff_references
from zarr_shardstore.interop.importing.hdf5 import ZSTD, parse_hdf5
from zarr_shardstore.interop.importing.reference_store import (
    RECODED,
    ParsedSource,
    Reference,
    ReferenceStore,
    SourceFiles,
    file_path,
)
from zarr_shardstore.tools.convert.api import shard_store
from zarr_shardstore.tools.convert.report import ArrayReport, ConversionReport, OnProgress
from zarr_shardstore.tools.inspect.find import DOCUMENTS, select_paths
from zarr_shardstore.tools.native.translate import v3_of_v2

_SIGNATURES = {
    b"\x89HDF\r\n\x1a\n": "hdf5",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
    b"II+\0": "tiff",
    b"MM\0+": "tiff",
    b"PK\3\4": "zip",
    b"{": "json",
}


def import_store(
    source: StoreLike | Mapping[str, Any],
    destination: StoreLike,
    *,
    chunks_per_shard: policies.ChunksPerShard = "auto",
    shard_nbytes: int | str | None = None,
    paths: Iterable[str] | str | None = None,
    recode: bool = False,
    executor: Executor | None = None,
    source_options: Mapping[str, Any] | None = None,
    destination_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    progress: OnProgress | None = None,
) -> ConversionReport:
    """Copy the chunks in files of other formats into native shards, without decoding them.

    Filters become codecs of Zarr v3, attributes and names of dimensions are kept, and missing
    chunks stay missing. The source is only read.

    Parameters
    ----------
    source
        Path or URL of an HDF5 or NetCDF-4 file, a tiled TIFF, references of kerchunk (JSON or
        Parquet), a zip or directory of Zarr, or an icechunk repository. Or a ``dict`` of
        references, a virtual dataset of VirtualiZarr, or a zarr store such as that of an icechunk
        session.
    destination
        As for `shard_store`, also if it has something already.
    chunks_per_shard, shard_nbytes, executor, dry_run, progress
        As for `shard_store`.
    paths
        Import only these arrays and groups, or patterns of these (``"raw/*"``). ``None``: all. A
        zarr store is imported as a whole.
    recode
        Decode what cannot be copied by the library of the format, and encode it again: only the
        chunks that skip a filter, or all chunks of an array whose codec or type no v3 reader
        knows. ``False``: leave it.
    source_options, destination_options
        Of obstore or fsspec. Those of the source are also for the files that references name;
        ``remote_protocol`` is that of names without one.

    Returns
    -------
    ConversionReport
        ``read_by`` of each array names the codecs that a reader has to know, and programs that
        were seen to know them; ``notes`` say what was encoded again, or left out. An array that
        cannot be copied has `is_left`, and a reason.

    Raises
    ------
    UnsupportedError
        If no array can be copied. The message names each, and why.
    ImportError
        If the library of the format is not installed; the message names it.
    ShardConflictError
        If a file of the source is changed concurrently.
    SpecError, CorruptShardError
        As for `shard_store`.

    Notes
    -----
    As for `shard_store`: each chunk is read back and compared, a killed import continues when it
    is run again, and memory is bounded. 24 bytes for each chunk of HDF5 come to that.
    """
    opened: Any = source
    notes: tuple[str, ...] = ()
    left: list[ArrayReport] = []
    kind, files = _kind_of(source, source_options)
    if kind == "icechunk":
        opened, source_options = _open_icechunk(str(source)), None
    elif kind != "zarr":
        if hasattr(source, "vz"):
            source = source.vz.to_kerchunk(format="dict")
        opened, source_options = _open_references(source, kind, files, paths, recode=recode), None
        parsed = opened.parsed
        recoded = (f"encoded again: {path!r} ({why})" for path, why in parsed.recoded.items())
        notes = (*parsed.notes, *recoded)
        left = [
            ArrayReport(path, "v3", "skipped", None, why, is_left=True)
            for path, why in parsed.refused.items()
        ]
        if left and not recode:
            notes += ("recode=True (--recode) may import arrays that were left: it encodes them",)
    if kind in ("icechunk", "zarr") and paths is not None:
        raise SpecError("a zarr store is imported as a whole: shard_store takes paths of it")
    with closing(opened) if isinstance(opened, ReferenceStore) else nullcontext():
        report = shard_store(
            opened,
            destination,
            chunks_per_shard=chunks_per_shard if shard_nbytes is None else ...,
            shard_nbytes=shard_nbytes,
            order="C",  # chunks of a file mostly lie so: one request reads many
            executor=executor,
            source_options=source_options,
            destination_options=destination_options,
            dry_run=dry_run,
            progress=progress,
            native=True,
        )
    arrays = sorted([*report.arrays, *left], key=lambda array: array.path)
    return replace(report, arrays=tuple(arrays), notes=notes + report.notes)


# ------------------------------------------------------------ what a source is


def _kind_of(source: Any, options: Mapping[str, Any] | None) -> tuple[str, SourceFiles]:
    files = SourceFiles(options)
    if hasattr(source, "vz"):
        return "references", files
    if isinstance(source, Mapping):
        is_zarr = all(isinstance(value, bytes) for value in source.values())
        return "zarr" if is_zarr else "references", files
    if not isinstance(source, str | Path) or "::" in str(source):
        return "zarr", files
    url = fspath(source)
    path = file_path(url)
    if url.rstrip("/").endswith((".parq", ".parquet")) or (
        path is not None
        and Path(path, ".zmetadata").is_file()
        and not Path(path, ".zgroup").exists()
    ):
        return "parquet", files
    if path is not None and isdir(path):
        is_icechunk = Path(path, "snapshots").is_dir() and Path(path, "transactions").is_dir()
        return "icechunk" if is_icechunk else "zarr", files
    for offset in (0, 512, 1024, 2048, 4096):  # HDF5 may begin behind a block of the user
        try:
            head = bytes(files.read(url, offset, offset + 8))
        except FileNotFoundError:
            if path is not None:
                raise SpecError(f"there is no {url!r}") from None
            return "zarr", files  # in an object store, perhaps a prefix
        kinds = [kind for sign, kind in _SIGNATURES.items() if head.lstrip().startswith(sign)]
        if kinds and (offset == 0 or kinds == ["hdf5"]):
            return kinds[0].replace("zip", "zarr"), files
    raise SpecError(
        f"{url!r} is no HDF5, NetCDF-4, TIFF, zip or JSON file, and no directory: of other formats "
        "let kerchunk or VirtualiZarr make references, and import these"
    )


def _open_icechunk(path: str) -> Any:
    """Open the newest snapshot of the branch main; containers of local virtual chunks, too."""
    icechunk = library("icechunk", "import", path)
    storage = icechunk.local_filesystem_storage(path)
    config = icechunk.Repository.fetch_config(storage)
    prefixes = (config and config.virtual_chunk_containers) or {}
    may_read = dict.fromkeys(prefixes)
    repository = icechunk.Repository.open(storage, authorize_virtual_chunk_access=may_read)
    return repository.readonly_session("main").store


# ---------------------------------------------------------- parsers of others


def _open_references(
    source: Any,
    kind: str,
    files: SourceFiles,
    paths: Iterable[str] | str | None,
    *,
    recode: bool,
) -> ReferenceStore:
    paths = paths if paths is None or isinstance(paths, str) else tuple(paths)
    if kind == "hdf5":
        library("h5py", "hdf5", fspath(source))
        parsed = parse_hdf5(files, files.url_of(fspath(source)), recode=recode)
    elif kind == "tiff":
        parsed = _parse_tiff(files, fspath(source), recode=recode)
    else:
        parsed = _parse_references(files, _load_references(source, kind, files), recode=recode)
    parsed = _only(parsed, paths)
    if parsed.refused and not any("shape" in doc for doc in parsed.documents.values()):
        each = "; ".join(f"{path!r}: {why}" for path, why in parsed.refused.items())
        advice = "name others by paths (--path)"
        raise UnsupportedError(
            f"these arrays cannot be imported as they are, and nothing was written: {each}. "
            + (
                advice[0].upper() + advice[1:]
                if recode
                else f"Pass recode=True (--recode), which encodes them again, or {advice}"
            )
        )
    recipe = pickle.dumps((source, kind, files.options, dict(files.states), paths, recode))
    return ReferenceStore(parsed, files, lambda: (_reopen, (recipe,)))


@lru_cache(maxsize=4)
def _reopen(recipe: bytes) -> ReferenceStore:
    """Parse a source in a worker, once for all of its tasks; a changed file is refused."""
    source, kind, options, states, paths, recode = pickle.loads(recipe)
    files = SourceFiles(options)
    files.states.update(states)
    return _open_references(source, kind, files, paths, recode=recode)


def _only(parsed: ParsedSource, paths: Iterable[str] | str | None) -> ParsedSource:
    """Leave out arrays that `paths` do not name, and groups that have none of those."""
    if paths is None:
        return parsed
    arrays = {
        key.rpartition("/")[0] for key, doc in parsed.documents.items() if "shape" in doc
    } | parsed.refused.keys()
    chosen = select_paths(arrays, paths)
    above = {""}.union(
        *({path[:i] for i, c in enumerate(path + "/") if c == "/"} for path in chosen)
    )
    documents = {k: doc for k, doc in parsed.documents.items() if k.rpartition("/")[0] in above}
    refused = {path: why for path, why in parsed.refused.items() if path in chosen}
    recoded = {path: why for path, why in parsed.recoded.items() if path in chosen}
    return replace(parsed, documents=documents, refused=refused, recoded=recoded)


def _parse_tiff(files: SourceFiles, url: str, *, recode: bool) -> ParsedSource:
    """Find the tiles or strips of the first series of a TIFF file, with all its levels."""
    tifffile = library("tifffile", "tiff", url)
    path = file_path(url)
    directory, _, name = (url if path is None else abspath(path)).rpartition("/")
    files.size(f"{directory}/{name}")  # which notes the state of the file before it is read

    def open_file() -> Any:
        return tifffile.TiffFile(files.open(url) if path is None else path, name=name)

    def open_arrays() -> Any:
        tif = open_file()
        return _ZarrArrays(tif.aszarr(), tif)

    with open_file() as tif:
        try:
            references = tiff_references(tif, directory)
        except UnsupportedError as error:
            if not recode:
                raise UnsupportedError(
                    f"{url!r} cannot be imported as it is, and nothing was written: {error}. "
                    "Pass recode=True (--recode), which encodes it again"
                ) from error
            with tif.aszarr() as store:
                why, is_local = str(error), path is not None
                return _recoded_tiff(store, why, open_arrays, is_local=is_local)
    return replace(_parse_references(files, references, recode=recode), open_arrays=open_arrays)


def _recoded_tiff(
    store: Any, why: str, open_arrays: Callable[[], Any], *, is_local: bool
) -> ParsedSource:
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
    recoded = dict.fromkeys(arrays, why)
    return ParsedSource(documents, references, open_arrays, recoded=recoded, is_local=is_local)


def _load_references(source: Any, kind: str, files: SourceFiles) -> Mapping[str, Any]:
    """Return references as fsspec reads them: templates are filled in."""
    found: Mapping[str, Any]
    if kind == "parquet":
        library("fastparquet", "import", fspath(source))
        fs, root = url_to_fs(fspath(source), **files.remote_options)
        found = LazyReferenceMapper(root, fs)
        return found
    if kind == "json":
        with files.open(fspath(source)) as file:
            source = json.load(file)
    # With "file" fsspec opens no client: it fetches nothing here.
    references = ReferenceFileSystem(source, remote_protocol="file", skip_instance_cache=True)
    found = references.references
    return found


class _References(Mapping[str, Reference]):
    """References of fsspec by chunk key; those of arrays that are encoded again are `RECODED`."""

    def __init__(self, files: SourceFiles, found: Mapping[str, Any]) -> None:
        self._files, self._found = files, found
        self.recoded: dict[str, str] = {}

    def __getitem__(self, key: str) -> Reference:
        try:
            value = self._found[key]
        except ValueError:  # fsspec's for a key that ends in no chunk, such as a group's
            raise KeyError(key) from None
        if key.rpartition("/")[0] in self.recoded:
            return RECODED
        if isinstance(value, str):
            is_base64 = value.startswith("base64:")
            return base64.b64decode(value.removeprefix("base64:")) if is_base64 else value.encode()
        if isinstance(value, bytes):
            is_base64 = value.startswith(b"base64:")
            return base64.b64decode(value.removeprefix(b"base64:")) if is_base64 else value
        url = self._files.url_of(value[0])
        start, nbytes = (0, self._files.size(url)) if len(value) == 1 else map(int, value[1:])
        return url, start, nbytes

    def __iter__(self) -> Iterator[str]:
        if not hasattr(self._found, "zmetadata"):
            yield from (key for key in self._found if key.rpartition("/")[2] not in DOCUMENTS)
            return
        for key, doc in self._found.zmetadata.items():  # its own iteration has no nested groups
            if key.endswith(".zarray"):
                for coords in np.ndindex(*layouts.chunk_grid_shape(doc["shape"], doc["chunks"])):
                    name = ".".join(map(str, coords)) or "0"
                    if self.get(key.removesuffix(".zarray") + name) is not None:
                        yield key.removesuffix(".zarray") + name

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _parse_references(
    files: SourceFiles, found: Mapping[str, Any], *, recode: bool
) -> ParsedSource:
    references = _References(files, found)
    keys = list(getattr(found, "zmetadata", found))
    documents: dict[str, Mapping[str, Any]] = {}
    for key in keys:
        if key.rpartition("/")[2] in DOCUMENTS and not key.endswith(".zmetadata"):
            value = references[key]
            parsed = metadata.parse_json(value) if isinstance(value, bytes) else None
            if parsed is None:
                raise SpecError(f"the document {key!r} of the references is no JSON object")
            attributes = parsed.pop("attributes", {}) if key.endswith(".zarray") else {}
            if attributes:  # VirtualiZarr writes them there, too
                documents.setdefault(f"{key.removesuffix('.zarray')}.zattrs", attributes)
            documents[key] = parsed
    refused: dict[str, str] = {}
    recoded: dict[str, str] = {}
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
    references.recoded = recoded
    documents = {k: doc for k, doc in documents.items() if k.rpartition("/")[0] not in refused}
    first = next((v for v in map(references.get, references) if isinstance(v, tuple)), RECODED)
    is_local = file_path(first[0]) is not None

    def open_arrays() -> Any:
        fs = ReferenceFileSystem(
            found,
            remote_protocol=None if not is_local else "file",
            remote_options={**files.remote_options, "asynchronous": True},
            asynchronous=True,
        )
        return _ZarrArrays(FsspecStore(fs, read_only=True, path=""))

    return ParsedSource(documents, references, open_arrays, refused, recoded, is_local=is_local)


class _ZarrArrays:
    """Arrays of a store by path."""

    def __init__(self, store: Store, file: Any = None) -> None:
        self._store, self._file = store, file

    def close(self) -> None:
        self._store.close()
        if self._file is not None:
            self._file.close()

    def __getitem__(self, path: str) -> Any:
        return zarr.open_array(self._store, path=path, mode="r")
