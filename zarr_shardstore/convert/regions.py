"""Locations of the values of an array, and the regions that a conversion visits.

A *value* is the opaque bytes that a chunk key has above sharding. A *region* is the box of the
chunk grid that one task converts: a shard, or a block of chunks where there are no shards.

A grid tells the possible objects of an array, not how many are stored. A walk through the grid
requests each of them; a listing costs what is stored. So some objects of a large grid are sampled.
If most are missing, the objects are listed, and only regions that hold one are visited. A listing
that has seen half of what the grid may hold is given up: from there on walking is no more work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.format.index import ShardingSpec
from zarr_shardstore.format.keys import ChunkKeyEncoding, Coords
from zarr_shardstore.format.layout import (
    ArrayLayout,
    Box,
    chunk_grid_shape,
    coords_of_entries,
    entries_in_box,
    grid_box,
    is_inside,
)
from zarr_shardstore.format.shard import EntryOrder, order_entries
from zarr_shardstore.inspect.open_base import BaseStoreHandle
from zarr_shardstore.shards.requests import CloseListing, KeyCursor, ListPage

_BLOCK = 4096
"""Values in a region of an array that has shards on neither side."""

_WALKED = 4096
"""Objects of a grid that is walked without sampling."""

_N_SAMPLES = 64
_N_DENSE = 16
"""Objects that are sampled, and how many of them make a grid one that is walked."""

_KEYS_PER_PAGE = 1024

_NUMBERS_PER_MERGE = 1 << 16
"""Region numbers that are collected before duplicates are dropped."""

_MAX_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ArrayLocation:
    """Keys and form of the values of one array in one base store.

    Parameters
    ----------
    prefix : str
        Of each key; the chunk key encoding spells the rest.
    grid_shape : tuple of int
        Number of values along each dimension.
    spec : ShardingSpec, optional
        Of the shards; ``None`` if each value has a key of its own.
    """

    base: BaseStoreHandle
    prefix: str
    encoding: ChunkKeyEncoding
    grid_shape: Coords
    spec: ShardingSpec | None

    @property
    def layout(self) -> ArrayLayout:
        """Translation of keys, where there are shards."""
        assert self.spec is not None
        return ArrayLayout("", self.prefix, self.encoding, self.grid_shape, self.spec)

    @property
    def object_grid_shape(self) -> Coords:
        """Number of objects along each dimension."""
        if self.spec is None:
            return self.grid_shape
        return chunk_grid_shape(self.grid_shape, self.spec.chunks_per_shard)


@dataclass(frozen=True, slots=True)
class ArrayRegion:
    """A box of the grid, and the order in which its values are converted.

    Parameters
    ----------
    box
        Half-open ranges of coordinates, inside the grid.
    ids : ndarray of int
        Entry ids of the values in that order.
    """

    box: Box
    ids: npt.NDArray[np.intp]
    shape: Coords
    coords: Coords

    @classmethod
    def of(
        cls, coords: Coords, shape: Coords, grid_shape: Coords, order: EntryOrder
    ) -> ArrayRegion:
        """Return region number `coords` of a grid that is cut into boxes of `shape`."""
        box = grid_box(coords, shape, grid_shape)
        ids = order_entries(entries_in_box(box, coords, shape), shape, order)
        return cls(box, ids, shape, coords)

    def value_coords(self) -> npt.NDArray[np.intp]:
        """Return the coordinates of the values in order; shape ``(n, ndim)``."""
        coords = coords_of_entries(self.ids, self.coords, self.shape)
        return np.array(coords, dtype=np.intp).reshape(len(self.ids), len(self.shape))

    def keys(self, location: ArrayLocation) -> list[str]:
        """Return the keys of the values in order, where each has one of its own."""
        keys = keys_of_box(location.prefix, location.encoding, self.box)
        in_c_order = np.sort(self.ids)
        return [keys[i] for i in np.searchsorted(in_c_order, self.ids).tolist()]


def keys_of_box(prefix: str, encoding: ChunkKeyEncoding, box: Box) -> list[str]:
    """Return the keys of all chunks in a box, in C order; faster than a call for each.

    >>> keys_of_box("a/", ChunkKeyEncoding("default", "/"), ((0, 2), (7, 9)))
    ['a/c/0/7', 'a/c/0/8', 'a/c/1/7', 'a/c/1/8']
    """
    if not box:
        return [prefix + encoding.encode(())]
    zero = encoding.encode((0,) * len(box))
    heads = [prefix + zero[: zero.index("0")]]
    for dim, (start, stop) in enumerate(box):
        end = encoding.separator if dim < len(box) - 1 else ""
        tails = [f"{n}{end}" for n in range(start, stop)]
        heads = [head + tail for head in heads for tail in tails]
    return heads


def block_shape(grid_shape: Coords) -> Coords:
    """Return the shape of regions without shards: rows of the grid, about `_BLOCK` values."""
    shape = []
    rest = _BLOCK
    for n in reversed(grid_shape):
        shape.append(max(1, min(n, rest)))
        rest //= shape[-1]
    return tuple(reversed(shape))


def random_coords(grid_shape: Coords, n: int, rng: np.random.Generator) -> list[Coords]:
    """Return `n` coordinates from all over a grid; some may be equal."""
    columns = [rng.integers(0, min(length, _MAX_INT64), n).tolist() for length in grid_shape]
    return list(zip(*columns, strict=True))


# --------------------------------------------------------- regions to visit

_Numbers: TypeAlias = npt.NDArray[Any]
"""int64, or Python ints where the grid has more regions than these count."""


@dataclass(frozen=True, slots=True)
class RegionList:
    """The regions of a grid that are visited: all, or those with these numbers in C order.

    Memory: 8 bytes for each number, some 60 where the grid has 2**62 regions or more.
    """

    grid_shape: Coords
    numbers: _Numbers | None

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


def regions_to_visit(locations: Sequence[ArrayLocation], region_shape: Coords) -> RegionList:
    """Return the regions in which one of these locations has an object; or all.

    Parameters
    ----------
    locations
        Of the same values: the source, and where an earlier run may have written some.
    region_shape
        Values along each dimension of a region.
    """
    grid_shape = chunk_grid_shape(locations[0].grid_shape, region_shape)
    every_region = RegionList(grid_shape, None)
    n_objects = max(math.prod(location.object_grid_shape) for location in locations)
    if n_objects <= _WALKED or _is_dense(locations[0]):
        return every_region
    # A listing does not follow links to directories.
    if any(location.base.backend.linked_directory(location.prefix) for location in locations):
        return every_region
    found = _FoundRegions(grid_shape, region_shape)
    if not all(map(found.list_objects, locations)):
        return every_region
    return RegionList(grid_shape, found.numbers())


def _is_dense(location: ArrayLocation) -> bool:
    """Return whether many of the sampled objects of the grid are stored."""
    coords = random_coords(location.object_grid_shape, _N_SAMPLES, np.random.default_rng(0))
    sizes = location.base.sizes([location.prefix + location.encoding.encode(c) for c in coords])
    return sum(size is not None for size in sizes) >= _N_DENSE


class _FoundRegions:
    """Numbers of the regions that hold an object, without duplicates."""

    def __init__(self, grid_shape: Coords, region_shape: Coords) -> None:
        self._grid_shape = grid_shape
        self._region_shape = region_shape
        self._n_regions = math.prod(grid_shape)
        edges = (n * size for n, size in zip(grid_shape, region_shape, strict=True))
        is_huge = max(self._n_regions, *edges) >= 2**62
        self._dtype: Any = object if is_huge else np.int64
        self._found: _Numbers = np.zeros(0, dtype=self._dtype)
        self._collected: list[_Numbers] = []
        self._n_collected = 0

    def numbers(self) -> _Numbers:
        """Return the numbers in ascending order."""
        self._merge()
        return self._found

    def list_objects(self, location: ArrayLocation) -> bool:
        """List the objects of a location; return ``False`` if a walk is no more work."""
        encoding, ndim, prefix = location.encoding, len(location.grid_shape), location.prefix
        dims = encoding.dims_of_components(ndim)
        has_marker = len(dims) > 1 and not dims[0]  # the "c" of the default encoding
        marker = f"{encoding.encode_component(0, ())}/" if has_marker else ""
        cursor = KeyCursor(prefix + marker)
        shape = location.object_grid_shape
        n_left = math.prod(shape) // 2
        while n_left > 0:
            page: list[str]
            (page,) = location.base.perform([ListPage(cursor, _KEYS_PER_PAGE)])
            decoded = (encoding.decode(key[len(prefix) :], ndim) for key in page)
            coords = [c for c in decoded if c is not None and is_inside(c, shape)]
            if coords and not self._add(location, coords):
                break
            if len(page) < _KEYS_PER_PAGE:
                return True
            n_left -= len(page)
        location.base.perform([CloseListing(cursor)])
        return False

    def _add(self, location: ArrayLocation, coords: Sequence[Coords]) -> bool:
        """Add the regions that hold objects; return ``False`` if these are most of the grid."""
        spec = location.spec
        object_shape = (1,) * len(self._grid_shape) if spec is None else spec.chunks_per_shard
        size = np.array(object_shape, dtype=self._dtype)
        region = np.array(self._region_shape, dtype=self._dtype)
        starts = np.array(coords, dtype=self._dtype) * size
        stops = np.minimum(starts + size, np.array(location.grid_shape, dtype=self._dtype))
        first, last = starts // region, (stops - 1) // region
        if (first == last).all():
            self._collect(np.unique(self._numbers_of(first)))
        else:
            n_numbers = sum(math.prod(row) for row in (last - first + 1).tolist())
            if n_numbers > self._n_regions // 2:
                return False
            for lows, highs in zip(first.tolist(), last.tolist(), strict=True):
                self._collect(self._numbers_in(lows, highs))
        return len(self._found) <= self._n_regions // 2

    def _collect(self, numbers: _Numbers) -> None:
        self._collected.append(numbers)
        self._n_collected += len(numbers)
        if self._n_collected > _NUMBERS_PER_MERGE:
            self._merge()

    def _numbers_of(self, rows: _Numbers) -> _Numbers:
        numbers = np.zeros(len(rows), dtype=self._dtype)
        for dim, n in enumerate(self._grid_shape):
            numbers = numbers * n + rows[:, dim]
        return numbers

    def _numbers_in(self, lows: Sequence[int], highs: Sequence[int]) -> _Numbers:
        """Return the numbers of all regions in a box, the corners included."""
        numbers = np.zeros(1, dtype=self._dtype)
        for n, low, high in zip(self._grid_shape, lows, highs, strict=True):
            along = np.arange(high - low + 1).astype(self._dtype) + low
            numbers = (numbers[:, None] * n + along[None, :]).reshape(-1)
        return numbers

    def _merge(self) -> None:
        self._found = np.unique(np.concatenate([self._found, *self._collected]))
        self._collected = []
        self._n_collected = 0
