"""Policy for new arrays: which are sharded, and the declaration of each."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format import shard
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import chunk_grid_shape
from zarr_shardstore.format.shard import IndexFormat, ShardingSpec
from zarr_shardstore.metadata.auto_shards import choose_chunks_per_shard
from zarr_shardstore.metadata.declaration import Declared
from zarr_shardstore.metadata.documents import Geometry, Node, chunk_nbytes
from zarr_shardstore.metadata.transformer_list import SHARDING, TransformerSpec
from zarr_shardstore.metadata.transformer_list import sharding_transformer as spell_sharding

Rule: TypeAlias = (
    SupportsIndex | Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]] | Literal["auto"] | None
)
ChunksPerShard: TypeAlias = Rule | Mapping[str, Rule]
_Normal: TypeAlias = Coords | int | Literal["auto"] | None
Rules: TypeAlias = _Normal | dict[str, _Normal]
V3Declaration: TypeAlias = Literal["codec", "storage_transformers"]

_SHARDING_ALONE = (TransformerSpec(SHARDING),)

_UNKNOWN_NBYTES = 1_000_000
"""Assumed size of a chunk whose data type does not tell it, as for texts."""


@dataclass(frozen=True, slots=True)
class ShardingPolicy:
    """Sharding of new arrays; `ShardingStore` documents the options."""

    rules: Rules = None
    """Chunks per shard of every array, or by path and pattern."""
    declaration: V3Declaration = "codec"
    """Form of the declaration of v3 arrays; v2 and the draft have one form each."""
    transformers: tuple[TransformerSpec, ...] | None = None
    """The stack; ``None``: sharding alone."""
    index: IndexFormat | None = None
    """Form of the shard index; ``None``: with a checksum, except in the draft's transformer."""

    def rule_of(self, path: str) -> _Normal:
        """Return the rule for an array; of several patterns the first that matches."""
        if not isinstance(self.rules, dict):
            return self.rules
        if path in self.rules:
            return self.rules[path]
        return next((rule for name, rule in self.rules.items() if matches(path, name)), None)

    def names_without_array(self, paths: Sequence[str]) -> list[str]:
        """Return the paths and patterns of the option that match none of these arrays."""
        names = self.rules if isinstance(self.rules, dict) else ()
        return [name for name in names if not any(matches(path, name) for path in paths)]

    def needs_no_metadata(self, hierarchy: str, path: str) -> bool:
        """Whether the option alone declares an array that has no metadata.

        Outside the draft this needs a mapping with a rule for this very path.
        """
        if hierarchy != "draft" and not (isinstance(self.rules, dict) and path in self.rules):
            return False
        return self.rule_of(path) not in (None, "auto")

    def chunks_per_shard_of(self, path: str, ndim: int) -> Coords | None:
        """Return the chunks per shard of a new array; ``None`` if it is not sharded.

        A 0-d array has one chunk, and a shard saves nothing: only the rule ``()`` asks for it. A
        rule for another number of dimensions, and ``"auto"``, which needs metadata, are refused.
        """
        rule = self.rule_of(path)
        if rule is None or (ndim == 0 and rule != ()):
            return None
        if isinstance(rule, str):
            raise SpecError(
                f"chunks_per_shard='auto' needs the metadata of the array {path!r}, and there "
                "is none: pass an int or a tuple for it"
            )
        if isinstance(rule, int):
            return shard.check_chunks_per_shard((rule,) * ndim)
        if len(rule) != ndim:
            raise SpecError(
                f"chunks_per_shard={rule} has {len(rule)} dimensions, the array {path!r} has "
                f"{ndim}: pass an int (for every dimension), or a mapping from array path to tuple"
            )
        return rule

    def declaration_of(
        self, node: Node, doc: Mapping[str, Any], geometry: Geometry
    ) -> Declared | None:
        """Return the declaration of a new array, given its document; ``None``: plain chunks."""
        ndim = len(geometry.shape)
        if self.rule_of(node.path) == "auto" and ndim:
            # By the size before compression, whose effect is not known yet.
            nbytes = chunk_nbytes(doc, geometry.chunk_shape) or _UNKNOWN_NBYTES
            grid_shape = chunk_grid_shape(geometry.shape, geometry.chunk_shape)
            cps: Coords | None = choose_chunks_per_shard(grid_shape, nbytes)[0]
        else:
            cps = self.chunks_per_shard_of(node.path, ndim)
        sharding: list[TransformerSpec] = []
        if cps is not None:
            sharding = [spell_sharding(ShardingSpec(cps, self.index or self.default_index(node)))]
        stack: list[TransformerSpec] = []
        for spec in _SHARDING_ALONE if self.transformers is None else self.transformers:
            stack += [spec] if spec.name != SHARDING or spec.configuration else sharding
        return self.declare(node, tuple(stack))

    def declaration_without_metadata(self, node: Node, ndim: int) -> Declared | None:
        """Return the declaration of shards that were written before their metadata."""
        cps = self.chunks_per_shard_of(node.path, ndim)
        if cps is None:
            return None
        return self.declare(node, (spell_sharding(ShardingSpec(cps, shard.DRAFT_INDEX)),))

    def declare(self, node: Node, transformers: tuple[TransformerSpec, ...]) -> Declared | None:
        if not transformers:
            return None
        if node.hierarchy == "v2":
            return Declared("filters", transformers)
        is_sharding_alone = [spec.name for spec in transformers] == [SHARDING]
        if node.hierarchy == "v3" and self.declaration == "codec" and is_sharding_alone:
            return Declared("codec", transformers)
        return Declared("storage_transformers", transformers)

    def default_index(self, node: Node) -> IndexFormat:
        """Return the form of the shard index if no option gives it."""
        has_draft_form = node.hierarchy == "draft" or (
            node.hierarchy == "v3" and self.declaration == "storage_transformers"
        )
        return shard.DRAFT_INDEX if has_draft_form else shard.ZEP2_INDEX


def matches(path: str, pattern: str) -> bool:
    return path == pattern or fnmatchcase(path, pattern)


def parse_rules(chunks_per_shard: ChunksPerShard) -> Rules:
    if not isinstance(chunks_per_shard, Mapping):
        return _normalize(chunks_per_shard)
    rules: dict[str, _Normal] = {}
    for path, rule in chunks_per_shard.items():
        if not isinstance(path, str):
            raise SpecError(f"chunks_per_shard maps array paths, got {path!r}")
        rules[path.strip("/")] = _normalize(rule)
    return rules


def _normalize(rule: Rule) -> _Normal:
    if rule is None or (isinstance(rule, str) and rule == "auto"):
        return rule
    try:
        if isinstance(rule, str | bytes | bool | Mapping):
            raise TypeError
        given: Any = rule.tolist() if isinstance(rule, np.ndarray) else rule
        if isinstance(given, Iterable):
            return shard.check_chunks_per_shard([operator.index(n) for n in given])
        return shard.check_chunks_per_shard([operator.index(given)])[0]
    except TypeError as error:
        raise SpecError(
            "chunks_per_shard is a whole number, or one for each dimension as in (2, 2), 'auto', "
            f"None, or a mapping from array path or pattern to one of these; got {rule!r}"
        ) from error
