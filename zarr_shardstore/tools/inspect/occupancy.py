"""Occupancy of the objects of one array: chunks and bytes, from the shard indexes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from zarr_shardstore.access import BaseStoreHandle, chunk_keys, walks


@dataclass(slots=True)
class Cell:
    """Content of one shard; of one chunk, if the array has no shards."""

    coords: chunk_keys.Coords
    n_chunks: int | None = 1
    """Stored chunks that lie in the array; ``None`` if the shard could not be read."""
    chunk_nbytes: int = 0
    index_nbytes: int = 0
    dead_nbytes: int = 0
    """Bytes of the shard that no entry and no index uses."""
    error: str = ""
    """Damage of the shard: it could not be read, or an entry leaves it."""


Round: TypeAlias = tuple[list[int], list[Cell]]
"""Sizes of some objects in the base store, and their content."""


def rounds_of_objects(base: BaseStoreHandle, grid: walks.ObjectGrid) -> Iterator[Round]:
    """Read the indexes of all objects of an array, some at a time; no chunk, but the values of a
    transformer below sharding. Objects outside the grid, or erased concurrently, are left out."""
    for listed in walks.walk(base.run, grid):
        if listed:
            yield _read_round(base, grid, listed)


def _read_round(
    base: BaseStoreHandle, grid: walks.ObjectGrid, listed: Sequence[walks.Stored]
) -> Round:
    sizes: list[int | None] = []
    if grid.below:  # the objects are not the values that are counted
        sizes = base.sizes([stored.key for stored in listed])
        if not grid.is_sharded:
            pairs = zip(listed, sizes, strict=True)
            listed = [stored._replace(nbytes=size) for stored, size in pairs if size is not None]
    found = walks.try_read(base.run, grid, listed, sizes=True)
    if not grid.below:
        sizes = [stored.nbytes for stored in found]
    return [size for size in sizes if size is not None], [*map(cell_of, found)]


def cell_of(stored: walks.Stored) -> Cell:
    """Return the content of an object that was read with its size."""
    nbytes, error = stored.nbytes or 0, "" if stored.damage is None else str(stored.damage)
    if isinstance(stored.damage, OSError):
        error = f"{stored.key!r}: {error}"
    if error and stored.decoded is None:
        return Cell(stored.coords, None, error=error)
    if stored.shard is None or stored.decoded is None:
        return Cell(stored.coords, chunk_nbytes=nbytes)
    index, spec = stored.decoded, stored.shard.spec
    # Damaged entries use no bytes.
    sound = np.setdiff1d(index.present_ids(), index.damaged_ids(nbytes, spec))
    starts, sizes = index.fields[sound].astype(np.int64).T
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], (starts + sizes)[order]
    reached = np.concatenate([[0], np.maximum.accumulate(stops)[:-1]])
    n_covered = int(np.maximum(stops - np.maximum(starts, reached), 0).sum())
    in_grid = stored.ids
    n_stored = int(sizes[np.isin(sound, in_grid)].sum())
    n_dead = max(0, nbytes - spec.index_nbytes - n_covered)
    return Cell(stored.coords, len(in_grid), n_stored, spec.index_nbytes, n_dead, error)
