"""Catalog: the array that a key belongs to, if the array has transformers.

A key is a chunk key only if the metadata document of its array says so. For arrays without a
document the ``chunks_per_shard`` of the store says so. A document is read when a key could first
be a chunk of its array. No directory is listed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

from zarr_shardstore.arrays.array_cache import ArrayCache, CachedArray, Generation
from zarr_shardstore.arrays.policy import ShardingPolicy
from zarr_shardstore.arrays.stored_array import StoredArray
from zarr_shardstore.errors import (
    ShardStoreError,
    SpecError,
    UnfinishedConversionError,
    UnsupportedError,
)
from zarr_shardstore.format import keys as chunk_keys
from zarr_shardstore.format.layout import ArrayLayout, ChunkRef, ShardRef, is_inside
from zarr_shardstore.format.shard import DRAFT_INDEX, ShardingSpec
from zarr_shardstore.metadata.documents import Node, document_key, node_of_document
from zarr_shardstore.shards.requests import Flow
from zarr_shardstore.shards.shard_listing import GridDirectory, locate_directory


class InvalidChunkKey(NamedTuple):
    """Key below an array that is no chunk key of the array, and the text of the error."""

    node: Node
    is_outside: bool
    """True for the spelling of a chunk key outside the grid."""
    message: str


class TransformedKey(NamedTuple):
    """Key of an array whose stack is not one sharding alone."""

    key: str
    array: StoredArray


_Found: TypeAlias = (
    "ChunkRef | ShardRef | TransformedKey | InvalidChunkKey | ShardStoreError | None"
)
"""``None``: the key passes to the base store."""

_State: TypeAlias = CachedArray | Literal["unread"]
"""The array at a place, as far as documents were read."""


class Catalog:
    """Finder of the array that a key belongs to. Thread safety: as `ArrayCache`."""

    def __init__(self, policy: ShardingPolicy, arrays: ArrayCache) -> None:
        self.arrays = arrays
        self._policy = policy

    def chunks_of(
        self, keys: Sequence[str], *, are_values: bool = True
    ) -> Flow[list[ChunkRef | TransformedKey | InvalidChunkKey | None]]:
        """Return the chunks that keys name; ``None`` for a key that passes to the base store.

        A bad document of an array raises its error. Keys of an array with an unknown declaration
        pass unless `are_values`, because listings and sizes are about stored objects.
        """
        generation = self.arrays.current()
        chunks: list[Any] = generation.chunks_of(keys)
        left = {i: keys[i] for i, chunk in enumerate(chunks) if chunk is None}
        if not left:
            return chunks
        answers = yield from self._locate([*left.values()], generation, in_grid=True)
        invalid = {answer.node for answer in answers if isinstance(answer, InvalidChunkKey)}
        if invalid:  # another process may have resized the array
            before = {node: generation.drop(node) for node in invalid}
            left = dict(enumerate(keys))  # also keys inside the former grid: all in one layout
            answers = yield from self._locate(keys, generation, in_grid=True)
            for node, array in before.items():
                now = generation.arrays.get(node)
                if array is not None and now is not None and not array.has_same_chunks(now):
                    raise generation.refuse(node)
        passing = () if are_values else UnsupportedError
        for i, answer in zip(left, answers, strict=True):
            chunks[i] = None if isinstance(answer, passing) else answer
            if isinstance(chunks[i], ShardStoreError):
                raise chunks[i]
        return chunks

    def erased_array(self, key: str) -> StoredArray | None:
        """Return the array that a key named a chunk of before this store erased its document.
        Callers that erase an array key by key may begin with the document."""
        absent = self.arrays.current().absent
        for node in _nodes_above(key):
            array = self.arrays.erased.get(node) if node in absent else None
            if array is not None and array.coords_of(key) is not None:
                return array
        return None

    def documents_above(self, keys: Iterable[str]) -> dict[str, ArrayLayout | None]:
        """Return the keys of the documents of the cached arrays of which keys spell chunks."""
        arrays = self.arrays.current().arrays
        found: dict[str, ArrayLayout | None] = {}
        done = set[str]()  # directories, of whose chunks one is enough
        for key in keys:
            directory = key.rpartition("/")[0]
            for node in _nodes_above(key) if directory not in done else ():
                if node.hierarchy == "v2" and Node("v3", node.path) in arrays:
                    continue  # another process has migrated it
                if node in arrays and arrays[node].coords_of(key) is not None:
                    found[document_key(node)] = None
                    done.add(directory)
        return found

    def shards_of(
        self, base_keys: Sequence[str]
    ) -> Flow[list[ShardRef | TransformedKey | ShardStoreError | None]]:
        """Return the shard that each key of the base store names, an error, or ``None``."""
        answers = yield from self._locate(base_keys, self.arrays.current(), in_grid=False)
        passing = ChunkRef | InvalidChunkKey | UnsupportedError
        return [None if isinstance(answer, passing) else answer for answer in answers]

    def directory_of(
        self, directory: str, *, or_own: bool = False, is_strict: bool = True
    ) -> Flow[GridDirectory | StoredArray | None]:
        """Return the array in whose grid a directory lies; ``None`` if none has metadata.

        With `or_own` the array's own directory counts. A `StoredArray` has other transformers than
        one sharding. If `is_strict`, a bad document raises its error; a hidden one always does.
        """
        path = directory.removesuffix("/")
        nodes = flat_nodes(path, or_draft=True) if or_own else []
        # "foo/c/96/" continues to a chunk key, if foo is an array of enough dimensions.
        for parent, _ in chunk_keys.v3_candidates(path):
            nodes += flat_nodes(parent)
        if candidate := chunk_keys.draft_candidate(path):
            nodes.append(Node("draft", candidate[0]))
        arrays = yield from self.arrays.lookup(nodes)
        for node in nodes:
            array = arrays[node]
            is_hidden = isinstance(array, UnfinishedConversionError)
            if isinstance(array, ShardStoreError) and (is_strict or is_hidden):
                raise array
            if isinstance(array, StoredArray) and array.stack:
                layout = array.layout
                found = array if layout is None else locate_directory(layout, directory)
                if found is None:
                    continue
                if (yield from self.arrays.confirm(layouts_of([found]))):  # it has grown
                    again = self.directory_of(directory, or_own=or_own, is_strict=is_strict)
                    return (yield from again)
                return found
        return None

    def may_lack_metadata(self, directory: str) -> bool:
        """Whether a directory may be, or be inside, an array that only the option declares."""
        cached = self.arrays.current().arrays
        parts = directory.removesuffix("/").split("/")
        return any(
            self._policy.needs_no_metadata(node.hierarchy, node.path)
            and not (node in cached or node.other_format in cached)
            for n in range(len(parts) + 1)
            for node in flat_nodes("/".join(parts[:n]), or_draft=True)
        )

    def _locate(
        self, keys: Sequence[str], generation: Generation, *, in_grid: bool
    ) -> Flow[list[_Found]]:
        """Return the chunk, or the shard unless `in_grid`, that each key names."""
        read: dict[Node, CachedArray] = {}
        answers: list[_Found] = [None] * len(keys)
        left: Sequence[int] = range(len(keys))
        while left:
            missing: dict[int, list[Node]] = {}
            for i in left:
                (chunk,) = generation.chunks_of([keys[i]]) if in_grid else (None,)
                answer = chunk or self._locate_one(keys[i], in_grid, generation, read)
                if isinstance(answer, list):
                    missing[i] = answer
                    continue
                answers[i] = answer
                if chunk is None and isinstance(answer, ChunkRef):
                    generation.add_key_table(answer.shard.layout)
            if missing:
                nodes = dict.fromkeys(node for nodes in missing.values() for node in nodes)
                read |= yield from self.arrays.lookup(list(nodes), generation)
            left = list(missing)
        return answers

    def _locate_one(
        self, key: str, in_grid: bool, generation: Generation, read: dict[Node, CachedArray]
    ) -> _Found | list[Node]:
        """Return what a key names, or the places that must be read first. `read` also has the bad
        documents, which are not cached."""

        def states_of(nodes: Sequence[Node]) -> dict[Node, _State]:
            states: dict[Node, _State] = {}
            for node in nodes:
                array = read.get(node) or generation.arrays.get(node)
                is_absent = generation.absent.get(node, 0.0) > time.monotonic()
                is_known = array is not None or node in read or is_absent
                states[node] = array if is_known else "unread"
            return states

        if in_grid:  # otherwise the base store has the key
            chunk_keys.check_key(key)
        candidates = list(self._candidates(key))
        for nodes, suffix in candidates:
            answer = _by_documents(states_of(nodes), key, suffix, in_grid)
            if answer != "elsewhere":
                return answer
        for nodes, suffix in candidates:
            if self._policy.needs_no_metadata(nodes[0].hierarchy, nodes[0].path):
                return self._by_rule(nodes[0], key, suffix, in_grid)
        if candidates or node_of_document(key) is not None:
            return None
        # The separator may be unusual, or the declaration and the spelling may be unknown.
        is_draft = key.startswith(chunk_keys.DRAFT_DATA_ROOT)
        odd: list[Node] = []
        for path, _ in chunk_keys.odd_candidates(key):
            odd += [Node("draft", path)] if is_draft else flat_nodes(path)
        return _by_odd_spelling(states_of(odd), key, in_grid)

    def _candidates(self, key: str) -> Iterator[tuple[list[Node], str]]:
        """Yield places of arrays that may own a key, and the suffix of the key there."""
        if draft := chunk_keys.draft_candidate(key):
            yield [Node("draft", draft[0])], draft[1]
            if self._policy.needs_no_metadata("draft", draft[0]):
                return  # a chunk by the option; no document of another hierarchy is read
        for path, suffix in chunk_keys.v3_candidates(key):
            yield [Node("v3", path)] if suffix.startswith("c") else flat_nodes(path), suffix

    def _by_rule(self, node: Node, key: str, suffix: str, in_grid: bool) -> _Found:
        """Cut a key of an array without a document, by the spelling of the key itself."""
        of_v3: chunk_keys.Style = "default" if suffix.startswith("c") else "v2"
        style = "draft" if node.hierarchy == "draft" else of_v3
        encoding = chunk_keys.ChunkKeyEncoding(style, "." if "." in suffix else "/")
        coords = tuple(map(int, re.findall("[0-9]+", suffix)))
        try:
            cps = self._policy.chunks_per_shard_of(node.path, len(coords))
        except SpecError as error:
            return InvalidChunkKey(node, False, f"key {key!r}: {error}")
        if cps is None:
            return None
        layout = _layout_by_rule(node, encoding, cps)
        return layout.chunk(coords, key) if in_grid else layout.shard(coords, key)


def layouts_of(found: Iterable[object]) -> dict[str, ArrayLayout | None]:
    """Return the layouts of chunks, shards, directories and transformed arrays, by the keys of
    their documents; not of others."""
    layouts: dict[str, ArrayLayout | None] = {}
    for each in found:
        layout: ArrayLayout | None = None
        match each:
            case ChunkRef(shard=ShardRef(layout=layout)):
                pass
            case ShardRef(layout=layout) | GridDirectory(layout=layout):
                pass
            case TransformedKey(array=array) | (StoredArray() as array):
                layout, _ = array.sharding
        if layout is not None:
            layouts[layout.document_key] = layout
    return layouts


@lru_cache(maxsize=256)
def _layout_by_rule(
    node: Node, encoding: chunk_keys.ChunkKeyEncoding, cps: chunk_keys.Coords
) -> ArrayLayout:
    spec = ShardingSpec(cps, DRAFT_INDEX)
    return ArrayLayout(node.path, node.chunk_prefix, encoding, None, spec)


def flat_nodes(path: str, *, or_draft: bool = False) -> list[Node]:
    """Return the places of an array whose chunk keys are below `path`, v3 first, as in zarr."""
    nodes = [Node("v3", path), Node("v2", path)]
    if or_draft and f"{path}/".startswith(chunk_keys.DRAFT_DATA_ROOT):
        nodes.append(Node("draft", path[len(chunk_keys.DRAFT_DATA_ROOT) :]))
    return nodes


def _nodes_above(key: str) -> Iterator[Node]:
    """Yield the places of all arrays of which a key may spell a chunk, the deepest first."""
    while key:
        key = key.rpartition("/")[0]
        yield from flat_nodes(key, or_draft=True)


def _by_documents(
    states: Mapping[Node, _State], key: str, suffix: str, in_grid: bool
) -> _Found | list[Node] | Literal["elsewhere"]:
    """Decide by the documents at one path which of their arrays has a key, or none."""
    of_other_format: _Found = None
    for state in states.values():
        match state:
            case None:
                pass
            case "unread":
                return [node for node, state in states.items() if state == "unread"]
            case StoredArray():
                answer = _locate_in(state, key, in_grid)
                geometry = state.document.geometry
                is_v2 = geometry is not None and geometry.encoding.style == "v2"
                if geometry is None or is_v2 != suffix.startswith("c"):
                    return answer
                of_other_format = answer
            case ShardStoreError():
                return state
    return "elsewhere" if of_other_format is None else of_other_format


def _by_odd_spelling(states: Mapping[Node, _State], key: str, in_grid: bool) -> _Found | list[Node]:
    """Decide which array has a key that is no usual chunk key."""
    if unread := [node for node, state in states.items() if state == "unread"]:
        return unread
    for state in states.values():
        match state:
            case ShardStoreError():
                return state
            case StoredArray(document=document) if document.geometry is not None:
                if document.geometry.encoding.separator not in ("/", "."):
                    answer = _locate_in(state, key, in_grid)
                    if not isinstance(answer, InvalidChunkKey) or answer.is_outside:
                        return answer
    return None


def _locate_in(array: StoredArray, key: str, in_grid: bool) -> _Found:
    geometry, grid_shape, node = array.document.geometry, array.grid_shape, array.node
    if not array.stack or geometry is None or grid_shape is None:
        return None
    encoding, prefix, ndim = geometry.encoding, node.chunk_prefix, len(grid_shape)
    coords = encoding.decode(key[len(prefix) :], ndim)
    if coords is None:
        first = prefix + encoding.encode((0,) * ndim)
        message = f"is no chunk key of the array {node.path!r}, which has {ndim} dimensions"
        return InvalidChunkKey(node, False, f"key {key!r} {message} and keys like {first!r}")
    if in_grid and not is_inside(coords, grid_shape):
        message = f"lies outside the array {node.path!r}, which has {grid_shape} chunks"
        return InvalidChunkKey(node, True, f"key {key!r} {message}")
    layout = array.layout
    if layout is None:
        return TransformedKey(key, array)
    return layout.chunk(coords, key) if in_grid else layout.shard(coords, key)
