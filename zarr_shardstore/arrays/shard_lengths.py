"""Shards of lengths that the user lists, in elements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from operator import index
from typing import Any

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.arguments import whole_number
from zarr_shardstore.format.box_grid import MAX_EDGES, BoxGrid, Side
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.metadata.documents import Geometry

_TOO_MANY = f"shards of listed lengths are at most {MAX_EDGES} along a dimension"


class InsideChunkError(SpecError):
    """A shard would end inside a chunk."""


@dataclass(frozen=True, slots=True)
class ShardLengths:
    """Lengths of shards in elements, by dimension."""

    sides: tuple[Side, ...] | dict[str | int, Side]
    """A length, or a list of lengths, for each dimension; or by name or number of a dimension."""
    are_ends: bool = False
    """Whether lists have places where shards begin, after the first, instead of lengths."""

    @property
    def is_by_name(self) -> bool:
        """Whether dimensions are named, so that arrays without them are left alone."""
        return not isinstance(self.sides, tuple)

    @classmethod
    def parse(cls, given: Any, *, are_ends: bool = False) -> ShardLengths:
        """Parse the argument `shards`, or raise `SpecError`."""
        if isinstance(given, Mapping):
            named = {name: _parse_side(side, are_ends) for name, side in given.items()}
            if named and all(isinstance(name, str | int) for name in named):
                return cls(named, are_ends)
        elif isinstance(given, Iterable) and not isinstance(given, str | bytes):
            return cls(tuple([_parse_side(side, are_ends) for side in given]), are_ends)
        raise SpecError(
            "shards has for each dimension a length in elements or a list of lengths, as in "
            f"[[31, 28, 31], 90], or these by name, as in {{'time': [31, 28, 31]}}; got {given!r}"
        )

    def sides_of(self, geometry: Geometry, dims: Sequence[str | None]) -> list[Side] | str:
        """Return the lengths in chunks for one array, or the reason why it gets none."""
        ndim, chunks = len(geometry.shape), geometry.chunks
        if isinstance(self.sides, tuple):
            if len(self.sides) != ndim:
                return f"it has {ndim} dimensions, and shards is for {len(self.sides)}"
            given = dict(enumerate(self.sides))
            return [self._in_chunks(chunks, geometry.shape, *item) for item in given.items()]
        given = {}
        for name, side in self.sides.items():
            of_name = dims.index(name) if name in dims else -1
            dim = name if isinstance(name, int) else of_name
            if dim in given:
                raise SpecError(f"shards names the dimension {dim} twice, by name and by number")
            if 0 <= dim < ndim:
                given[dim] = side
        if not given:
            return f"it has none of the dimensions {list(self.sides)}"
        return [
            self._in_chunks(chunks, geometry.shape, dim, given[dim]) if dim in given else 1
            for dim in range(ndim)
        ]

    def names_without_array(self, arrays: Sequence[Sequence[str | None]]) -> list[str]:
        """Return the names, and the tuple, that fit none of the arrays with these dimensions."""
        if isinstance(self.sides, tuple):
            fits = any(len(dims) == len(self.sides) for dims in arrays)
            return [] if fits else [f"{len(self.sides)} dimensions"]
        there = {*chain.from_iterable(arrays), *range(max(map(len, arrays), default=0))}
        return [str(name) for name in self.sides if name not in there]

    def _in_chunks(self, chunks: BoxGrid, shape: Coords, dim: int, side: Side) -> Side:
        c, n = chunks.sides[dim], shape[dim]
        if isinstance(side, int):
            if isinstance(c, int) and side % c == 0:
                return side // c
            if n // side > MAX_EDGES:
                raise SpecError(_TOO_MANY)
            ends = [*range(side, n, side), max(n, side)]
        elif self.are_ends:
            ends = [*side, n] if side[-1] < n else [*side]
        else:
            ends = [*accumulate(side)]
        if len(ends) > MAX_EDGES:
            raise SpecError(_TOO_MANY)
        if ends[-1] < n:
            raise SpecError(
                f"shards end at {ends[-1]} along dimension {dim}, and the array at {n}: list "
                "lengths for all of it"
            )
        numbers = [0, *[_number_at(chunks, dim, end, n) for end in ends]]
        if any(stop <= start for start, stop in pairwise(numbers)):
            raise SpecError(f"shards along dimension {dim} are in ascending order, got {ends}")
        return tuple([stop - start for start, stop in pairwise(numbers)])


def _number_at(chunks: BoxGrid, dim: int, end: int, n: int) -> int:
    """Return the number of the chunk that begins at a place; the end of the array is one."""
    number = chunks.number(dim, end)
    start, stop = chunks.bounds(dim, number)
    if start == end:
        return number
    if end >= n and stop >= n > start:
        return number + 1
    raise InsideChunkError(
        f"a shard ends at {end} along dimension {dim}, inside a chunk from {start} to {stop}: "
        "shards consist of whole chunks"
    )


def _parse_side(given: Any, are_ends: bool) -> Side:
    with suppress(TypeError):
        given = index(given)
    given = [given] if are_ends and isinstance(given, int) else given
    if isinstance(given, Iterable) and not isinstance(given, str | bytes):
        lengths = [-1 if isinstance(n, bool) else n for n in given]
        what = "a place in shards_at" if are_ends else "a length in shards"
        side = tuple(whole_number(what, n, 1) for n in lengths)
        if side:
            return side
        raise SpecError("a list of lengths in shards is empty")
    return whole_number("a length in shards", given, 1)
