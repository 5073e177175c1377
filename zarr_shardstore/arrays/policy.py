"""Policy for new arrays: which are sharded, their chunks per shard, and the declaration of each.

``chunks_per_shard="auto"`` makes shards of 10 to 100 MB. Larger shards mean fewer objects and
requests. Smaller shards are cheaper to rewrite, and more readers share the work.

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
from typing import Any, Literal, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.arrays.shard_lengths import InsideChunkError as InsideChunkError
from zarr_shardstore.arrays.shard_lengths import ShardLengths as ShardLengths
from zarr_shardstore.errors import SpecError
from zarr_shardstore.format import shard
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.metadata.declaration import Declared
from zarr_shardstore.metadata.documents import Geometry, Node, chunk_nbytes
from zarr_shardstore.metadata.transformer_list import SHARDING, TransformerSpec
from zarr_shardstore.metadata.transformer_list import sharding_transformer as spell_sharding

_Shape: TypeAlias = SupportsIndex | Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]]
Rule: TypeAlias = _Shape | Literal["auto"] | Mapping[str, SupportsIndex] | ShardLengths | None
ChunksPerShard: TypeAlias = Rule | Mapping[str, Rule]
Dimensions: TypeAlias = Sequence[str | None]
"""Names of the dimensions of an array; empty if there are none."""


class ByteBudget(int):
    """Most bytes of a shard before compression: the rule of `shard_nbytes`."""


_Normal: TypeAlias = (
    Coords | int | ByteBudget | ShardLengths | Literal["auto"] | dict[str, int] | None
)
Rules: TypeAlias = _Normal | dict[str, _Normal]
V3Declaration: TypeAlias = Literal["codec", "storage_transformers"]

_SHARDING_ALONE = (TransformerSpec(SHARDING),)

MAX_SHARD_NBYTES = 100_000_000
_MIN_SHARD_NBYTES = 10_000_000
_GOAL_NBYTES = 64_000_000
"""Size that shards approach from below, in bytes."""

_MAX_ENTRIES = 2**17
"""Most entries in a shard: the reader of one chunk fetches an index of 2 MiB."""

_MAX_SMALL_ENTRIES = 255
"""Most entries of a shard that is not clipped to the grid: an index of 4 KiB, one page."""

_MAX_GROWING_ENTRIES = 2**14
"""Most entries of a shard whose first dimension is not clipped: an index of 256 KiB."""

UNKNOWN_NBYTES = 1_000_000
"""Assumed size of a chunk of variable length, as of texts."""


@dataclass(frozen=True, slots=True)
class ShardingPolicy:
    """Sharding of new arrays; `ShardingStore` documents the options."""

    rules: Rules = None
    """Chunks per shard of every array, or by name, as pickles of stores have them."""
    declaration: V3Declaration = "codec"
    """Form of the declaration of v3 arrays; v2 and the draft have one each."""
    transformers: tuple[TransformerSpec, ...] | None = None
    """The stack; ``None``: sharding alone."""
    index: shard.IndexFormat | None = None
    """Form of the shard index; ``None``: with a checksum, except in the draft's transformer."""
    is_left_out: bool = field(default=False, compare=False)
    """True if no option says whether arrays are sharded: the user of a new store is warned."""

    @property
    def _by_name(self) -> dict[str | None, _Normal]:
        """Rules by path, pattern or dimension, in the order of the option; ``None`` names all."""
        rules: Any = self.rules
        return rules if isinstance(rules, dict) else {None: rules}

    @property
    def _by_dimension(self) -> dict[str, int]:
        """Rules whose name may be a dimension."""
        rules = self.rules if isinstance(self.rules, dict) else {}
        return {name: rule for name, rule in rules.items() if type(rule) is int}

    @property
    def names_dimensions(self) -> bool:
        """Whether names of dimensions may decide about shards."""
        rules = self._by_name.values()
        named = dict, ShardLengths
        return bool(self._by_dimension) or any(isinstance(rule, named) for rule in rules)

    def rule_of(self, path: str, dims: Dimensions = ()) -> _Normal:
        """Return the rule by path, by the first pattern that matches, or by dimensions. `SpecError`
        if path and dimensions differ."""
        rules, named = self._by_name, self._by_dimension
        by_dimension = named if named.keys() & set(dims) else None
        if path not in rules:
            found = (rule for name, rule in rules.items() if matches(path, name))
            return next(found, by_dimension)
        is_both = path in named and by_dimension
        if is_both and any(named.get(d or "", 1) != named[path] for d in dims):
            raise SpecError(
                f"{path!r} in chunks_per_shard is an array, of the dimensions {list(dims)}, and a "
                f"dimension: write {{{path!r}: {(named[path],) * len(dims)}}} for the array, or "
                f"{{'*': {named}}} for all arrays by dimension"
            )
        return rules[path]

    def names_without_array(self, arrays: Mapping[str, Dimensions]) -> list[str]:
        """Return the names, and the tuple, of the option that fit no array. Each array has an item
        for each dimension, ``None`` for one without a name."""
        unknown: list[str] = []
        there = {dim for dims in arrays.values() for dim in dims}
        for name, rule in self._by_name.items():
            matched = [dims for path, dims in arrays.items() if matches(path, name)]
            if isinstance(rule, ShardLengths):
                unknown += rule.names_without_array(matched)
            elif name is None:
                if isinstance(rule, tuple) and all(len(dims) != len(rule) for dims in matched):
                    unknown.append(str(rule))
            elif not matched and not (name in self._by_dimension and name in there):
                unknown.append(name)
            elif isinstance(rule, dict):
                unknown += [dim for dim in rule if not any(dim in dims for dims in matched)]
        return unknown

    def reason_to_leave(self, path: str, ndim: int, dims: Dimensions) -> str:
        """Return why an array that the option may be meant for has no shards; else ``""``."""
        rule = self.rule_of(path, dims)
        if isinstance(rule, dict) and not rule.keys() & set(dims):
            return f"it has none of the dimensions {list(rule)}"
        if isinstance(rule, tuple) and len(rule) != ndim and path not in self._by_name:
            return f"it has {ndim} dimensions, and chunks_per_shard={rule} is for {len(rule)}"
        if rule is None and not any(matches(path, name) for name in self._by_name):
            from difflib import get_close_matches  # 0.5 ms

            there = [dim for dim in dims if dim]
            for name in self._by_dimension:
                if get_close_matches(name.casefold(), map(str.casefold, there), 1, 0.7):
                    return f"it has the dimensions {there}, and none is {name!r}"
        return ""

    def needs_no_metadata(self, hierarchy: str, path: str) -> bool:
        """Whether the option alone declares an array, outside the draft by its very path."""
        if hierarchy != "draft" and path not in self._by_name:
            return False
        rule = self.rule_of(path)
        return type(rule) is int or isinstance(rule, tuple)

    def chunks_per_shard_of(self, path: str, ndim: int, dims: Dimensions = ()) -> Coords | None:
        """Return the chunks per shard of a new array; ``None`` for plain chunks."""
        rule = self.rule_of(path, dims)
        # A shard of a 0-d array saves no object.
        if rule is None or (ndim == 0 and rule != ()) or self.reason_to_leave(path, ndim, dims):
            return None
        assert rule != "auto", "its shards are chosen by the metadata"
        assert not isinstance(rule, ShardLengths), "only conversions have such a rule"
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
        ndim, grid, rule = len(geometry.shape), geometry.grid_shape, self.rule_of(node.path, dims)
        cps: Coords | None
        if isinstance(rule, str | ByteBudget) and ndim:
            # The size after compression is not known yet.
            nbytes = chunk_nbytes(doc, geometry.chunk_shape) or UNKNOWN_NBYTES
            cps = choose_chunks_per_shard(grid, nbytes, None if rule == "auto" else rule)[0]
        else:
            cps = self.chunks_per_shard_of(node.path, ndim, dims)
            # Shards that were written before their metadata are not clipped.
            if cps is not None and not self.needs_no_metadata(node.hierarchy, node.path):
                cps = clip_to_grid(cps, grid)
        sharding: list[TransformerSpec] = []
        if cps is not None:
            index = self.index or self.default_index(node)
            sharding = [spell_sharding(shard.ShardingSpec(cps, index))]
        stack: list[TransformerSpec] = []
        for spec in _SHARDING_ALONE if self.transformers is None else self.transformers:
            stack += [spec] if spec.name != SHARDING or spec.configuration else sharding
        return self.declare(node, tuple(stack), geometry)

    def declaration_without_metadata(self, node: Node, ndim: int) -> Declared | None:
        """Return the declaration of shards that were written before their metadata."""
        cps = self.chunks_per_shard_of(node.path, ndim)
        spec = None if cps is None else shard.ShardingSpec(cps, shard.DRAFT_INDEX)
        return None if spec is None else self.declare(node, (spell_sharding(spec),))

    def declare(
        self,
        node: Node,
        transformers: tuple[TransformerSpec, ...],
        geometry: Geometry | None = None,
    ) -> Declared | None:
        """Return the declaration of transformers; the codec has chunks of one shape only."""
        if not transformers:
            return None
        if node.hierarchy == "v2":
            return Declared("filters", transformers)
        is_sharding_alone = [spec.name for spec in transformers] == [SHARDING]
        is_even = geometry is None or geometry.sides is None
        if node.hierarchy == "v3" and self.declaration == "codec" and is_sharding_alone and is_even:
            return Declared("codec", transformers)
        return Declared("storage_transformers", transformers)

    def default_index(self, node: Node) -> shard.IndexFormat:
        """Return the form of the shard index if no option gives it."""
        is_v3_codec = node.hierarchy == "v3" and self.declaration == "codec"
        return shard.ZEP2_INDEX if is_v3_codec or node.hierarchy == "v2" else shard.DRAFT_INDEX


def matches(path: str, pattern: str | None) -> bool:
    """Whether a path is a path or fits a pattern; ``None`` fits every path."""
    return pattern is None or path == pattern or fnmatchcase(path, pattern)


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
    if rule is None or isinstance(rule, ShardLengths) or (isinstance(rule, str) and rule == "auto"):
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
    """Clip chunks per shard to the grid where the index would become large, the last dimension
    first. The array may grow along the first dimension of which a shard has several chunks."""
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

    Shards are as near to cubes, counted in chunks, as the grid allows, and about equally long. A
    shard of several chunks has at most `budget` bytes. If the whole array has less, and `may_grow`,
    shards are longer than the grid along the first dimension.
    """
    grid = tuple(max(n, 1) for n in grid_shape)
    chunk_nbytes = max(chunk_nbytes, 1)
    about = f"{'stored ' if budget is None else ''}chunks have about {_readable(chunk_nbytes)}"
    max_nbytes = budget or MAX_SHARD_NBYTES
    min_nbytes = _MIN_SHARD_NBYTES if budget is None else budget // 2
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
    shown, nbytes = " × ".join(map(str, cps)), _readable(math.prod(cps) * chunk_nbytes)
    return cps, f"{about}: {shown} of them make shards of {nbytes}"


def _grown(grid: Coords, goal: float) -> list[int]:
    """Return a box of about `goal` chunks, as near to a cube as the grid allows."""

    def cube(side: int) -> list[int]:
        return [min(side, n) for n in grid]

    sides = range(1, _MAX_ENTRIES + 1)
    cps = cube(bisect_right(sides, goal * (1 + 1e-9), key=lambda side: math.prod(cube(side))))
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
    """Make the shards along each dimension about equally long, without adding a shard. The last
    shard stays a short one where shards would get fewer than `at_least` chunks."""
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
