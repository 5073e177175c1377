"""What new arrays get: the stack of transformers that the options of a store ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from zarr_shardstore.format.auto import choose_chunks_per_shard
from zarr_shardstore.format.declarations import Declared
from zarr_shardstore.format.documents import Geometry, Node, chunk_nbytes
from zarr_shardstore.format.grid import chunk_grid_shape
from zarr_shardstore.format.index import DRAFT_INDEX, ZEP2_INDEX, IndexFormat
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.spec import ShardingSpec
from zarr_shardstore.format.transformer_specs import (
    SHARDING,
    TransformerSpec,
    sharding_transformer,
)
from zarr_shardstore.store.policy import ShardingPolicy

__all__ = ["NewArrays", "V3Declaration"]

V3Declaration: TypeAlias = Literal["codec", "storage_transformers"]

_UNKNOWN_NBYTES = 1_000_000
"""Taken for the size of a chunk whose data type does not tell it, as of texts."""


@dataclass(frozen=True, slots=True)
class NewArrays:
    """How new arrays are declared.

    Parameters
    ----------
    policy : ShardingPolicy
        Which of them are sharded, and how many chunks a shard has.
    declaration
        How v3 arrays are declared; those of v2 and of the draft have one way each.
    transformers : optional
        The stack; ``None``: sharding alone.
    index : optional
        Form of the shard index; ``None``: with a checksum, but for the draft's transformer.
    """

    policy: ShardingPolicy
    declaration: V3Declaration = "codec"
    transformers: tuple[TransformerSpec, ...] | None = None
    index: IndexFormat | None = None

    def declared(self, node: Node, doc: Mapping[str, Any], geometry: Geometry) -> Declared | None:
        """What a new array declares; ``None``: plain chunks.

        Parameters
        ----------
        doc
            Its document, as readers see it.

        Raises
        ------
        SpecError
            If the policy does not fit its number of dimensions.
        """

        def choose() -> Coords:
            # What compression will save is not known yet.
            grid_shape = chunk_grid_shape(geometry.shape, geometry.chunk_shape)
            nbytes = chunk_nbytes(doc, geometry.chunk_shape)
            return choose_chunks_per_shard(grid_shape, nbytes or _UNKNOWN_NBYTES)[0]

        cps = self.policy.for_array(node.path, len(geometry.shape), choose)
        sharding = None
        if cps is not None:
            sharding = sharding_transformer(
                ShardingSpec(cps, self.index or self.default_index(node))
            )
        if self.transformers is None:
            return self.declare(node, () if sharding is None else (sharding,))
        stack = []
        for spec in self.transformers:
            if spec.name != SHARDING or spec.configuration:
                stack.append(spec)
            elif sharding is not None:
                stack.append(sharding)
        return self.declare(node, tuple(stack))

    def declare(self, node: Node, transformers: tuple[TransformerSpec, ...]) -> Declared | None:
        """How an array of this hierarchy declares these transformers."""
        if not transformers:
            return None
        if node.hierarchy == "v2":
            return Declared("filters", transformers)
        is_sharding_alone = [spec.name for spec in transformers] == [SHARDING]
        if node.hierarchy == "v3" and self.declaration == "codec" and is_sharding_alone:
            return Declared("codec", transformers)
        return Declared("storage_transformers", transformers)

    def sharded_by_rule(self, node: Node) -> bool:
        """Whether the policy alone makes shards of chunks that have no metadata."""
        return self.policy.needs_no_metadata(node.hierarchy, node.path)

    def declared_by_rule(self, node: Node, ndim: int) -> Declared | None:
        """What describes the shards that were written before the metadata."""
        cps: Coords | None = self.policy.for_array(node.path, ndim)
        if cps is None:
            return None
        return self.declare(node, (sharding_transformer(ShardingSpec(cps, DRAFT_INDEX)),))

    def default_index(self, node: Node) -> IndexFormat:
        """Form of the shard index where no option says it."""
        has_draft_form = node.hierarchy == "draft" or (
            node.hierarchy == "v3" and self.declaration == "storage_transformers"
        )
        return DRAFT_INDEX if has_draft_form else ZEP2_INDEX
