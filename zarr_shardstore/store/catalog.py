"""Which keys belong to which sharded array.

A key is a chunk key only if the metadata document of its array says so; for arrays without a
document the ``chunks_per_shard`` of the store says so. The catalog reads each document once,
when it first meets a key that could be a chunk of that array, and never lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.documents import (
    ArrayDocument,
    Node,
    document_key,
    parse_array,
    parse_json,
)
from zarr_shardstore.format.index import DRAFT_INDEX
from zarr_shardstore.format.keys import (
    DRAFT_DATA_ROOT,
    ChunkKeyEncoding,
    Coords,
    draft_candidate,
    v3_candidates,
)
from zarr_shardstore.format.layout import ArrayLayout, ChunkRef, ShardRef
from zarr_shardstore.format.spec import ShardingSpec
from zarr_shardstore.plan.listing import GridDirectory, locate_directory
from zarr_shardstore.plan.requests import Exists, Flow, Found, Get, Request
from zarr_shardstore.store.policy import ShardingPolicy

__all__ = ["Catalog", "Misfit"]

_MAX_ABSENT = 65_536
"""Places without an array that are remembered; stray numeric keys could make any number."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """A key in a sharded array that is no chunk key of it.

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
class _Located:
    """A key, cut into array and coordinates."""

    layout: ArrayLayout
    coords: Coords


_Answer: TypeAlias = "_Located | Misfit | None"
"""``None``: the key is no chunk key."""


class Catalog:
    """What is known of the arrays of one store.

    Thread safety: may be used from any thread; what is learned twice is learned equal.
    """

    def __init__(self, policy: ShardingPolicy) -> None:
        self._policy = policy
        self._arrays: dict[Node, ArrayDocument] = {}
        self._absent: dict[Node, None] = {}

    # ------------------------------------------------------------ learning

    def learn(self, node: Node, array: ArrayDocument | None) -> None:
        """Remember what is at `node`; ``None``: no array."""
        if array is not None:
            self._absent.pop(node, None)
            self._arrays[node] = array
            return
        self._arrays.pop(node, None)
        self._absent[node] = None
        while len(self._absent) > _MAX_ABSENT:
            self._absent.pop(next(iter(self._absent)), None)

    def learn_document(self, node: Node, data: bytes | memoryview | None) -> None:
        """Remember what the stored document of `node` says; ``None``: there is none."""
        doc = None if data is None else parse_json(data)
        self.learn(node, None if doc is None else parse_array(node, doc))

    def forget(self, node: Node) -> None:
        """Read the document of `node` again when it is next needed."""
        self._arrays.pop(node, None)
        self._absent.pop(node, None)

    def forget_directory(self, prefix: str) -> None:
        """Forget all arrays whose document key starts with `prefix`."""
        for known in (self._arrays, self._absent):
            for node in [n for n in list(known) if document_key(n).startswith(prefix)]:
                known.pop(node, None)

    def clear(self) -> None:
        """Forget everything."""
        self._arrays.clear()
        self._absent.clear()

    # ----------------------------------------------------------- resolving

    def chunks_of(self, keys: Sequence[str]) -> Flow[list[ChunkRef | Misfit | None]]:
        """The chunks that keys name; ``None`` for a key that passes through.

        Before a key is called a misfit its document is read again: another process may have
        resized the array.
        """
        answers = yield from self._locate(keys, in_grid=True)
        misfits = {a.node for a in answers if isinstance(a, Misfit)}
        if misfits:
            for node in misfits:
                self.forget(node)
            answers = yield from self._locate(keys, in_grid=True)
        chunks: list[ChunkRef | Misfit | None] = []
        for key, a in zip(keys, answers, strict=True):
            chunks.append(a.layout.chunk(a.coords, key) if isinstance(a, _Located) else a)
        return chunks

    def shards_of(self, base_keys: Sequence[str]) -> Flow[list[ShardRef | None]]:
        """The shards that keys of the base store name; ``None`` for any other key."""
        answers = yield from self._locate(base_keys, in_grid=False)
        return [
            ShardRef(a.layout, a.coords, key) if isinstance(a, _Located) else None
            for key, a in zip(base_keys, answers, strict=True)
        ]

    def directory_of(self, directory: str, *, or_own: bool = False) -> Flow[GridDirectory | None]:
        """Where a directory lies inside the grid of an array that has metadata.

        ``None`` if it does not; with `or_own`, the array's own directory is found too.
        """
        path = directory.removesuffix("/")
        # "foo/c/96/" continues to a chunk key, if foo is an array of enough dimensions.
        nodes = [Node("v3", parent) for parent, _ in v3_candidates(path)]
        candidate = draft_candidate(path)
        if candidate is not None:
            nodes.append(Node("draft", candidate[0]))
        if or_own:
            nodes.insert(0, Node("v3", path))
            if directory.startswith(DRAFT_DATA_ROOT):
                nodes.append(Node("draft", path[len(DRAFT_DATA_ROOT) :]))
        nodes = [node for node in nodes if node not in self._absent]
        yield from self._learn_unknown(nodes)
        for node in nodes:
            array = self._arrays.get(node)
            if array is not None and array.layout is not None:
                found = locate_directory(array.layout, directory)
                if found is not None:
                    return found
        return None

    def has_array(self, node: Node) -> Flow[bool]:
        """Whether there is an array document at `node`."""
        yield from self._learn_unknown([node])
        return node in self._arrays

    def may_lack_metadata(self, directory: str) -> bool:
        """Whether a directory may be, or be inside, an array that only the option declares."""
        segments = directory.removesuffix("/").split("/")
        parents = ["/".join(segments[:n]) for n in range(len(segments) + 1)]
        if any(self._policy.names(p) and Node("v3", p) not in self._arrays for p in parents):
            return True
        root = DRAFT_DATA_ROOT.removesuffix("/")
        paths = [p[len(root) + 1 :] for p in parents if p == root or p.startswith(f"{root}/")]
        return any(self._policy.has_rule(p) and Node("draft", p) not in self._arrays for p in paths)

    def _locate(self, keys: Sequence[str], *, in_grid: bool) -> Flow[list[_Answer]]:
        absent: set[Node] = set()
        answers: list[_Answer] = [None] * len(keys)
        open_positions: Sequence[int] = range(len(keys))
        while open_positions:
            unknown: dict[int, Node] = {}
            for i in open_positions:
                answer = self._locate_one(keys[i], in_grid, absent)
                if isinstance(answer, Node):
                    unknown[i] = answer
                else:
                    answers[i] = answer
            if unknown:
                absent |= yield from self._learn_unknown(list(dict.fromkeys(unknown.values())))
            open_positions = list(unknown)
        return answers

    def _learn_unknown(self, nodes: Sequence[Node]) -> Flow[set[Node]]:
        """Read the documents of nodes that are not known yet; return those without an array."""
        absent: set[Node] = set()
        unknown = [n for n in nodes if n not in self._arrays and n not in self._absent]
        # Where the store's own rule would apply, a document is not expected: ask whether it
        # is there before it is read, so that writing a whole shard reads nothing.
        doubtful = [n for n in unknown if n.hierarchy == "draft" and self._policy.has_rule(n.path)]
        if doubtful:
            exist: list[bool] = yield [Exists(document_key(n)) for n in doubtful]
            for node, is_there in zip(doubtful, exist, strict=True):
                if not is_there:
                    self.learn(node, None)
                    absent.add(node)
        unknown = [n for n in unknown if n not in absent]
        if unknown:
            # An array that the option names, and that exists in format 2, does not lack metadata.
            named = [n for n in unknown if n.hierarchy == "v3" and self._policy.names(n.path)]
            batch: list[Request] = [Get(document_key(n)) for n in unknown]
            replies = yield batch + [Exists(f"{n.path}/.zarray".lstrip("/")) for n in named]
            in_format_2 = {
                n for n, is_there in zip(named, replies[len(unknown) :], strict=True) if is_there
            }
            for node, found in zip(unknown, replies, strict=False):
                self._learn_reply(node, found, node in in_format_2)
                if node not in self._arrays:
                    absent.add(node)
        return absent

    def _learn_reply(self, node: Node, found: Found, is_in_format_2: bool) -> None:
        """Remember in one step what is at `node`: other tasks must not see half of it."""
        if found.value is None and is_in_format_2:
            self.learn(node, ArrayDocument(node, None, None, None))
        else:
            self.learn_document(node, found.value)

    def _locate_one(self, key: str, in_grid: bool, just_absent: set[Node]) -> _Answer | Node:
        """What is known about a key, or which document must be read to know more."""
        for node, suffix in self._candidates(key):
            array = self._arrays.get(node)
            if array is not None:
                return _locate_in(array, key, suffix, in_grid)
            if node not in self._absent and node not in just_absent:
                return node
        for node, suffix in self._candidates(key):
            has_rule = self._policy.has_rule if node.hierarchy == "draft" else self._policy.names
            if has_rule(node.path):
                return self._locate_by_rule(node, key, suffix)
        return None

    def _candidates(self, key: str) -> Iterator[tuple[Node, str]]:
        """Places of arrays that may own a key, with the rest of the key."""
        draft = draft_candidate(key)
        if draft is not None:
            yield Node("draft", draft[0]), draft[1]
            if self._policy.has_rule(draft[0]):
                return  # a chunk by the option; no document of another hierarchy is asked for
        for path, suffix in v3_candidates(key):
            yield Node("v3", path), suffix

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
            return Misfit(node, False, f"key {key!r}: {error}")
        if cps is None:
            return None
        spec = ShardingSpec(cps, DRAFT_INDEX)
        return _Located(ArrayLayout(node.path, node.chunk_prefix, encoding, None, spec), coords)


def _locate_in(array: ArrayDocument, key: str, suffix: str, in_grid: bool) -> _Answer:
    layout = array.layout
    if layout is None:
        return None
    coords = layout.encoding.decode(suffix, layout.ndim)
    if coords is None:
        return Misfit(
            array.node,
            False,
            f"key {key!r} is no chunk key of the array {layout.path!r}, which has {layout.ndim} "
            f"dimensions and keys like {layout.chunk((0,) * layout.ndim).key!r}",
        )
    if in_grid and not layout.has_chunk(coords):
        return Misfit(
            array.node,
            True,
            f"key {key!r} lies outside the array {layout.path!r}, which has "
            f"{layout.grid_shape} chunks",
        )
    return _Located(layout, coords)


def _encoding_of(node: Node, suffix: str) -> ChunkKeyEncoding:
    """The encoding that a suffix without metadata is written in."""
    separator: Literal["/", "."] = "." if "." in suffix else "/"
    if node.hierarchy == "draft":
        return ChunkKeyEncoding("draft", separator)
    return ChunkKeyEncoding("default" if suffix.startswith("c") else "v2", separator)


def _is_zero_dim(encoding: ChunkKeyEncoding, suffix: str) -> bool:
    return encoding.style != "v2" and suffix == "c"
