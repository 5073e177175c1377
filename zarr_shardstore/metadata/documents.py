"""Metadata documents of arrays: their keys, and the chunk grids and chunk keys that they state.

==========  ==============================  ===================================
hierarchy   document of array ``foo/bar``   document of the root array
==========  ==============================  ===================================
draft       meta/root/foo/bar.array.json    meta/root.array.json
v3          foo/bar/zarr.json               zarr.json
v2          foo/bar/.zarray                 .zarray
==========  ==============================  ===================================

A *conversion marker* is in the document while a conversion in place replaces the objects of an
array. Each reader refuses the array, with the name of the marker in its error. The marker is the
only codec in v3, the last filter in v2, and the only storage transformer in the draft.

*Consolidated metadata* has copies of array documents. The zarr.json of a v3 group has them in
``consolidated_metadata.metadata``, by path below the group. The .zmetadata of v2 has them in
``metadata``, by key below its directory.

Names of dimensions are in v3's ``dimension_names``, or in xarray's attribute ``_ARRAY_DIMENSIONS``
of v2. They may also be in the ``multiscales`` of an OME-Zarr group above the array.

Source: Zarr v3 draft of 2022, "Storage keys" (``metadata_key_suffix`` is ``.json``); Zarr v3
core, "Metadata", "Extension points"; Zarr v2, "Metadata"; spec_notes/readers.md (unknown codecs);
zarr-python 3, ``ConsolidatedMetadata``; zarr-python 2, ``consolidate_metadata``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from zarr_shardstore.errors import SpecError, UnfinishedConversionError, UnsupportedError
from zarr_shardstore.format.box_grid import BoxGrid, Side
from zarr_shardstore.format.consolidated_index import (
    CONSOLIDATED_INDEX_MEMBER,
    declares_consolidated_index,
)
from zarr_shardstore.format.keys import DRAFT_DATA_ROOT, SEPARATORS, ChunkKeyEncoding, Coords
from zarr_shardstore.metadata import declaration
from zarr_shardstore.metadata.declaration import Declaration, Native, format_of, values_in
from zarr_shardstore.metadata.transformer_list import (
    CODEC_MEMBERS,
    TransformerSpec,
    agree,
    name_of,
)

Hierarchy = Literal["draft", "v3", "v2"]

_DRAFT_META = "meta/root"
_DRAFT_SUFFIX = ".array.json"
_NAMES = {"v3": "zarr.json", "v2": ".zarray"}

_MAX_DEPTH = 200
"""Most levels of objects and lists, for recursive functions. Documents have about ten."""

_STRING = re.compile(rb'"[^"]*"')
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # up or down a level, as int8
_NEITHER = bytes(set(range(256)) - set(b'[]{}"'))

_WORDS = (b"sharding", b"shardstore", b"storage_transformers")
"""Each declaration has one of these words."""

ADOPTED = "zarr_shardstore_adopted"
"""Member of a v3 document whose first shards are adopted files of other formats."""

_NBYTES = {"bool": 1, "numpy.datetime64": 8, "numpy.timedelta64": 8}
_MAX_ITEMSIZE = 2**31 - 1
"""As in numpy."""
_DATA_TYPE = re.compile(
    r"^(?:(?:u?int|float|complex|r)([0-9]{1,9})|[<>|=]?([biufcmMSUV])([0-9]{1,9})(?:\[\w+\])?)\Z"
)

_MARKER = "zarr_shardstore.unfinished_conversion"
_MEMBERS_OF_CHUNKS = (
    "data_type", "codecs", "dtype", "compressor", "filters", "order", "chunk_memory_layout",
)  # fmt: skip
_MARKED = ("filters", "codecs", "storage_transformers")
_MARKER_MESSAGE = "the array is being converted: run the same command again to finish it"


class Node(NamedTuple):
    """Place of an array: its hierarchy, and its path there (``""`` for the root)."""

    hierarchy: Hierarchy
    path: str

    @property
    def chunk_prefix(self) -> str:
        """Text before the suffix in each chunk key."""
        root = DRAFT_DATA_ROOT if self.hierarchy == "draft" else ""
        return f"{root}{self.path}/" if self.path else root

    @property
    def other_format(self) -> Node | None:
        """The place that may have the same chunk keys, as after a migration of v2 to v3."""
        other: dict[str, Hierarchy] = {"v2": "v3", "v3": "v2"}
        return None if self.hierarchy == "draft" else Node(other[self.hierarchy], self.path)


def document_key(node: Node) -> str:
    """Return the key of the metadata document of an array."""
    if node.hierarchy == "draft":
        return _DRAFT_META + (f"/{node.path}" if node.path else "") + _DRAFT_SUFFIX
    name = _NAMES[node.hierarchy]
    return f"{node.path}/{name}" if node.path else name


def node_of_document(key: str) -> Node | None:
    """Return the array whose document has this key; ``None`` for any other key."""
    path, _, name = key.rpartition("/")
    if name == "zarr.json":
        return Node("v3", path)
    if name == ".zarray":
        return Node("v2", path)
    if key == _DRAFT_META + _DRAFT_SUFFIX:
        return Node("draft", "")
    if key.startswith(f"{_DRAFT_META}/") and key.endswith(_DRAFT_SUFFIX) and name != _DRAFT_SUFFIX:
        return Node("draft", key[len(_DRAFT_META) + 1 : -len(_DRAFT_SUFFIX)])
    return None


def keys_of_groups(node: Node) -> list[str]:
    """Return the keys of the documents above an array that may have consolidated metadata."""
    name = {"v3": "zarr.json", "v2": ".zmetadata"}.get(node.hierarchy)
    parts = node.path.split("/") if node.path else []
    return ["/".join([*parts[:n], name]) for n in range(len(parts))] if name else []


# ----------------------------------------------------------------------------- JSON


def parse_json(data: bytes | memoryview | None) -> dict[str, Any] | None:
    """Return the JSON object in a document; ``None`` without one, or if it is too deep."""
    text = bytes(data or b"")
    try:
        doc = json.loads(text)
    except (ValueError, RecursionError):
        return None
    may_be_deep = text.count(b"{") + text.count(b"[") > _MAX_DEPTH
    return None if not isinstance(doc, dict) or (may_be_deep and _is_too_deep(text)) else doc


def _is_too_deep(text: bytes) -> bool:
    """Count the levels of a document by its brackets: a walk over its values takes longer."""
    if b"\0" in text:  # in UTF-16 and UTF-32 a byte of another character may be a bracket
        text = text.decode(json.detect_encoding(text)).encode(errors="replace")
    unescaped = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    steps = _STRING.sub(b"", unescaped.translate(_STEPS, _NEITHER).replace(b'""', b""))
    return bool(np.frombuffer(steps, np.int8).cumsum().max() > _MAX_DEPTH)


def parse_document(node: Node, data: bytes | memoryview | None) -> dict[str, Any] | None:
    """As `parse_json`; raise `SpecError` if a document that names sharding cannot be parsed."""
    doc = parse_json(data)
    if doc is None and any(word in bytes(data or b"") for word in _WORDS):
        raise SpecError(
            f"the document {document_key(node)!r} of {node.path!r} is no JSON object that can be "
            "read, and it names sharding: restore the document"
        )
    return doc


def dump_document(doc: Mapping[str, Any]) -> bytes:
    return json.dumps(doc, indent=2).encode()


# ------------------------------------------------------------------------------ notes


def notes_of(doc: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members about stored objects, which only this package writes."""
    return {name: doc[name] for name in (CONSOLIDATED_INDEX_MEMBER, ADOPTED) if name in doc}


def without_notes(doc: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the document without `notes_of`; the same object if there are none."""
    notes = notes_of(doc)
    return {name: doc[name] for name in doc if name not in notes} if notes else doc


def adopted_files(doc: Mapping[str, Any]) -> list[Any]:
    """Return the notes about adopted files, in the order of their shards."""
    note = doc.get(ADOPTED)
    files = note.get("files") if isinstance(note, Mapping) else None
    return files if isinstance(files, list) else []


# ------------------------------------------------------------------- parsed documents


class Geometry(NamedTuple):
    """Shape of an array and of its chunks, in elements, and the spelling of its chunk keys."""

    shape: Coords
    chunk_shape: Coords
    """Shape of the chunks; where they differ, of the largest."""
    encoding: ChunkKeyEncoding
    sides: tuple[Side, ...] | None = None
    """Lengths of the chunks along each dimension; ``None``: all chunks have one shape."""

    @property
    def chunks(self) -> BoxGrid:
        """Cut of the array into chunks."""
        return BoxGrid(self.sides or self.chunk_shape)

    @property
    def grid_shape(self) -> Coords:
        """Number of chunks along each dimension, the last one perhaps cut by the edge."""
        if self.sides is not None:
            return self.chunks.shape(self.shape)
        return tuple([-(-n // c) for n, c in zip(self.shape, self.chunk_shape, strict=True)])

    def in_boxes(self, boxes: BoxGrid) -> Geometry:
        """Return the geometry of boxes of these chunks, as of shards."""
        sides: list[Side] = []
        chunks = self.chunks
        for dim, n_chunks in enumerate(self.grid_shape):
            mine, theirs = chunks.sides[dim], boxes.sides[dim]
            if isinstance(mine, int):  # the grid may be long: it is not counted
                listed = (theirs,) if isinstance(theirs, int) else theirs
                sides.append(tuple([mine * n for n in listed]))
                continue
            last = boxes.number(dim, max(n_chunks, 1) - 1)
            ends = [boxes.bounds(dim, number)[1] for number in range(last + 1)]
            starts = [chunks.bounds(dim, end)[0] for end in (0, *ends)]
            sides.append(tuple([stop - start for start, stop in pairwise(starts)]))
        merged = BoxGrid(tuple(sides))
        return self._replace(chunk_shape=merged.largest, sides=merged.uneven)

    def has_same_chunks(self, other: Geometry | None, *, but_last: bool = False) -> bool:
        """Whether both cut the same chunks, where both arrays reach; or all `but_last` ones of
        lists, as of an array that two writers have made longer."""
        if other is None or self.encoding != other.encoding:
            return False
        if len(self.shape) != len(other.shape):
            return False
        both = [*map(min, self.shape, other.shape)]
        return self.chunks.has_same_boxes(other.chunks, both, but_last=but_last)


@dataclass(frozen=True, slots=True)
class ArrayDocument:
    """Parsed document of an array: geometry of the chunks, and storage transformers."""

    node: Node
    geometry: Geometry | None
    """``None`` if the chunk grid or the key encoding is unknown."""
    declaration: Declaration | None = None
    """``None`` for plain chunks."""
    transformers: tuple[TransformerSpec, ...] = ()
    """Nearest to the array first."""
    has_consolidated_index: bool = field(default=False, compare=False)
    n_adopted: int = field(default=0, compare=False)
    """Number of shards along the first dimension that are adopted files."""
    members: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Members that say what the bytes of a chunk mean: data type and codecs."""

    def has_same_chunks(self, other: ArrayDocument) -> bool:
        """Whether the same bytes are the same elements, where both arrays reach."""
        mine, theirs = self.geometry, other.geometry
        if mine is None or theirs is None:
            return mine is theirs
        if mine == theirs and self.members == other.members:
            return True
        return mine.has_same_chunks(theirs) and agree(self.members, other.members)


def is_array_document(node: Node, doc: Mapping[str, Any]) -> bool:
    """Whether a document describes an array. A document of v3 may describe a group."""
    return node.hierarchy != "v3" or doc.get("node_type") == "array"


def parse_array(
    node: Node, doc: Mapping[str, Any], native: Native = "flat"
) -> ArrayDocument | None:
    """Parse an array document; ``None`` if it describes no array. The conversion marker and unknown
    forms of sharding raise errors."""
    if not is_array_document(node, doc):
        return None
    texts = declaration.scan(doc)
    if any(_MARKER in texts.get(member, ()) for member in _MARKED):
        raise UnfinishedConversionError(
            f"the array {node.path!r} is being converted, or a conversion was interrupted: wait "
            "for it, or run that command again, which finishes it; nothing is lost. "
            "`zarr-shardstore info` of the store names its state and the command"
        )
    found = declaration.find_declaration(doc, native, texts)
    geometry = plain_geometry(node.hierarchy, doc)
    members = {name: doc[name] for name in _MEMBERS_OF_CHUNKS if name in doc}
    if found is None:
        return ArrayDocument(node, geometry, members=members)
    if geometry is None:
        raise UnsupportedError(f"it is sharded, and {unknown_geometry(doc)}")
    match found.how:
        case "codec":
            assert found.chunks is not None
            sides = found.chunks.uneven
            geometry = geometry._replace(chunk_shape=found.chunks.largest, sides=sides)
            members["codecs"] = doc["codecs"][0]["configuration"]["codecs"]
        case "filters":
            cps = declaration.chunks_per_shard(found, len(geometry.shape))
            chunk_shape = tuple(s // n for s, n in zip(geometry.chunk_shape, cps, strict=True))
            geometry = geometry._replace(chunk_shape=chunk_shape)
            members["filters"] = declaration.strip(doc, "filters")["filters"]
    has_index = CONSOLIDATED_INDEX_MEMBER in doc and declares_consolidated_index(doc)
    n_adopted = len(adopted_files(doc)) if ADOPTED in doc else 0
    notes = (has_index, n_adopted, members)
    return ArrayDocument(node, geometry, found.how, found.transformers, *notes)


def plain_geometry(hierarchy: Hierarchy, doc: Mapping[str, Any]) -> Geometry | None:
    """Return the stated geometry, of chunks or of shards; ``None`` if unknown."""
    style: Any = hierarchy
    unknown: Any = set()
    try:
        match hierarchy:
            case "draft":
                grid = doc["chunk_grid"]
                separator, chunk_shape = grid.get("separator", "/"), grid["chunk_shape"]
                unknown = {grid["type"]} - {"regular"}
                unknown |= grid.keys() - {"type", "chunk_shape", "separator"}
            case "v3":
                encoding = declaration.chunk_key_encoding(doc)
                chunk_shape = declaration.sides_of_grid(doc)
                if isinstance(encoding, str):
                    encoding = {"name": encoding}
                if doc.keys() - declaration.MEMBERS_OF_V3:
                    unknown = set(declaration.not_understood(doc))
                style, options = encoding["name"], encoding.get("configuration") or {}
                separator = options.get("separator", "/" if style == "default" else ".")
                unknown |= {style} - {"default", "v2"}
                unknown |= (encoding.keys() - CODEC_MEMBERS) | (options.keys() - {"separator"})
            case "v2":
                separator, chunk_shape = doc.get("dimension_separator") or ".", doc["chunks"]
        shape = doc["shape"]
        is_known = (
            not unknown
            and format_of(doc) == hierarchy
            and isinstance(shape, list | tuple)
            and isinstance(chunk_shape, list | tuple)
            and len(shape) == len(chunk_shape)
            and all(isinstance(n, int) and n >= 0 for n in shape)
            and all(isinstance(n, tuple) or (isinstance(n, int) and n > 0) for n in chunk_shape)
            and SEPARATORS[style].fullmatch(separator) is not None
        )
    except (KeyError, TypeError, AttributeError, SpecError):
        return None
    if not is_known:
        return None
    sides = [side if isinstance(side, tuple) else int(side) for side in chunk_shape]  # true is 1
    shape = tuple(map(int, shape))
    chunks = BoxGrid(tuple(sides))
    return Geometry(shape, chunks.largest, ChunkKeyEncoding(style, separator), chunks.uneven)


def unknown_geometry(doc: Mapping[str, Any]) -> str:
    """Return why `plain_geometry` of a document is ``None``."""
    if format_of(doc) == "v3":
        grid, encoding = map(name_of, (doc.get("chunk_grid"), doc.get("chunk_key_encoding")))
        if isinstance(grid, str) and grid not in ("regular", "rectilinear"):
            return f"its chunk grid {grid!r} is not known here"
        if isinstance(encoding, str) and encoding not in ("default", "v2", declaration.MARKER):
            return f"its chunk key encoding {encoding!r} is not known here"
        if members := declaration.not_understood(doc):
            return f"its member {members[0]!r} must be understood, and is not known here"
    return "its shape, its chunk grid or its chunk keys have a form that is not known here"


def chunk_nbytes(doc: Mapping[str, Any], chunk_shape: Coords) -> int | None:
    """Return the bytes of a decoded chunk; ``None`` if the data type has no fixed size, or is
    unknown."""
    try:
        given: Any = doc["dtype" if format_of(doc) == "v2" else "data_type"]
        given = given if isinstance(given, Mapping) else {"name": given}
        name, options = given.get("name", given.get("type")), given.get("configuration") or {}
        if isinstance(name, list) and len(name) == 1:  # plain bytes of zarr-python 2.18
            name = dict(name)[""]
        if "length_bytes" in options:
            itemsize = int(options["length_bytes"])
        elif name in _NBYTES:
            itemsize = _NBYTES[name]
        else:
            bits, kind, n = _DATA_TYPE.findall(name)[0]
            itemsize = int(bits) // 8 if bits else int(n) * (4 if kind == "U" else 1)
    except Exception:  # a hint does not fail: other programs may know the data type
        return None
    return itemsize * math.prod(chunk_shape) if 0 < itemsize <= _MAX_ITEMSIZE else None


def has_empty_chunks(doc: Mapping[str, Any]) -> bool:
    """Whether chunks are 0 long in some dimension, as in an array of zarr 3.1 without values."""
    try:
        is_v2 = doc.get("zarr_format") == 2
        return 0 in (doc["chunks"] if is_v2 else doc["chunk_grid"]["configuration"]["chunk_shape"])
    except (KeyError, TypeError):
        return False


# ----------------------------------------------------------------- names of dimensions


def dimension_names(doc: Any) -> tuple[str | None, ...]:
    """Return the names of dimensions in an array document, or in attributes alone; else ``()``."""
    for members in (doc, doc.get("attributes") if isinstance(doc, Mapping) else None):
        for key in ("dimension_names", "_ARRAY_DIMENSIONS"):
            names = members.get(key) if isinstance(members, Mapping) else None
            if isinstance(names, list | tuple):
                return tuple(name if isinstance(name, str) else None for name in names)
    return ()


def keys_of_dimension_names(node: Node) -> dict[str, str]:
    """Return the keys of v2 attributes and groups that may name dimensions, with the path below."""
    if node.hierarchy == "draft":
        return {}
    name = ".zattrs" if node.hierarchy == "v2" else _NAMES["v3"]
    parts = node.path.split("/")
    keys = {"/".join([*parts[:n], name]): "/".join(parts[n:]) for n in reversed(range(len(parts)))}
    return {f"{node.path}/{name}".lstrip("/"): "", **keys} if name == ".zattrs" else keys


def axes_of_ome(doc: Mapping[str, Any], path: str) -> tuple[str | None, ...]:
    """Return the names of axes that an OME-Zarr group gives the array at `path` below it."""
    attributes = doc.get("attributes", doc)
    with suppress(KeyError, TypeError, AttributeError):
        for image in attributes.get("ome", attributes)["multiscales"]:
            if any(each["path"].strip("/") == path for each in image["datasets"]):
                axes = [
                    axis["name"] if isinstance(axis, Mapping) else axis for axis in image["axes"]
                ]
                return dimension_names({"dimension_names": axes})
    return ()


# ----------------------------------------------------------------- conversion marker


def with_conversion_marker(doc: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of an array while its objects are replaced."""
    if doc.get("zarr_format") == 2:
        filters = [*(doc.get("filters") or ()), {"id": _MARKER, "message": _MARKER_MESSAGE}]
        return {**doc, "filters": filters}
    marker = {"name": _MARKER, "configuration": {"message": _MARKER_MESSAGE}}
    if "node_type" in doc:
        return {**doc, "codecs": [marker], "storage_transformers": []}
    marker |= {"extension": _MARKER, "type": "unfinished"}  # as zarr-python 2.18 spells one
    return {**doc, "storage_transformers": [marker]}


def has_conversion_marker(doc: Mapping[str, Any]) -> bool:
    lists = [doc.get(member) for member in _MARKED]
    return any(value == _MARKER for value in values_in(lists))


# -------------------------------------------------------------- consolidated metadata


def members(path: str, doc: Mapping[str, Any]) -> dict[str, tuple[Node, Mapping[str, Any]]]:
    """Return array documents by name in the consolidated metadata of the directory `path`."""
    found: dict[str, tuple[Node, Mapping[str, Any]]] = {}
    is_v2 = "zarr_consolidated_format" in doc
    for name, member in all_members(doc).items():
        below = f"{path}/{name}".strip("/")
        node = node_of_document(below) if is_v2 else Node("v3", below)
        is_array = isinstance(member, Mapping) and (is_v2 or member.get("node_type") == "array")
        if is_array and node is not None and node.hierarchy == ("v2" if is_v2 else "v3"):
            found[name] = node, member
    return found


def with_members(
    doc: Mapping[str, Any], changed: Mapping[str, Mapping[str, Any] | None]
) -> dict[str, Any]:
    """Return `doc` with other copies in its consolidated metadata; ``None`` removes one."""
    metadata = {k: v for k, v in {**all_members(doc), **changed}.items() if v is not None}
    if "zarr_consolidated_format" in doc:
        return {**doc, "metadata": metadata}
    return {**doc, "consolidated_metadata": {**doc["consolidated_metadata"], "metadata": metadata}}


def all_members(doc: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return documents of every kind by name in the consolidated metadata of a document."""
    holder = doc if "zarr_consolidated_format" in doc else doc.get("consolidated_metadata")
    metadata = holder.get("metadata") if isinstance(holder, Mapping) else None
    return metadata if isinstance(metadata, Mapping) else {}


def is_document(key: str) -> bool:
    """Whether users may see another value of a key than the stored one."""
    return node_of_document(key) is not None or key.rpartition("/")[2] == ".zmetadata"
