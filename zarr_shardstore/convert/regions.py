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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Self

import numpy as np
import numpy.typing as npt

from zarr_shardstore.format import layout
from zarr_shardstore.format.keys import ChunkKeyEncoding, Coords
from zarr_shardstore.format.shard import ZEP2_INDEX, EntryOrder, ShardingSpec, order_entries
from zarr_shardstore.inspect.occupancy import grid_directory
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
_MAX_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ArrayLocation:
    """Keys and form of the values of one array; without `spec` each value has its own key."""

    base: BaseStoreHandle
    prefix: str
    encoding: ChunkKeyEncoding
    grid_shape: Coords
    spec: ShardingSpec | None

    def shard(self, coords: Coords) -> layout.ShardRef:
        assert self.spec is not None
        keys = layout.ArrayLayout("", self.prefix, self.encoding, self.grid_shape, self.spec)
        return keys.shard(coords)

    @property
    def object_grid_shape(self) -> Coords:
        """Number of objects along each dimension."""
        if self.spec is None:
            return self.grid_shape
        return layout.chunk_grid_shape(self.grid_shape, self.spec.chunks_per_shard)


@dataclass(frozen=True, slots=True)
class ArrayRegion:
    """A box of the grid, and the entry ids of its values in the order of conversion.

    It is counted as a shard of `shape` chunks, also where there are no such shards.
    """

    shape: Coords
    coords: Coords
    ids: npt.NDArray[np.intp]

    @classmethod
    def of(cls, shape: Coords, coords: Coords, grid_shape: Coords, order: EntryOrder) -> Self:
        """Return region number `coords` of a grid that is cut into boxes."""
        box = layout.grid_box(coords, shape, grid_shape)
        entries = layout.entries_in_box(box, coords, shape)
        return cls(shape, coords, order_entries(entries, shape, order))

    def keys(self, location: ArrayLocation) -> list[str]:
        """Return the keys of the values in order, where each has one of its own."""
        regions = replace(location, spec=ShardingSpec(self.shape, ZEP2_INDEX))
        return regions.shard(self.coords).chunk_keys(self.ids)


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


def regions_to_visit(
    locations: Sequence[ArrayLocation], region_shape: Coords
) -> list[Coords] | None:
    """Return the regions in which one of these locations has an object; ``None``: all regions.

    Memory: some 150 bytes for each region.
    """
    n_objects = max(math.prod(location.object_grid_shape) for location in locations)
    if n_objects <= _WALKED:
        return None
    first = locations[0]
    sampled = random_coords(first.object_grid_shape, _N_SAMPLES, np.random.default_rng(0))
    sizes = first.base.sizes([first.prefix + first.encoding.encode(c) for c in sampled])
    if sum(size is not None for size in sizes) >= _N_DENSE:
        return None
    # A listing does not follow links to directories.
    if any(location.base.backend.linked_directory(location.prefix) for location in locations):
        return None
    found: set[Coords] = set()
    if not all(_list_regions(location, region_shape, found) for location in locations):
        return None
    return sorted(found)


def _list_regions(location: ArrayLocation, region_shape: Coords, found: set[Coords]) -> bool:
    """Add the regions that hold objects; return ``False`` if a walk is no more work."""
    base, encoding, prefix = location.base, location.encoding, location.prefix
    grid_shape, object_grid = location.grid_shape, location.object_grid_shape
    object_shape = location.spec.chunks_per_shard if location.spec else (1,) * len(grid_shape)
    n_regions = math.prod(layout.chunk_grid_shape(grid_shape, region_shape))
    max_regions = min(n_regions // 2, _MAX_INT64 - 1)
    n_left = math.prod(object_grid) // 2
    cursor = KeyCursor(grid_directory(prefix, encoding, len(grid_shape)))
    while n_left > 0 and len(found) <= max_regions:
        page: list[str]
        (page,) = base.perform([ListPage(cursor, _KEYS_PER_PAGE)])
        for key in page:
            coords = encoding.decode(key[len(prefix) :], len(grid_shape))
            if coords is None or not layout.is_inside(coords, object_grid):
                continue
            box = zip(layout.grid_box(coords, object_shape, grid_shape), region_shape, strict=True)
            regions = product(*(range(lo // n, (hi - 1) // n + 1) for (lo, hi), n in box))
            found.update(islice(regions, max_regions + 1))
        if len(page) < _KEYS_PER_PAGE:
            return len(found) <= max_regions
        n_left -= len(page)
    base.perform([CloseListing(cursor)])
    return False
