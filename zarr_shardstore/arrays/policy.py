"""Policy for new arrays: which are sharded, their chunks per shard, and the declaration of each.

``chunks_per_shard="auto"`` makes shards of 10 to 100 MB. Larger shards mean fewer objects, and
requests that are worth their latency. Smaller shards are cheaper to rewrite, and more readers
share the work.

Source: the recommendation of zarr-vectors and of the discussion of sharding, 10 to 100 MB.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format import shard
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import chunk_grid_shape
from zarr_shardstore.format.shard import IndexFormat, ShardingSpec
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

MAX_SHARD_NBYTES = 100_000_000
_MIN_SHARD_NBYTES = 10_000_000
_GOAL_NBYTES = 64_000_000
"""Size that shards approach from below, in bytes."""

_MAX_ENTRIES = 2**17
"""Entries in a shard: an index of 2 MiB, which a reader of one chunk has to fetch."""

UNKNOWN_NBYTES = 1_000_000
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
    is_left_out: bool = field(default=False, compare=False)
    """Whether no option says if arrays are sharded: a new store is told that they are not."""

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
        """Whether the option alone declares an array that has no metadata. Outside the draft this
        needs a mapping with a rule for this very path."""
        if hierarchy != "draft" and not (isinstance(self.rules, dict) and path in self.rules):
            return False
        return self.rule_of(path) not in (None, "auto")

    def chunks_per_shard_of(self, path: str, ndim: int) -> Coords | None:
        """Return the chunks per shard of a new array; ``None`` if it is not sharded. A shard of a
        0-d array saves nothing: only the rule ``()`` asks for it."""
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
            nbytes = chunk_nbytes(doc, geometry.chunk_shape) or UNKNOWN_NBYTES
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


def choose_chunks_per_shard(grid_shape: Coords, chunk_nbytes: float) -> tuple[Coords, str]:
    """Choose chunks per shard for an array, and give the reason.

    Shards are as near to cubes, counted in chunks, as the grid allows. Several shards along a
    dimension have about the same length. The length need not divide the grid.
    """
    grid = tuple(max(n, 1) for n in grid_shape)
    chunk_nbytes = max(chunk_nbytes, 1)
    about = f"stored chunks have about {_readable(chunk_nbytes)}"
    if math.prod(grid) <= _MAX_ENTRIES and math.prod(grid) * chunk_nbytes <= MAX_SHARD_NBYTES:
        total = _readable(math.prod(grid) * chunk_nbytes)
        return grid, f"{about}, the whole array {total}: one shard"
    goal = min(_GOAL_NBYTES / chunk_nbytes, _MAX_ENTRIES)
    if goal < 2:
        return (1,) * len(grid), f"{about}: each is large enough for an object of its own"
    cps = _even(_grown(grid, goal), grid, _MIN_SHARD_NBYTES / chunk_nbytes)
    nbytes = _readable(math.prod(cps) * chunk_nbytes)
    shown = " × ".join(map(str, cps))
    return cps, f"{about}: {shown} of them make shards of {nbytes}"


def _grown(grid: Coords, goal: float) -> list[int]:
    """Return a box of about `goal` chunks, as near to a cube as the grid allows."""

    def n_in_cube(side: int) -> int:
        return math.prod(min(side, n) for n in grid)

    side = bisect_right(range(1, _MAX_ENTRIES + 1), goal * (1 + 1e-9), key=n_in_cube)
    cps = [min(side, n) for n in grid]
    while True:  # the next cube would be too large
        larger = [
            (n, dim)
            for dim, n in enumerate(cps)
            if n < grid[dim] and math.prod(cps) // n * (n + 1) <= goal
        ]
        if not larger:
            return cps
        cps[min(larger)[1]] += 1


def _even(cps: list[int], grid: Coords, at_least: float) -> Coords:
    """Make the shards along each dimension about equally long, without adding a shard.

    If shards got fewer than `at_least` chunks by that, the last shard is a short one instead.
    """
    even = [-(-n // -(-n // c)) for c, n in zip(cps, grid, strict=True)]
    shape = list(cps)
    for dim in sorted(range(len(cps)), key=lambda dim: (-even[dim] / cps[dim], dim)):
        if math.prod(shape) // shape[dim] * even[dim] >= at_least:
            shape[dim] = even[dim]
    return tuple(shape)


def _readable(nbytes: float) -> str:
    if nbytes < 1000:
        return f"{nbytes:.0f} bytes"
    for unit in ("kB", "MB"):
        nbytes /= 1000
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
    return f"{nbytes / 1000:.3g} GB"
