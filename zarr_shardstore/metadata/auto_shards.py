"""Chunks per shard for ``chunks_per_shard="auto"``: shards of 10 to 100 MB.

Larger shards mean fewer objects, and requests that are worth their latency. Smaller shards are
cheaper to rewrite, and more readers share the work.

Source: the recommendation of zarr-vectors and of the discussion of sharding, 10 to 100 MB.
"""

from __future__ import annotations

import math

from zarr_shardstore.format.keys import Coords

MAX_SHARD_NBYTES = 100_000_000
_MIN_SHARD_NBYTES = 10_000_000
_GOAL_NBYTES = 64_000_000
"""Size that shards approach from below, in bytes."""

_MAX_ENTRIES = 2**17
"""Entries in a shard: an index of 2 MiB, which a reader of one chunk has to fetch."""


def choose_chunks_per_shard(grid_shape: Coords, chunk_nbytes: float) -> tuple[Coords, str]:
    """Choose chunks per shard for an array, and give the reason.

    Shards are as near to cubes, counted in chunks, as the grid allows. Several shards along a
    dimension have about the same length. The length need not divide the grid.
    """
    grid = tuple(max(n, 1) for n in grid_shape)
    chunk_nbytes = max(chunk_nbytes, 1)
    about = f"stored chunks have about {_readable(chunk_nbytes)}"
    if math.prod(grid) <= _MAX_ENTRIES and math.prod(grid) * chunk_nbytes <= MAX_SHARD_NBYTES:
        total = _readable(math.prod(grid) * chunk_nbytes)
        return grid, f"{about}, the whole array {total}: one shard"
    goal = min(_GOAL_NBYTES / chunk_nbytes, _MAX_ENTRIES)
    if goal < 2:
        return (1,) * len(grid), f"{about}: each is large enough for an object of its own"
    cps = _even(_grown(grid, goal), grid, _MIN_SHARD_NBYTES / chunk_nbytes)
    nbytes = _readable(math.prod(cps) * chunk_nbytes)
    shown = " × ".join(map(str, cps))
    return cps, f"{about}: {shown} of them make shards of {nbytes}"


def _grown(grid: Coords, goal: float) -> list[int]:
    """Return a box of about `goal` chunks, as near to a cube as the grid allows."""
    cps = [1] * len(grid)
    free = set(range(len(grid)))
    rest = goal
    while free:
        side = max(1, int(rest ** (1 / len(free)) + 1e-9))
        small = {dim for dim in free if grid[dim] <= side}
        for dim in small or free:
            cps[dim] = min(side, grid[dim])
        rest /= math.prod(cps[dim] for dim in small)
        free = free - small if small else set()
    while True:  # rounding down to whole numbers left some chunks
        larger = [
            (n, dim)
            for dim, n in enumerate(cps)
            if n < grid[dim] and math.prod(cps) // n * (n + 1) <= goal
        ]
        if not larger:
            return cps
        cps[min(larger)[1]] += 1


def _even(cps: list[int], grid: Coords, at_least: float) -> Coords:
    """Make the shards along each dimension about equally long, without adding a shard.

    If shards got fewer than `at_least` chunks by that, the last shard is a short one instead.
    """
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
