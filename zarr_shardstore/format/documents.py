"""Metadata documents: where they are, and what they say about the keys of an array.

==========  ==============================  ===================================
hierarchy   document of array ``foo/bar``   document of the root array
==========  ==============================  ===================================
draft       meta/root/foo/bar.array.json    meta/root.array.json
v3          foo/bar/zarr.json               zarr.json
==========  ==============================  ===================================

Source: Zarr v3 draft of 2022, "Storage keys" (``metadata_key_suffix`` is ``.json`` in every
store we know of); Zarr v3 core, "Metadata".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zarr_shardstore.format.declarations import Declaration, find_declaration
from zarr_shardstore.format.grid import chunk_grid_shape
from zarr_shardstore.format.keys import DRAFT_DATA_ROOT, ChunkKeyEncoding, Coords
from zarr_shardstore.format.layout import ArrayLayout
from zarr_shardstore.format.spec import ShardingSpec

__all__ = [
    "ArrayDocument",
    "Geometry",
    "Hierarchy",
    "Node",
    "document_key",
    "dump_document",
    "has_empty_chunks",
    "node_of_document",
    "parse_array",
    "parse_json",
    "plain_geometry",
]

Hierarchy = Literal["draft", "v3"]

_DRAFT_META = "meta/root"
_DRAFT_SUFFIX = ".array.json"
_V3_NAME = "zarr.json"


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


def document_key(node: Node) -> str:
    """Key of the metadata document of an array.

    >>> document_key(Node("draft", "foo/bar"))
    'meta/root/foo/bar.array.json'
    """
    if node.hierarchy == "draft":
        return _DRAFT_META + (f"/{node.path}" if node.path else "") + _DRAFT_SUFFIX
    return f"{node.path}/{_V3_NAME}" if node.path else _V3_NAME


def node_of_document(key: str) -> Node | None:
    """The array whose document has this key; ``None`` if it is the key of no document."""
    if key == _V3_NAME:
        return Node("v3", "")
    if key.endswith(f"/{_V3_NAME}"):
        return Node("v3", key[: -len(_V3_NAME) - 1])
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
    """What a stored array document says about keys.

    Parameters
    ----------
    geometry : Geometry, optional
        Of the chunks; ``None`` if the document has a chunk grid or a key encoding that is not
        known here.
    declaration, spec : optional
        How the array is declared as sharded; ``None`` for plain chunks.
    """

    node: Node
    geometry: Geometry | None
    declaration: Declaration | None
    spec: ShardingSpec | None

    @property
    def layout(self) -> ArrayLayout | None:
        """Key translation of the array; ``None`` for plain chunks."""
        if self.spec is None or self.geometry is None:
            return None
        grid_shape = chunk_grid_shape(self.geometry.shape, self.geometry.chunk_shape)
        return ArrayLayout(
            path=self.node.path,
            prefix=self.node.chunk_prefix,
            encoding=self.geometry.encoding,
            grid_shape=grid_shape,
            spec=self.spec,
        )


def parse_json(data: bytes | memoryview) -> dict[str, Any] | None:
    """The JSON object that a document holds; ``None`` if it holds none."""
    try:
        doc = json.loads(bytes(data))
    except (ValueError, RecursionError):  # the latter: nested by the thousand, to do harm
        return None
    return doc if isinstance(doc, dict) else None


def dump_document(doc: Mapping[str, Any]) -> bytes:
    """Bytes of a document."""
    return json.dumps(doc, indent=2).encode()


def parse_array(node: Node, doc: Mapping[str, Any]) -> ArrayDocument | None:
    """Read an array document; ``None`` if it describes no array.

    Raises
    ------
    SpecError, UnsupportedError
        As `find_declaration`.
    """
    if node.hierarchy == "v3" and doc.get("node_type") != "array":
        return None
    geometry = plain_geometry(node.hierarchy, doc)
    if geometry is None:
        return ArrayDocument(node, None, None, None)
    found = find_declaration(doc)
    if found is None:
        return ArrayDocument(node, geometry, None, None)
    declaration, spec = found
    if declaration == "codec":
        cps = spec.chunks_per_shard
        chunk_shape = tuple(s // n for s, n in zip(geometry.chunk_shape, cps, strict=True))
        geometry = Geometry(geometry.shape, chunk_shape, geometry.encoding)
    return ArrayDocument(node, geometry, declaration, spec)


def plain_geometry(hierarchy: Hierarchy, doc: Mapping[str, Any]) -> Geometry | None:
    """Geometry of the chunk grid and the keys that a document states, sharded or not."""
    try:
        grid = doc["chunk_grid"]
        encoding: ChunkKeyEncoding | None
        if hierarchy == "draft":
            is_regular = grid["type"] == "regular"
            chunk_shape = grid["chunk_shape"]
            encoding = _encoding("draft", grid.get("separator", "/"))
        else:
            is_regular = grid["name"] == "regular"
            chunk_shape = grid["configuration"]["chunk_shape"]
            encoding = _v3_encoding(doc["chunk_key_encoding"])
        shape = doc["shape"]
        numbers = [*shape, *chunk_shape]
    except (KeyError, TypeError, AttributeError):
        return None
    is_sound = (
        is_regular
        and encoding is not None
        and len(shape) == len(chunk_shape)
        and all(isinstance(n, int) and n >= 0 for n in numbers)
        and all(n > 0 for n in chunk_shape)
    )
    if not is_sound or encoding is None:
        return None
    return Geometry(tuple(shape), tuple(chunk_shape), encoding)


def has_empty_chunks(doc: Mapping[str, Any]) -> bool:
    """Whether chunks are 0 long in some dimension: such an array, of zarr 3.1, holds nothing."""
    try:
        return 0 in doc["chunk_grid"]["configuration"]["chunk_shape"]
    except (KeyError, TypeError):
        return False


def _v3_encoding(encoding: Any) -> ChunkKeyEncoding | None:
    if isinstance(encoding, str):
        encoding = {"name": encoding}
    name = encoding["name"]
    if name not in ("default", "v2"):
        return None
    default = "/" if name == "default" else "."
    separator = (encoding.get("configuration") or {}).get("separator", default)
    return _encoding(name, separator)


def _encoding(style: Literal["draft", "default", "v2"], separator: Any) -> ChunkKeyEncoding | None:
    return ChunkKeyEncoding(style, separator) if separator in ("/", ".") else None
