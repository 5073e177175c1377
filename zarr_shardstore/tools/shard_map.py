"""Which shards of an array are there, and how full each is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.grid import grid_box
from zarr_shardstore.format.keys import ChunkKeyEncoding, Coords
from zarr_shardstore.io.resolve import BaseStoreLike
from zarr_shardstore.tools.find_arrays import arrays_at, find_arrays, read_array
from zarr_shardstore.tools.occupancy import ObjectGrid, rounds_of_objects
from zarr_shardstore.tools.open_base import OpenBase, open_base

__all__ = ["MAX_CELLS", "ShardMap", "shard_map"]

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


def _there(base: OpenBase, path: str) -> str:
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
