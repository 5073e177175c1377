"""References to the chunks of a store: each is a stored object, an offset and a size.

Any program reads them: the references have documents of plain chunks, as users of a `ShardingStore`
see them. No byte of a chunk is copied. The version of each shard is noted before its index is read,
so a change between both, or later, makes another version.
"""

from __future__ import annotations

import math
import os
import posixpath
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from zarr.core.sync import sync
from zarr.storage import FsspecStore, ObjectStore

from zarr_shardstore.access import (
    BaseStoreHandle,
    StoreLike,
    arguments,
    chunk_keys,
    declarations,
    file_keys,
    fs,
    locks,
    metadata,
    open_base,
    stacks,
    walks,
)
from zarr_shardstore.errors import ShardConflictError, SpecError, UnsupportedError
from zarr_shardstore.interop.references.reference_formats import (
    S_NS,
    ChunkRanges,
    Form,
    ReferencedArray,
    References,
    Version,
    form_of,
    read_versions,
)
from zarr_shardstore.tools.inspect.find import (
    FoundArray,
    find_contents,
    lineage,
    read_array,
    select_paths,
)
from zarr_shardstore.tools.native import data_types, document_members, translate
from zarr_shardstore.tools.native.draft_documents import array_of_draft, node_of_meta_key
from zarr_shardstore.tools.native.translate import ZarrFormat, documents_in

_MASKED = "xarray masks its fill value, unless told use_zarr_fill_value_as_mask=False"


def to_references(
    store: StoreLike,
    paths: Iterable[str] | str | None = None,
    *,
    zarr_format: ZarrFormat | None = None,
    to: Any = "kerchunk-json",
    out: str | os.PathLike[str] | None = None,
    url: str | None = None,
    group: str = "",
    storage_options: Mapping[str, Any] | None = None,
    on_report: Callable[[dict[str, Any]], object] | None = None,
) -> Any:
    """Make references to the chunks of a store, for programs that cannot read shards.

    Parameters
    ----------
    store
        A store, or an argument that `ShardingStore` takes for one.
    paths
        Paths of arrays and groups, or patterns of these (``"raw/*"``); a group stands for all
        below it. ``None``: everything.
    zarr_format : {2, 3}, optional
        Format of the documents. By default 2 for kerchunk; 3 for the others, which take no 2.
    to : {"kerchunk-json", "kerchunk-parquet", "virtualizarr"} or icechunk store
        Form of the references. An icechunk store belongs to a writable session.
    out : str or path, optional
        Path or URL of references for kerchunk: JSON replaces a file there, Parquet does not.
    url : str, optional
        Prefix by which readers reach the stored objects: ``"s3://bucket/v.zarr"``. By default the
        URL of the store.
    group : str
        Group of the references for everything; by default the root.
    storage_options : mapping, optional
        Options for a URL of the store.
    on_report : callable, optional
        Called at the end with a report: for each array its path, chunks, objects, and a note.

    Returns
    -------
    dict, str, icechunk store or ManifestStore
        What a reader opens. For kerchunk `out`, or without it the references.

    Raises
    ------
    UnsupportedError
        If the format cannot express an array: v2 lacks a codec, or a storage transformer changes
        bytes. The message names it.
    SpecError
        If the store has no URL, or a path names nothing.
    ShardConflictError
        If another process appends to a shard. Shards that this process appends to are sealed.
    CorruptShardError
        If the index of a shard is damaged.

    Notes
    -----
    A write to a shard makes the references to it stale: `stale_references` finds such shards, and
    icechunk refuses to read their chunks.

    Cost: the requests that find the arrays, a listing of each array, and one read for each shard.

    Examples
    --------
    >>> import numpy as np, zarr
    >>> from zarr_shardstore import ShardingStore
    >>> base = {}
    >>> store = ShardingStore(base, chunks_per_shard=2)
    >>> options = {"chunks": 1, "compressors": None}
    >>> z = zarr.create_array(store, name="z", data=np.arange(4, dtype="u1"), **options)
    >>> to_references(base, url="s3://bucket/v.zarr")["refs"]["z/3"]
    ['s3://bucket/v.zarr/z/c/1', 1, 1]
    """
    form = form_of(to, out, url)
    zarr_format = form.zarr_formats[0] if zarr_format is None else zarr_format
    if zarr_format not in form.zarr_formats:
        known = " or ".join(map(str, form.zarr_formats))
        raise SpecError(f"{form.name} takes zarr_format {known}, got {zarr_format!r}")
    base = open_base(store, storage_options, needs_chunks=True)
    base.seal()
    client = base.store.store if url is None and type(base.store) is ObjectStore else None
    reader = _Reader(base, chunk_keys.check_prefix(arguments.array_path(group)), zarr_format, form)
    reached = base.url if url is None else url
    if not reached:
        raise SpecError(
            f"no URL leads to the objects of {base.describe()}: pass url= (--url), the prefix by "
            "which readers reach them"
        )
    found = References(reached.rstrip("/"), zarr_format, *reader.read(paths), client)
    made = form.make(found)
    if on_report is not None:
        on_report(found.report(form.name))
    return made


def stale_references(
    store: StoreLike,
    references: str | os.PathLike[str] | Mapping[str, Any],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the keys of shards that changed after references for kerchunk were made.

    `references` are a result of `to_references`. Shards are compared by ETag, else by size and
    time, as far as the store states them. No shard is read.
    """
    noted = read_versions(references)
    base = open_base(store, storage_options)
    base.seal()
    directory = posixpath.commonpath(map(posixpath.dirname, noted)) if noted else ""
    version_of = _versions_below(base, f"{directory}/".lstrip("/"))
    versions = {key: version_of(key) for key in noted}
    return [key for key, now in versions.items() if now is None or not now.may_be(noted[key])]


def _versions_below(base: BaseStoreHandle, prefix: str) -> Callable[[str], Version | None]:
    """Return a function that returns the version of an object by its key; ``None``: missing.

    Objects of a remote store are listed at once; the key must be below the prefix.
    """
    store: Any = base.store
    root = base.root_of_files
    infos: dict[str, Any] = {}
    if root is None and type(store) is ObjectStore:
        infos = {info["path"]: info for page in store.store.list(prefix or None) for info in page}
    elif root is None and type(store) is FsspecStore:
        store.fs.invalidate_cache()
        found = sync(store.fs._find(f"{store.path}/{prefix}".rstrip("/"), detail=True))
        top = f"{store.path.strip('/')}/".lstrip("/")
        infos = {path.strip("/").removeprefix(top): info for path, info in found.items()}
    listed: dict[str, Version] = {}
    for key, info in infos.items():  # obstore, s3fs, others
        etag = info.get("e_tag") or info.get("ETag") or info.get("etag") or ""
        listed[key] = Version(etag.strip('"') or None, None, info.get("size"))

    def version_of(key: str) -> Version | None:
        if root is not None:
            file = fs.state_of(root + key)
            return None if file is None else Version(None, file[2], file[1])
        if key in listed:
            return listed[key]
        (nbytes,) = base.sizes([key])
        return None if nbytes is None else Version(nbytes=nbytes)

    return version_of


@dataclass(frozen=True, slots=True)
class _Reader:
    base: BaseStoreHandle
    group: str
    zarr_format: ZarrFormat
    form: Form

    def read(
        self, paths: Iterable[str] | str | None
    ) -> tuple[dict[str, declarations.Document], list[ReferencedArray]]:
        """Return attributes of groups by path, and arrays. Indexes are read last."""
        contents = self.base.run(find_contents())
        arrays = {array.node.path: array for array in contents.broken}
        for hierarchy in ("draft", "v2", "v3"):  # the last of several arrays at a path counts
            arrays |= {n.path: a for n, a in contents.arrays.items() if n.hierarchy == hierarchy}
        groups = self._groups(contents.other_keys)
        groups = {path: groups[path] for path in groups if path not in arrays}
        selected = select_paths({*arrays, *groups}, paths)
        planned = [self._plan(arrays[path]) for path in sorted(selected) if path in arrays]
        shown = {self._at(path): groups[path] for path in groups}
        wanted = {self._at(path) for path in selected if path in groups}
        for at in filter(None, map(self._at, selected)):
            wanted |= {*lineage(at)[:-1]}
        groups = {path: shown.get(path, {}) for path in wanted}
        return groups, [self._with_ranges(*each) for each in planned]

    def _at(self, path: str) -> str:
        """Return the path of a node in the references."""
        return f"{self.group}/{path}".strip("/")

    def _groups(self, keys: Iterable[str]) -> dict[str, declarations.Document]:
        """Return the attributes of groups by path; of two at a path the attributes of v3."""
        found: list[tuple[str, str]] = []
        for key in sorted(keys):  # .zgroup before zarr.json
            path, _, name = key.rpartition("/")
            if name in (".zgroup", "zarr.json"):
                found.append((path, key))
            elif name.endswith(".group.json") and (at := node_of_meta_key(key)) is not None:
                found.append((at, key))
        groups: dict[str, declarations.Document] = {}
        docs = self.base.documents([key for _, key in found])
        attributes = self.base.documents([f"{path}/.zattrs".lstrip("/") for path, _ in found])
        for (path, key), doc, of_v2 in zip(found, docs, attributes, strict=True):
            if doc is None:
                raise SpecError(f"{key!r} holds no JSON object")
            if key.endswith(".zgroup"):
                groups[path] = of_v2 or {}
            elif doc.get("node_type") == "group" or key.endswith(".group.json"):
                groups[path] = document_members.attributes_of(doc)
        if self.zarr_format == 2:
            return {path: translate.to_ome_04(groups[path]) for path in groups}
        if any(map(translate.is_ome_04, groups.values())):
            return {path: translate.to_ome_05(groups[path]) for path in groups}
        return groups

    def _plan(self, found: FoundArray) -> tuple[walks.ObjectGrid, ReferencedArray]:
        """Translate the document of an array, which has no ranges yet."""
        path = found.node.path
        try:
            doc = dict(declarations.without_mark(found.doc))  # flat, also if zarr shards it
            array = read_array(FoundArray(found.node, doc, found.geometry))
            stack = [t for t in array.stack if not isinstance(t, stacks.ReadOnlyTransformer)]
            if stack and not (len(stack) == 1 and isinstance(stack[0], stacks.ShardingTransformer)):
                names = [transformer.name for transformer in array.document.transformers]
                raise UnsupportedError(
                    f"of the storage transformers {names} one changes the stored bytes, which "
                    "only this package reads: copy it into a store without that one"
                )
            if array.grid_shape is None:
                raise UnsupportedError("its chunk grid or its chunk keys are not known here")
            doc, attributes = self._documents(found, doc)
        except (SpecError, UnsupportedError) as error:
            raise type(error)(f"the array {path or '/'!r} takes no references: {error}") from error
        encoding = self.form.encoding
        if encoding is None:
            geometry = metadata.plain_geometry("v2" if self.zarr_format == 2 else "v3", doc)
            assert geometry is not None
            encoding = geometry.encoding
        elif self.zarr_format == 2:
            doc = {**doc, "dimension_separator": encoding.separator}
        else:
            options = {"separator": encoding.separator}
            doc = {**doc, "chunk_key_encoding": {"name": encoding.style, "configuration": options}}
        # xarray takes the fill value of v2 for missing data. In v3 an attribute says so.
        own = found.doc.get("attributes") or {}
        is_unmasked = found.node.hierarchy != "v2" and "_FillValue" not in own
        is_for_xarray = is_unmasked and "_ARRAY_DIMENSIONS" in attributes
        note = _MASKED if is_for_xarray and doc["fill_value"] in (0, _null(doc)) else ""
        at = self._at(path)
        shown = ReferencedArray(at, doc, attributes, encoding, array.grid_shape, note=note)
        return walks.ObjectGrid.of_array(array), shown

    def _documents(
        self, found: FoundArray, doc: declarations.Document
    ) -> tuple[declarations.Document, declarations.Document]:
        """Return the document of an array in the wanted format, and its attributes of v2."""
        attributes: declarations.Document = {}
        if found.node.hierarchy == "v2":
            key = f"{found.node.path}/.zattrs".lstrip("/")
            attributes = self.base.documents([key])[0] or {}
        elif found.node.hierarchy == "draft":
            doc = array_of_draft({k: v for k, v in doc.items() if k != "storage_transformers"})
        named = documents_in(self.zarr_format, doc, attributes)
        return named[".zarray" if self.zarr_format == 2 else "zarr.json"], named.get(".zattrs", {})

    def _with_ranges(self, grid: walks.ObjectGrid, array: ReferencedArray) -> ReferencedArray:
        array = replace(array, ranges=tuple(self._ranges(grid)))
        is_complete = array.n_chunks == math.prod(array.grid_shape)
        if is_complete and array.note:
            return replace(array, doc={**array.doc, "fill_value": None}, note="")
        if is_complete or array.doc["fill_value"] is not None:
            return array
        if array.doc["dtype"] == "|O" or not isinstance(array.doc["dtype"], str):
            return array
        # zarr 2 fills missing chunks with uninitialized memory.
        note = _MASKED if "_ARRAY_DIMENSIONS" in array.attributes else ""
        return replace(array, doc={**array.doc, "fill_value": _null(array.doc)}, note=note)

    def _ranges(self, grid: walks.ObjectGrid) -> Iterator[ChunkRanges]:
        version_of = _versions_below(self.base, grid.prefix)
        for listed in walks.walk(self.base.run, grid):
            # Before the indexes: a change between both makes another version.
            self._check_journals(grid, listed)
            versions = {key: version_of(key) for key, *_ in listed}
            sizes = {key: found.nbytes for key, found in versions.items() if found is not None}
            if not grid.is_sharded:
                coords = np.array([s.coords for s in listed if s.key in sizes], dtype=np.intp)
                nbytes = np.array([size or 0 for size in sizes.values()], dtype=np.uint64)
                coords = coords.reshape(len(sizes), len(grid.shape))
                yield ChunkRanges([*sizes], coords, np.zeros_like(nbytes), nbytes)
                continue
            known = [stored._replace(nbytes=sizes.get(stored.key)) for stored in listed]
            if self.form.knows_seconds:
                # A later write must have a later second.
                newest = max((v.modified_ns or 0 for v in versions.values() if v), default=0)
                time.sleep(min(1, max(0, (newest // S_NS + 1) - time.time())) if newest else 0)
            read = walks.read_stored(grid, known, sizes=True, consistent=True)
            for stored in self.base.run(read):
                yield _in_shard(stored, versions[stored.key])

    def _check_journals(self, grid: walks.ObjectGrid, listed: Sequence[walks.Stored]) -> None:
        root = self.base.root_of_files
        for key, *_ in listed if root is not None and grid.is_sharded else ():
            if os.path.exists(locks.beside(f"{root}{key}", file_keys.JOURNAL_SUFFIX)):
                raise ShardConflictError(
                    f"the shard {key!r} is being appended to, or its writer was killed: close the "
                    "writer, or run zarr-shardstore compact, and then this again"
                )


def _in_shard(stored: walks.Stored, version: Version | None) -> ChunkRanges:
    stored.check()
    shard, index = stored.shard, stored.decoded
    assert shard is not None
    assert index is not None
    cps, ids = shard.spec.chunks_per_shard, stored.ids
    inside = np.array(np.unravel_index(ids, cps) if cps else (), dtype=np.intp)
    starts = np.array([start for start, _ in shard.layout.spec.boxes.box(shard.coords)], dtype=int)
    coords = inside.reshape(len(cps), len(ids)).T + starts
    version = version or Version(nbytes=stored.nbytes)  # a new shard
    return ChunkRanges([shard.key], coords, index.fields[ids, 0], index.fields[ids, 1], version)


def _null(doc: declarations.Document) -> Any:
    """Return the fill value that ``null`` stands for in a v2 document."""
    if doc["dtype"] == "|O":
        return ""
    return data_types.fill_value_of_v2(None, data_types.parse_numpy(doc["dtype"]))
