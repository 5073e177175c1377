"""import_store: chunks in files of other formats become shards, and are never decoded.

Libraries find the places of the chunks: h5py, tifffile, fsspec for references of kerchunk and
VirtualiZarr. A conversion reads them by a `SourceBackend`. A source that is a zarr store already
(a zip, icechunk, VirtualiZarr's ``ManifestStore``) needs no parser.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from os import fspath
from os.path import isdir
from pathlib import Path
from typing import Any
from uuid import uuid4

from zarr_shardstore.access import StoreLike
from zarr_shardstore.errors import (
    DOCUMENTATION,
    ShardConflictError,
    SpecError,
    UnsupportedError,
)
from zarr_shardstore.interop.importing.hdf5 import parse_hdf5
from zarr_shardstore.interop.importing.references import (
    check_keys,
    load_references,
    parse_references,
    parse_tiff,
)
from zarr_shardstore.interop.importing.source import (
    ParsedSource,
    SourceBackend,
    SourceFiles,
    faults_named,
    file_path,
    format_of,
    library,
)
from zarr_shardstore.tools.convert.api import Lengths, Shape, shard_store
from zarr_shardstore.tools.convert.report import ArrayReport, ConversionReport, OnProgress
from zarr_shardstore.tools.inspect.find import DOCUMENTS, lineage, select_paths

_PARSERS = {"hdf5": parse_hdf5, "tiff": parse_tiff}


def import_store(
    source: StoreLike | Mapping[str, Any],
    destination: StoreLike,
    *,
    chunks_per_shard: Shape = ...,
    shard_nbytes: int | str | None = None,
    shards: Lengths = None,
    shards_at: Lengths = None,
    paths: Iterable[str] | str | None = None,
    recode: bool = False,
    executor: Executor | None = None,
    source_options: Mapping[str, Any] | None = None,
    destination_options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    progress: OnProgress | None = None,
) -> ConversionReport:
    """Copy the chunks in files of other formats into native shards, without decoding them.

    Filters become codecs of Zarr v3. Attributes and dimension names are kept, and missing chunks
    stay missing. The source is only read.

    Parameters
    ----------
    source
        Path or URL of an HDF5 or NetCDF-4 file, a tiled TIFF, references of kerchunk (JSON or
        Parquet), a zip or directory of Zarr, or an icechunk repository. Or a ``dict`` of
        references, a virtual dataset of VirtualiZarr, or a zarr store, such as the store of an
        icechunk session.
    destination
        As for `shard_store`, also if it is not empty.
    chunks_per_shard, shard_nbytes, shards, shards_at, executor, dry_run, progress
        As for `shard_store`.
    paths
        Import only these arrays and groups, or patterns of these (``"raw/*"``). ``None``: all. A
        zarr store is imported as a whole.
    recode
        Decode chunks that cannot be copied by the library of the format, and encode them again:
        only the chunks that skip a filter, or all chunks of an array whose codec or type no v3
        reader knows. ``False``: leave such arrays.
    source_options, destination_options
        Options of obstore or fsspec. Options of the source also apply to the files that references
        name; ``remote_protocol`` is the protocol of names without one.

    Returns
    -------
    ConversionReport
        ``read_by`` of each array names the codecs that a reader must know, and programs that were
        seen to know them; ``notes`` say what was encoded again, or left out. An array that cannot
        be copied has `is_left`, and a reason.

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
    is run again, and memory is bounded. HDF5 takes 24 bytes more for each chunk.
    """
    files = SourceFiles(source_options)
    if hasattr(source, "vz"):
        source = source.vz.to_kerchunk(format="dict")
    kind = _kind_of(source, files)
    is_zarr = kind in ("icechunk", "zarr")
    if is_zarr and paths is not None:
        raise SpecError("a zarr store is imported as a whole: shard_store takes paths of it")
    opened: Any = source
    if kind == "icechunk":
        opened = _open_icechunk(str(source))
    elif not is_zarr:
        opened = _open_references(source, kind, files, paths, recode=recode)
    with nullcontext() if is_zarr else closing(opened):
        report = shard_store(
            opened,
            destination,
            chunks_per_shard=chunks_per_shard,
            shard_nbytes=shard_nbytes,
            shards=shards,
            shards_at=shards_at,
            order="C",  # the usual order in a file: one request reads many chunks
            executor=executor,
            source_options=source_options if kind == "zarr" else None,
            destination_options=destination_options,
            dry_run=dry_run,
            estimate=dry_run,
            progress=progress,
            native=True,
        )
    if is_zarr:
        return report
    report = _with_left(report, opened.parsed, recode=recode)
    if report.arrays and report.n_left == len(report.arrays):
        each = "; ".join(f"{array.path!r}: {array.reason}" for array in report.arrays)
        raise UnsupportedError(
            f"no array of {source!r} could be imported, only its groups were: {each}"
        )
    return report


def _with_left(report: ConversionReport, parsed: ParsedSource, *, recode: bool) -> ConversionReport:
    """Return a report that also has the arrays that were left, and the notes of the parser."""
    left = [
        ArrayReport(path, "v3", "skipped", None, why, is_left=True)
        for path, why in parsed.refused.items()
    ]
    arrays = sorted([*report.arrays, *left], key=lambda array: array.path)
    failed = {array.path for array in report.arrays if array.is_left}
    again = [(path, why) for path, why in parsed.recoded.items() if path not in failed]
    notes = [f"encoded again: {path!r} ({why})" for path, why in again]
    if left and not recode:
        notes.append("recode=True (--recode) may import arrays that were left: it encodes them")
    return replace(report, arrays=tuple(arrays), notes=(*parsed.notes, *notes, *report.notes))


_OTHER_FORMATS = (".nc", ".nc4", ".h5", ".hdf5", ".tif", ".tiff")


def _kind_of(source: Any, files: SourceFiles) -> str:
    if isinstance(source, Mapping):
        is_zarr = all(isinstance(value, bytes) for value in source.values())
        return "zarr" if is_zarr else "references"
    if not isinstance(source, str | Path) or "::" in str(source):
        return "zarr"
    url = fspath(source)
    path = file_path(url)
    if url.rstrip("/").endswith((".parq", ".parquet")):
        return "parquet"
    if path is not None and isdir(path):
        if Path(path, ".zmetadata").is_file() and not Path(path, ".zgroup").exists():
            return "parquet"
        is_icechunk = Path(path, "snapshots").is_dir() and Path(path, "transactions").is_dir()
        _refuse_other_files(path)
        return "icechunk" if is_icechunk else "zarr"
    try:
        nbytes = files.size(url)
        if not nbytes and path is None:
            return "zarr"  # for fsspec a prefix is an object without bytes
        kind = format_of(partial(files.read, url), nbytes)
    except (FileNotFoundError, ShardConflictError):
        if path is not None:
            raise SpecError(f"there is no {url!r}") from None
        return "zarr"  # no object: in an object store, perhaps a prefix
    if kind == "zarr" and path is None:
        scheme = url.partition("://")[0]
        raise SpecError(
            f"{url!r} is a zip: take 'zip::{url}', with source_options={{{scheme!r}: …}} if needed"
        )
    if kind in ("hdf5", "tiff", "json", "zarr"):
        return kind
    raise SpecError(
        f"{url!r} is no HDF5, NetCDF-4, TIFF, zip or JSON file, and no directory: adopt takes .npy "
        "files; of other formats such as NetCDF-3, and of many files, let kerchunk or VirtualiZarr "
        f"make references, and import these ({DOCUMENTATION}how-to/netcdf.html)"
    )


def _refuse_other_files(directory: str) -> None:
    """Refuse a directory without documents of Zarr that has files of other formats."""
    if any(Path(directory, name).exists() for name in DOCUMENTS):
        return
    for name in os.listdir(directory):
        if name.endswith(_OTHER_FORMATS) and Path(directory, name).is_file():
            raise SpecError(
                f"{directory!r} is a directory of files as {name!r}: import one of these, or "
                f"references to many ({DOCUMENTATION}how-to/netcdf.html)"
            )


def _open_icechunk(path: str) -> Any:
    """Open the newest snapshot of the branch main, with containers of virtual chunks."""
    icechunk = library("icechunk", "import", repr(path))
    storage = icechunk.local_filesystem_storage(path)
    config = icechunk.Repository.fetch_config(storage)
    prefixes = (config and config.virtual_chunk_containers) or {}
    may_read = dict.fromkeys(prefixes)
    repository = icechunk.Repository.open(storage, authorize_virtual_chunk_access=may_read)
    return repository.readonly_session("main").store


def _open_references(
    source: Any, kind: str, files: SourceFiles, paths: Iterable[str] | str | None, *, recode: bool
) -> SourceBackend:
    paths = paths if paths is None or isinstance(paths, str) else tuple(paths)
    what = kind if kind in _PARSERS else f"references ({kind})"
    with faults_named(f"the source cannot be read as {what}: copy it again, or mend it; "):
        if kind in _PARSERS:
            parsed = _PARSERS[kind](files, fspath(source), recode=recode)
        else:
            parsed = parse_references(files, load_references(source, kind, files), recode=recode)
    parsed = _only(parsed, paths)
    check_keys(parsed)
    if not any("shape" in doc for doc in parsed.documents.values()):
        if not parsed.refused:
            raise SpecError(f"the source, read as {kind}, has no array; nothing was written")
        each = "; ".join(f"{path!r}: {why}" for path, why in parsed.refused.items())
        advice = "Pass recode=True (--recode), which encodes them again, or name"
        raise UnsupportedError(
            f"these arrays cannot be imported as they are, and nothing was written: {each}. "
            f"{'Name' if recode else advice} others by paths (--path)"
        )
    what_is_known = files.options, dict(files.states)
    recipe = pickle.dumps((uuid4().bytes, source, kind, *what_is_known, paths, recode))
    return SourceBackend(parsed, files, lambda: (_reopen, (recipe,)))


@lru_cache(maxsize=4)
def _reopen(recipe: bytes) -> SourceBackend:
    """Parse a source in a worker, once for all tasks of an import; a changed file is refused."""
    _, source, kind, options, states, paths, recode = pickle.loads(recipe)
    files = SourceFiles(options)
    files.states.update(states)
    return _open_references(source, kind, files, paths, recode=recode)


def _only(parsed: ParsedSource, paths: Iterable[str] | str | None) -> ParsedSource:
    """Leave out arrays that `paths` does not name, and groups without a named array."""
    if paths is None:
        return parsed
    arrays = {
        key.rpartition("/")[0] for key, doc in parsed.documents.items() if "shape" in doc
    } | parsed.refused.keys()
    chosen = select_paths(arrays, paths)
    above = {"", *(at for path in chosen for at in lineage(path))}
    documents = {k: doc for k, doc in parsed.documents.items() if k.rpartition("/")[0] in above}
    refused = {path: why for path, why in parsed.refused.items() if path in chosen}
    recoded = {path: why for path, why in parsed.recoded.items() if path in chosen}
    return replace(parsed, documents=documents, refused=refused, recoded=recoded)
