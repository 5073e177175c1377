"""Grid arithmetic: chunks in shards, entries in C order, the clipped edge.

All shapes and coordinates are tuples of Python ints, one per dimension: no overflow.

Source: sharding storage transformer draft, "Key & value transformation" (floor division)
and "Binary shard format" (row-major order of entries).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from zarr_shardstore.format.keys import Coords

Box = tuple[tuple[int, int], ...]
"""A half-open range ``(start, stop)`` for each dimension."""


def chunk_grid_shape(shape: Sequence[int], chunk_shape: Sequence[int]) -> Coords:
    """Return the number of chunks along each dimension; the last may hang over the edge."""
    return tuple(-(-s // c) for s, c in zip(shape, chunk_shape, strict=True))


def is_inside(coords: Coords, grid_shape: Coords) -> bool:
    """Whether `coords` lie in the grid."""
    return all(c < n for c, n in zip(coords, grid_shape, strict=True))


def shard_coords_of(chunk_coords: Coords, chunks_per_shard: Coords) -> Coords:
    """Return the coordinates of the shard that holds a chunk.

    >>> shard_coords_of((96, 18), (32, 2))
    (3, 9)
    """
    return tuple(c // n for c, n in zip(chunk_coords, chunks_per_shard, strict=True))


def entry_id_of(chunk_coords: Coords, chunks_per_shard: Coords) -> int:
    """Return the C-order number of a chunk's entry in its shard."""
    entry_id = 0
    for c, n in zip(chunk_coords, chunks_per_shard, strict=True):
        entry_id = entry_id * n + c % n
    return entry_id


def coords_of_entries(
    entry_ids: npt.ArrayLike, shard_coords: Coords, chunks_per_shard: Coords
) -> list[Coords]:
    """Return the chunk coordinates of entries of one shard, in the order given."""
    ids = np.asarray(entry_ids, dtype=np.intp)
    if not chunks_per_shard:
        return [()] * len(ids)
    local = np.unravel_index(ids, chunks_per_shard)
    columns = [
        [s * n + c for c in dim.tolist()]
        for dim, s, n in zip(local, shard_coords, chunks_per_shard, strict=True)
    ]
    return list(zip(*columns, strict=True))


def grid_box(shard_coords: Coords, chunks_per_shard: Coords, grid_shape: Coords | None) -> Box:
    """Return the chunk coordinates that one shard covers, clipped to the grid if it is known."""
    box = []
    for dim, (s, n) in enumerate(zip(shard_coords, chunks_per_shard, strict=True)):
        stop = (s + 1) * n
        if grid_shape is not None:
            stop = max(s * n, min(stop, grid_shape[dim]))
        box.append((s * n, stop))
    return tuple(box)


def numbers_begun(digits: str, start: int, stop: int) -> list[tuple[int, int]]:
    """Return ascending half-open ranges of numbers in ``[start, stop)`` that begin with `digits`.

    >>> numbers_begun("4", 0, 45)
    [(4, 5), (40, 45)]
    """
    if not digits:
        return [(start, stop)] if start < stop else []
    low, high = int(digits), int(digits) + 1
    ranges = []
    while low < stop:
        if max(low, start) < min(high, stop):
            ranges.append((max(low, start), min(high, stop)))
        if low == 0:
            break
        low, high = low * 10, high * 10
    return ranges


def n_in_grid_box(shard_coords: Coords, chunks_per_shard: Coords, grid_shape: Coords | None) -> int:
    """Count the chunks in a `grid_box` without making it: each write needs the number."""
    if grid_shape is None:
        return math.prod(chunks_per_shard)
    n_chunks = 1
    for s, n, size in zip(shard_coords, chunks_per_shard, grid_shape, strict=True):
        n_chunks *= max(0, min(n, size - s * n))
    return n_chunks


def entries_in_box(
    box: Box, shard_coords: Coords, chunks_per_shard: Coords
) -> npt.NDArray[np.intp]:
    """Return ascending ids of the entries of one shard whose coordinates lie in `box`."""
    ids = np.zeros(1, dtype=np.intp)
    for (start, stop), s, n in zip(box, shard_coords, chunks_per_shard, strict=True):
        local = np.arange(max(start - s * n, 0), max(min(stop - s * n, n), 0), dtype=np.intp)
        ids = (ids[:, None] * n + local[None, :]).reshape(-1)
    return ids
