"""Policy for new arrays: which are sharded, their chunks per shard, and the declaration of each.

``chunks_per_shard="auto"`` makes shards of 10 to 100 MB. Larger shards mean fewer objects, and
requests that are worth their latency. Smaller shards are cheaper to rewrite, and more readers
share the work.

A shard that reaches beyond the grid has entries that are missing, 16 bytes each. An array that
grows fills them. So a new shard is clipped to the grid where its index would become large. The
first dimension is clipped least, because most arrays grow along it.

Source: the recommendation of zarr-vectors and of the discussion of sharding, 10 to 100 MB;
spec_notes/decisions/0031-shapes.md.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeAlias

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
    SupportsIndex
    | Sequence[SupportsIndex]
    | npt.NDArray[np.integer[Any]]
    | Literal["auto"]
    | Mapping[str, SupportsIndex]
    | None
)
ChunksPerShard: TypeAlias = Rule | Mapping[str, Rule]
Dimensions: TypeAlias = Sequence[str | None]
"""Names of the dimensions of an array; empty if it has none."""


class ByteBudget(int):
    """Rule of `shard_nbytes`: the bytes that a shard has at most, before compression."""


_Normal: TypeAlias = Coords | int | ByteBudget | Literal["auto"] | dict[str, int] | None
Rules: TypeAlias = _Normal | dict[str, _Normal]
V3Declaration: TypeAlias = Literal["codec", "storage_transformers"]

_SHARDING_ALONE = (TransformerSpec(SHARDING),)

MAX_SHARD_NBYTES = 100_000_000
_MIN_SHARD_NBYTES = 10_000_000
_GOAL_NBYTES = 64_000_000
"""Size that shards approach from below, in bytes."""

_MAX_ENTRIES = 2**17
"""Entries in a shard: an index of 2 MiB, which a reader of one chunk has to fetch."""

_MAX_SMALL_ENTRIES = 255
"""Entries of a shard that is not clipped to the grid: their index has 4 KiB, a page."""

_MAX_GROWING_ENTRIES = 2**14
"""Entries up to which the first dimension is not clipped: an index of 256 KiB."""

UNKNOWN_NBYTES = 1_000_000
"""Assumed size of a chunk whose data type does not tell it, as for texts."""


class ShapeRule(NamedTuple):
    """Shape of the shards of arrays with a path, a pattern or a dimension of this name."""

    name: str | None  # None: of every array
    shape: _Normal

    def matches(self, path: str) -> bool:
        return self.name is None or matches(path, self.name)

    @property
    def may_name_dimension(self) -> bool:
        return self.name is not None and type(self.shape) is int


@dataclass(frozen=True, slots=True)
class ShardingPolicy:
    """Sharding of new arrays; `ShardingStore` documents the options."""

    rules: Rules = None
    """Chunks per shard of every array, or by path and pattern, as pickles of stores have them."""
    declaration: V3Declaration = "codec"
    """Form of the declaration of v3 arrays; v2 and the draft have one form each."""
    transformers: tuple[TransformerSpec, ...] | None = None
    """The stack; ``None``: sharding alone."""
    index: IndexFormat | None = None
    """Form of the shard index; ``None``: with a checksum, except in the draft's transformer."""
    is_left_out: bool = field(default=False, compare=False)
    """Whether no option says if arrays are sharded: a new store is told that they are not."""

    @property
    def shape_rules(self) -> list[ShapeRule]:
        """The rules in the order of the option."""
        if isinstance(self.rules, dict):
            return [ShapeRule(name, shape) for name, shape in self.rules.items()]
        return [ShapeRule(None, self.rules)]

    @property
    def names_dimensions(self) -> bool:
        """Whether names of dimensions may decide about shards."""
        return any(
            rule.may_name_dimension or isinstance(rule.shape, dict) for rule in self.shape_rules
        )

    def rule_of(self, path: str, dims: Dimensions = ()) -> _Normal:
        """Return the rule for an array: by its path, else by the first pattern that matches, else
        by its dimensions, which the keys with whole numbers name. `SpecError` if two differ."""
        rules = self.shape_rules
        named: dict[Any, Any] = {r.name: r.shape for r in rules if r.may_name_dimension}
        by_dimension = named if named.keys() & set(dims) else None
        own = next((rule for rule in rules if rule.name == path), None)
        if own is None:
            return next((rule.shape for rule in rules if rule.matches(path)), by_dimension)
        if (
            path in named
            and by_dimension
            and any(named.get(d or "", 1) != named[path] for d in dims)
        ):
            raise SpecError(
                f"{path!r} in chunks_per_shard is an array, of the dimensions {list(dims)}, and a "
                f"dimension: write {{{path!r}: {(named[path],) * len(dims)}}} for the array, or "
                f"{{'*': {named}}} for all arrays by dimension"
            )
        return own.shape

    def names_without_array(self, arrays: Mapping[str, Dimensions]) -> list[str]:
        """Return the paths, patterns, dimensions and the tuple of the option that fit none of these
        arrays. Each array is a path, with one item for each dimension."""
        unknown: list[str] = []
        for rule in self.shape_rules:
            name, shape = rule
            matched = [dims for path, dims in arrays.items() if rule.matches(path)]
            if name is None:
                if isinstance(shape, tuple) and all(len(dims) != len(shape) for dims in matched):
                    unknown.append(str(shape))
            elif not matched and not (
                rule.may_name_dimension and any(name in dims for dims in arrays.values())
            ):
                unknown.append(name)
            elif isinstance(shape, dict):
                unknown += [dim for dim in shape if not any(dim in dims for dims in matched)]
        return unknown

    def reason_to_leave(self, path: str, ndim: int, dims: Dimensions) -> str:
        """Return why the option leaves out an array that it may be meant for; ``""`` if not so."""
        rule = self.rule_of(path, dims)
        if isinstance(rule, dict) and not rule.keys() & set(dims):
            return f"it has none of the dimensions {list(rule)}"
        if isinstance(rule, tuple) and len(rule) != ndim and not self._is_named(path):
            return f"it has {ndim} dimensions, and chunks_per_shard={rule} is for {len(rule)}"
        if rule is None and not any(each.matches(path) for each in self.shape_rules):
            from difflib import get_close_matches  # 0.5 ms

            there = [dim for dim in dims if dim]
            for name in [each.name for each in self.shape_rules if each.may_name_dimension]:
                if name and get_close_matches(name.casefold(), map(str.casefold, there), 1, 0.7):
                    return f"it has the dimensions {there}, and none is {name!r}"
        return ""

    def _is_named(self, path: str) -> bool:
        return any(rule.name == path for rule in self.shape_rules)

    def needs_no_metadata(self, hierarchy: str, path: str) -> bool:
        """Whether the option alone declares an array that has no metadata. Outside the draft this
        needs a mapping with a rule for this very path."""
        if hierarchy != "draft" and not self._is_named(path):
            return False
        rule = self.rule_of(path)
        return type(rule) is int or isinstance(rule, tuple)

    def chunks_per_shard_of(self, path: str, ndim: int, dims: Dimensions = ()) -> Coords | None:
        """Return the chunks per shard of a new array; ``None`` if it is not sharded. A shard of a
        0-d array saves nothing: only the rule ``()`` asks for it."""
        rule = self.rule_of(path, dims)
        if rule is None or (ndim == 0 and rule != ()) or self.reason_to_leave(path, ndim, dims):
            return None
        assert rule != "auto", "its shards are chosen by the metadata"
        if isinstance(rule, dict):
            return shard.check_chunks_per_shard([rule.get(name or "", 1) for name in dims])
        if isinstance(rule, int):
            return shard.check_chunks_per_shard((rule,) * ndim)
        if len(rule) != ndim:
            raise SpecError(
                f"chunks_per_shard={rule} has {len(rule)} dimensions, the array {path!r} has "
                f"{ndim}: pass an int (for every dimension), or a mapping from array path to tuple"
            )
        return rule

    def declaration_of(
        self, node: Node, doc: Mapping[str, Any], geometry: Geometry, dims: Dimensions = ()
    ) -> Declared | None:
        """Return the declaration of a new array, given its document; ``None``: plain chunks."""
        ndim = len(geometry.shape)
        rule = self.rule_of(node.path, dims)
        grid = chunk_grid_shape(geometry.shape, geometry.chunk_shape)
        cps: Coords | None
        if isinstance(rule, str | ByteBudget) and ndim:
            # By the size before compression, whose effect is not known yet.
            nbytes = chunk_nbytes(doc, geometry.chunk_shape) or UNKNOWN_NBYTES
            cps = choose_chunks_per_shard(grid, nbytes, None if rule == "auto" else rule)[0]
        else:
            cps = self.chunks_per_shard_of(node.path, ndim, dims)
            # Shards that were written before their metadata have no grid to be clipped to.
            if cps is not None and not self.needs_no_metadata(node.hierarchy, node.path):
                cps = clip_to_grid(cps, grid)
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
            raise SpecError(f"chunks_per_shard maps array paths or dimensions, got {path!r}")
        rules[path.strip("/")] = _normalize(rule)
    return rules


def _normalize(rule: Rule) -> _Normal:
    if rule is None or (isinstance(rule, str) and rule == "auto"):
        return rule
    try:
        if isinstance(rule, Mapping):
            numbers = shard.check_chunks_per_shard([_whole(n) for n in rule.values()])
            if not rule or not all(isinstance(name, str) for name in rule):
                raise TypeError
            return dict(zip(rule, numbers, strict=True))
        given: Any = rule.tolist() if isinstance(rule, np.ndarray) else rule
        if isinstance(given, Iterable) and not isinstance(given, str | bytes):
            return shard.check_chunks_per_shard([operator.index(n) for n in given])
        return shard.check_chunks_per_shard([_whole(given)])[0]
    except TypeError as error:
        raise SpecError(
            "chunks_per_shard is a whole number, or one for each dimension as in (2, 2), 'auto', "
            "None, or a mapping from array path or pattern to one of these, or from dimension to "
            f"whole number; got {rule!r}"
        ) from error


def _whole(number: Any) -> int:
    if isinstance(number, bool):
        raise TypeError
    return operator.index(number)


def clip_to_grid(cps: Coords, grid_shape: Coords) -> Coords:
    """Return chunks per shard of which the grid has as many, where the index would become large.

    The last dimension is clipped first. The array is expected to grow along the first dimension of
    which a shard has several chunks.
    """
    clipped = list(cps)
    first = next((dim for dim, n in enumerate(cps) if n > 1), 0)
    for dim in reversed(range(len(cps))):
        if math.prod(clipped) > (_MAX_GROWING_ENTRIES if dim == first else _MAX_SMALL_ENTRIES):
            clipped[dim] = min(cps[dim], max(grid_shape[dim], 1))
    return tuple(clipped)


def choose_chunks_per_shard(
    grid_shape: Coords, chunk_nbytes: float, budget: int | None = None, *, may_grow: bool = True
) -> tuple[Coords, str]:
    """Choose chunks per shard for an array, and give the reason.

    With a `budget` a shard of more than one chunk has at most so many bytes. If the whole array has
    less, and `may_grow`, shards are longer than the grid along the first dimension.

    Shards are as near to cubes, counted in chunks, as the grid allows. Several shards along a
    dimension have about the same length. The length need not divide the grid.
    """
    grid = tuple(max(n, 1) for n in grid_shape)
    chunk_nbytes = max(chunk_nbytes, 1)
    about = f"{'stored ' if budget is None else ''}chunks have about {_readable(chunk_nbytes)}"
    max_nbytes, min_nbytes = budget or MAX_SHARD_NBYTES, _MIN_SHARD_NBYTES
    if budget is not None:
        min_nbytes = budget // 2
    if math.prod(grid) <= _MAX_ENTRIES and math.prod(grid) * chunk_nbytes <= max_nbytes:
        if budget is not None and may_grow:
            n = min(budget // chunk_nbytes, _MAX_SMALL_ENTRIES) // math.prod(grid[1:])
            grid = (max(grid[0], int(n)), *grid[1:])
        total = _readable(math.prod(grid) * chunk_nbytes)
        return grid, f"{about}, the whole array {total}: one shard"
    goal = min((budget or _GOAL_NBYTES) / chunk_nbytes, _MAX_ENTRIES)
    if goal < 2:
        return (1,) * len(grid), f"{about}: each is large enough for an object of its own"
    cps = _even(_grown(grid, goal), grid, min_nbytes / chunk_nbytes)
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
