"""Presence of chunks: stored and missing chunks, from listings and shard indexes alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from zarr_shardstore.access import (
    BaseStoreHandle,
    StoreLike,
    arguments,
    chunk_keys,
    metadata,
    open_base,
    walks,
)
from zarr_shardstore.errors import SpecError
from zarr_shardstore.tools.check.objects import checked_array
from zarr_shardstore.tools.inspect.find import FoundArray, arrays_at, find_arrays

_MAX_ASKED = 4096
"""Objects of a region that are requested one by one; for a larger region the array is listed."""

_CHUNKS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class ArrayPresence:
    """The stored chunks of one array, or of a region of its grid of chunks."""

    path: str
    hierarchy: metadata.Hierarchy
    start: chunk_keys.Coords
    """First coordinates of the region."""
    is_stored: npt.NDArray[np.bool_]
    """One element for each chunk of the region."""
    errors: tuple[str, ...] = ()
    """One for each damaged shard index: the chunks of the shard count as missing."""
    in_source: npt.NDArray[np.bool_] | None = None
    """The chunks that the source has: only these count as missing."""

    def chunks(self, *, stored: bool) -> Iterator[chunk_keys.Coords]:
        """Yield the coordinates of the stored chunks, or of the missing ones."""
        flat, shape = self.is_stored.reshape(-1), self.is_stored.shape or (1,)
        for first in range(0, flat.size, _CHUNKS_AT_ONCE):
            is_wanted = flat[first : first + _CHUNKS_AT_ONCE] == stored
            if self.in_source is not None and not stored:
                is_wanted &= self.in_source.reshape(-1)[first : first + _CHUNKS_AT_ONCE]
            ids = first + np.flatnonzero(is_wanted)
            for row in zip(*np.unravel_index(ids, shape), strict=True):
                yield tuple(int(n) + start for n, start in zip(row, self.start, strict=False))


def presence(
    store: StoreLike,
    paths: Iterable[str] | str | None = None,
    *,
    region: Sequence[slice] | None = None,
    source: StoreLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[ArrayPresence]:
    """Find the stored chunks of each array, without reading a chunk.

    Parameters
    ----------
    paths
        As of `check_store`.
    region
        In chunk coordinates, with a slice for each dimension, or for the first ones.
    source
        A replica, with shards or without: only chunks that it has count as missing.

    Raises
    ------
    SpecError
        If a path names no array, or the region does not fit an array, or has more than 2²⁸ chunks;
        or if an array of the source has another grid of chunks.
    """
    base, replica = open_base(store, storage_options), None if source is None else open_base(source)
    for found in find_arrays(base, paths):
        here = _presence_of(base, found, region)
        if replica is not None:
            others = arrays_at(replica, here.path)[:1]
            if not others or not _have_same_chunks(found, others[0]):
                raise SpecError(f"the source has no array {here.path!r} with the same chunks")
            there = _presence_of(replica, others[0], region)
            errors = here.errors + tuple(f"in the source, {error}" for error in there.errors)
            here = replace(here, in_source=there.is_stored, errors=errors)
        yield here


def _have_same_chunks(one: FoundArray, other: FoundArray) -> bool:
    mine, theirs = (checked_array(each).document.geometry for each in (one, other))
    if mine is None or theirs is None or mine.shape != theirs.shape:
        return False
    return mine.chunks.has_same_boxes(theirs.chunks, mine.shape)


def _presence_of(
    base: BaseStoreHandle, found: FoundArray, region: Sequence[slice] | None
) -> ArrayPresence:
    array, node = checked_array(found), found.node
    shape = array.grid_shape
    if shape is None:
        raise SpecError(f"the chunk grid of {node.path!r} is not known here")
    box = arguments.box_of(region, shape)
    is_stored = np.zeros([hi - lo for lo, hi in box], dtype=np.bool_)
    errors: list[str] = []
    grid = walks.ObjectGrid.of_array(array)
    for some in walks.walk(base.run, grid, box, max_asked=_MAX_ASKED):
        for stored in base.run(walks.read_stored(grid, some)):
            if stored.damage is None:
                stored.mark(is_stored, box)
            else:
                errors.append(str(stored.damage))
    starts = tuple(lo for lo, _ in box)
    return ArrayPresence(node.path, node.hierarchy, starts, is_stored, tuple(errors))
