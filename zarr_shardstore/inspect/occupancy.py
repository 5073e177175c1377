"""What the objects of one array hold: read shard by shard, from the indexes alone.

Objects are listed and read in rounds, so that memory does not grow with the array: one round
is 64 shards, or fewer where their indexes are large. Where the grid of the objects is huge, its
directories are listed one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from zarr_shardstore.arrays.stored_array import StoredArray
from zarr_shardstore.errors import CorruptShardError, ShardStoreError
from zarr_shardstore.format.grid import chunk_grid_shape, is_inside
from zarr_shardstore.format.index import IndexDamageError, ShardIndex
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import ArrayLayout, ShardRef
from zarr_shardstore.inspect.open_base import BaseStoreHandle
from zarr_shardstore.shards.index_reads import corrupt, try_read_indexes
from zarr_shardstore.shards.requests import Flow, GetSize, ListDir, ListPrefix, relay
from zarr_shardstore.shards.shard_listing import entries_present
from zarr_shardstore.shards.sharding import ShardingTransformer
from zarr_shardstore.shards.stack import Stack, gather, keys_above, run_above

_OBJECTS_AT_ONCE = 64
"""Objects in a round: as many as a backend asks for at once."""

_INDEX_BYTES_AT_ONCE = 64 * 1024 * 1024
"""Of the indexes of a round; one index may have 256 MiB."""

_KEYS_AT_ONCE = 1 << 17
"""Objects of a grid up to which one listing asks for all of them: some 20 MB of keys."""

_N_ATTEMPTS = 2
"""A shard may be replaced between the questions for its index and its size: then ask again."""


@dataclass(frozen=True, slots=True)
class ObjectGrid:
    """Which objects an array may have: shards, or chunks if it is not sharded.

    Parameters
    ----------
    array : StoredArray
        With a known geometry.
    """

    array: StoredArray
    layout: ArrayLayout | None = field(init=False)
    """Where chunks and shards are; ``None`` for plain chunks."""
    below: Stack = field(init=False)
    """Transformers between shards and the base store."""
    shape: Coords = field(init=False)
    """Number of objects along each dimension."""

    def __post_init__(self) -> None:
        stack, grid_shape = self.array.stack, self.array.grid_shape
        assert grid_shape is not None
        layout, below, shape = None, stack, grid_shape
        for i, transformer in enumerate(stack):
            if isinstance(transformer, ShardingTransformer):
                layout, below = transformer.layout, stack[i + 1 :]
                shape = chunk_grid_shape(grid_shape, layout.spec.chunks_per_shard)
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "below", below)
        object.__setattr__(self, "shape", shape)

    def coords_of(self, key: str) -> Coords | None:
        """Coordinates of the object with this key; ``None`` if it is none of the grid."""
        coords = self.array.coords_of(key)
        return coords if coords is not None and is_inside(coords, self.shape) else None


@dataclass(slots=True)
class Cell:
    """What one shard holds, or that a chunk of an array without shards is there.

    Parameters
    ----------
    n_chunks : int, optional
        Stored chunks that lie in the array; ``None`` if the shard could not be read.
    chunk_nbytes, index_nbytes : int
        Size of these chunks together, and of the index.
    dead_nbytes : int
        Bytes of the shard in no entry and not in the index, each once.
    """

    coords: Coords
    n_chunks: int | None = 1
    chunk_nbytes: int = 0
    index_nbytes: int = 0
    dead_nbytes: int = 0


@dataclass(slots=True)
class Round:
    """Some objects of an array.

    Parameters
    ----------
    object_nbytes : list of int
        Size of each object in the base store.
    cells : list of Cell
        What they hold.
    errors : list of str
        One for each shard that could not be read, or has an entry that leaves it.
    """

    object_nbytes: list[int] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def rounds_of_objects(base: BaseStoreHandle, grid: ObjectGrid) -> Iterator[Round]:
    """Look at all objects of an array, some at a time. No chunk is read.

    Where a transformer lies below sharding, its values are read, whole if they have to be.
    Objects outside the grid are left out, as are those that vanish meanwhile.

    Raises
    ------
    OSError
        If none of the objects of a round can be read. Other errors of the base store, too.
    """
    n_at_once = _OBJECTS_AT_ONCE
    if grid.layout is not None:
        fit = _INDEX_BYTES_AT_ONCE // grid.layout.spec.index_nbytes
        n_at_once = min(n_at_once, max(1, fit))
    for keys in _keys(base, grid):
        for i in range(0, len(keys), n_at_once):
            yield _look_at(base, grid, keys[i : i + n_at_once])


def _look_at(base: BaseStoreHandle, grid: ObjectGrid, keys: Sequence[str]) -> Round:
    """One round; an object that cannot be read blocks no other one."""
    try:
        return base.run(_read_objects(grid, keys))
    except (OSError, ShardStoreError) as error:
        if len(keys) == 1 and isinstance(error, ShardStoreError):
            return _unreadable(base, grid, keys[0], error)
        if len(keys) == 1:
            raise
    whole = Round()
    failures: list[OSError] = []
    for key in keys:
        try:
            part = _look_at(base, grid, [key])
        except OSError as error:
            failures.append(error)
            coords = grid.coords_of(key)
            part = Round([], [] if coords is None else [Cell(coords, None)], [f"{key!r}: {error}"])
        whole.object_nbytes += part.object_nbytes
        whole.cells += part.cells
        whole.errors += part.errors
    if len(failures) == len(keys):
        raise failures[0]
    return whole


def _unreadable(base: BaseStoreHandle, grid: ObjectGrid, key: str, error: Exception) -> Round:
    (size,) = base.perform([GetSize(key)])
    coords = grid.coords_of(key)
    cells = [] if coords is None else [Cell(coords, None)]
    return Round([] if size is None else [size], cells, [str(error)])


def _read_objects(grid: ObjectGrid, keys: Sequence[str]) -> Flow[Round]:
    if grid.layout is None:
        return (yield from _read_plain(grid, keys))
    shard_keys = keys
    if grid.below:
        shard_keys = [key for key, _ in (yield from keys_above(grid.below, keys))]
    shards = [shard for key in shard_keys if (shard := grid.layout.shard_of_key(key)) is not None]
    done = Round()
    for attempt in range(_N_ATTEMPTS):
        results = yield from gather(
            [
                relay([GetSize(key) for key in keys] if attempt == 0 else []),
                run_above(grid.below, read_shards(shards)),
            ]
        )
        if attempt == 0:
            done.object_nbytes = [size for size in results[0] if size is not None]
        again = []
        for shard, (cell, error) in zip(shards, results[1], strict=True):
            if error is not None and attempt + 1 < _N_ATTEMPTS:
                again.append(shard)
            elif cell is not None:
                done.cells.append(cell)
                done.errors += [] if error is None else [error]
        shards = again
        if not shards:
            break
    return done


def _read_plain(grid: ObjectGrid, keys: Sequence[str]) -> Flow[Round]:
    """Of an array without shards: each object is a chunk."""
    sizes: list[int | None] = yield [GetSize(key) for key in keys]
    there = {key: size for key, size in zip(keys, sizes, strict=True) if size is not None}
    above = list(there.items())
    if grid.array.stack:
        named = yield from keys_above(grid.array.stack, list(there))
        above = [(key, there.get(key, nbytes or 0)) for key, nbytes in named]
    cells = [
        Cell(coords, chunk_nbytes=nbytes)
        for key, nbytes in above
        if (coords := grid.coords_of(key)) is not None
    ]
    return Round(list(there.values()), cells)


def read_shards(shards: Sequence[ShardRef]) -> Flow[list[tuple[Cell | None, str | None]]]:
    """What each shard holds, and what is wrong with it; indexes and sizes in one round."""
    if not shards:
        return []
    indexes, sizes = yield from gather(
        [try_read_indexes(shards, cache=False), relay([GetSize(shard.key) for shard in shards])]
    )
    found: list[tuple[Cell | None, str | None]] = []
    for shard, index, size in zip(shards, indexes, sizes, strict=True):
        if index is None or size is None:
            found.append((None, None))
        elif isinstance(index, CorruptShardError):
            found.append((Cell(shard.coords, None), str(index)))
        else:
            found.append(_cell_of(shard, index, size))
    return found


def _cell_of(shard: ShardRef, index: ShardIndex, nbytes: int) -> tuple[Cell, str | None]:
    spec = shard.layout.spec
    error = None
    try:
        index.check_entries(nbytes, spec.index)
    except IndexDamageError as damage:
        error = str(corrupt(shard, damage))
    in_grid = entries_present(shard, index)
    at_start = spec.index.location == "start"
    first, stop = (spec.index_nbytes, nbytes) if at_start else (0, nbytes - spec.index_nbytes)
    # Entries that leave the data use nothing. uint64 addition wraps, hence the comparison of
    # sizes with what is left.
    offsets, sizes = index.fields.T
    fits = (offsets >= np.uint64(first)) & (offsets <= np.uint64(max(stop, 0)))
    fits &= sizes <= np.uint64(max(stop, 0)) - np.where(fits, offsets, np.uint64(0))
    starts, sizes = (np.where(fits, column, 0).astype(np.int64) for column in (offsets, sizes))
    n_used = spec.index_nbytes + _n_covered(starts, starts + sizes)
    cell = Cell(
        shard.coords,
        len(in_grid),
        int(sizes[in_grid].sum()),
        spec.index_nbytes,
        max(0, nbytes - n_used),
    )
    return cell, error


def _n_covered(
    starts: np.ndarray[tuple[int], np.dtype[np.int64]],
    stops: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> int:
    """Bytes in at least one of some half-open ranges."""
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], stops[order]
    reached = np.concatenate([[0], np.maximum.accumulate(stops)[:-1]])
    return int(np.maximum(stops - np.maximum(starts, reached), 0).sum())


def _keys(base: BaseStoreHandle, grid: ObjectGrid) -> Iterator[list[str]]:
    """Keys of the objects of the grid, directory by directory if they may be very many."""
    geometry, prefix = grid.array.document.geometry, grid.array.node.chunk_prefix
    assert geometry is not None
    encoding, ndim = geometry.encoding, len(grid.shape)
    dims = encoding.dims_of_components(ndim)
    n = 1 if len(dims) > 1 and not dims[0] else 0  # the "c" of the default encoding
    directories = [f"{prefix}{encoding.encode_component(0, ())}/" if n else prefix]
    if math.prod(grid.shape) > _KEYS_AT_ONCE and n < len(dims) - 1:
        (names,) = base.perform([ListDir(directories[0])])
        directories = [
            f"{directories[0]}{name}/"
            for name in sorted(names)
            if encoding.decode_component(n, name, len(dims[n])) is not None
        ]
    for directory in directories:
        (keys,) = base.perform([ListPrefix(directory)])
        found = sorted(key for key in keys if grid.coords_of(key) is not None)
        # zarr 2.18 spells the only key of a 0-d draft array "c0", and prefers it to "c".
        yield found if ndim else found[-1:]
