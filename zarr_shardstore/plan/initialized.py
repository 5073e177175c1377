"""Which chunks of a region are stored, from the indexes of the shards that it touches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.arguments import items_of, short
from zarr_shardstore.format.grid import Box, grid_box
from zarr_shardstore.format.index import MISSING, ShardIndex
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import ArrayLayout, ShardRef

__all__ = [
    "Region",
    "box_of_region",
    "directory_of_box",
    "is_in_box",
    "mark_chunks",
    "shards_of_box",
]

Region: TypeAlias = Sequence[slice] | None
"""In chunk coordinates, a slice for each dimension; dimensions at the end may be left out."""

_MAX_CHUNKS = 2**32
"""A byte for each; more is asked for by mistake, or by hostile metadata."""


def box_of_region(region: Region, grid_shape: Coords) -> Box:
    """The chunks of a region, clipped to the grid as Python clips slices.

    Raises
    ------
    SpecError
        If it has more dimensions than the grid, or steps, or too many chunks.
    """
    slices = () if region is None else tuple(items_of("region", region))
    if len(slices) > len(grid_shape) or not all(isinstance(s, slice) for s in slices):
        raise SpecError(
            f"region is a slice for each of {len(grid_shape)} dims, got {short(region)}"
        )
    slices += (slice(None),) * (len(grid_shape) - len(slices))
    box = []
    for part, n in zip(slices, grid_shape, strict=True):
        start, stop, step = part.indices(n)
        if step != 1:
            raise SpecError(f"a region has no steps, got {region!r}")
        box.append((start, max(start, stop)))
    n_chunks = math.prod(stop - start for start, stop in box)
    if n_chunks > _MAX_CHUNKS:
        raise SpecError(f"the region has {n_chunks} chunks, ask for at most {_MAX_CHUNKS} at once")
    return tuple(box)


def directory_of_box(layout: ArrayLayout, box: Box) -> str:
    """The smallest directory of the base store that holds all shards that a box touches."""
    ranges = _shard_ranges(layout, box)
    first = layout.shard(tuple(r[0] for r in ranges)).key.split("/")
    last = layout.shard(tuple(r[-1] for r in ranges)).key.split("/")
    n_common = 0
    while n_common < len(first) - 1 and first[n_common] == last[n_common]:
        n_common += 1
    return "".join(f"{part}/" for part in first[:n_common])


def shards_of_box(layout: ArrayLayout, box: Box) -> Iterator[ShardRef]:
    """All shards that a box touches, whether they are stored or not."""
    return map(layout.shard, itertools.product(*_shard_ranges(layout, box)))


def is_in_box(shard: ShardRef, box: Box) -> bool:
    """Whether a shard may have chunks of a box."""
    ranges = _shard_ranges(shard.layout, box)
    return all(c in r for c, r in zip(shard.coords, ranges, strict=True))


def mark_chunks(out: npt.NDArray[np.bool_], box: Box, shard: ShardRef, index: ShardIndex) -> None:
    """Set what stands in `out`, which has the shape of the box, for the chunks of one shard."""
    cps = shard.layout.spec.chunks_per_shard
    present = (index.fields != MISSING).any(axis=1).reshape(cps)
    covered = grid_box(shard.coords, cps, shard.layout.grid_shape)
    both = [(max(a, c), max(a, c, min(b, d))) for (a, b), (c, d) in zip(box, covered, strict=True)]
    there = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, covered, strict=True))
    here = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, box, strict=True))
    out[here] = present[there]


def _shard_ranges(layout: ArrayLayout, box: Box) -> list[range]:
    cps = layout.spec.chunks_per_shard
    return [range(a // n, -(-b // n)) for (a, b), n in zip(box, cps, strict=True)]
