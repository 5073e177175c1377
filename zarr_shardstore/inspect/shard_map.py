"""Which shards of an array are there, and how full each is.

A shard map cut into flat panels: slices over the leading dimensions, sampled down to fit.

Where several shards share one place of a panel, it says how many chunks all of them hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.grid import Box, grid_box
from zarr_shardstore.format.keys import ChunkKeyEncoding, Coords
from zarr_shardstore.inspect.find import arrays_at, find_arrays, read_array
from zarr_shardstore.inspect.occupancy import ObjectGrid, rounds_of_objects
from zarr_shardstore.inspect.open_base import BaseStoreHandle, open_base
from zarr_shardstore.io.backends.resolve import BaseStoreLike

MAX_CELLS = 2**26
"""Most shards in a map: 256 MiB, 4 bytes for each."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardMap:
    """How full each shard of an array is; each chunk, if the array has no shards.

    Parameters
    ----------
    path : str
        Of the array.
    is_sharded : bool
        Whether cells are shards, or chunks.
    fill : ndarray
        float32, one number for each cell of the grid: 0 missing … 1 full, of the chunks that
        lie in the array; NaN if the shard could not be read.
    grid_shape, chunks_per_shard : tuple of int
        Chunks along each dimension, of the array and of a shard (1 if there are no shards).
    prefix, encoding
        Spelling of the keys of the cells.
    errors : tuple of str
        One for each shard that could not be read, or has an entry that leaves it.
    """

    path: str
    is_sharded: bool
    fill: npt.NDArray[np.float32]
    grid_shape: Coords
    chunks_per_shard: Coords
    prefix: str
    encoding: ChunkKeyEncoding
    errors: tuple[str, ...] = ()

    @property
    def shape(self) -> Coords:
        """Number of cells along each dimension."""
        return self.fill.shape

    def key_of(self, coords: Coords) -> str:
        """Key of the object of a cell in the base store."""
        return self.prefix + self.encoding.encode(coords)

    def n_possible(self, coords: Coords) -> int:
        """Chunks that a cell can hold: fewer at the edge of the array."""
        box = grid_box(coords, self.chunks_per_shard, self.grid_shape)
        return math.prod(stop - start for start, stop in box)

    def n_stored(self, coords: Coords) -> int | None:
        """Chunks that a cell holds; ``None`` if it could not be read."""
        fill = float(self.fill[coords])
        return None if math.isnan(fill) else round(fill * self.n_possible(coords))

    def as_dict(self) -> dict[str, Any]:
        """The map as JSON can hold it; the fill of a shard that could not be read is null."""
        fill = self.fill.astype(object)
        fill[np.isnan(self.fill)] = None
        return {
            "path": self.path,
            "is_sharded": self.is_sharded,
            "shape": list(self.shape),
            "grid_shape": list(self.grid_shape),
            "chunks_per_shard": list(self.chunks_per_shard),
            "counts": self.counts(),
            "fill": fill.tolist(),
            "errors": list(self.errors),
        }

    def counts(self) -> dict[str, int]:
        """Cells that are full, partial, missing (no chunk is stored) and unreadable."""
        full, missing = int((self.fill == 1).sum()), int((self.fill == 0).sum())
        unreadable = int(np.isnan(self.fill).sum())
        return {
            "full": full,
            "partial": self.fill.size - full - missing - unreadable,
            "missing": missing,
            "unreadable": unreadable,
        }


_MAX_NAMED = 10


def _there(base: BaseStoreHandle, path: str) -> str:
    """The arrays below a path, else all that there are, for a message."""
    paths = [array.node.path for array in find_arrays(base)]
    pattern = path.strip("/")
    below = [p for p in paths if not pattern or p.startswith(f"{pattern}/")]
    named = list(dict.fromkeys(below or paths))
    if not named:
        return ""
    more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
    where = f"below {path!r}" if below and pattern else "in it"
    return f"; the arrays {where}: {', '.join(map(repr, named[:_MAX_NAMED]))}{more}"


def shard_map(
    store: BaseStoreLike,
    path: str = "",
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> ShardMap:
    """Look at the index of each shard of the array at `path`. No chunk is read.

    Of arrays of several hierarchies at one path it is the v3 one, else the v2 one.

    Raises
    ------
    SpecError
        If there is no array at `path`, or its document is not sound.
    UnsupportedError
        If its chunk grid is not known, or has more than `MAX_CELLS` cells.

    Examples
    --------
    >>> import zarr
    >>> from zarr_shardstore import ShardingStore
    >>> base = {}
    >>> z = zarr.create_array(
    ...     ShardingStore(base, chunks_per_shard=4), shape=(10,), chunks=(1,), dtype="u1"
    ... )
    >>> z[2:10] = 1
    >>> shard_map(base).fill.tolist()
    [0.5, 1.0, 1.0]
    """
    base = open_base(store, storage_options)
    found = arrays_at(base, path)
    if not found:
        raise SpecError(f"there is no array at {path!r} in {base.describe()}{_there(base, path)}")
    array = read_array(found[0])
    if array.document.geometry is None or array.grid_shape is None:
        raise UnsupportedError(f"the chunk grid or the chunk keys of {path!r} are not known here")
    grid = ObjectGrid(array)
    if math.prod(grid.shape) > MAX_CELLS:
        what = "chunks" if grid.layout is None else "shards"
        raise UnsupportedError(
            f"the grid of {path!r} has {math.prod(grid.shape)} {what} {list(grid.shape)}, "
            f"a map has at most {MAX_CELLS}"
        )
    cps = (1,) * len(grid.shape) if grid.layout is None else grid.layout.spec.chunks_per_shard
    fill = np.zeros(grid.shape, dtype=np.float32)
    errors: list[str] = []
    mapped = ShardMap(
        array.node.path,
        grid.layout is not None,
        fill,
        array.grid_shape,
        cps,
        array.node.chunk_prefix,
        array.document.geometry.encoding,
    )
    for part in rounds_of_objects(base, grid):
        errors += part.errors
        for cell in part.cells:
            n_chunks = math.nan if cell.n_chunks is None else cell.n_chunks
            fill[cell.coords] = n_chunks / mapped.n_possible(cell.coords)
    fill.flags.writeable = False
    return replace(mapped, errors=tuple(errors))


Fits = Callable[[int, int, int], bool]
"""Whether so many panels of so many rows and columns fit."""


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """Two dimensions of a map, the others at fixed places.

    Parameters
    ----------
    title : str
        Where it lies in the leading dimensions, as ``"[3, 4:8, :, :]"``; empty if there are none.
    stored, possible : ndarray
        Chunks that each place holds, and can hold; float64, rows and columns.
    unreadable : ndarray
        Whether any shard of the place could not be read; bool.
    """

    title: str
    stored: npt.NDArray[np.float64]
    possible: npt.NDArray[np.float64]
    unreadable: npt.NDArray[np.bool_]
    leading: Coords

    @property
    def fraction(self) -> npt.NDArray[np.float64]:
        """Fraction of the chunks that are stored; NaN where it is not known."""
        known = np.where(self.unreadable, np.nan, self.stored)
        return np.divide(known, self.possible, out=np.zeros_like(known), where=self.possible > 0)


@dataclass(frozen=True, slots=True)
class Panels:
    """All panels of a map.

    Parameters
    ----------
    factors : tuple of int
        Shards along each dimension that share one place.
    """

    panels: list[Panel]
    factors: Coords
    shard_shape: Coords

    @property
    def n_rows(self) -> int:
        """Places of a panel from top to bottom."""
        return int(self.panels[0].stored.shape[0]) if self.panels else 0

    @property
    def n_columns(self) -> int:
        """Places of a panel from left to right."""
        return int(self.panels[0].stored.shape[1]) if self.panels else 0

    def box(self, panel: Panel, row: int, column: int) -> Box:
        """Shard coordinates that share a place, half-open."""
        n_flat = min(2, len(self.factors))
        place = (*panel.leading, *(row, column)[2 - n_flat :])
        return tuple(
            (p * f, min((p + 1) * f, n))
            for p, f, n in zip(place, self.factors, self.shard_shape, strict=True)
        )


def cut_into_panels(shards: ShardMap, fits: Fits) -> Panels:
    """Cut a map into panels that fit; the last two dimensions are rows and columns.

    A map of one dimension is one row. No panel for a grid without shards.
    """
    shape = shards.shape
    factors = _factors(shape, fits)
    if 0 in shape:
        return Panels([], factors, shape)
    unreadable: npt.NDArray[Any] = np.isnan(shards.fill)
    stored: npt.NDArray[Any] = np.where(unreadable, np.float32(0), shards.fill)
    possible = np.ones((), dtype=np.float64)
    for axis, (n, factor) in enumerate(zip(shape, factors, strict=True)):
        cps, n_chunks = shards.chunks_per_shard[axis], shards.grid_shape[axis]
        extents = np.minimum(cps, n_chunks - cps * np.arange(n))  # fewer chunks at the edge
        # In float32, which holds each count of chunks of a shard, until places are few.
        stored = stored * extents.astype(np.float32).reshape(-1, *(1,) * (len(shape) - 1 - axis))
        if factor > 1:
            starts = np.arange(0, n, factor)
            stored = np.add.reduceat(stored, starts, axis=axis, dtype=np.float64)
            unreadable = np.logical_or.reduceat(unreadable, starts, axis=axis)
            extents = np.add.reduceat(extents, starts)
        possible = np.multiply.outer(possible, extents.astype(np.float64))
    flat = (1,) * (2 - len(shape)) + stored.shape
    stored = np.rint(stored.reshape(flat).astype(np.float64))
    possible, unreadable = possible.reshape(flat), unreadable.reshape(flat)
    panels = [
        Panel(_title(at, factors, shape), stored[at], possible[at], unreadable[at], at)
        for at in product(*map(range, flat[:-2]))
    ]
    return Panels(panels, factors, shape)


def _factors(shape: Coords, fits: Fits) -> Coords:
    """Shards that share a place, along each dimension: about as few as fit."""
    factors = [1] * len(shape)
    while True:
        sizes = [-(-n // factor) for n, factor in zip(shape, factors, strict=True)]
        rows, columns = (1, 1, *sizes)[-2:]
        if fits(math.prod(sizes[:-2]), rows, columns) or max(sizes, default=1) <= 1:
            return tuple(factors)
        last, leading = len(shape) - 1, range(len(shape) - 2)
        if not fits(1, 1, columns):
            axes = [last]
        elif not fits(1, rows, 1):
            axes = [last - 1]
        elif not fits(1, rows, columns):
            axes = [last - 1, last]
        else:  # one panel fits, so there are too many
            axes = list(leading)
        candidates = [axis for axis in axes if axis >= 0 and sizes[axis] > 1] or [
            axis for axis, size in enumerate(sizes) if size > 1
        ]
        axis = max(candidates, key=lambda axis: sizes[axis])
        factors[axis] += max(1, factors[axis] // 8)  # few steps also for millions of shards


def _title(at: Coords, factors: Coords, shape: Coords) -> str:
    if not at:
        return ""
    parts = []
    for p, f, n in zip(at, factors[: len(at)], shape[: len(at)], strict=True):
        start, stop = p * f, min((p + 1) * f, n)
        parts.append(str(start) if stop - start == 1 else f"{start}:{stop}")
    return f"[{', '.join([*parts, ':', ':'])}]"
