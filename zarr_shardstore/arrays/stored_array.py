"""Stored array: its document, and the stack of transformers that the document declares.

Transformers are made by name. This package has some, the process may register others, and other
packages add theirs by an entry point. The object takes the configuration (a mapping) and the array
(an `ArrayContext`) and returns a `StorageTransformer`::

    [project.entry-points."zarr_shardstore.storage_transformers"]
    "example.org/rot13" = "example_package:rot13"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from reprlib import repr as short
from typing import Any, NamedTuple, TypeAlias

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.consolidated_index import CONSOLIDATED_INDEX_NAME
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import ArrayLayout, is_inside
from zarr_shardstore.metadata import documents
from zarr_shardstore.metadata.declaration import MARKER, Native, is_sharded_by_zarr, strip
from zarr_shardstore.metadata.documents import ArrayDocument, Node
from zarr_shardstore.metadata.transformer_list import SHARDING
from zarr_shardstore.shards import stack as stacks
from zarr_shardstore.shards.read import ReadOptions

TransformerFactory: TypeAlias = Callable[
    [Mapping[str, Any], stacks.ArrayContext], stacks.StorageTransformer
]

_ENTRY_POINTS = "zarr_shardstore.storage_transformers"

_factories: dict[str, Any] = {SHARDING: None, "crc32c": stacks.crc32c}
"""Factories by name. `ArrayReader` itself makes the sharding."""


class StoredArray(NamedTuple):
    """An array document, and the transformers between its chunks and the base store."""

    document: ArrayDocument
    node: Node
    grid_shape: Coords | None
    """Number of chunks along each dimension, if it is known."""
    stack: stacks.Stack
    """Transformers, nearest to the array first; empty for plain chunks."""
    layout: ArrayLayout | None
    """Keys of chunks and shards, if the stack is one sharding alone."""
    unknown: str = ""
    """Why keys of the array pass: zarr shards it in an unknown form."""

    @property
    def sharding(self) -> tuple[ArrayLayout | None, stacks.Stack]:
        """Layout of the sharding in the stack, if there is one, and the transformers below it."""
        found = stacks.split_at_sharding(self.stack)
        return (None, ()) if found is None else (found[0].layout, found[1])

    def has_same_chunks(self, other: StoredArray | None) -> bool:
        """Whether both keep each chunk in the same place, with bytes that mean the same, where
        both arrays reach."""
        if other is None or bool(self.stack) != bool(other.stack):
            return False
        if self.layout is not None and other.layout is not None:
            return self.layout.has_same_entries(other.layout)
        if self.document.transformers != other.document.transformers:
            return False
        return self.document.geometry is None or self.document.has_same_chunks(other.document)

    def coords_of(self, key: str) -> Coords | None:
        """Return the coordinates that a chunk key spells, also outside the grid."""
        geometry, prefix = self.document.geometry, self.node.chunk_prefix
        if geometry is None or not key.startswith(prefix):
            return None
        return geometry.encoding.decode(key[len(prefix) :], len(geometry.shape))

    def is_outside(self, key: str) -> bool:
        """Whether a key spells a chunk outside the grid."""
        coords, grid_shape = self.coords_of(key), self.grid_shape
        return coords is not None and grid_shape is not None and not is_inside(coords, grid_shape)

    def is_inside_grid(self, directory: str) -> bool:
        """Whether the path of a directory of this array spells a coordinate."""
        geometry = self.document.geometry
        rest = directory[len(self.node.chunk_prefix) :].removesuffix("/")
        spells = geometry and rest and geometry.encoding.decode_leading(rest, len(geometry.shape))
        return bool(spells)


@dataclass(frozen=True, slots=True)
class ArrayReader:
    """Parser of array documents, with the options of one store."""

    native: Native
    reading: ReadOptions = field(default_factory=ReadOptions)
    sharded_by_zarr: set[str] = field(default_factory=set, compare=False)
    """Chunk prefixes of the arrays read so far that zarr itself shards."""
    lengths: dict[Node, int] = field(default_factory=dict, compare=False)
    """Elements along the first dimension of arrays whose documents follow their chunks."""

    def read(self, node: Node, doc: Mapping[str, Any]) -> StoredArray | None:
        """Return the array that a stored document describes; ``None`` if it describes none.

        Keys of an array whose sharding codec has an unknown form pass, as with zarr. `SpecError`
        for an impossible declaration, `UnsupportedError` for an unknown storage transformer.
        """
        if node in self.lengths and doc.get("shape"):
            doc = {**doc, "shape": [self.lengths[node], *doc["shape"][1:]]}
        try:
            document = documents.parse_array(node, doc, self.native)
            if document is None:
                return None
            if document.declaration is None and MARKER in doc:
                self.sharded_by_zarr.add(node.chunk_prefix)
            grid_shape = document.geometry and document.geometry.grid_shape
            stack = self._stack(document, grid_shape, doc)
        except (SpecError, UnsupportedError) as error:
            text = f"the document of the array {node.path!r}: {error}"
            if isinstance(error, UnsupportedError) and is_sharded_by_zarr(doc):
                self.sharded_by_zarr.add(node.chunk_prefix)
                return StoredArray(ArrayDocument(node, None), node, None, (), None, unknown=text)
            raise type(error)(text) from error
        top = stack[0] if len(stack) == 1 else None
        layout = top.layout if isinstance(top, stacks.ShardingTransformer) else None
        return StoredArray(document, node, grid_shape, stack, layout)

    def _stack(
        self, document: ArrayDocument, grid_shape: Coords | None, doc: Mapping[str, Any]
    ) -> stacks.Stack:
        node, geometry = document.node, document.geometry
        if document.declaration is None or geometry is None or grid_shape is None:
            return ()
        prefix = node.chunk_prefix
        index_key = prefix + CONSOLIDATED_INDEX_NAME if document.has_consolidated_index else None
        nbytes = documents.chunk_nbytes(doc, geometry.chunk_shape)
        place = (node.path, prefix, geometry.encoding, grid_shape)
        of_document = (document.n_adopted, document, documents.document_key(node))
        stack: list[stacks.StorageTransformer] = []
        passed_over: list[str] = []
        for transformer in document.transformers:
            if transformer.sharding is not None:
                layout = ArrayLayout(*place, transformer.sharding, index_key, nbytes, *of_document)
                stack.append(stacks.ShardingTransformer(layout, self.reading))
                continue
            try:
                factory = find_factory(transformer.name)
            except UnsupportedError:
                if transformer.must_understand:
                    raise
                passed_over.append(transformer.name)
            else:
                shown = strip(documents.without_notes(doc), document.declaration)
                context = stacks.ArrayContext(*place, shown, self.reading, index_key, nbytes)
                stack.append(factory(transformer.configuration, context))
        if passed_over:  # values can be read, but not written
            stack.insert(0, stacks.ReadOnlyTransformer(node.path, tuple(passed_over)))
        if sum(isinstance(transformer, stacks.ShardingTransformer) for transformer in stack) > 1:
            raise UnsupportedError(
                "it has more than one sharding in its storage transformers; shards of shards "
                "cannot be updated safely"
            )
        return tuple(stack)


def register_storage_transformer(name: str, factory: TransformerFactory) -> None:
    """Register a storage transformer in this process.

    Parameters
    ----------
    name
        Name in metadata: a URI, or a name with a domain, so that it is unique.
    factory
        Called with the configuration and the array, each time a document is parsed.

    Raises
    ------
    SpecError
        If another factory has the name, the name is no text, or the factory is not callable.
    """
    if not isinstance(name, str) or not callable(factory):
        raise SpecError(f"name is a str and factory is callable, got {short((name, factory))}")
    if _factories.setdefault(name, factory) is not factory:
        raise SpecError(f"there is a storage transformer {name!r} already")


def find_factory(name: str) -> TransformerFactory:
    """Return the factory of a storage transformer, or raise `UnsupportedError`."""
    if name not in _factories:
        installed = {entry.name: entry for entry in entry_points(group=_ENTRY_POINTS)}
        if name not in installed:
            known = ", ".join(map(repr, sorted({*_factories, *installed})))
            raise UnsupportedError(
                f"the storage transformer {name!r} is not known: install the package that provides "
                f"it (entry point {_ENTRY_POINTS!r}), or register it; known are {known}"
            )
        _factories.setdefault(name, installed[name].load())
    factory: TransformerFactory = _factories[name]
    return factory
