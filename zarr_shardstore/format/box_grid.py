"""Boxes that a grid is cut into, along each dimension by one length or at edges.

An array is cut into chunks this way, and the grid of its chunks into shards. All numbers are
Python ints, which do not overflow.

Source: Zarr v3 core, "Regular grids"; zarr-extensions, chunk grid ``rectilinear``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.format.keys import Coords, KnownSide

Box: TypeAlias = tuple[tuple[int, int], ...]
"""A half-open range ``(start, stop)`` for each dimension."""

Side: TypeAlias = int | tuple[int, ...]
"""Length of all boxes along one dimension; or the length of each; after these, the largest."""

MAX_EDGES = 2**18
"""Most boxes that have lengths of their own, along all dimensions. More are an attack."""


@dataclass(frozen=True, slots=True)
class BoxGrid:
    """Cut of a grid into boxes."""

    sides: tuple[Side, ...]
    """A list of equal lengths becomes one length."""
    largest: Coords = field(init=False, compare=False, repr=False)
    """Largest length along each dimension."""
    uneven: tuple[Side, ...] | None = field(init=False, compare=False, repr=False)
    """The sides; ``None`` if each dimension has one length."""
    _starts: tuple[Sequence[int], ...] = field(init=False, compare=False, repr=False)
    """Starts of the boxes that have lengths of their own, and the end of the last."""

    def __post_init__(self) -> None:
        largest = tuple([s if isinstance(s, int) else max(s) for s in self.sides])
        pairs = zip(self.sides, largest, strict=True)
        sides = tuple([n if isinstance(s, int) or min(s) == n else s for s, n in pairs])
        starts = [() if isinstance(s, int) else (0, *accumulate(s)) for s in sides]
        object.__setattr__(self, "sides", sides)
        object.__setattr__(self, "largest", largest)
        object.__setattr__(self, "uneven", None if sides == largest else sides)
        object.__setattr__(self, "_starts", tuple(starts))

    def bounds(self, dim: int, number: int) -> tuple[int, int]:
        """Return start and stop of a box along one dimension."""
        side = self.sides[dim]
        if isinstance(side, int):
            return number * side, (number + 1) * side
        starts, n = self._starts[dim], len(side)
        if number < n:
            return starts[number], starts[number + 1]
        start = starts[n] + (number - n) * self.largest[dim]
        return start, start + self.largest[dim]

    def has_box(self, coords: Coords, known: Sequence[KnownSide]) -> bool:
        """Whether the box at `coords` lies where a `MarkedKey` knows it."""
        if self.uneven is None and known == self.largest:
            return True
        for dim, (i, side) in enumerate(zip(coords, known, strict=True)):
            number, lo, hi = (i, i * side, i * side + side) if isinstance(side, int) else side
            if self.bounds(dim, number) != (lo, hi):
                return False
        return True

    def number(self, dim: int, at: int) -> int:
        """Return the number of the box that has a place of the grid, along one dimension."""
        side = self.sides[dim]
        if isinstance(side, int):
            return at // side
        starts = self._starts[dim]
        if at < starts[-1]:
            return bisect_right(starts, at) - 1
        return len(side) + (at - starts[-1]) // self.largest[dim]

    def shape(self, grid_shape: Sequence[int]) -> Coords:
        """Return the number of boxes along each dimension of a grid, which may cut the last."""
        return tuple([self.number(dim, end - 1) + 1 for dim, end in enumerate(grid_shape)])

    def lengths(self, coords: Coords) -> Coords:
        """Return the shape of one box, which the grid does not cut."""
        bounds = [self.bounds(dim, number) for dim, number in enumerate(coords)]
        return tuple([stop - start for start, stop in bounds])

    def box(self, coords: Coords, grid_shape: Coords | None = None) -> Box:
        """Return one box, clipped to the grid if it is known."""
        if self.uneven:
            box = [self.bounds(dim, number) for dim, number in enumerate(coords)]
        else:
            box = [(i * n, (i + 1) * n) for i, n in zip(coords, self.largest, strict=True)]
        if grid_shape is not None:
            box = [(lo, max(lo, min(hi, n))) for (lo, hi), n in zip(box, grid_shape, strict=True)]
        return tuple(box)

    def boxes_of(self, box: Box) -> list[range]:
        """Return the numbers, by dimension, of the boxes that have a part of `box`."""
        return [
            range(self.number(dim, lo), self.number(dim, hi - 1) + 1 if hi > lo else 0)
            for dim, (lo, hi) in enumerate(box)
        ]

    def n_in_box(
        self, coords: Coords, grid_shape: Coords | None, growing: Collection[int] = ()
    ) -> int:
        """Return the number of places in a box, which is not clipped where the grid grows."""
        lengths = self.lengths(coords) if self.uneven else self.largest
        if grid_shape is None:
            return math.prod(lengths)
        n_places = 1
        for dim, n in enumerate(lengths):
            start = self.bounds(dim, coords[dim])[0] if self.uneven else coords[dim] * n
            n_places *= n if dim in growing else max(0, min(n, grid_shape[dim] - start))
        return n_places

    def ids_in(self, coords: Coords, *boxes: Box) -> npt.NDArray[np.intp]:
        """Return the C-order numbers, in one box, of the places in `boxes`, which ascend."""
        found = [np.zeros(0, dtype=np.intp)]
        whole = self.box(coords)
        for box in boxes:
            ids = np.zeros(1, dtype=np.intp)
            for (start, stop), (lo, hi) in zip(box, whole, strict=True):
                local = np.arange(max(start - lo, 0), max(min(stop, hi) - lo, 0), dtype=np.intp)
                ids = (ids[:, None] * (hi - lo) + local[None, :]).reshape(-1)
            found.append(ids)
        return found[1] if len(found) == 2 else np.concatenate(found)

    def has_same_boxes(
        self, other: BoxGrid, grid_shape: Sequence[int], *, but_last: bool = False
    ) -> bool:
        """Whether both cut a grid of this shape in the same way, perhaps `but_last` boxes."""
        if len(self.sides) != len(other.sides):
            return False
        for dim, length in enumerate(grid_shape):
            mine, theirs = self.sides[dim], other.sides[dim]
            if mine == theirs:
                continue
            if isinstance(mine, int) and isinstance(theirs, int):
                return False
            n = self.number(dim, length - 1)
            if n != other.number(dim, length - 1):
                return False
            numbers = range(min(n + 1 - but_last, MAX_EDGES + 1))  # then the lengths repeat
            if any(self.bounds(dim, i) != other.bounds(dim, i) for i in numbers):
                return False
        return True


def parse_side(given: Any, max_edges: int = MAX_EDGES) -> Side | None:
    """Parse a length, or a list of lengths and of pairs ``[length, count]``; ``None`` if it is no
    such thing, or too long."""
    if type(given) is int:
        return given if given > 0 else None
    if not isinstance(given, list | tuple) or not given:
        return None
    lengths: list[int] = []
    for item in given:
        pair = item if isinstance(item, list | tuple) else (item, 1)
        is_pair = len(pair) == 2 and all(type(n) is int and n > 0 for n in pair)
        if not is_pair or pair[1] > max_edges - len(lengths):
            return None
        lengths += [pair[0]] * pair[1]
    return tuple(lengths)


def parse_sides(given: Sequence[Any]) -> list[Side] | None:
    """Parse a side for each dimension; ``None`` if one is none, or all have too many lengths."""
    sides: list[Side] = []
    n_left = MAX_EDGES
    for text in given:
        if (side := parse_side(text, n_left)) is None:
            return None
        n_left -= len(side) if isinstance(side, tuple) else 0
        sides.append(side)
    return sides


def spell_side(side: Side) -> int | list[Any]:
    """Return a side as metadata spells it, with counts if that is shorter."""
    if isinstance(side, int):
        return side
    counted = [(length, len([*same])) for length, same in groupby(side)]
    pairs = [length if n == 1 else [length, n] for length, n in counted]
    return pairs if len(pairs) < len(side) else list(side)
