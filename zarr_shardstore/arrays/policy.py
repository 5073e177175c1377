"""Policy for new arrays: which are sharded, and the stack of transformers that they declare."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.index import (
    DRAFT_INDEX,
    ZEP2_INDEX,
    IndexFormat,
    ShardingSpec,
    check_chunks_per_shard,
)
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import chunk_grid_shape
from zarr_shardstore.metadata.auto_shards import choose_chunks_per_shard
from zarr_shardstore.metadata.declaration import Declared
from zarr_shardstore.metadata.documents import Geometry, Node, chunk_nbytes
from zarr_shardstore.metadata.transformer_list import (
    SHARDING,
    TransformerSpec,
    sharding_transformer,
)

Rule: TypeAlias = (
    SupportsIndex | Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]] | Literal["auto"] | None
)
ChunksPerShard: TypeAlias = Rule | Mapping[str, Rule]
_Normal: TypeAlias = Coords | int | Literal["auto"] | None


class ShardingPolicy:
    """Rules of the option `chunks_per_shard`.

    Parameters
    ----------
    chunks_per_shard
        ``None``: new arrays are not sharded. An int: that many chunks along every dimension.
        A tuple: for arrays of its length. ``"auto"``: by the size of chunks, so that shards
        have 10 to 100 MB. A mapping from array path, or from a pattern of paths
        (``"raw/*"``; the first that matches counts), to one of these.

    Raises
    ------
    SpecError
        If a number is not a whole number of at least 1, or a shard would have too many entries.
    """

    __slots__ = ("chunks_per_shard",)

    def __init__(self, chunks_per_shard: ChunksPerShard = None) -> None:
        if isinstance(chunks_per_shard, Mapping):
            rules: dict[str, _Normal] = {}
            for path, rule in chunks_per_shard.items():
                if not isinstance(path, str):
                    raise SpecError(f"chunks_per_shard maps array paths, got {path!r}")
                rules[path.strip("/")] = _normalize(rule)
            self.chunks_per_shard: _Normal | dict[str, _Normal] = rules
        else:
            self.chunks_per_shard = _normalize(chunks_per_shard)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardingPolicy) and self.chunks_per_shard == other.chunks_per_shard

    __hash__ = None  # type: ignore[assignment]

    def for_array(
        self, path: str, ndim: int, choose: Callable[[], Coords] | None = None
    ) -> Coords | None:
        """Return the chunks per shard of a new array; ``None`` if it is not sharded.

        A 0-d array has one chunk, and a shard saves nothing: only the rule ``()`` asks for it.

        Parameters
        ----------
        choose
            Returns the choice of ``"auto"`` for this array.

        Raises
        ------
        SpecError
            If the rule has another number of dimensions, or asks for too many entries; if it
            is ``"auto"`` and `choose` is missing.
        """
        rule = self._rule(path)
        if rule is None or (ndim == 0 and rule != ()):
            return None
        if isinstance(rule, str):
            if choose is None:
                raise SpecError(
                    f"chunks_per_shard='auto' needs the metadata of the array {path!r}, and there "
                    "is none: pass an int or a tuple for it"
                )
            return choose()
        if isinstance(rule, int):
            return check_chunks_per_shard((rule,) * ndim)
        if len(rule) != ndim:
            raise SpecError(
                f"chunks_per_shard={rule} has {len(rule)} dimensions, the array {path!r} has "
                f"{ndim}: pass an int (for every dimension), or a mapping from array path to tuple"
            )
        return rule

    def names(self, path: str) -> bool:
        """Whether the option is a mapping with a fixed rule for this very path."""
        rules = self.chunks_per_shard
        return isinstance(rules, dict) and rules.get(path) not in (None, "auto")

    def has_rule(self, path: str) -> bool:
        """Whether the option shards this array."""
        return self._rule(path) is not None

    def needs_no_metadata(self, hierarchy: str, path: str) -> bool:
        """Whether the option alone declares an array that has no metadata."""
        if hierarchy == "draft":
            return self._rule(path) not in (None, "auto")
        return self.names(path)

    def is_auto(self, path: str) -> bool:
        """Whether the rule of this array is ``"auto"``."""
        return self._rule(path) == "auto"

    def names_without_array(self, paths: Sequence[str]) -> list[str]:
        """Return the paths and patterns of the option that match none of these arrays."""
        rules = self.chunks_per_shard if isinstance(self.chunks_per_shard, dict) else {}
        return [
            name
            for name in rules
            if not any(path == name or fnmatchcase(path, name) for path in paths)
        ]

    def _rule(self, path: str) -> _Normal:
        rules = self.chunks_per_shard
        if not isinstance(rules, dict):
            return rules
        if path in rules:
            return rules[path]
        return next((rule for name, rule in rules.items() if fnmatchcase(path, name)), None)


def _normalize(rule: Rule) -> _Normal:
    if rule is None or (isinstance(rule, str) and rule == "auto"):
        return rule
    try:
        if isinstance(rule, str | bytes | bool | Mapping):
            raise TypeError
        given: Any = rule.tolist() if isinstance(rule, np.ndarray) else rule
        if isinstance(given, Iterable):
            return check_chunks_per_shard([operator.index(n) for n in given])
        return check_chunks_per_shard([operator.index(given)])[0]
    except TypeError as error:
        raise SpecError(
            "chunks_per_shard is a whole number, or one for each dimension as in (2, 2), 'auto', "
            f"None, or a mapping from array path or pattern to one of these; got {rule!r}"
        ) from error


V3Declaration: TypeAlias = Literal["codec", "storage_transformers"]

_UNKNOWN_NBYTES = 1_000_000
"""Assumed size of a chunk whose data type does not tell it, as for texts."""


@dataclass(frozen=True, slots=True)
class NewArrays:
    """Declarations of new arrays.

    Parameters
    ----------
    policy : ShardingPolicy
        Chunks per shard.
    declaration
        Form of the declaration of v3 arrays; v2 and the draft have one form each.
    transformers : optional
        The stack; ``None``: sharding alone.
    index : optional
        Form of the shard index; ``None``: with a checksum, except in the draft's transformer.
    """

    policy: ShardingPolicy
    declaration: V3Declaration = "codec"
    transformers: tuple[TransformerSpec, ...] | None = None
    index: IndexFormat | None = None

    def declared(self, node: Node, doc: Mapping[str, Any], geometry: Geometry) -> Declared | None:
        """Return the declaration of a new array; ``None``: plain chunks.

        Parameters
        ----------
        doc
            Its document, as users see it.

        Raises
        ------
        SpecError
            If the policy does not fit its number of dimensions.
        """

        def choose() -> Coords:
            # Before compression, whose effect is not known yet.
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
        """Return the declaration of transformers in a document of this hierarchy."""
        if not transformers:
            return None
        if node.hierarchy == "v2":
            return Declared("filters", transformers)
        is_sharding_alone = [spec.name for spec in transformers] == [SHARDING]
        if node.hierarchy == "v3" and self.declaration == "codec" and is_sharding_alone:
            return Declared("codec", transformers)
        return Declared("storage_transformers", transformers)

    def declared_by_rule(self, node: Node, ndim: int) -> Declared | None:
        """Return the declaration of shards that were written before their metadata."""
        cps = self.policy.for_array(node.path, ndim)
        if cps is None:
            return None
        return self.declare(node, (sharding_transformer(ShardingSpec(cps, DRAFT_INDEX)),))

    def default_index(self, node: Node) -> IndexFormat:
        """Return the form of the shard index if no option gives it."""
        has_draft_form = node.hierarchy == "draft" or (
            node.hierarchy == "v3" and self.declaration == "storage_transformers"
        )
        return DRAFT_INDEX if has_draft_form else ZEP2_INDEX
