"""Maps of arrays: the fill of each shard."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.format.layout import n_in_grid_box
from zarr_shardstore.inspect.find import arrays_at, find_arrays, quoted, read_array
from zarr_shardstore.inspect.occupancy import ObjectGrid, rounds_of_objects
from zarr_shardstore.inspect.open_base import BaseStoreHandle, open_base
from zarr_shardstore.io.backends.resolve import BaseStoreLike

MAX_CELLS = 2**26
"""Most shards in a map: 256 MiB, 4 bytes for each."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardMap:
    """Fill of each shard of an array; of each chunk, if the array has no shards.

    Parameters
    ----------
    path : str
        Path of the array.
    is_sharded : bool
        True if cells are shards, false if they are chunks.
    fill : ndarray
        float32, one number for each cell of the grid: 0 missing … 1 full, of the chunks that
        lie in the array; NaN if the shard could not be read.
    grid_shape, chunks_per_shard : tuple of int
        Chunks along each dimension, of the array and of a shard (1 if there are no shards).
    errors : tuple of str
        One for each shard that could not be read, or has an entry that leaves it.
    """

    path: str
    is_sharded: bool
    fill: npt.NDArray[np.float32]
    grid_shape: Coords
    chunks_per_shard: Coords
    errors: tuple[str, ...] = ()

    @property
    def shape(self) -> Coords:
        """Number of cells along each dimension."""
        return self.fill.shape

    def as_dict(self) -> dict[str, Any]:
        """Return the map as JSON can hold it; the fill of an unreadable shard is null."""
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
        """Count the cells that are full, partial, missing (no chunk is stored) and unreadable."""
        full, missing = int((self.fill == 1).sum()), int((self.fill == 0).sum())
        unreadable = int(np.isnan(self.fill).sum())
        return {
            "full": full,
            "partial": self.fill.size - full - missing - unreadable,
            "missing": missing,
            "unreadable": unreadable,
        }


def shard_map(
    store: BaseStoreLike,
    path: str = "",
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> ShardMap:
    """Read the index of each shard of the array at `path`. No chunk is read.

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
        raise SpecError(f"no array at {path!r} in {base.describe()}{_there(base, path)}")
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
    for part in rounds_of_objects(base, grid):
        errors += part.errors()
        for cell in part.cells:
            n_chunks = math.nan if cell.n_chunks is None else cell.n_chunks
            fill[cell.coords] = n_chunks / n_in_grid_box(cell.coords, cps, array.grid_shape)
    fill.flags.writeable = False
    is_sharded = grid.layout is not None
    return ShardMap(array.node.path, is_sharded, fill, array.grid_shape, cps, tuple(errors))


def _there(base: BaseStoreHandle, path: str) -> str:
    """Name the arrays below a path, else all arrays, for an error message."""
    paths = [array.node.path for array in find_arrays(base)]
    below = [p for p in paths if p.startswith(f"{path.strip('/')}/")]
    if below:
        return f"; the arrays below {path!r}: {quoted(below)}"
    return f"; the arrays in it: {quoted(paths)}" if paths else ""
