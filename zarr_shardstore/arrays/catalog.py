"""Which keys belong to which array that something stands between: a sharding, as a rule.

A key is a chunk key only if the metadata document of its array says so; for arrays without a
document the ``chunks_per_shard`` of the store says so. Documents are read when a key is first met
that could be a chunk of their array; nothing is listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from zarr_shardstore.arrays.array_cache import (
    ArrayCache,
    Generation,
    RecentArrays,
    State,
    StoredArray,
)
from zarr_shardstore.arrays.policy import ShardingPolicy
from zarr_shardstore.errors import ShardStoreError, SpecError
from zarr_shardstore.format.grid import is_inside
from zarr_shardstore.format.index import DRAFT_INDEX
from zarr_shardstore.format.keys import (
    DRAFT_DATA_ROOT,
    ChunkKeyEncoding,
    Coords,
    check_key,
    draft_candidate,
    odd_candidates,
    v3_candidates,
)
from zarr_shardstore.format.layout import ArrayLayout, ChunkRef, ShardRef
from zarr_shardstore.format.ranges import ByteRange
from zarr_shardstore.format.sharding_spec import ShardingSpec
from zarr_shardstore.metadata.documents import Node, node_of_document
from zarr_shardstore.shards.read import ShardReads
from zarr_shardstore.shards.requests import Flow
from zarr_shardstore.shards.shard_listing import GridDirectory, locate_directory


@dataclass(frozen=True, slots=True)
class InvalidChunkKey:
    """A key in an array that is no chunk key of it.

    Parameters
    ----------
    node : Node
        Whose document says so.
    is_outside : bool
        It is spelled like one, but lies outside the grid.
    message : str
        What is wrong, for whoever wants to write it.
    """

    node: Node
    is_outside: bool
    message: str


@dataclass(frozen=True, slots=True)
class TransformedKey:
    """A key of an array whose stack is not just one sharding."""

    key: str
    array: StoredArray


@dataclass(frozen=True, slots=True)
class _Located:
    """A key, cut into array and coordinates."""

    owner: StoredArray | ArrayLayout
    coords: Coords


_Answer: TypeAlias = "_Located | InvalidChunkKey | ShardStoreError | None"
"""``None``: the key is no chunk key."""


class Catalog:
    """Finds the array that a key belongs to.

    Thread safety: may be used from any thread.
    """

    def __init__(self, policy: ShardingPolicy, known: ArrayCache) -> None:
        self._policy = policy
        self._known = known
        self.recent = RecentArrays(known)

    def chunks_of(
        self, keys: Sequence[str]
    ) -> Flow[list[ChunkRef | TransformedKey | InvalidChunkKey | None]]:
        """The chunks that keys name; ``None`` for a key that passes through.

        Before a key is called a misfit its document is read again: another process may have
        resized the array.

        Raises
        ------
        SpecError, UnsupportedError
            If a key is not valid, or the document of an array that it belongs to is bad.
        """
        chunks: list[ChunkRef | TransformedKey | InvalidChunkKey | None] = [
            *self.recent.chunks_of(keys)
        ]
        if len(keys) > 1 and chunks[0] is None and self._meet(keys[0]):
            chunks = [*self.recent.chunks_of(keys)]
        left = [i for i, chunk in enumerate(chunks) if chunk is None]
        for i in left:  # what an array knows as its own is valid
            check_key(keys[i])
        if left:
            found = yield from self._find_chunks([keys[i] for i in left])
            for i, chunk in zip(left, found, strict=True):
                chunks[i] = chunk
        return chunks

    def reads_by_shard(
        self, keys: Sequence[str], byte_ranges: Sequence[ByteRange | None] | None
    ) -> list[ShardReads] | None:
        """Reads of keys that are all known to be chunks; ``None``: ask `chunks_of`.

        Raises
        ------
        SpecError
            If a key is not valid.
        """
        groups = self.recent.by_shard(keys, byte_ranges)
        if not groups and len(keys) > 1 and self._meet(keys[0]):
            groups = self.recent.by_shard(keys, byte_ranges)
        n_known = sum(len(group.positions) for group in groups)
        return groups if n_known == len(keys) else None

    def _meet(self, key: str) -> bool:
        """See that the array of a chunk key is a recent one; false if more must be asked first."""
        check_key(key)
        knowledge = self._known.now()
        answer = self._locate_one(key, True, knowledge, {})
        if not isinstance(answer, _Located):
            return False
        self._met(answer.owner, knowledge)
        return True

    def _met(self, owner: StoredArray | ArrayLayout, knowledge: Generation) -> None:
        layout = owner.layout if isinstance(owner, StoredArray) else owner
        self.recent.met(layout, knowledge)

    def _find_chunks(
        self, keys: Sequence[str]
    ) -> Flow[list[ChunkRef | TransformedKey | InvalidChunkKey | None]]:
        knowledge = self._known.now()
        answers = yield from self._locate(keys, knowledge, in_grid=True)
        misfits = {a.node for a in answers if isinstance(a, InvalidChunkKey)}
        if misfits:
            for node in misfits:
                knowledge.forget(node)
            answers = yield from self._locate(keys, knowledge, in_grid=True)
        chunks: list[ChunkRef | TransformedKey | InvalidChunkKey | None] = []
        shards: dict[tuple[int, Coords], ShardRef] = {}  # one object for all chunks of a shard
        for key, answer in zip(keys, answers, strict=True):
            match answer:
                case ShardStoreError():
                    raise answer
                case _Located(StoredArray() as array, coords) if array.layout is None:
                    chunks.append(TransformedKey(key, array))
                case _Located(owner, coords):
                    chunks.append(_layout_of(owner).chunk(coords, key, shards))
                case _:
                    chunks.append(answer)
        return chunks

    def chunk_without_document(self, key: str) -> ChunkRef | None:
        """The chunk that a key named before this store erased the document of its array.

        Who erases an array key by key may begin with its metadata.
        """
        for nodes, suffix in self._candidates(key):
            for node in nodes:
                array = self._known.erased_at(node)
                if array is not None and array.layout is not None:
                    coords = array.layout.encoding.decode(suffix, array.layout.ndim)
                    return None if coords is None else array.layout.chunk(coords, key)
        return None

    def shards_of(
        self, base_keys: Sequence[str]
    ) -> Flow[list[ShardRef | TransformedKey | ShardStoreError | None]]:
        """The shards that keys of the base store name; ``None`` for a key that is none.

        Where the document of an array is bad, the error stands in the place of the shard.
        """
        answers = yield from self._locate(base_keys, self._known.now(), in_grid=False)
        shards: list[ShardRef | TransformedKey | ShardStoreError | None] = []
        for key, answer in zip(base_keys, answers, strict=True):
            match answer:
                case _Located(StoredArray() as array) if array.layout is None:
                    shards.append(TransformedKey(key, array))
                case _Located(owner, coords):
                    shards.append(ShardRef(_layout_of(owner), coords, key))
                case ShardStoreError():
                    shards.append(answer)
                case _:
                    shards.append(None)
        return shards

    def directory_of(
        self, directory: str, *, or_own: bool = False, is_strict: bool = True
    ) -> Flow[GridDirectory | StoredArray | None]:
        """The array in whose grid a directory lies; ``None`` if there is none with metadata.

        With `or_own` the array's own directory counts. An array whose stack is not just one
        sharding is returned as it is.

        Raises
        ------
        SpecError, UnsupportedError
            If it is strict, and the document of such an array is bad.
        """
        path = directory.removesuffix("/")
        # "foo/c/96/" continues to a chunk key, if foo is an array of enough dimensions.
        nodes = [node for parent, _ in v3_candidates(path) for node in _flat_nodes(parent)]
        candidate = draft_candidate(path)
        if candidate is not None:
            nodes.append(Node("draft", candidate[0]))
        if or_own:
            nodes[:0] = _flat_nodes(path)
            if directory.startswith(DRAFT_DATA_ROOT):
                nodes.append(Node("draft", path[len(DRAFT_DATA_ROOT) :]))
        known = yield from self._known.know(nodes, self._known.now())
        for node in nodes:
            array = known[node]
            if isinstance(array, ShardStoreError) and is_strict:
                raise array
            if isinstance(array, StoredArray) and array.stack:
                if array.layout is None:
                    return array
                found = locate_directory(array.layout, directory)
                if found is not None:
                    return found
        return None

    def has_array(self, path: str) -> Flow[bool]:
        """Whether there is an array document of Zarr v3 or v2 at `path`."""
        known = yield from self._known.know(_flat_nodes(path), self._known.now())
        return any(array is not None for array in known.values())

    def may_lack_metadata(self, directory: str) -> bool:
        """Whether a directory may be, or be inside, an array that only the option declares."""
        known = self._known.now()
        segments = directory.removesuffix("/").split("/")
        parents = ["/".join(segments[:n]) for n in range(len(segments) + 1)]
        if any(self._policy.names(p) and not known.has_any(_flat_nodes(p)) for p in parents):
            return True
        root = DRAFT_DATA_ROOT.removesuffix("/")
        paths = [p[len(root) + 1 :] for p in parents if p == root or p.startswith(f"{root}/")]
        return any(
            self._policy.needs_no_metadata("draft", p) and not known.has_any([Node("draft", p)])
            for p in paths
        )

    def _locate(
        self, keys: Sequence[str], knowledge: Generation, *, in_grid: bool
    ) -> Flow[list[_Answer]]:
        known: dict[Node, State] = {}
        answers: list[_Answer] = [None] * len(keys)
        open_positions: Sequence[int] = range(len(keys))
        last: _Answer = None
        while open_positions:
            unknown: dict[int, list[Node]] = {}
            for i in open_positions:
                sibling = _locate_sibling(last, keys[i], in_grid)
                if sibling is not None:
                    answers[i] = sibling
                    continue
                answer = self._locate_one(keys[i], in_grid, knowledge, known)
                if isinstance(answer, list):
                    unknown[i] = answer
                else:
                    answers[i] = last = answer
            if unknown:
                nodes = dict.fromkeys(node for nodes in unknown.values() for node in nodes)
                known |= yield from self._known.know(list(nodes), knowledge)
            open_positions = list(unknown)
        if isinstance(last, _Located) and in_grid:
            self._met(last.owner, knowledge)
        return answers

    def _locate_one(
        self, key: str, in_grid: bool, knowledge: Generation, just_learned: dict[Node, State]
    ) -> _Answer | list[Node]:
        """What is known about a key, or which documents must be read to know more."""
        for nodes, suffix in self._candidates(key):
            unknown: list[Node] = []
            otherwise: _Answer = None
            for node in nodes:
                array = just_learned.get(node) or knowledge.arrays.get(node)
                if array is None and node not in just_learned and node not in knowledge.absent:
                    unknown.append(node)
                if unknown:
                    continue  # those before this one come first
                if isinstance(array, StoredArray):
                    answer = _locate_in(array, key, suffix, in_grid)
                    if _may_spell(array, suffix):
                        return answer
                    otherwise = answer  # or of the array of the other format at this path
                elif array is not None:
                    return array
            if unknown:
                return unknown
            if otherwise is not None:
                return otherwise
        is_usual = False
        for nodes, suffix in self._candidates(key):
            is_usual = True
            node = nodes[0]
            if self._policy.needs_no_metadata(node.hierarchy, node.path):
                return self._locate_by_rule(node, key, suffix)
        return None if is_usual else self._locate_odd(key, in_grid, knowledge, just_learned)

    def _locate_odd(
        self, key: str, in_grid: bool, knowledge: Generation, just_learned: dict[Node, State]
    ) -> _Answer | list[Node]:
        """A key that the usual grammar of chunk keys does not give to an array.

        It may be spelled by a separator of its own; or be a chunk key, spelled in a way that is
        not known, of an array that declares what is not understood.
        """
        if node_of_document(key) is not None:
            return None
        makes = _draft_nodes if key.startswith(DRAFT_DATA_ROOT) else _flat_nodes
        odd = [(makes(directory), suffix) for directory, suffix in odd_candidates(key)]
        nodes = dict.fromkeys(node for found, _ in odd for node in found)
        known = {node: just_learned.get(node) or knowledge.arrays.get(node) for node in nodes}
        unknown = [
            node
            for node, array in known.items()
            if array is None and node not in just_learned and node not in knowledge.absent
        ]
        if unknown:
            return unknown
        for found, suffix in odd:
            for node in found:
                array = known[node]
                if isinstance(array, ShardStoreError):
                    return array
                if array is not None and array.is_spelled_oddly:
                    answer = _locate_in(array, key, suffix, in_grid)
                    if not isinstance(answer, InvalidChunkKey) or answer.is_outside:
                        return answer
        return None

    def _candidates(self, key: str) -> Iterator[tuple[list[Node], str]]:
        """Places of arrays that may own a key, with the rest of the key."""
        draft = draft_candidate(key)
        if draft is not None:
            yield [Node("draft", draft[0])], draft[1]
            if self._policy.needs_no_metadata("draft", draft[0]):
                return  # a chunk by the option; no document of another hierarchy is asked for
        for path, suffix in v3_candidates(key):
            yield [Node("v3", path)] if suffix.startswith("c") else _flat_nodes(path), suffix

    def _locate_by_rule(self, node: Node, key: str, suffix: str) -> _Answer:
        """A key of an array that has no document, spelled as it spells itself."""
        encoding = _encoding_of(node, suffix)
        coords: Coords | None = ()
        if not _is_zero_dim(encoding, suffix):
            n_numbers = suffix.replace(".", "/").removeprefix("c/").count("/") + 1
            coords = encoding.decode(suffix, n_numbers)
        assert coords is not None, "candidates are well-formed"
        try:
            cps = self._policy.for_array(node.path, len(coords))
        except SpecError as error:
            return InvalidChunkKey(node, False, f"key {key!r}: {error}")
        if cps is None:
            return None
        return _Located(_layout_by_rule(node, encoding, cps), coords)


@lru_cache(maxsize=256)
def _layout_by_rule(node: Node, encoding: ChunkKeyEncoding, cps: Coords) -> ArrayLayout:
    spec = ShardingSpec(cps, DRAFT_INDEX)
    return ArrayLayout(node.path, node.chunk_prefix, encoding, None, spec)


def _flat_nodes(path: str) -> list[Node]:
    """Places of an array whose keys are below its own path; v3 comes first, as in zarr."""
    return [Node("v3", path), Node("v2", path)]


def _draft_nodes(path: str) -> list[Node]:
    return [Node("draft", path)]


def _layout_of(owner: StoredArray | ArrayLayout) -> ArrayLayout:
    layout = owner.layout if isinstance(owner, StoredArray) else owner
    assert layout is not None
    return layout


def _may_spell(array: StoredArray, suffix: str) -> bool:
    geometry = array.document.geometry
    return geometry is None or (geometry.encoding.style == "v2") != suffix.startswith("c")


def _locate_in(array: StoredArray, key: str, suffix: str, in_grid: bool) -> _Answer:
    geometry, grid_shape = array.document.geometry, array.grid_shape
    if not array.stack or geometry is None or grid_shape is None:
        return None
    encoding, ndim, path = geometry.encoding, len(grid_shape), array.node.path
    coords = encoding.decode(suffix, ndim)
    if coords is None:
        first = array.node.chunk_prefix + encoding.encode((0,) * ndim)
        return InvalidChunkKey(
            array.node,
            False,
            f"key {key!r} is no chunk key of the array {path!r}, which has {ndim} dimensions "
            f"and keys like {first!r}",
        )
    if in_grid and not is_inside(coords, grid_shape):
        return InvalidChunkKey(
            array.node,
            True,
            f"key {key!r} lies outside the array {path!r}, which has {grid_shape} chunks",
        )
    return _Located(array, coords)


def _locate_sibling(last: _Answer, key: str, in_grid: bool) -> _Located | None:
    """A key of the array of the key before, found without looking at other places.

    Two keys that differ only in the numbers after the path of their array may belong to the
    same other arrays on the way to it, and of the first these are known not to own it.
    """
    if not isinstance(last, _Located):
        return None
    if isinstance(last.owner, ArrayLayout):
        return _locate_without_document(last.owner, key)
    array, grid_shape = last.owner, last.owner.grid_shape
    coords = array.coords_of(key)
    if coords is None or grid_shape is None:
        return None
    if in_grid and not is_inside(coords, grid_shape):
        return None
    return _Located(array, coords)


def _locate_without_document(layout: ArrayLayout, key: str) -> _Located | None:
    """As `_locate_sibling`: a draft key of an array that is known to have no document."""
    if layout.encoding.style != "draft" or not key.startswith(layout.prefix):
        return None
    coords = layout.coords_of(key)
    return None if coords is None else _Located(layout, coords)


def _encoding_of(node: Node, suffix: str) -> ChunkKeyEncoding:
    """The encoding that a suffix without metadata is written in."""
    separator: Literal["/", "."] = "." if "." in suffix else "/"
    if node.hierarchy == "draft":
        return ChunkKeyEncoding("draft", separator)
    return ChunkKeyEncoding("default" if suffix.startswith("c") else "v2", separator)


def _is_zero_dim(encoding: ChunkKeyEncoding, suffix: str) -> bool:
    return encoding.style != "v2" and suffix == "c"
