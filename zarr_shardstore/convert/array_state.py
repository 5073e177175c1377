"""Arrays as their documents describe them, and their documents in another form.

A migration leaves documents of Zarr v2 and v3 at one path, with the same chunk keys. They are one
array with two documents: either both change, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zarr_shardstore.arrays.policy import NewArrays
from zarr_shardstore.arrays.registry import check_known
from zarr_shardstore.errors import ShardStoreError
from zarr_shardstore.format.consolidated_index import without_consolidated_index
from zarr_shardstore.format.index import ShardingSpec
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import chunk_grid_shape
from zarr_shardstore.inspect.find import FoundArray
from zarr_shardstore.metadata.declaration import (
    MARKER,
    Declared,
    apply,
    find_declaration,
    has_sharding_codec,
    is_native_by_choice,
    strip,
)
from zarr_shardstore.metadata.documents import (
    Geometry,
    Node,
    chunk_nbytes,
    document_key,
    parse_array,
)
from zarr_shardstore.metadata.transformer_list import (
    SHARDING,
    TransformerSpec,
    sharding_spec,
    sharding_transformer,
)


@dataclass(frozen=True, slots=True)
class ArrayState:
    """An array as its stored documents describe it.

    Parameters
    ----------
    node : Node
        Its place; that of the v3 document, if there are two.
    documents : dict
        Documents by node.
    geometry : Geometry, optional
        Of its values: chunks, as they are below all transformers but sharding.
    spec : ShardingSpec, optional
        Of its shards; ``None``: each value has a key of its own.
    obstacle : str
        Reason why it cannot be converted, if so.
    """

    node: Node
    documents: dict[Node, Mapping[str, Any]]
    geometry: Geometry | None
    spec: ShardingSpec | None = None
    obstacle: str = ""

    @property
    def path(self) -> str:
        """Path of the array."""
        return self.node.path

    @property
    def grid_shape(self) -> Coords:
        """Number of values along each dimension."""
        assert self.geometry is not None
        return chunk_grid_shape(self.geometry.shape, self.geometry.chunk_shape)

    @property
    def nominal_nbytes(self) -> int | None:
        """Bytes of a value before compression; ``None`` if the data type does not tell."""
        if self.geometry is None:
            return None
        return chunk_nbytes(self.documents[self.node], self.geometry.chunk_shape)

    def documents_for(
        self, spec: ShardingSpec | None, new_arrays: NewArrays, *, keeps_declaration: bool
    ) -> dict[str, dict[str, Any]]:
        """Return the documents, by key, of the same array with other shards.

        Parameters
        ----------
        keeps_declaration
            A document that declares transformers continues to declare them in the same way.
        """
        return {
            document_key(node): _declared_as(node, doc, spec, new_arrays, keeps_declaration)
            for node, doc in self.documents.items()
        }


def array_states(arrays: Iterable[FoundArray]) -> list[ArrayState]:
    """Return the states of the arrays of a store, in the order of their paths."""
    states: dict[Node, ArrayState] = {}
    for found in arrays:
        state = _state_of(found)
        twin = found.node.twin
        other = None if twin is None else states.get(twin)
        if other is not None and _share_keys(state, other):
            del states[other.node]
            state = _with_both_documents(state, other)
        states[state.node] = state
    return sorted(states.values(), key=lambda state: state.path)


def _state_of(found: FoundArray) -> ArrayState:
    node = found.node
    doc = _without_marks(found.doc)
    documents = {node: found.doc}
    if found.geometry is None:
        return ArrayState(node, documents, None, obstacle="its chunk grid is not known here")
    try:
        document = parse_array(node, doc)
        assert document is not None
        above, spec = _split(document.transformers, len(found.geometry.shape))
        for transformer in above:
            check_known(transformer.name)
    except ShardStoreError as error:
        return ArrayState(node, documents, found.geometry, obstacle=str(error))
    obstacle = ""
    if any(transformer.name == SHARDING for transformer in above):
        obstacle = "other storage transformers lie below its shards"
    elif spec is None and has_sharding_codec(doc) and document.declaration is None:
        obstacle = "its own sharding has a form that cannot be re-packed"
    return ArrayState(node, documents, document.geometry, spec, obstacle)


def _split(
    transformers: tuple[TransformerSpec, ...], ndim: int
) -> tuple[tuple[TransformerSpec, ...], ShardingSpec | None]:
    """Split a stack into the transformers above the values, and the sharding, if any."""
    if transformers and transformers[-1].name == SHARDING:
        return transformers[:-1], sharding_spec(transformers[-1], ndim)
    return transformers, None


def _declared_as(
    node: Node,
    doc: Mapping[str, Any],
    spec: ShardingSpec | None,
    new_arrays: NewArrays,
    keeps_declaration: bool,
) -> dict[str, Any]:
    doc = _without_marks(doc)
    declared = find_declaration(doc)
    above: tuple[TransformerSpec, ...] = ()
    if declared is not None:
        above, _ = _split(declared.transformers, len(doc["shape"]))
        doc = strip(doc, declared.how)
    sharding = () if spec is None else (sharding_transformer(spec),)
    transformers = (*above, *sharding)
    new = new_arrays.declare(node, transformers)
    if new is not None and declared is not None and keeps_declaration:
        new = Declared(declared.how, transformers)
    return dict(doc) if new is None else apply(doc, new)


def _without_marks(doc: Mapping[str, Any]) -> Mapping[str, Any]:
    """Remove two members that do not hold for the array in another form.

    One leaves the sharding to zarr: here it is meant, too. The other announces a consolidated
    index: it is of the old shards.
    """
    doc = without_consolidated_index(doc)
    if is_native_by_choice(doc):
        return {name: member for name, member in doc.items() if name != MARKER}
    return doc


def _share_keys(state: ArrayState, other: ArrayState) -> bool:
    """Return whether chunks of both have the same keys: in one dimension no separator counts."""
    if state.geometry is None or other.geometry is None:
        return False
    spelled, spelled_there = state.geometry.encoding, other.geometry.encoding
    corners = [(0,) * len(geometry.shape) for geometry in (state.geometry, other.geometry)]
    return any(spelled.encode(corner) == spelled_there.encode(corner) for corner in corners)


def _with_both_documents(state: ArrayState, other: ArrayState) -> ArrayState:
    v3, v2 = (state, other) if state.node.hierarchy == "v3" else (other, state)
    obstacle = v3.obstacle or v2.obstacle
    assert v3.geometry is not None
    is_same = v3.geometry.has_same_chunks(v2.geometry) and v3.spec == v2.spec
    if not is_same or v3.grid_shape != v2.grid_shape:
        obstacle = obstacle or "its documents of Zarr v2 and v3 contradict each other"
    return ArrayState(v3.node, v3.documents | v2.documents, v3.geometry, v3.spec, obstacle)
