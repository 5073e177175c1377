"""What an array is now, and what its documents say when it is something else.

Documents of Zarr v2 and v3 that stand at one path and have the same chunk keys, as after a
migration, are one array with two documents: both change, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zarr_shardstore.arrays.policy import NewArrays
from zarr_shardstore.arrays.registry import check_known
from zarr_shardstore.errors import ShardStoreError
from zarr_shardstore.format.consolidated_index import without_consolidated_index
from zarr_shardstore.format.grid import chunk_grid_shape
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.sharding_spec import ShardingSpec
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
class Form:
    """How the values of an array are stored.

    Parameters
    ----------
    spec : ShardingSpec, optional
        Of its shards; ``None``: each value has a key of its own.
    """

    spec: ShardingSpec | None

    @property
    def chunks_per_shard(self) -> Coords | None:
        """Values along each dimension of a shard."""
        return None if self.spec is None else self.spec.chunks_per_shard


@dataclass(frozen=True, slots=True)
class ArrayState:
    """An array as its stored documents describe it.

    Parameters
    ----------
    node : Node
        Its place; that of the v3 document, if there are two.
    documents : dict
        By place.
    geometry : Geometry, optional
        Of its values: chunks, as they are below all transformers but sharding.
    form : Form
        How they are stored.
    obstacle : str
        Why it cannot be converted, if so.
    """

    node: Node
    documents: dict[Node, Mapping[str, Any]]
    geometry: Geometry | None
    form: Form = field(default_factory=lambda: Form(None))
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
        self, form: Form, new_arrays: NewArrays, *, keeps_declaration: bool
    ) -> dict[str, dict[str, Any]]:
        """Documents, by key, of the same array in another form.

        Parameters
        ----------
        keeps_declaration
            What declares transformers already goes on to do so in the same way.
        """
        return {
            document_key(node): _declared_as(node, doc, form, new_arrays, keeps_declaration)
            for node, doc in self.documents.items()
        }


def array_states(arrays: Iterable[FoundArray]) -> list[ArrayState]:
    """What the arrays of a store are, in the order of their paths."""
    states: dict[Node, ArrayState] = {}
    for found in arrays:
        state = _state_of(found)
        twin = found.node.twin
        other = None if twin is None else states.get(twin)
        if other is None or not _share_keys(state, other):
            states[found.node] = state
        else:
            assert twin is not None
            states.pop(twin)
            both = _both(state, other)
            states[both.node] = both
    return sorted(states.values(), key=lambda state: state.path)


def _state_of(found: FoundArray) -> ArrayState:
    node = found.node
    doc = _without_choice(found.doc)
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
    return ArrayState(node, documents, document.geometry, Form(spec), obstacle)


def _split(
    transformers: tuple[TransformerSpec, ...], ndim: int
) -> tuple[tuple[TransformerSpec, ...], ShardingSpec | None]:
    """The transformers above the values, and the sharding nearest to the store, if any."""
    if transformers and transformers[-1].name == SHARDING:
        return transformers[:-1], sharding_spec(transformers[-1], ndim)
    return transformers, None


def _declared_as(
    node: Node, doc: Mapping[str, Any], form: Form, new_arrays: NewArrays, keeps_declaration: bool
) -> dict[str, Any]:
    doc = _without_choice(doc)
    declared = find_declaration(doc)
    above: tuple[TransformerSpec, ...] = ()
    if declared is not None:
        above, _ = _split(declared.transformers, len(doc["shape"]))
        doc = strip(doc, declared.how)
    sharding = () if form.spec is None else (sharding_transformer(form.spec),)
    transformers = (*above, *sharding)
    new = new_arrays.declare(node, transformers)
    if new is not None and declared is not None and keeps_declaration:
        new = Declared(declared.how, transformers)
    return dict(doc) if new is None else apply(doc, new)


def _without_choice(doc: Mapping[str, Any]) -> Mapping[str, Any]:
    """A document without the mark that leaves its sharding to zarr: here it is meant; and
    without the one of consolidated indexes: those are of shards that were there before."""
    doc = without_consolidated_index(doc)
    if is_native_by_choice(doc):
        return {name: member for name, member in doc.items() if name != MARKER}
    return doc


def _share_keys(state: ArrayState, other: ArrayState) -> bool:
    """Whether chunks of both have the same keys; in one dimension separators do not matter."""
    if state.geometry is None or other.geometry is None:
        return False
    spelled, spelled_there = state.geometry.encoding, other.geometry.encoding
    corners = [(0,) * len(geometry.shape) for geometry in (state.geometry, other.geometry)]
    return any(spelled.encode(corner) == spelled_there.encode(corner) for corner in corners)


def _both(state: ArrayState, other: ArrayState) -> ArrayState:
    v3, v2 = (state, other) if state.node.hierarchy == "v3" else (other, state)
    obstacle = v3.obstacle or v2.obstacle
    assert v3.geometry is not None
    is_same = v3.geometry.has_same_chunks(v2.geometry) and v3.form == v2.form
    if not is_same or v3.grid_shape != v2.grid_shape:
        obstacle = obstacle or "its documents of Zarr v2 and v3 contradict each other"
    return ArrayState(v3.node, v3.documents | v2.documents, v3.geometry, v3.form, obstacle)
