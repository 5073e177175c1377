"""Census of arrays: stored and missing chunks, from listings and shard indexes alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from zarr_shardstore.access import (
    BaseStoreHandle,
    StoreLike,
    arguments,
    chunk_keys,
    index_reads,
    layouts,
    metadata,
    open_base,
    requests,
    stacks,
)
from zarr_shardstore.errors import CorruptShardError, SpecError
from zarr_shardstore.tools.check.shards import checked_array
from zarr_shardstore.tools.convert.other_keys import in_rounds
from zarr_shardstore.tools.inspect.find import find_arrays
from zarr_shardstore.tools.inspect.occupancy import ObjectGrid, keys_of_values

_MAX_ASKED = 4096
"""Objects of a region that are asked for one by one; of more the array is listed."""

_CHUNKS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class ArrayCensus:
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


def census(
    store: StoreLike,
    paths: Iterable[str] | str | None = None,
    *,
    region: Sequence[slice] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[ArrayCensus]:
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
        yield _count(base, ObjectGrid(array), region)


def _count(base: BaseStoreHandle, grid: ObjectGrid, region: Sequence[slice] | None) -> ArrayCensus:
    array, shape = grid.array, grid.array.grid_shape
    assert shape is not None
    assert array.document.geometry is not None
    node, encoding = array.node, array.document.geometry.encoding
    cuts = [*(region or ()), *[slice(None)] * (len(shape) - len(region or ()))]
    if len(cuts) != len(shape) or any(cut.step not in (None, 1) for cut in cuts):
        raise SpecError(
            f"the region has a slice for each of the {len(shape)} dims of {node.path!r}"
        )
    ranges = [cut.indices(n)[:2] for cut, n in zip(cuts, shape, strict=True)]
    box = tuple((lo, max(lo, hi)) for lo, hi in ranges)
    arguments.check_n_chunks(math.prod(hi - lo for lo, hi in box))
    is_stored = np.zeros([hi - lo for lo, hi in box], dtype=np.bool_)
    cps = grid.chunks_per_shard
    cells = [range(lo // n, -(-hi // n)) for (lo, hi), n in zip(box, cps, strict=True)]
    rounds: Iterable[Sequence[str]]
    if math.prod(map(len, cells)) <= _MAX_ASKED or not shape:
        rounds = in_rounds([node.chunk_prefix + encoding.encode(c) for c in product(*cells)])
    else:
        listed = keys_of_values(base, node.chunk_prefix, encoding, len(shape))
        rounds = (some for keys in listed for some in in_rounds(keys))
    errors: list[str] = []
    for some in rounds:
        there = [(key, c) for key in some if (c := grid.coords_of(key)) is not None]
        there = [(k, c) for k, c in there if all(n in r for n, r in zip(c, cells, strict=True))]
        for coords in _stored_chunks(base, grid, there, box, errors):
            is_stored[tuple((coords - [lo for lo, _ in box]).T)] = True
    return ArrayCensus(
        node.path, node.hierarchy, tuple(lo for lo, _ in box), is_stored, tuple(errors)
    )


def _stored_chunks(
    base: BaseStoreHandle,
    grid: ObjectGrid,
    objects: Sequence[tuple[str, chunk_keys.Coords]],
    box: tuple[tuple[int, int], ...],
    errors: list[str],
) -> Iterator[npt.NDArray[np.intp]]:
    """Yield the coordinates of stored chunks, one row each, of some objects."""
    if grid.layout is None:
        exist = base.run(
            stacks.ask_through(grid.array.stack, [requests.Exists(key) for key, _ in objects])
        )
        there = [c for (_, c), is_there in zip(objects, exist, strict=True) if is_there]
        yield np.array(there, dtype=np.intp).reshape(len(there), len(box))
        return
    shards = [shard for key, _ in objects if (shard := grid.layout.shard_of_key(key)) is not None]
    indexes = base.run(
        stacks.run_through(grid.below, index_reads.try_read_indexes(shards, cache=False))
    )
    cps = grid.chunks_per_shard
    for shard, index in zip(shards, indexes, strict=True):
        if isinstance(index, CorruptShardError):
            errors.append(str(index))
        elif index is not None:
            ids = np.intersect1d(
                index.present_ids(), layouts.entries_in_box(box, shard.coords, cps)
            )
            inside = np.array(np.unravel_index(ids, cps) if cps else (), dtype=np.intp)
            yield inside.reshape(len(cps), len(ids)).T + np.multiply(shard.coords, cps, dtype=int)
