"""Occupancy of the objects of one array: chunks and bytes, from the shard indexes alone.

Objects are listed and read in rounds, so that memory does not grow with the array. If the grid is
huge, its directories are listed one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from zarr_shardstore.access import (
    BaseStoreHandle,
    chunk_keys,
    entries_present,
    index_reads,
    layouts,
    requests,
    shard_format,
    stacks,
    stored_arrays,
)
from zarr_shardstore.errors import CorruptShardError, ShardStoreError

_KEYS_AT_ONCE = 1 << 17
"""Objects of a grid up to which one listing asks for all of them: some 20 MB of keys."""


class ObjectGrid:
    """The grid of the objects that an array may have: of its shards, or of its chunks."""

    def __init__(self, array: stored_arrays.StoredArray) -> None:
        assert array.grid_shape is not None
        self.array = array
        self.layout: layouts.ArrayLayout | None = None  # of shards; None for plain chunks
        self.below: stacks.Stack = array.stack  # between shards and the base store
        self.chunks_per_shard: chunk_keys.Coords = (1,) * len(array.grid_shape)
        for i, transformer in enumerate(array.stack):
            if isinstance(transformer, stacks.ShardingTransformer):
                self.layout, self.below = transformer.layout, array.stack[i + 1 :]
                self.chunks_per_shard = transformer.layout.spec.chunks_per_shard
        self.shape = layouts.chunk_grid_shape(array.grid_shape, self.chunks_per_shard)

    def coords_of(self, key: str) -> chunk_keys.Coords | None:
        coords = self.array.coords_of(key)
        return coords if coords is not None and layouts.is_inside(coords, self.shape) else None


@dataclass(slots=True)
class Cell:
    """Content of one shard; of one chunk, if the array has no shards."""

    coords: chunk_keys.Coords
    n_chunks: int | None = 1
    """Stored chunks that lie in the array; ``None`` if the shard could not be read."""
    chunk_nbytes: int = 0
    index_nbytes: int = 0
    dead_nbytes: int = 0
    """Bytes of the shard in no entry and not in the index, each counted once."""
    error: str = ""
    """Damage of the shard: it could not be read, or has an entry that leaves it."""


@dataclass(slots=True)
class Round:
    """Some objects of an array: their sizes in the base store, and their content."""

    object_nbytes: list[int]
    cells: list[Cell]

    def errors(self) -> list[str]:
        return [cell.error for cell in self.cells if cell.error]


def rounds_of_objects(base: BaseStoreHandle, grid: ObjectGrid) -> Iterator[Round]:
    """Read the indexes of all objects of an array, some at a time; no chunk, but the values of a
    transformer below sharding. Objects outside the grid, or erased concurrently, are left out."""
    for keys in rounds_of_keys(base, grid):
        yield _read_round(base, grid, keys)


def rounds_of_keys(base: BaseStoreHandle, grid: ObjectGrid) -> Iterator[list[str]]:
    """List the keys of the objects of an array in rounds: their indexes fit in memory."""
    geometry, ndim = grid.array.document.geometry, len(grid.shape)
    assert geometry is not None
    nbytes = 1 if grid.layout is None else grid.layout.spec.index_nbytes
    listed = keys_of_values(
        base,
        grid.array.node.chunk_prefix,
        geometry.encoding,
        ndim,
        by_directory=math.prod(grid.shape) > _KEYS_AT_ONCE,
    )
    for keys in listed:
        found = sorted(key for key in keys if grid.coords_of(key) is not None)
        if not ndim:  # zarr 2.18 spells the only key of a 0-d draft array "c0", and prefers it
            found = found[-1:]
        yield from index_reads.rounds_of(found, lambda _: nbytes)


def _read_round(base: BaseStoreHandle, grid: ObjectGrid, keys: Sequence[str]) -> Round:
    """Read one round; if that fails, read each object alone, and report the error in its cell. An
    `OSError` is raised if no object can be read."""
    with suppress(OSError, ShardStoreError):
        return base.run(_read_objects(grid, keys))
    sizes: list[int] = []
    cells: list[Cell] = []
    failures: list[OSError] = []
    for key in keys:
        coords = grid.coords_of(key)
        assert coords is not None
        try:
            alone = base.run(_read_objects(grid, [key]))
            sizes += alone.object_nbytes
            cells += alone.cells
        except ShardStoreError as error:
            sizes += [size for size in base.sizes([key]) if size is not None]
            cells.append(Cell(coords, None, error=str(error)))
        except OSError as error:
            failures.append(error)
            cells.append(Cell(coords, None, error=f"{key!r}: {error}"))
    if len(failures) == len(keys):
        raise failures[0]
    return Round(sizes, cells)


def _read_objects(grid: ObjectGrid, keys: Sequence[str]) -> requests.Flow[Round]:
    if grid.layout is None:
        return (yield from _read_plain(grid, keys))
    shard_keys = keys
    if grid.below:
        shard_keys = [key for key, _ in (yield from stacks.keys_above(grid.below, keys))]
    shards = [shard for key in shard_keys if (shard := grid.layout.shard_of_key(key)) is not None]
    sizes, cells = yield from stacks.in_shared_rounds(
        [
            requests.ask([requests.GetSize(key) for key in keys]),
            stacks.run_through(grid.below, read_shards(shards)),
        ]
    )
    # A shard that is replaced between the requests for its index and its size looks damaged.
    damaged = [i for i, cell in enumerate(cells) if cell is not None and cell.error]
    again = yield from stacks.run_through(grid.below, read_shards([shards[i] for i in damaged]))
    for i, cell in zip(damaged, again, strict=True):
        cells[i] = cell
    return Round(
        [size for size in sizes if size is not None], [cell for cell in cells if cell is not None]
    )


def _read_plain(grid: ObjectGrid, keys: Sequence[str]) -> requests.Flow[Round]:
    sizes: list[int | None] = yield [requests.GetSize(key) for key in keys]
    there = {key: size for key, size in zip(keys, sizes, strict=True) if size is not None}
    above = list(there.items())
    if grid.array.stack:
        named = yield from stacks.keys_above(grid.array.stack, list(there))
        above = [(key, there.get(key, nbytes or 0)) for key, nbytes in named]
    cells = [
        Cell(coords, chunk_nbytes=nbytes)
        for key, nbytes in above
        if (coords := grid.coords_of(key)) is not None
    ]
    return Round(list(there.values()), cells)


def read_shards(shards: Sequence[layouts.ShardRef]) -> requests.Flow[list[Cell | None]]:
    """Read the content of shards in one round; ``None`` for one that does not exist."""
    if not shards:
        return []
    indexes, sizes = yield from stacks.in_shared_rounds(
        [
            index_reads.try_read_indexes(shards, cache=False),
            requests.ask([requests.GetSize(shard.key) for shard in shards]),
        ]
    )
    cells: list[Cell | None] = []
    for shard, index, size in zip(shards, indexes, sizes, strict=True):
        if index is None or size is None:
            cells.append(None)
        elif isinstance(index, CorruptShardError):
            cells.append(Cell(shard.coords, None, error=str(index)))
        else:
            cells.append(_cell_of(shard, index, size))
    return cells


def _cell_of(shard: layouts.ShardRef, index: shard_format.ShardIndex, nbytes: int) -> Cell:
    spec = shard.layout.spec
    error = ""
    try:
        index.check_entries(nbytes, spec)
    except shard_format.IndexDamageError as damage:
        error = str(index_reads.corrupt(shard, damage))
    # Damaged entries use nothing.
    sound = np.setdiff1d(index.present_ids(), index.damaged_ids(nbytes, spec))
    starts, sizes = index.fields[sound].astype(np.int64).T
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], (starts + sizes)[order]
    reached = np.concatenate([[0], np.maximum.accumulate(stops)[:-1]])
    n_covered = int(np.maximum(stops - np.maximum(starts, reached), 0).sum())
    in_grid = entries_present(shard, index)
    n_stored = int(sizes[np.isin(sound, in_grid)].sum())
    n_dead = max(0, nbytes - spec.index_nbytes - n_covered)
    return Cell(shard.coords, len(in_grid), n_stored, spec.index_nbytes, n_dead, error)


def keys_of_values(
    base: BaseStoreHandle,
    prefix: str,
    encoding: chunk_keys.ChunkKeyEncoding,
    ndim: int,
    *,
    by_directory: bool = True,
) -> Iterator[list[str]]:
    """List the keys below a prefix that are spelled as those of values. Where dimensions are
    directories, `by_directory` takes a listing for each number of the first one."""

    def is_value(key: str) -> bool:
        return encoding.decode(key[len(prefix) :], ndim) is not None

    top = grid_directory(prefix, encoding, ndim)
    directories = [top]
    if encoding.separator != "/" or ndim < 2:  # nothing of ours lies deeper, and other arrays may
        yield [key for key in (top + name for name in base.names(top)) if is_value(key)]
        return
    if by_directory:
        directories = [
            f"{top}{name}/"
            for name in sorted(base.names(top))
            if encoding.decode_start(f"{top}{name}/"[len(prefix) :], ndim) is not None
        ]
    for directory in directories:
        (keys,) = base.perform([requests.ListPrefix(directory)])
        yield [key for key in keys if is_value(key)]


def grid_directory(prefix: str, encoding: chunk_keys.ChunkKeyEncoding, ndim: int) -> str:
    """Return the directory of all chunks: below the "c" of the default encoding, if that is one."""
    return f"{prefix}c/" if ndim and encoding.marker == "c/" else prefix
