"""The arrays of a store that a tool is asked for: all, those at or below a path, of a pattern."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from zarr_shardstore.arrays.array_cache import ArrayReader, StoredArray
from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.arguments import array_path, paths_of
from zarr_shardstore.format.keys import check_prefix
from zarr_shardstore.inspect.contents import FoundArray, find_hierarchy
from zarr_shardstore.inspect.open_base import BaseStoreHandle
from zarr_shardstore.metadata.documents import (
    Hierarchy,
    Node,
    document_key,
    is_array_document,
    node_of_document,
    parse_json,
    plain_geometry,
)
from zarr_shardstore.shards.read import ReadOptions
from zarr_shardstore.shards.requests import Flow, Found, Get

_READER = ArrayReader("flat", ReadOptions())

_DOCUMENTS_AT_ONCE = 256
"""Documents that are read in one round."""

_HIERARCHIES: tuple[Hierarchy, ...] = ("v3", "v2", "draft")


def find_arrays(
    base: BaseStoreHandle, paths: Iterable[str] | str | None = None
) -> list[FoundArray]:
    """The arrays of a store, sorted by path.

    What has the name of an array document and holds no JSON object is among them, with an
    empty `doc`.

    Parameters
    ----------
    paths
        Of arrays, of groups, which stand for all below them, or patterns as ``"raw/*"``;
        ``None``: all arrays.

    Cost: the path of an array takes one round; all else a walk through the store.

    Raises
    ------
    SpecError
        If a path names no array.
    """
    if paths is None:
        return _in_order(base.run(_find_all()))
    found: dict[Node, FoundArray] = {}
    every: dict[Node, FoundArray] | None = None
    for pattern in paths_of(paths):
        matches = arrays_at(base, pattern)
        if not matches:
            if every is None:
                every = base.run(_find_all())
            selected = select_paths({node.path for node in every}, pattern)
            matches = [array for node, array in every.items() if node.path in selected]
        found |= {array.node: array for array in matches}
    return _in_order(found)


def select_paths(nodes: Collection[str], paths: Iterable[str] | str | None) -> set[str]:
    """Return those of the paths of `nodes` that the argument `paths` of a tool names.

    It names arrays and groups, or gives patterns of these (``"raw/*"``). A group stands for
    everything below it.

    >>> sorted(select_paths(["mask", "raw/a", "raw/b/x"], ["raw/b", "m*"]))
    ['mask', 'raw/b/x']

    Raises
    ------
    SpecError
        If a path or pattern names nothing.
    """
    if paths is None:
        return set(nodes)
    selected: set[str] = set()
    for pattern in paths_of(paths):
        found = {path for path in nodes if any(_matches(at, pattern) for at in _lineage(path))}
        if not found:
            names = ", ".join(map(repr, sorted(nodes)[:10])) or "none"
            raise SpecError(f"no array has the path {pattern!r}, and no group; there are {names}")
        selected |= found
    return selected


def _matches(path: str, pattern: str) -> bool:
    return path == pattern or fnmatchcase(path, pattern)


def _lineage(path: str) -> list[str]:
    """Return the paths of the root, of all groups above a node, and of the node itself."""
    ends = [i for i, letter in enumerate(path) if letter == "/"]
    return ["", *(path[:end] for end in ends), path]


def arrays_at(base: BaseStoreHandle, path: str) -> list[FoundArray]:
    """The arrays at a path: of each hierarchy at most one."""
    path = check_prefix(array_path(path))
    return base.run(_read_documents([Node(hierarchy, path) for hierarchy in _HIERARCHIES]))


def read_array(found: FoundArray) -> StoredArray:
    """What an array document declares.

    Raises
    ------
    SpecError, UnsupportedError
        If it cannot be read, or declares what is not possible or not known.
    """
    if not found.doc:
        raise SpecError(f"{document_key(found.node)!r} holds no JSON object")
    array = _READER.read(found.node, found.doc)
    assert array is not None, "what was found is an array"
    return array


def _in_order(found: Mapping[Node, FoundArray]) -> list[FoundArray]:
    return [found[node] for node in sorted(found, key=lambda node: (node.path, node.hierarchy))]


def _find_all() -> Flow[dict[Node, FoundArray]]:
    hierarchy = yield from find_hierarchy()
    found = dict(hierarchy.arrays)
    others = [node for key in hierarchy.other_keys if (node := node_of_document(key)) is not None]
    for i in range(0, len(others), _DOCUMENTS_AT_ONCE):
        broken = yield from _read_documents(others[i : i + _DOCUMENTS_AT_ONCE])
        found |= {array.node: array for array in broken}
    return found


def _read_documents(nodes: Sequence[Node]) -> Flow[list[FoundArray]]:
    replies: list[Found] = yield [Get(document_key(node)) for node in nodes]
    found = []
    for node, reply in zip(nodes, replies, strict=True):
        if reply.value is None:
            continue
        doc = parse_json(reply.value)
        if doc is None:
            found.append(FoundArray(node, {}, None))
        elif is_array_document(node, doc):
            found.append(FoundArray(node, doc, plain_geometry(node.hierarchy, doc)))
    return found
