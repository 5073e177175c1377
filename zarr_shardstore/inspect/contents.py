"""What there is in a store: its arrays, and every other key that does not belong to one.

Directories are walked from the root, all of one depth in one round, and never those of chunks:
an array of 10 million chunks costs the few requests of its documents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zarr_shardstore.format.grid import chunk_grid_shape
from zarr_shardstore.format.ranges import Range
from zarr_shardstore.metadata.documents import (
    Geometry,
    Node,
    document_key,
    is_array_document,
    node_of_document,
    parse_json,
    plain_geometry,
)
from zarr_shardstore.shards.requests import Flow, Found, Get, ListDir, ListPrefix

STAGING = ".zarr_shardstore/"
"""Where conversions in place keep what is not in its place yet; no part of the hierarchy."""

_DRAFT_META = "meta/"
_DRAFT_ROOT = "root"
_DOCUMENTS = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
"""Names that are those of keys, whatever else is there."""

_NAMES_AT_ONCE = 256
"""Directories that are looked at in one round."""

_MAX_CHUNK_NAMES = 1 << 20
"""Chunks in one directory of an array up to which it is listed for keys that are no chunks."""


@dataclass(frozen=True, slots=True)
class FoundArray:
    """An array document as it is stored.

    Parameters
    ----------
    node : Node
        Its place.
    doc : dict
        The parsed document.
    geometry : Geometry, optional
        Of what is stored, so of shards if there are any; ``None`` if it is not known here.
    """

    node: Node
    doc: Mapping[str, Any]
    geometry: Geometry | None


@dataclass(slots=True)
class StoreContents:
    """Everything in a store but the chunks and shards of its arrays.

    Parameters
    ----------
    arrays
        By place, sorted by path.
    other_keys : list of str
        Keys that belong to no array of the list: documents of groups, attributes,
        consolidated metadata, and whatever else there is. In no order.
    unlisted
        Arrays whose directory holds too many chunks to be listed for keys that are none; only
        documents are found there.
    """

    arrays: dict[Node, FoundArray] = field(default_factory=dict)
    other_keys: list[str] = field(default_factory=list)
    unlisted: list[Node] = field(default_factory=list)


def find_hierarchy(root: str = "") -> Flow[StoreContents]:
    """Find all arrays, and all other keys, at and below a directory of a base store.

    Cost: for each directory that holds no chunks one listing and two documents, all
    directories of one depth in one round; the documents of a draft hierarchy in one listing.
    """
    found = StoreContents()
    draft: dict[str, Node] = {}
    if not root:
        draft = yield from _find_draft_arrays(found)
    level = [f"{root}/" if root else ""]
    while level:
        below: list[str] = []
        for i in range(0, len(level), _NAMES_AT_ONCE):
            below += yield from _visit(level[i : i + _NAMES_AT_ONCE], draft, found)
        level = below
    found.arrays = dict(sorted(found.arrays.items(), key=lambda item: item[0].path))
    return found


def parents_of(node: Node) -> list[str]:
    """Paths of the groups that may hold a copy of the document of an array, the root last."""
    if not node.path or node.hierarchy == "draft":
        return []
    segments = node.path.split("/")
    return ["/".join(segments[:n]) for n in reversed(range(len(segments)))]


def _find_draft_arrays(found: StoreContents) -> Flow[dict[str, Node]]:
    """The arrays of a draft hierarchy, by the directory of their chunks."""
    (names,) = yield [ListDir(_DRAFT_META)]
    keys = [_DRAFT_META + name for name in names]
    if _DRAFT_ROOT in names:  # else it is some group of that name, with all its chunks
        (below,) = yield [ListPrefix(f"{_DRAFT_META}{_DRAFT_ROOT}/")]
        keys += below
    nodes = [node for key in keys if (node := node_of_document(key)) and node.hierarchy == "draft"]
    if not nodes:
        return {}
    replies: list[Found] = yield [Get(document_key(node)) for node in nodes]
    at: dict[str, Node] = {}
    for node, reply in zip(nodes, replies, strict=True):
        if reply.value is not None and _add(found, node, reply.value):
            at[node.chunk_prefix] = node
    return at


def _visit(
    directories: Sequence[str], draft: Mapping[str, Node], found: StoreContents
) -> Flow[list[str]]:
    """Look at directories, or keys that may be some; return what may be directories below."""
    replies: list[Found] = yield [
        request
        for d in directories
        for request in (
            Get(f"{d}zarr.json"),
            Get(f"{d}.zarray"),
            Get(d.removesuffix("/") or "zarr.json", Range(0, 1)),
        )
    ]
    own: dict[str, list[Node]] = {}
    to_list: list[str] = []
    unlisted: list[str] = []
    for i, directory in enumerate(directories):
        v3, v2, itself = replies[3 * i : 3 * i + 3]
        path = directory.removesuffix("/")
        nodes = [
            node
            for node, reply in ((Node("v3", path), v3), (Node("v2", path), v2))
            if reply.value is not None and _add(found, node, reply.value)
        ]
        if directory in draft:
            nodes.append(draft[directory])
        if path and itself.value is not None:
            found.other_keys.append(path)
        if sum(_n_names(found.arrays[node].geometry) for node in nodes) > _MAX_CHUNK_NAMES:
            found.unlisted += nodes
            unlisted.append(directory)
        else:
            to_list.append(directory)
        own[directory] = nodes
    yield from _find_documents(unlisted, found)
    listings: list[list[str]] = yield [ListDir(d) for d in to_list]
    below: list[str] = []
    for directory, names in zip(to_list, listings, strict=True):
        below += _names_below(directory, names, own[directory], found)
    return below


def _find_documents(directories: Sequence[str], found: StoreContents) -> Flow[None]:
    """Find the documents of directories that are not listed, as attributes of arrays."""
    keys = [
        directory + name
        for directory in directories
        for name in _DOCUMENTS
        if node_of_document(directory + name) not in found.arrays
    ]
    if keys:
        replies: list[Found] = yield [Get(key, Range(0, 1)) for key in keys]
        found.other_keys += [
            key for key, reply in zip(keys, replies, strict=True) if reply.value is not None
        ]


def _names_below(
    directory: str, names: Sequence[str], own: Sequence[Node], found: StoreContents
) -> list[str]:
    geometries = [g for node in own if (g := found.arrays[node].geometry) is not None]
    below = []
    for name in names:
        key = directory + name
        if f"{key}/" == STAGING or node_of_document(key) in found.arrays:
            continue
        if name in _DOCUMENTS:
            found.other_keys.append(key)
        elif not any(_is_of_chunks(geometry, name) for geometry in geometries):
            below.append(f"{key}/")
    return below


def _is_of_chunks(geometry: Geometry, name: str) -> bool:
    """Whether a name in the directory of an array is that of a chunk, or of chunks below it."""
    encoding, ndim = geometry.encoding, len(geometry.shape)
    if not ndim:  # the draft's may have another name, too: that is copied as it is
        return name == encoding.encode(())
    first = encoding.dims_of_components(ndim)[0]
    return encoding.decode_component(0, name, len(first)) is not None


def _n_names(geometry: Geometry | None) -> int:
    """Names that the chunks or shards of an array may have in its own directory."""
    if geometry is None:
        return 0
    grid = chunk_grid_shape(geometry.shape, geometry.chunk_shape)
    first = geometry.encoding.dims_of_components(len(grid))[0]
    return math.prod(grid[dim] for dim in first)


def _add(found: StoreContents, node: Node, data: memoryview) -> bool:
    """Add the array that a document describes; whether it describes one."""
    doc = parse_json(data)
    if doc is None or not is_array_document(node, doc):
        return False
    found.arrays[node] = FoundArray(node, doc, plain_geometry(node.hierarchy, doc))
    return True
