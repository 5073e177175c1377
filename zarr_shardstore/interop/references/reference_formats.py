"""References in memory, and their forms for other programs.

Source: kerchunk, "References specification", version 1; fsspec, ``LazyReferenceMapper``; icechunk,
``VirtualChunkSpec``; virtualizarr, ``ChunkManifest``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit
from uuid import uuid4

import fsspec
import numpy as np
import numpy.typing as npt
from fsspec.implementations.reference import LazyReferenceMapper
from zarr.core.buffer import cpu
from zarr.core.metadata import ArrayV3Metadata
from zarr.core.sync import sync

from zarr_shardstore.access import arguments, chunk_keys, declarations, metadata
from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.interop.importing.source import library
from zarr_shardstore.tools.native.translate import ZarrFormat, documents_in

OUR_MEMBER = "zarr_shardstore"
"""Member of kerchunk's JSON with the states of shards; readers pass over it."""

_AT_ONCE = 10_000  # references in one write
_library = partial(library, extra="references", user="this form of references")

S_NS = 1_000_000_000


class Version(NamedTuple):
    """Version of a stored object; ``None`` for each fact that the store does not state."""

    etag: str | None = None
    """ETag without quotes."""
    modified_ns: int | None = None
    """Time of the last change, in nanoseconds since 1970."""
    nbytes: int | None = None

    def may_be(self, other: Version) -> bool:
        """Whether both may be of the same bytes."""
        if self.etag is not None and other.etag is not None:
            return self.etag == other.etag
        pairs = zip(self[1:], other[1:], strict=True)
        return all(one is None or two is None or one == two for one, two in pairs)


class ChunkRanges(NamedTuple):
    """Byte ranges of chunks in one shard; or whole objects, each a chunk, which have no version."""

    keys: Sequence[str]
    """Key of the shard; or the keys of the objects."""
    coords: npt.NDArray[np.intp]
    """Coordinates of the chunks, shape ``(n, ndim)``."""
    offsets: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint64]
    """Sizes in bytes, shape ``(n,)``, as the offsets."""
    version: Version | None = None
    """Version of the shard."""


@dataclass(frozen=True, slots=True)
class ReferencedArray:
    """An array as its readers see it, with the ranges of its chunks."""

    path: str
    doc: declarations.Document
    """The ``zarr.json`` of v3, or the ``.zarray`` of v2."""
    attributes: declarations.Document
    """Attributes of v2; in v3 they are in the document."""
    encoding: chunk_keys.ChunkKeyEncoding
    grid_shape: chunk_keys.Coords
    ranges: Sequence[ChunkRanges] = ()
    note: str = ""

    @property
    def n_chunks(self) -> int:
        return sum(len(some.coords) for some in self.ranges)

    @property
    def n_objects(self) -> int:
        return sum(len(some.keys) for some in self.ranges)

    def chunk_keys(self, coords: npt.NDArray[np.intp]) -> list[str]:
        prefix = f"{self.path}/" if self.path else ""
        if not self.grid_shape:
            return [prefix + self.encoding.encode(())] * len(coords)
        columns = [map(str, column) for column in coords.T.tolist()]
        texts = map(self.encoding.separator.join, zip(*columns, strict=True))
        return [prefix + self.encoding.marker + text for text in texts]


@dataclass(frozen=True, slots=True)
class References:
    """References to all chunks of some arrays; about 60 bytes of memory for each chunk."""

    url: str
    """Prefix of the keys of stored objects, without a slash at its end."""
    zarr_format: ZarrFormat
    groups: Mapping[str, declarations.Document]
    """Attributes by path, also of implied groups."""
    arrays: Sequence[ReferencedArray]
    client: Any = None
    """Client of obstore that reads below the URL, if there is one."""

    def documents(self) -> Iterator[tuple[str, declarations.Document]]:
        """Yield documents by key, groups first."""
        for path, attributes in sorted(self.groups.items()):
            doc = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
            for name, shown in documents_in(self.zarr_format, doc, {}).items():
                yield f"{path}/{name}".lstrip("/"), shown
        for array in self.arrays:
            name = ".zarray" if self.zarr_format == 2 else "zarr.json"
            yield f"{array.path}/{name}".lstrip("/"), array.doc
            if array.attributes:
                yield f"{array.path}/.zattrs".lstrip("/"), array.attributes

    def head(self) -> dict[str, Any]:
        """Return the member of kerchunk's document with the versions of shards by key."""
        found = [some for array in self.arrays for some in array.ranges]
        states = {some.keys[0]: some.version for some in found if some.version is not None}
        return {OUR_MEMBER: {"url": self.url, "states": states}}

    def report(self, to: str) -> dict[str, Any]:
        names = ("path", "n_chunks", "n_objects", "note")
        arrays = [{name: getattr(array, name) for name in names} for array in self.arrays]
        return {"to": to, "zarr_format": self.zarr_format, "url": self.url, "arrays": arrays}

    def of_kerchunk(self) -> Iterator[tuple[str, Any]]:
        """Yield keys and references: text, ``[url]``, or ``[url, offset, nbytes]``."""
        for key, doc in self.documents():
            yield key, json.dumps(doc)
        for array in self.arrays:
            for keys, coords, offsets, sizes, version in array.ranges:
                shown = array.chunk_keys(coords)
                quoted = map(quote, keys) if self.url.startswith("http") else keys
                urls = [f"{self.url}/{key}" for key in quoted]
                if version is None:
                    yield from zip(shown, ([url] for url in urls), strict=True)
                    continue
                columns = shown, offsets.tolist(), sizes.tolist()
                for key, offset, nbytes in zip(*columns, strict=True):
                    yield key, [urls[0], offset, nbytes] if nbytes else ""


class Form(NamedTuple):
    """A form of references. The first of its formats is the default."""

    name: str
    zarr_formats: tuple[ZarrFormat, ...]
    make: Callable[[References], Any]
    encoding: chunk_keys.ChunkKeyEncoding | None = None
    """The only chunk key encoding of the form; ``None``: any."""
    knows_seconds: bool = False
    """Whether times of its checksums are whole seconds."""


def form_of(to: Any, out: str | os.PathLike[str] | None, url: str | None) -> Form:
    """Return the form that the arguments name; virtualizarr also by its module."""
    to = getattr(to, "__name__", to)
    if to == "kerchunk-json":
        return Form(to, (2, 3), partial(_to_json, out=out))
    if to == "kerchunk-parquet" and out is not None:
        return Form(to, (2,), partial(_to_parquet, out=out), chunk_keys.ChunkKeyEncoding("v2", "."))
    if out is not None or to == "kerchunk-parquet":
        raise SpecError(f"out= is needed for 'kerchunk-parquet', and only for kerchunk; to={to!r}")
    if to == "virtualizarr":
        return Form(to, (3,), _to_virtualizarr, chunk_keys.ChunkKeyEncoding("default", "."))
    if type(to).__name__ != "IcechunkStore" or to.read_only:
        raise SpecError(
            "to= is 'kerchunk-json', 'kerchunk-parquet', 'virtualizarr', or the store of a "
            f"writable icechunk session, got {to!r}"
        )
    encoding = chunk_keys.ChunkKeyEncoding("default", "/")
    return Form("icechunk", (3,), partial(_to_icechunk, store=to, url=url), encoding, True)


# ------------------------------------------------------------------------- kerchunk


@contextmanager
def _published(out: str | os.PathLike[str], *, replaces: bool) -> Iterator[tuple[Any, str]]:
    """Yield a file system and a path to write; then the written file gets the name `out`.

    A killed writer leaves a path that ends with ``.partial``, and `out` as it was.
    """
    fs, path = fsspec.core.url_to_fs(os.fspath(out))
    if fs.isdir(path) or (not replaces and fs.exists(path)):
        raise SpecError(f"there is something at {path!r} already: remove it, or name another path")
    partial_path = f"{path}.{uuid4().hex}.partial"
    try:
        yield fs, partial_path
        fs.mv(partial_path, path, recursive=not replaces)
    except BaseException:
        with suppress(Exception):
            fs.rm(partial_path, recursive=True)
        raise


def _to_json(found: References, out: str | os.PathLike[str] | None) -> Any:
    head = {"version": 1, **found.head()}
    if out is None:
        return {**head, "refs": dict(found.of_kerchunk())}
    with _published(out, replaces=True) as (fs, path), fs.open(path, "w") as file:
        file.write(json.dumps(head)[:-1] + ', "refs": {\n')
        entries, separator = found.of_kerchunk(), ""
        while part := dict(islice(entries, _AT_ONCE)):
            file.write(separator + json.dumps(part)[1:-1])
            separator = ",\n"
        file.write("}}\n")
    return os.fspath(out)


def _to_parquet(found: References, out: str | os.PathLike[str]) -> str:
    if any(not array.path for array in found.arrays):
        raise UnsupportedError(
            "this form has no place for an array at the root: pass group= (--group)"
        )
    for name in ("kerchunk.df", "fastparquet"):
        _library(name)
    with _published(out, replaces=False) as (fs, path):
        # Of a column of categories fsspec cannot read a missing chunk.
        options = {"record_size": _AT_ONCE, "categorical_threshold": 1 << 62}
        references = LazyReferenceMapper.create(path, fs=fs, **options)
        for key, value in found.of_kerchunk():
            references[key] = value or b""
        references.flush()
        doc = {**json.loads(fs.cat_file(f"{path}/.zmetadata")), **found.head()}
        fs.pipe_file(f"{path}/.zmetadata", json.dumps(doc).encode())
    return os.fspath(out)


def read_versions(references: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Version]:
    """Return the versions of shards, by key, in references for kerchunk."""
    doc: Any = references
    if not isinstance(references, Mapping):
        fs, path = fsspec.core.url_to_fs(os.fspath(references))
        data = fs.cat_file(f"{path}/.zmetadata" if fs.isdir(path) else path)
        doc = metadata.parse_json(data) or {}
    states = doc.get(OUR_MEMBER, {}).get("states")
    if states is None:
        raise SpecError(f"{references!r} tells no states of shards: it was not made here")
    return {key: Version(*state) for key, state in states.items()}


# ------------------------------------------------------------------------- icechunk


def _refuse_empty(found: References) -> None:
    """Raise `UnsupportedError` for a stored chunk of no bytes."""
    for array in found.arrays:
        for some in array.ranges:
            for key in array.chunk_keys(some.coords[some.nbytes == 0])[:1]:
                raise UnsupportedError(f"the chunk {key!r} has no bytes: only kerchunk takes it")


def _to_icechunk(found: References, store: Any, url: str | None) -> Any:
    """Write into a session, which the caller commits. A `url` of the caller is quoted already."""
    spec_of = _library("icechunk").VirtualChunkSpec
    _refuse_empty(found)
    url = quote(found.url, safe=":/@") if url is None else found.url
    for array in found.arrays:
        if sync(store.exists(f"{array.path}/zarr.json".lstrip("/"))):
            raise SpecError(
                f"the session has an array at {array.path!r}: delete that, with its corrected "
                "chunks, or pass group= (--group)"
            )
    for key, doc in found.documents():
        value = cpu.Buffer.from_bytes(json.dumps(doc).encode())
        is_implied = doc.get("node_type") == "group" and not doc["attributes"]
        sync((store.set_if_not_exists if is_implied else store.set)(key, value))
    for array in found.arrays:
        specs = _icechunk_specs(array, url, spec_of)
        while part := list(islice(specs, _AT_ONCE)):
            if store.set_virtual_refs(f"/{array.path}", part):
                raise SpecError(
                    f"the repository has no virtual chunk container for {part[0].location!r}: "
                    "configure one whose url_prefix it begins with; nothing is committed"
                )
    return store


def _icechunk_specs(array: ReferencedArray, url: str, spec_of: Any) -> Iterator[Any]:
    for keys, coords, offsets, sizes, version in array.ranges:
        locations = [f"{url}/{quote(key)}" for key in keys]
        etag, modified = None, None
        if version is not None:
            locations *= len(coords)
            etag = version.etag
            if etag is None and version.modified_ns is not None:
                modified = datetime.fromtimestamp(version.modified_ns // S_NS + 1, UTC)
        columns = locations, coords.tolist(), offsets.tolist(), sizes.tolist()
        for location, at, offset, nbytes in zip(*columns, strict=True):
            yield spec_of(at, location, offset, nbytes, etag, modified)


# --------------------------------------------------------------------- virtualizarr


def _to_virtualizarr(found: References) -> Any:
    manifests = _library("virtualizarr.manifests")
    _refuse_empty(found)
    if any(not array.path for array in found.arrays):
        raise UnsupportedError("a ManifestStore has no array at its root: pass group= (--group)")
    below: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {p: ({}, {}) for p in found.groups}
    for array in found.arrays:
        arguments.check_n_chunks(math.prod(array.grid_shape))
        if {"#", "?"} & {*found.url, *array.path}:
            raise UnsupportedError(f"a ManifestStore cuts URLs at '#' and '?': {array.path!r}")
        paths = np.full(array.grid_shape, "", dtype=np.dtypes.StringDType())
        offsets, lengths = np.zeros(paths.shape, np.uint64), np.zeros(paths.shape, np.uint64)
        for some in array.ranges:
            if not len(some.coords):
                continue
            at = (*some.coords.T, ...)  # also of an array without dimensions
            paths[at] = np.array([f"{found.url}/{key}" for key in some.keys], paths.dtype)
            offsets[at], lengths[at] = some.offsets, some.nbytes
        manifest = manifests.ChunkManifest.from_arrays(
            paths=paths, offsets=offsets, lengths=lengths, validate_paths=False
        )
        group, _, name = array.path.rpartition("/")
        below[group][0][name] = manifests.ManifestArray(
            ArrayV3Metadata.from_dict(array.doc), manifest
        )
    for path in sorted(found.groups, reverse=True):  # members before their group
        arrays, groups = below[path]
        made = manifests.ManifestGroup(arrays, groups, attributes=dict(found.groups[path]))
        if not path:
            return manifests.ManifestStore(made, registry=_registry(found))
        group, _, name = path.rpartition("/")
        below[group][1][name] = made
    raise SpecError("there is no array to make references of")


def _registry(found: References) -> Any:
    """Return the client by which a ``ManifestStore`` reads chunks, if one is known."""
    scheme, host = urlsplit(found.url)[:2]
    client = found.client
    if scheme == "file":
        client = _library("obstore.store").LocalStore()
    known = {} if client is None else {f"{scheme}://{host}": client}
    return _library("obspec_utils.registry").ObjectStoreRegistry(known)
