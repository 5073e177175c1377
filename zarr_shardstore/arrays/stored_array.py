"""A stored array: its document, and the stack of transformers that the document declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zarr_shardstore.arrays.registry import make_stack
from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.consolidated_index import (
    CONSOLIDATED_INDEX_NAME,
    without_consolidated_index,
)
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import ArrayLayout, is_inside
from zarr_shardstore.metadata.declaration import Native, strip
from zarr_shardstore.metadata.documents import ArrayDocument, Node, chunk_nbytes, parse_array
from zarr_shardstore.shards.read import ReadOptions
from zarr_shardstore.shards.sharding import ShardingTransformer
from zarr_shardstore.shards.stack import ArrayContext, Stack


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array document, and the transformers between its chunks and the base store."""

    document: ArrayDocument
    stack: Stack = ()
    """Transformers, nearest to the array first; empty for plain chunks."""
    node: Node = field(init=False)
    """Place of the document."""
    layout: ArrayLayout | None = field(init=False)
    """Where chunks and shards are, if the stack is one sharding; these are treated together."""
    grid_shape: Coords | None = field(init=False)
    """Number of chunks along each dimension, if it is known."""

    def __post_init__(self) -> None:
        top = self.stack[0] if len(self.stack) == 1 else None
        layout = top.layout if isinstance(top, ShardingTransformer) else None
        object.__setattr__(self, "node", self.document.node)
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "grid_shape", self.document.grid_shape)

    @property
    def has_unusual_separator(self) -> bool:
        """Whether its chunk keys have a separator that the usual grammar does not know."""
        geometry = self.document.geometry
        return geometry is not None and geometry.encoding.separator not in ("/", ".")

    def coords_of(self, key: str) -> Coords | None:
        """Return the coordinates that a chunk key spells, also outside the grid."""
        geometry, prefix = self.document.geometry, self.node.chunk_prefix
        if geometry is None or not key.startswith(prefix):
            return None
        return geometry.encoding.decode(key[len(prefix) :], len(geometry.shape))

    def is_outside(self, key: str) -> bool:
        """Whether a key is that of a chunk outside the grid."""
        coords = self.coords_of(key)
        return (
            coords is not None
            and self.grid_shape is not None
            and not is_inside(coords, self.grid_shape)
        )

    def is_inside_grid(self, directory: str) -> bool:
        """Whether the path of a directory of this array spells a coordinate."""
        geometry = self.document.geometry
        rest = directory[len(self.node.chunk_prefix) :].removesuffix("/")
        if geometry is None or not rest:
            return False
        return bool(geometry.encoding.decode_leading(rest, len(geometry.shape)))


@dataclass(frozen=True, slots=True)
class ArrayReader:
    """Parser of array documents, with the options of one store."""

    native: Native
    reading: ReadOptions

    def read(self, node: Node, doc: Mapping[str, Any]) -> StoredArray | None:
        """Return the array that a stored document describes; ``None`` if it describes no array.

        What it declares may be impossible (`SpecError`) or unknown (`UnsupportedError`).
        """
        try:
            document = parse_array(node, doc, self.native)
            return None if document is None else StoredArray(document, self._stack(document, doc))
        except (SpecError, UnsupportedError) as error:
            raise type(error)(f"the document of the array {node.path!r}: {error}") from error

    def _stack(self, document: ArrayDocument, doc: Mapping[str, Any]) -> Stack:
        node, geometry, grid_shape = document.node, document.geometry, document.grid_shape
        if document.declaration is None or geometry is None or grid_shape is None:
            return ()
        prefix, index_key = node.chunk_prefix, None
        if document.has_consolidated_index:
            index_key = prefix + CONSOLIDATED_INDEX_NAME
        nbytes = chunk_nbytes(doc, geometry.chunk_shape)
        only = document.transformers[0] if len(document.transformers) == 1 else None
        if only is not None and only.sharding is not None:
            parts = (geometry.encoding, grid_shape, only.sharding, index_key, nbytes)
            return (ShardingTransformer(ArrayLayout(node.path, prefix, *parts), self.reading),)
        context = ArrayContext(
            path=node.path,
            prefix=prefix,
            encoding=geometry.encoding,
            grid_shape=grid_shape,
            document=strip(without_consolidated_index(doc), document.declaration),
            reading=self.reading,
            index_key=index_key,
            chunk_nbytes=nbytes,
        )
        stack = make_stack(document.transformers, context)
        if sum(isinstance(transformer, ShardingTransformer) for transformer in stack) > 1:
            raise UnsupportedError(
                "it has more than one sharding in its storage transformers; shards of shards "
                "cannot be updated safely"
            )
        return stack
