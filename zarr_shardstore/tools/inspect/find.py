"""Arrays of a base store and the keys that belong to no array, found in its directories.

A walk lists directories from the root, all of one depth in one round. It lists no directory of
chunks: an array of any size costs the few requests of its documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zarr.abc.store import Store

from zarr_shardstore.access import (
    STAGING,
    BaseStoreHandle,
    arguments,
    backends,
    byte_ranges,
    chunk_keys,
    metadata,
    open_base,
    policies,
    requests,
    resolve,
    stored_arrays,
)
from zarr_shardstore.errors import SpecError, UnsupportedError

_READER = stored_arrays.ArrayReader("flat")
HIERARCHIES: tuple[metadata.Hierarchy, ...] = ("v3", "v2", "draft")

_DRAFT_META = "meta/"
_DRAFT_ROOT = "root"
DOCUMENTS = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
"""Names of documents. A directory with such a name is not walked."""

_DIRECTORIES_AT_ONCE = 256

_MAX_CHUNK_NAMES = 1 << 20
"""Most names of chunks in the directory of an array that is listed."""

NO_ARRAY_HINT = "pass the directory of zarr.json, .zgroup or .zarray"

_MAX_QUOTED = 10
"""Most paths in an error message."""


@dataclass(frozen=True, slots=True)
class FoundArray:
    """An array document as it is stored."""

    node: metadata.Node
    doc: Mapping[str, Any]
    """Empty if the document is no JSON object."""
    geometry: metadata.Geometry | None
    """Geometry of the stored objects: shards if there are any; ``None`` if it is not known here."""


@dataclass(slots=True)
class StoreContents:
    """Everything in a store but the chunks and shards of its arrays."""

    arrays: dict[metadata.Node, FoundArray] = field(default_factory=dict)
    """Arrays by node, sorted by path."""
    other_keys: list[str] = field(default_factory=list)
    """Keys that belong to no array, in no order: documents of groups, attributes, and others."""
    unlisted: list[metadata.Node] = field(default_factory=list)
    """Arrays whose directory holds too many chunks to be listed. Of its other keys only documents
    are found."""
    broken: list[FoundArray] = field(default_factory=list)
    """Documents of arrays that hold no JSON object. Their keys are also among the other keys."""


def find_arrays(
    base: BaseStoreHandle, paths: Iterable[str] | str | None = None
) -> list[FoundArray]:
    """Return the arrays of a store, or those that `paths` name, sorted by path; also broken
    documents. Cost: one round for each path of an array; else a walk."""
    patterns = None if paths is None else arguments.paths_of(paths)
    found = [arrays_at(base, pattern) for pattern in patterns or ()]
    if not found or not all(found):
        contents = base.run(find_contents())
        walked = [*contents.arrays.values(), *contents.broken]
        selected = select_paths({array.node.path for array in walked}, patterns)
        found = [[array for array in walked if array.node.path in selected]]
    unique = {array.node: array for some in found for array in some}
    return sorted(unique.values(), key=lambda array: (array.node.path, array.node.hierarchy))


def arrays_at(base: BaseStoreHandle, path: str) -> list[FoundArray]:
    """Return the arrays at a path: at most one of each hierarchy."""
    path = chunk_keys.check_prefix(arguments.array_path(path))
    nodes = [metadata.Node(hierarchy, path) for hierarchy in HIERARCHIES]
    gets = [requests.Get(metadata.document_key(node)) for node in nodes]
    replies: list[requests.Found] = base.perform(gets)
    found = [_parse(node, reply) for node, reply in zip(nodes, replies, strict=True)]
    return [array for array in found if array is not None]


def select_paths(nodes: Collection[str], paths: Iterable[str] | str | None) -> set[str]:
    """Return the paths of `nodes` that the argument `paths` of a tool names: arrays, groups with
    everything below them, or patterns of these (``"raw/*"``)."""
    if paths is None:
        return set(nodes)
    selected: set[str] = set()
    for pattern in arguments.paths_of(paths):
        found = {n for n in nodes if any(policies.matches(at, pattern) for at in lineage(n))}
        if not found:
            there = quoted(sorted(nodes))
            raise SpecError(f"no array has the path {pattern!r}, or is below it; there are {there}")
        selected |= found
    return selected


def lineage(path: str) -> list[str]:
    """Return the paths of the root, of the groups above a node, and of the node."""
    return ["", *(path[:i] for i, sign in enumerate(f"{path}/") if sign == "/")]


def quoted(paths: Iterable[str]) -> str:
    """Return the first few paths, quoted for an error message."""
    unique = list(dict.fromkeys(paths))
    more = f" and {len(unique) - _MAX_QUOTED} more" if len(unique) > _MAX_QUOTED else ""
    return (", ".join(map(repr, unique[:_MAX_QUOTED])) or "none") + more


def read_array(found: FoundArray) -> stored_arrays.StoredArray:
    """Return the array that a document declares, or raise why there is none."""
    if not found.doc:
        raise SpecError(f"{metadata.document_key(found.node)!r} holds no JSON object")
    array = _READER.read(found.node, found.doc)
    assert array is not None, "find_arrays returns documents of arrays only"
    if array.unknown:
        raise UnsupportedError(array.unknown)
    return array


def _parse(node: metadata.Node, reply: requests.Found) -> FoundArray | None:
    """Parse a document; ``None`` if it is missing, or the document of a group."""
    if reply.value is None:
        return None
    doc = metadata.parse_json(reply.value)
    if doc is None:
        return FoundArray(node, {}, None)
    if not metadata.is_array_document(node, doc):
        return None
    return FoundArray(node, doc, metadata.plain_geometry(node.hierarchy, doc))


def find_contents() -> requests.Flow[StoreContents]:
    """Find all arrays and all other keys of a base store. Cost: a listing and three reads for each
    directory without chunks, and a listing of the documents of a draft hierarchy."""
    found = StoreContents()
    draft = yield from _find_draft_arrays(found)
    level = [""]
    while level:
        chunk_keys.check_no_loop(level)
        below: list[str] = []
        for i in range(0, len(level), _DIRECTORIES_AT_ONCE):
            below += yield from _visit(level[i : i + _DIRECTORIES_AT_ONCE], draft, found)
        level = below
    found.arrays = dict(sorted(found.arrays.items(), key=lambda item: item[0].path))
    return found


def _find_draft_arrays(found: StoreContents) -> requests.Flow[dict[str, metadata.Node]]:
    """Find the arrays of a draft hierarchy; return them by the directory of their chunks."""
    (names,) = yield [requests.ListDir(_DRAFT_META)]
    keys = [_DRAFT_META + name for name in names]
    if _DRAFT_ROOT in names:  # without it "meta" is an ordinary group, perhaps with many chunks
        cursor = requests.KeyCursor(f"{_DRAFT_META}{_DRAFT_ROOT}/")
        (below,) = yield [requests.ListPage(cursor)]
        keys += below
    found_nodes = map(metadata.node_of_document, keys)
    nodes = [node for node in found_nodes if node and node.hierarchy == "draft"]
    if not nodes:
        return {}
    replies: list[requests.Found] = yield [
        requests.Get(metadata.document_key(node)) for node in nodes
    ]
    return {
        node.chunk_prefix: node
        for node, reply in zip(nodes, replies, strict=True)
        if _add(found, node, reply)
    }


def _visit(
    directories: Sequence[str], draft: Mapping[str, metadata.Node], found: StoreContents
) -> requests.Flow[list[str]]:
    """Read some directories; return the names in them that may be directories. A name in a listing
    may be a key, a directory, or both: so each is also read as a key."""
    gets: list[requests.Request] = []
    for directory in directories:
        gets += [requests.Get(f"{directory}zarr.json"), requests.Get(f"{directory}.zarray")]
        itself = directory.removesuffix("/") or "zarr.json"
        gets.append(requests.Get(itself, byte_ranges.Range(0, 1)))
    replies: list[Any] = yield from _ask(gets, lambda i: i % 3 == 2)
    listed: dict[str, list[metadata.Node]] = {}
    document_keys: list[str] = []
    for i, directory in enumerate(directories):
        v3, v2, at_path = replies[3 * i : 3 * i + 3]
        path = directory.removesuffix("/")
        both = (metadata.Node("v3", path), v3), (metadata.Node("v2", path), v2)
        nodes = [node for node, reply in both if _add(found, node, reply)]
        if directory in draft:
            nodes.append(draft[directory])
        if path and at_path is not None and at_path.value is not None:
            found.other_keys.append(path)
        if sum(_n_names(found.arrays[node].geometry) for node in nodes) <= _MAX_CHUNK_NAMES:
            listed[directory] = nodes
            continue
        found.unlisted += nodes
        keys = [directory + name for name in DOCUMENTS]
        document_keys += [key for key in keys if metadata.node_of_document(key) not in found.arrays]
    if document_keys:
        replies = yield [requests.Get(key, byte_ranges.Range(0, 1)) for key in document_keys]
        pairs = zip(document_keys, replies, strict=True)
        found.other_keys += [key for key, reply in pairs if reply.value is not None]
    return (yield from _list(listed, found))


def _list(
    listed: Mapping[str, Sequence[metadata.Node]], found: StoreContents
) -> requests.Flow[list[str]]:
    """List directories with the arrays in them; return the names that may be directories."""
    arrays = list(listed.values())
    listings = yield from _ask([requests.ListDir(d) for d in listed], lambda i: bool(arrays[i]))
    below: list[str] = []
    for (directory, nodes), names in zip(listed.items(), listings, strict=True):
        if names is None:
            found.unlisted += nodes
        geometries = [g for node in nodes if (g := found.arrays[node].geometry) is not None]
        for name in names or ():
            key = directory + name
            if f"{key}/" == STAGING or metadata.node_of_document(key) in found.arrays:
                continue
            if name in DOCUMENTS:
                found.other_keys.append(key)
            elif not any(_is_of_chunks(geometry, name) for geometry in geometries):
                below.append(f"{key}/")
    return below


def _ask(
    batch: Sequence[requests.Request], may_fail: Callable[[int], bool]
) -> requests.Flow[list[Any]]:
    """Return replies; ``None`` where the base store refuses a request that may fail."""
    try:
        return (yield list(batch))
    except backends.ODD_KEY_ERRORS as error:
        if isinstance(error, SpecError):
            raise
    replies: list[Any] = []
    for i, request in enumerate(batch):
        try:
            replies += yield [request]
        except backends.ODD_KEY_ERRORS:
            if not may_fail(i):
                raise
            replies.append(None)
    return replies


def _is_of_chunks(geometry: metadata.Geometry, name: str) -> bool:
    """Return whether a name in the directory of an array leads to chunks."""
    encoding, ndim = geometry.encoding, len(geometry.shape)
    if not ndim:  # a second key of a 0-d draft array is copied as it is
        return name == encoding.encode(())
    return encoding.decode_leading(name, ndim) is not None


def _n_names(geometry: metadata.Geometry | None) -> int:
    """Return the number of names that the chunks of an array may have in its directory."""
    if geometry is None:
        return 0
    grid = geometry.grid_shape
    if geometry.encoding.separator == "/":
        grid = grid[: 0 if geometry.encoding.style == "default" else 1]
    return math.prod(grid)


def _add(found: StoreContents, node: metadata.Node, reply: requests.Found) -> bool:
    """Add the array that a document describes; return whether it describes one."""
    array = _parse(node, reply)
    if array is None:
        return False
    if not array.doc:
        found.broken.append(array)
        return False
    found.arrays[node] = array
    return True


def check_copies_above(base: BaseStoreHandle) -> None:
    """Refuse a part of a hierarchy whose documents a group above the part has copies of."""
    stores = resolve.stores_above(base.store) if isinstance(base.store, Store) else ()
    for store, path in stores:
        above = open_base(store)
        try:
            docs = above.documents(["zarr.json", ".zmetadata", ".zgroup"])
        except Exception:  # a server refuses in its own way who may read a part alone
            return
        members = [name for doc in docs for name in metadata.all_members(doc or {})]
        if any(f"{name}/".startswith(f"{path}/") for name in members):
            place = above.root_of_files or above.url or above.describe()
            raise SpecError(
                f"the consolidated metadata of {place} would keep the former documents of "
                f"{path!r}; nothing was written: convert {place}, of which paths={path!r} (--path) "
                "chooses a part"
            )
        if docs[0] is docs[2] is None:
            return
