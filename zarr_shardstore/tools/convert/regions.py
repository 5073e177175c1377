"""Locations of the values of an array, and the regions that a conversion visits.

A *value* is the opaque bytes that a chunk key has above sharding. A *region* is the box of the
chunk grid that one task converts: a shard, or a block of chunks where there are no shards.

The cost of a visit to all regions grows with the grid, the cost of a listing with the stored
objects. So some objects of a large grid are sampled. If most are missing, the objects are listed,
and only regions that hold one are visited. A listing that has seen half of the grid is given up.
For a shard that lies in several regions, its index decides which regions to visit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from zarr_shardstore.access import BaseStoreHandle, box_grids, chunk_keys, shard_format, walks
from zarr_shardstore.errors import SpecError

BLOCK = 4096
"""Values in a region of an array without shards on either side."""

MAX_KEYS = 2**16
"""Most values in a region whose target has a key for each: shards may declare more."""

_WALKED = 4096
"""Most objects and regions of a grid that is visited without sampling, if it has few values."""

_FEW = 2**20
"""Most values of such a grid. A region costs time for each value that it may have."""

_MAX_WALKED = 2**24
"""Most regions that are visited where links hide objects from a listing."""

_N_SAMPLES = 64
_N_DENSE = 16
"""Objects that are sampled, and the number of stored ones in a grid that is visited as a whole."""

_MAX_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ArrayLocation:
    """Keys and form of the values of one array."""

    base: BaseStoreHandle
    grid: walks.ObjectGrid
    has_copies: bool = False
    """Whether its objects, perhaps shards, are copied as they are."""


@dataclass(frozen=True, slots=True)
class ArrayRegion:
    """A box of the grid, and entry ids of its values, as of a shard, in the order of conversion."""

    regions: shard_format.ShardingSpec
    """Cut of the grid into regions."""
    coords: chunk_keys.Coords
    ids: npt.NDArray[np.intp]

    def keys(self, location: ArrayLocation) -> list[str]:
        """Return the keys of the values, in order, as plain chunks."""
        shard = replace(location.grid.layout, spec=self.regions).shard(self.coords)
        return shard.chunk_keys(self.ids)


@dataclass(frozen=True, slots=True)
class ReadRound:
    """Some values; or one piece of a large value, which `continues` it or `has_more` after it."""

    ids: npt.NDArray[np.int64]
    """Entry ids of the values."""
    sizes: npt.NDArray[np.int64]
    """Bytes of each value, or of the piece."""
    pieces: Sequence[memoryview]
    """One piece for each value, or one piece with all values in order."""
    continues: bool = False
    has_more: bool = False

    def values(self) -> Sequence[memoryview]:
        if len(self.pieces) == len(self.ids):
            return self.pieces
        (data,) = self.pieces
        return [data[lo:hi] for lo, hi in pairwise([0, *np.cumsum(self.sizes).tolist()])]


def block_shape(grid_shape: chunk_keys.Coords, n_values: int) -> chunk_keys.Coords:
    """Return the shape of regions without shards: rows of a grid with about `n_values`."""
    shape = []
    rest = n_values
    for n in reversed(grid_shape):
        shape.append(max(1, min(n, rest)))
        rest //= shape[-1]
    return tuple(reversed(shape))


def random_coords(box: Iterable[range], n: int) -> list[chunk_keys.Coords]:
    """Return `n` coordinates from all over a box, each time the same; some may be equal."""
    rng, columns = np.random.default_rng(0), []
    for side in box:
        offsets = rng.integers(0, min(side.stop - side.start, _MAX_INT64), n)
        columns.append([side.start + offset for offset in offsets.tolist()])
    return list(zip(*columns, strict=True))


def regions_to_visit(
    locations: Sequence[ArrayLocation], regions: box_grids.BoxGrid
) -> list[chunk_keys.Coords] | None:
    """Return the regions in which one of these locations has a value; ``None``: all regions.

    Memory: some 150 bytes for each region. Raises `CorruptShardError` for a damaged index.
    """
    first = locations[0]
    n_regions = math.prod(regions.shape(first.grid.grid_shape))
    n_objects = max(math.prod(location.grid.shape) for location in locations)
    if not n_regions:
        return []
    if max(n_objects, n_regions) <= _WALKED and math.prod(first.grid.grid_shape) <= _FEW:
        return None
    if n_objects > _WALKED and _is_dense(first, map(range, first.grid.shape)):
        return None
    # A listing does not follow links to directories.
    links = (location.base.backend.linked_directory(location.grid.prefix) for location in locations)
    if link := next(filter(None, links), None):
        if n_regions > _MAX_WALKED:
            raise SpecError(
                f"objects of the array at {first.grid.prefix!r} lie behind the link {link!r}, and "
                f"its grid has {n_regions} places where they may be: convert the directory that "
                "the link leads to"
            )
        return None
    found: set[chunk_keys.Coords] = set()
    max_regions = min(n_regions // 2, _MAX_INT64 - 1)
    for location in locations:
        n_listed = 0
        with closing(walks.walk(location.base.run, location.grid)) as rounds:
            for some in rounds:
                add_regions(location, some, regions, found)
                n_listed += len(some)
                if n_listed >= max(n_objects, n_regions) // 2 or len(found) > max_regions:
                    return None
    return sorted(found)


def _is_dense(location: ArrayLocation, box: Iterable[range]) -> bool:
    """Return whether enough objects of a box are stored, by samples from all over it."""
    keys = [location.grid.key(coords) for coords in random_coords(box, _N_SAMPLES)]
    return sum(size is not None for size in location.base.sizes(keys)) >= _N_DENSE


def add_regions(
    location: ArrayLocation,
    objects: Sequence[walks.Stored],
    regions: box_grids.BoxGrid,
    found: set[chunk_keys.Coords],
) -> None:
    """Add the regions of some objects; of a shard in several regions, the regions of its values."""
    grid, shards = location.grid, []
    for stored in objects:
        numbers = regions.boxes_of(grid.boxes.box(stored.coords, grid.grid_shape))
        if all(len(side) == 1 for side in numbers):
            found.add(tuple(side.start for side in numbers))
        else:
            shards.append(stored)
    for stored in location.base.run(walks.read_stored(grid, shards)):
        stored.check()
        box = grid.boxes.box(stored.coords)
        inside = np.unravel_index(stored.ids, grid.boxes.lengths(stored.coords))
        columns = []
        for dim, ((first, _), column) in enumerate(zip(box, inside, strict=True)):
            there, at = np.unique(column, return_inverse=True)
            # Python ints: numpy has no integers for some coordinates.
            numbers_there = [regions.number(dim, first + i) for i in there.tolist()]
            columns.append([numbers_there[i] for i in at.tolist()])
        found.update(zip(*columns, strict=True))


def only_stored(location: ArrayLocation, region: ArrayRegion) -> ArrayRegion:
    """Return a region without the values that no listed object has.

    Cost: samples and a listing, if many objects may lie in the region and most samples are missing.
    The listing ends where a request for each object is no more work.
    """
    grid, boxes = location.grid, region.regions.boxes
    ranges = grid.boxes.boxes_of(boxes.box(region.coords, grid.grid_shape))
    n_objects = math.prod(r.stop - r.start for r in ranges)
    if n_objects <= _WALKED or _is_dense(location, ranges):
        return region
    if location.base.backend.linked_directory(location.grid.prefix):
        return region
    there, n_listed = [np.zeros(0, np.intp)], 0
    with closing(walks.walk(location.base.run, grid)) as rounds:
        for some in rounds:
            for stored in some:
                if all(c in r for c, r in zip(stored.coords, ranges, strict=True)):
                    of_object = grid.boxes.box(stored.coords, grid.grid_shape)
                    there.append(boxes.ids_in(region.coords, of_object))
            n_listed += len(some)
            if n_listed >= n_objects:
                return region
    return replace(region, ids=region.ids[np.isin(region.ids, np.concatenate(there))])
