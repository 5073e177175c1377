"""Presence of chunks: stored and missing chunks, from listings and shard indexes alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    stored_arrays,
    walks,
)
from zarr_shardstore.errors import SpecError
from zarr_shardstore.tools.check.objects import checked_array
from zarr_shardstore.tools.inspect.find import find_arrays

_MAX_ASKED = 4096
"""Objects of a region that are asked for one by one; of more the array is listed."""

_CHUNKS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class ArrayPresence:
    """The stored chunks of one array, or of a region of its grid of chunks."""

    path: str
    hierarchy: metadata.Hierarchy
    start: chunk_keys.Coords
    """First coordinates of the region."""
    is_stored: npt.NDArray[np.bool_]
    """For each chunk of the region."""
    errors: tuple[str, ...] = ()
    """One for each shard whose index is damaged: its chunks count as missing."""

    def chunks(self, *, stored: bool) -> Iterator[chunk_keys.Coords]:
        """Yield the coordinates of the chunks that are stored, or of those that are missing."""
        flat, shape = self.is_stored.reshape(-1), self.is_stored.shape or (1,)
        for first in range(0, flat.size, _CHUNKS_AT_ONCE):
            ids = first + np.flatnonzero(flat[first : first + _CHUNKS_AT_ONCE] == stored)
            for row in zip(*np.unravel_index(ids, shape), strict=True):
                yield tuple(int(n) + start for n, start in zip(row, self.start, strict=False))


def presence(
    store: StoreLike,
    paths: Iterable[str] | str | None = None,
    *,
    region: Sequence[slice] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[ArrayPresence]:
    """Count the stored chunks of each array; no chunk is read.

    Parameters
    ----------
    paths
        As of `check_store`.
    region
        In chunk coordinates, with a slice for each dimension, or for the first ones.

    Raises
    ------
    SpecError
        If a path names no array, or the region does not fit an array, or has more than 2²⁸ chunks.
    """
    base = open_base(store, storage_options)
    for found in find_arrays(base, paths):
        array = checked_array(found)
        if array.grid_shape is None:
            raise SpecError(f"the chunk grid of {found.node.path!r} is not known here")
        yield _count(base, array, array.grid_shape, region)


def _count(
    base: BaseStoreHandle,
    array: stored_arrays.StoredArray,
    shape: chunk_keys.Coords,
    region: Sequence[slice] | None,
) -> ArrayPresence:
    cuts = [*(region or ()), *[slice(None)] * (len(shape) - len(region or ()))]
    if len(cuts) != len(shape) or any(cut.step not in (None, 1) for cut in cuts):
        raise SpecError(
            f"the region has a slice for each of the {len(shape)} dims of {array.node.path!r}"
        )
    ranges = [cut.indices(n)[:2] for cut, n in zip(cuts, shape, strict=True)]
    box = tuple((lo, max(lo, hi)) for lo, hi in ranges)
    arguments.check_n_chunks(math.prod(hi - lo for lo, hi in box))
    is_stored = np.zeros([hi - lo for lo, hi in box], dtype=np.bool_)
    errors: list[str] = []
    grid = walks.ObjectGrid.of_array(array)
    for found in walks.walk(base.run, grid, box, needs=("index",), max_asked=_MAX_ASKED):
        for stored in found:
            if stored.damage is None:
                stored.mark(is_stored, box)
            else:
                errors.append(str(stored.damage))
    starts = tuple(lo for lo, _ in box)
    node = array.node
    return ArrayPresence(node.path, node.hierarchy, starts, is_stored, tuple(errors))
