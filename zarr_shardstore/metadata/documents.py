"""Metadata documents: where they are, and what they say about the keys of an array.

==========  ==============================  ===================================
hierarchy   document of array ``foo/bar``   document of the root array
==========  ==============================  ===================================
draft       meta/root/foo/bar.array.json    meta/root.array.json
v3          foo/bar/zarr.json               zarr.json
v2          foo/bar/.zarray                 .zarray
==========  ==============================  ===================================

Source: Zarr v3 draft of 2022, "Storage keys" (``metadata_key_suffix`` is ``.json`` in every
store we know of); Zarr v3 core, "Metadata"; Zarr v2, "Metadata".

The document of an array whose stored objects are being replaced: every reader refuses it.

==========  ==============================================================================
hierarchy   what no reader knows, and names in its error
==========  ==============================================================================
v3          the only codec
v2          the last filter
draft       the only storage transformer
==========  ==============================================================================

Source: Zarr v3 core, "Extension points"; Zarr v2, "Metadata" (filters); readers.md has what
each reader does with a codec that it does not know.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from zarr_shardstore.errors import SpecError, UnfinishedConversionError, UnsupportedError
from zarr_shardstore.format.consolidated_index import declares_consolidated_index
from zarr_shardstore.format.grid import chunk_grid_shape
from zarr_shardstore.format.keys import DRAFT_DATA_ROOT, ChunkKeyEncoding, Coords, is_separator
from zarr_shardstore.metadata.data_types import parse_draft, parse_numpy, parse_v3
from zarr_shardstore.metadata.declaration import (
    Declaration,
    Native,
    chunk_key_encoding,
    chunks_per_shard,
    find_declaration,
    format_of,
)
from zarr_shardstore.metadata.transformer_list import TransformerSpec

_NAME = "zarr_shardstore.unfinished_conversion"
_MESSAGE = "the array is being converted: run the same command again to finish it"


def unfinished(doc: Mapping[str, Any]) -> dict[str, Any]:
    """The document of an array while its objects are neither the old nor the new ones."""
    if doc.get("zarr_format") == 2:
        filters = [*(doc.get("filters") or ()), {"id": _NAME, "message": _MESSAGE}]
        return {**doc, "filters": filters}
    mark = {"name": _NAME, "configuration": {"message": _MESSAGE}}
    if "node_type" in doc:
        return {**doc, "codecs": [mark], "storage_transformers": []}
    mark |= {"extension": _NAME, "type": "unfinished"}  # as zarr-python 2.18 spells one
    return {**doc, "storage_transformers": [mark]}


def is_unfinished(doc: Mapping[str, Any]) -> bool:
    """Whether `unfinished` made the document."""
    lists = (doc.get("filters"), doc.get("codecs"), doc.get("storage_transformers"))
    return any(
        isinstance(item, Mapping) and _NAME in (item.get("name"), item.get("id"))
        for items in lists
        if isinstance(items, list)
        for item in items
    )


def check_finished(path: str, doc: Mapping[str, Any]) -> None:
    """Refuse an array whose objects are being replaced.

    Raises
    ------
    UnfinishedConversionError
        With what to do.
    """
    if is_unfinished(doc):
        raise UnfinishedConversionError(
            f"the array {path!r} is being converted, or a conversion was interrupted: wait for it, "
            "or run that command again, which finishes it; nothing is lost"
        )


Hierarchy = Literal["draft", "v3", "v2"]

_DRAFT_META = "meta/root"
_DRAFT_SUFFIX = ".array.json"
_MAX_DEPTH = 200
"""Levels of a JSON value. Documents have about ten; more would need too deep a recursion."""

_WORDS = (b"sharding", b"shardstore", b"storage_transformers")
"""Words of all declarations."""

_DRAFT_GRID = {"type", "chunk_shape", "separator"}
_EXTENSION_MEMBERS = {"name", "configuration", "must_understand"}
_NAMES = {"v3": "zarr.json", "v2": ".zarray"}


@dataclass(frozen=True, slots=True)
class Node:
    """The place of an array: its hierarchy, and its path there (``""`` for the root)."""

    hierarchy: Hierarchy
    path: str

    @property
    def chunk_prefix(self) -> str:
        """What comes before the suffix in each chunk key."""
        root = DRAFT_DATA_ROOT if self.hierarchy == "draft" else ""
        return f"{root}{self.path}/" if self.path else root

    @property
    def twin(self) -> Node | None:
        """The array of the other format that may have the same chunk keys, as after a migration."""
        match self.hierarchy:
            case "v3":
                return Node("v2", self.path)
            case "v2":
                return Node("v3", self.path)
        return None


def document_key(node: Node) -> str:
    """Key of the metadata document of an array.

    >>> document_key(Node("draft", "foo/bar"))
    'meta/root/foo/bar.array.json'
    >>> document_key(Node("v2", "foo/bar"))
    'foo/bar/.zarray'
    """
    if node.hierarchy == "draft":
        return _DRAFT_META + (f"/{node.path}" if node.path else "") + _DRAFT_SUFFIX
    name = _NAMES[node.hierarchy]
    return f"{node.path}/{name}" if node.path else name


def node_of_document(key: str) -> Node | None:
    """The array whose document has this key; ``None`` if it is the key of no document."""
    path, _, name = key.rpartition("/")
    if name == "zarr.json":
        return Node("v3", path)
    if name == ".zarray":
        return Node("v2", path)
    if key == _DRAFT_META + _DRAFT_SUFFIX:
        return Node("draft", "")
    if key.startswith(f"{_DRAFT_META}/") and key.endswith(_DRAFT_SUFFIX):
        return Node("draft", key[len(_DRAFT_META) + 1 : -len(_DRAFT_SUFFIX)])
    return None


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of an array and of its chunks (in elements), and how its chunk keys are spelled."""

    shape: Coords
    chunk_shape: Coords
    encoding: ChunkKeyEncoding

    def has_same_chunks(self, other: Geometry | None) -> bool:
        """Whether chunks of the one are chunks of the other, wherever both arrays reach."""
        return (
            other is not None
            and self.chunk_shape == other.chunk_shape
            and self.encoding == other.encoding
        )


@dataclass(frozen=True, slots=True)
class ArrayDocument:
    """What a stored array document says about keys and values.

    Parameters
    ----------
    geometry : Geometry, optional
        Of the chunks; ``None`` if the document has a chunk grid or a key encoding that is not
        known here.
    declaration : optional
        How the transformers are declared; ``None`` for plain chunks.
    transformers
        What stands between the array and the store, nearest to the array first.
    has_consolidated_index
        The array has a consolidated index.
    """

    node: Node
    geometry: Geometry | None
    declaration: Declaration | None = None
    transformers: tuple[TransformerSpec, ...] = ()
    has_consolidated_index: bool = field(default=False, compare=False)

    @property
    def grid_shape(self) -> Coords | None:
        """Number of chunks along each dimension, if the geometry is known."""
        if self.geometry is None:
            return None
        return chunk_grid_shape(self.geometry.shape, self.geometry.chunk_shape)


def parse_json(data: bytes | memoryview) -> dict[str, Any] | None:
    """The JSON object that a document holds; ``None`` if it holds none, or is nested too deeply."""
    text = bytes(data)
    try:
        doc = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return doc if isinstance(doc, dict) and not _is_too_deep(doc, text) else None


def parse_document(node: Node, data: bytes | memoryview) -> dict[str, Any] | None:
    """As `parse_json`, for the document of an array.

    Raises
    ------
    SpecError
        If it cannot be parsed and names sharding: damaged, or nested to do harm.
    """
    doc = parse_json(data)
    if doc is None and any(word in bytes(data) for word in _WORDS):
        raise SpecError(
            f"the document {document_key(node)!r} of {node.path!r} is no JSON object that can be "
            "read, and it names sharding: restore the document"
        )
    return doc


def _is_too_deep(doc: dict[str, Any], text: bytes) -> bool:
    if text.count(b"{") + text.count(b"[") <= _MAX_DEPTH:
        return False
    level: list[Any] = [doc]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.values()
            elif isinstance(value, list):
                below += value
        if not below:
            return False
        level = below
    return True


def dump_document(doc: Mapping[str, Any]) -> bytes:
    """Bytes of a document."""
    return json.dumps(doc, indent=2).encode()


def is_array_document(node: Node, doc: Mapping[str, Any]) -> bool:
    """Whether a document describes an array; only those of v3 may describe a group instead."""
    return node.hierarchy != "v3" or doc.get("node_type") == "array"


def parse_array(
    node: Node, doc: Mapping[str, Any], native: Native = "flat"
) -> ArrayDocument | None:
    """Read an array document; ``None`` if it describes no array.

    Raises
    ------
    SpecError, UnsupportedError
        As `find_declaration`; also if it is sharded and the keys of its chunks are not known.
    UnfinishedConversionError
        If the objects of the array are being replaced.
    """
    if not is_array_document(node, doc):
        return None
    check_finished(node.path, doc)
    found = find_declaration(doc, native)
    geometry = plain_geometry(node.hierarchy, doc) if format_of(doc) == node.hierarchy else None
    if found is None:
        return ArrayDocument(node, geometry)
    if geometry is None:
        raise UnsupportedError(
            "it is sharded, and its shape, its chunk grid or the keys of its chunks have a form "
            "that is not known here"
        )
    cps = chunks_per_shard(found, len(geometry.shape))
    chunk_shape = tuple(s // n for s, n in zip(geometry.chunk_shape, cps, strict=True))
    geometry = Geometry(geometry.shape, chunk_shape, geometry.encoding)
    return ArrayDocument(
        node, geometry, found.how, found.transformers, declares_consolidated_index(doc)
    )


def plain_geometry(hierarchy: Hierarchy, doc: Mapping[str, Any]) -> Geometry | None:
    """Geometry of the chunk grid and the keys that a document states, sharded or not."""
    try:
        encoding: ChunkKeyEncoding | None
        is_regular = True
        match hierarchy:
            case "draft":
                grid = doc["chunk_grid"]
                is_regular = grid["type"] == "regular" and grid.keys() <= _DRAFT_GRID
                chunk_shape = grid["chunk_shape"]
                encoding = _encoding("draft", grid.get("separator", "/"))
            case "v3":
                grid = doc["chunk_grid"]
                is_regular = grid["name"] == "regular" and len(grid["configuration"]) == 1
                chunk_shape = grid["configuration"]["chunk_shape"]
                encoding = _v3_encoding(chunk_key_encoding(doc))
            case "v2":
                chunk_shape = doc["chunks"]
                encoding = _encoding("v2", doc.get("dimension_separator") or ".")
        shape = doc["shape"]
        are_lists = isinstance(shape, list | tuple) and isinstance(chunk_shape, list | tuple)
        numbers = [*shape, *chunk_shape]
    except (KeyError, TypeError, AttributeError):
        return None
    is_sound = (
        is_regular
        and are_lists
        and encoding is not None
        and len(shape) == len(chunk_shape)
        and all(type(n) is int and n >= 0 for n in numbers)
        and all(n > 0 for n in chunk_shape)
    )
    if not is_sound or encoding is None:
        return None
    return Geometry(tuple(shape), tuple(chunk_shape), encoding)


def chunk_nbytes(doc: Mapping[str, Any], chunk_shape: Coords) -> int | None:
    """Bytes of a chunk before compression; ``None`` if the data type does not tell.

    >>> chunk_nbytes({"zarr_format": 2, "dtype": "<u2"}, (10, 10))
    200
    """
    try:
        if doc.get("zarr_format") == 2:
            itemsize = parse_numpy(doc["dtype"]).itemsize
        elif "node_type" in doc:
            itemsize = parse_v3(doc["data_type"], "little").itemsize
        else:
            itemsize = parse_draft(doc["data_type"]).itemsize
    except Exception:  # a hint must not fail: what the data type is, others may know
        return None
    return itemsize * math.prod(chunk_shape)


def has_empty_chunks(doc: Mapping[str, Any]) -> bool:
    """Whether chunks are 0 long in some dimension: such an array, of zarr 3.1, holds nothing."""
    try:
        if doc.get("zarr_format") == 2:
            return 0 in doc["chunks"]
        return 0 in doc["chunk_grid"]["configuration"]["chunk_shape"]
    except (KeyError, TypeError):
        return False


def _v3_encoding(encoding: Any) -> ChunkKeyEncoding | None:
    if isinstance(encoding, str):
        encoding = {"name": encoding}
    name, options = encoding["name"], encoding.get("configuration") or {}
    is_known = encoding.keys() <= _EXTENSION_MEMBERS and options.keys() <= {"separator"}
    if not is_known or name not in ("default", "v2"):
        return None
    return _encoding(name, options.get("separator", "/" if name == "default" else "."))


def _encoding(style: Literal["draft", "default", "v2"], separator: Any) -> ChunkKeyEncoding | None:
    return ChunkKeyEncoding(style, separator) if is_separator(style, separator) else None
