"""Which regions of an array hold anything: found by a listing, where the grid is much larger.

A grid says how many objects an array may have, and nothing about how many there are. Walking it
asks for each of them, a listing costs what is stored. So some places of a large grid are asked for
first. If most of them are empty, the objects are listed; a listing that has seen half of what the
grid may hold is given up, because walking is no more work then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from zarr_shardstore.format.grid import chunk_grid_shape, is_inside
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.plan.requests import CloseListing, GetSize, KeyCursor, ListPage
from zarr_shardstore.tools.places import Place

__all__ = ["RegionList", "regions_to_visit"]

_WALKED = 4096
"""Objects of a grid that are asked for without a listing."""

_N_SAMPLES = 64
_N_DENSE = 16
"""Places that are asked for, and how many objects in them make a grid one that is walked."""

_MAX_INT64 = 2**63 - 1

_KEYS_PER_PAGE = 1024

_NUMBERS_PER_MERGE = 1 << 16
"""Regions that are found before they are made unique: each has a number of its own once."""

Numbers = npt.NDArray[Any]
"""int64, or Python ints where the grid has more regions than these count."""


@dataclass(frozen=True, slots=True)
class RegionList:
    """The regions of a grid that are visited: all, or those with these numbers in C order.

    Memory: 8 bytes for each number, some 60 where the grid has 2**62 regions or more.
    """

    grid_shape: Coords
    numbers: Numbers | None

    def __len__(self) -> int:
        return math.prod(self.grid_shape) if self.numbers is None else len(self.numbers)

    def __iter__(self) -> Iterator[Coords]:
        if self.numbers is None:
            return product(*map(range, self.grid_shape))
        return map(self._coords_of, self.numbers)

    def _coords_of(self, number: Any) -> Coords:
        coords = []
        rest = int(number)
        for n in reversed(self.grid_shape):
            rest, c = divmod(rest, n)
            coords.append(c)
        return tuple(reversed(coords))


def regions_to_visit(places: Sequence[Place], region_shape: Coords) -> RegionList:
    """The regions in which one of these places has an object; or all.

    Parameters
    ----------
    places
        Of the same values: where they are, and where an earlier run may have left some.
    region_shape
        Values along each dimension of a region.
    """
    grid_shape = chunk_grid_shape(places[0].grid_shape, region_shape)
    n_objects = [math.prod(place.object_grid_shape) for place in places]
    if max(n_objects) <= _WALKED or _is_dense(places[0]) or any(map(_has_links, places)):
        return RegionList(grid_shape, None)
    finder = _Finder(grid_shape, region_shape)
    for place in places:
        if not finder.list_objects(place):
            return RegionList(grid_shape, None)
    return RegionList(grid_shape, finder.numbers())


def _is_dense(place: Place) -> bool:
    """Whether many places of the grid hold an object, as far as some of them tell."""
    rng = np.random.default_rng(0)
    lengths = [min(n, _MAX_INT64) for n in place.object_grid_shape]
    columns = [rng.integers(0, n, _N_SAMPLES).tolist() for n in lengths]
    coords = zip(*columns, strict=True)
    keys = [place.prefix + place.encoding.encode(c) for c in coords]
    sizes = place.base.perform([GetSize(key) for key in keys])
    return sum(size is not None for size in sizes) >= _N_DENSE


def _has_links(place: Place) -> bool:
    """Whether objects may lie behind a link to a directory: listings do not follow it."""
    return place.base.runner.backend.linked_directory(place.prefix) is not None


class _Finder:
    """Numbers of the regions in which objects lie."""

    def __init__(self, grid_shape: Coords, region_shape: Coords) -> None:
        self._grid_shape = grid_shape
        self._region_shape = region_shape
        self._n_regions = math.prod(grid_shape)
        edges = (n * size for n, size in zip(grid_shape, region_shape, strict=True))
        is_huge = max(self._n_regions, *edges) >= 2**62
        self._dtype: Any = object if is_huge else np.int64
        self._found: Numbers = np.zeros(0, dtype=self._dtype)
        self._pending: list[Numbers] = []

    def numbers(self) -> Numbers:
        """Those that were found, ascending."""
        self._merge()
        return self._found

    def list_objects(self, place: Place) -> bool:
        """List the objects of a place; ``False`` if walking the grid is no more work."""
        encoding, ndim, prefix = place.encoding, len(place.grid_shape), place.prefix
        dims = encoding.dims_of_components(ndim)
        has_marker = len(dims) > 1 and not dims[0]  # the "c" of the default encoding
        marker = f"{encoding.encode_component(0, ())}/" if has_marker else ""
        cursor = KeyCursor(prefix + marker)
        shape = place.object_grid_shape
        n_left = math.prod(shape) // 2
        while n_left > 0:
            page: list[str]
            (page,) = place.base.perform([ListPage(cursor, _KEYS_PER_PAGE)])
            decoded = (encoding.decode(key[len(prefix) :], ndim) for key in page)
            coords = [c for c in decoded if c is not None and is_inside(c, shape)]
            if coords and not self._add(place, coords):
                break
            if len(page) < _KEYS_PER_PAGE:
                return True
            n_left -= len(page)
        place.base.perform([CloseListing(cursor)])
        return False

    def _add(self, place: Place, coords: Sequence[Coords]) -> bool:
        """Add the regions that objects lie in; ``False`` if these are most of the grid."""
        cps = (1,) * len(self._grid_shape) if place.spec is None else place.spec.chunks_per_shard
        size = np.array(cps, dtype=self._dtype)
        region = np.array(self._region_shape, dtype=self._dtype)
        starts = np.array(coords, dtype=self._dtype) * size
        stops = np.minimum(starts + size, np.array(place.grid_shape, dtype=self._dtype))
        first, last = starts // region, (stops - 1) // region
        if (first == last).all():
            self._pending.append(np.unique(self._numbers_of(first)))
        else:
            n_numbers = sum(math.prod(row) for row in (last - first + 1).tolist())
            if n_numbers > self._n_regions // 2:
                return False
            for lows, highs in zip(first.tolist(), last.tolist(), strict=True):
                self._pending.append(self._numbers_in(lows, highs))
                if sum(map(len, self._pending)) > _NUMBERS_PER_MERGE:
                    self._merge()
        if sum(map(len, self._pending)) > _NUMBERS_PER_MERGE:
            self._merge()
        return len(self._found) <= self._n_regions // 2

    def _numbers_of(self, rows: Numbers) -> Numbers:
        numbers = np.zeros(len(rows), dtype=self._dtype)
        for dim, n in enumerate(self._grid_shape):
            numbers = numbers * n + rows[:, dim]
        return numbers

    def _numbers_in(self, lows: Sequence[int], highs: Sequence[int]) -> Numbers:
        """Of all regions in a box, the corners included."""
        numbers = np.zeros(1, dtype=self._dtype)
        for n, low, high in zip(self._grid_shape, lows, highs, strict=True):
            along = np.arange(high - low + 1).astype(self._dtype) + low
            numbers = (numbers[:, None] * n + along[None, :]).reshape(-1)
        return numbers

    def _merge(self) -> None:
        self._found = np.unique(np.concatenate([self._found, *self._pending]))
        self._pending = []
