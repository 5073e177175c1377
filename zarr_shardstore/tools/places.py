"""Where the values of an array are on one side of a conversion, and its regions.

A *value* is what a chunk key above sharding has: opaque bytes. A *region* is a box of the chunk
grid that one task converts: a shard, or a block of chunks where there are no shards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zarr_shardstore.format.grid import (
    Box,
    chunk_grid_shape,
    coords_of_entries,
    entries_in_box,
    grid_box,
)
from zarr_shardstore.format.keys import ChunkKeyEncoding, Coords
from zarr_shardstore.format.layout import ArrayLayout
from zarr_shardstore.format.orders import EntryOrder, order_entries
from zarr_shardstore.format.spec import ShardingSpec
from zarr_shardstore.tools.open_base import OpenBase

__all__ = ["Place", "Region", "block_shape", "keys_of_box", "n_regions"]

_BLOCK = 4096
"""Values in a region of an array that has shards on neither side."""


@dataclass(frozen=True, slots=True)
class Place:
    """Keys and form of the values of one array in one base store.

    Parameters
    ----------
    prefix : str
        What comes before the suffix in each key.
    grid_shape : tuple of int
        Number of values along each dimension.
    spec : ShardingSpec, optional
        Of the shards; ``None`` if each value has a key of its own.
    """

    base: OpenBase
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
class Region:
    """A box of the grid, and the order in which its values are taken.

    Parameters
    ----------
    box
        Half-open ranges of coordinates, inside the grid.
    ids : ndarray of int
        Entry ids of the values, in the order in which they are taken.
    positions : ndarray of int
        The same, as positions in the C order of the box.
    """

    box: Box
    ids: npt.NDArray[np.intp]
    positions: npt.NDArray[np.intp]
    shape: Coords
    coords: Coords

    @classmethod
    def of(cls, coords: Coords, shape: Coords, grid_shape: Coords, order: EntryOrder) -> Region:
        """Region number `coords` of a grid that is cut into boxes of `shape`."""
        box = grid_box(coords, shape, grid_shape)
        ascending = entries_in_box(box, coords, shape)
        ids = order_entries(ascending, shape, order)
        return cls(box, ids, np.searchsorted(ascending, ids), shape, coords)

    def value_coords(self) -> npt.NDArray[np.intp]:
        """Coordinates of the values in order; shape ``(n, ndim)``."""
        coords = coords_of_entries(self.ids, self.coords, self.shape)
        return np.array(coords, dtype=np.intp).reshape(len(self.ids), len(self.shape))

    def keys(self, place: Place) -> list[str]:
        """Keys of the values in order, where each has one of its own."""
        keys = keys_of_box(place.prefix, place.encoding, self.box)
        return [keys[i] for i in self.positions.tolist()]


def keys_of_box(prefix: str, encoding: ChunkKeyEncoding, box: Box) -> list[str]:
    """Keys of all chunks in a box, in C order; much less than a call for each.

    >>> keys_of_box("a/", ChunkKeyEncoding("default", "/"), ((0, 2), (7, 9)))
    ['a/c/0/7', 'a/c/0/8', 'a/c/1/7', 'a/c/1/8']
    """
    if not box:
        return [prefix + encoding.encode(())]
    zero = encoding.encode((0,) * len(box))
    marker = zero[: zero.index("0")]
    heads = [prefix + marker]
    for dim, (start, stop) in enumerate(box):
        end = encoding.separator if dim < len(box) - 1 else ""
        tails = [f"{n}{end}" for n in range(start, stop)]
        heads = [head + tail for head in heads for tail in tails]
    return heads


def block_shape(grid_shape: Coords) -> Coords:
    """Shape of the regions of an array without shards: rows of the grid, about `_BLOCK` values."""
    shape = []
    rest = _BLOCK
    for n in reversed(grid_shape):
        shape.append(max(1, min(n, rest)))
        rest //= shape[-1]
    return tuple(reversed(shape))


def n_regions(grid_shape: Coords, shape: Coords) -> int:
    """Number of regions that a grid is cut into."""
    return math.prod(chunk_grid_shape(grid_shape, shape))
