"""What a store holds: its arrays, how they are sharded, and what their shards hold."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from zarr_shardstore.arrays.stored_array import StoredArray
from zarr_shardstore.errors import ShardStoreError, SpecError
from zarr_shardstore.format.keys import Coords
from zarr_shardstore.inspect.find import FoundArray, arrays_at, find_arrays, read_array
from zarr_shardstore.inspect.occupancy import ObjectGrid, rounds_of_objects
from zarr_shardstore.inspect.open_base import BaseStoreHandle, open_base
from zarr_shardstore.io.backends.resolve import BaseStoreLike
from zarr_shardstore.metadata.declaration import Declaration, has_sharding_codec
from zarr_shardstore.metadata.documents import Hierarchy, Node

_MAX_ERRORS = 20
"""Texts of errors that are kept for one array; `ArrayInfo.n_errors` counts all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayInfo:
    """How one array is stored. Shapes are in elements, grids in chunks or shards, sizes in bytes.

    Parameters
    ----------
    path, hierarchy : str
        Its place: ``""`` is the root; ``"v3"``, ``"v2"`` or ``"draft"``.
    declaration : {"codec", "storage_transformers", "filters"}, optional
        How its metadata declares what stands between it and the store; ``None``: nothing does.
    shape, dtype, chunk_shape, shard_shape, chunks_per_shard, chunk_grid_shape, shard_grid_shape
        As its document says, the data type as it is spelled there. ``None`` where it does not
        say, or the array has no shards.
    n_chunks, n_chunks_of_grid : int
        Chunks that are stored, and all that the array may have.
    n_objects, n_objects_of_grid : int
        The same of shards; of chunks, if the array has no shards.
    fill : float
        Fraction of the chunks of the grid that are stored; 0 where there are none.
    stored_nbytes : int
        Of all objects. It is `chunk_nbytes` + `index_nbytes` + `dead_nbytes`, unless entries
        overlap or lie outside the array, shards cannot be read, or transformers add bytes.
    chunk_nbytes, index_nbytes : int
        Of the stored chunks, and of the shard indexes.
    dead_nbytes : int
        Bytes of shards that no entry and no index use.
    smallest, mean, largest
        Object in bytes; ``None`` if there is none.
    shares_objects : bool
        Whether the objects are those of the v3 array at the same path, as after a migration
        of metadata; totals count them once.
    n_errors : int
        Shards that could not be read, and reasons why the array could not.
    errors : tuple of str
        The first of them.
    notes : tuple of str
        What these figures do not show.
    """

    path: str
    hierarchy: Hierarchy
    declaration: Declaration | None = None
    shape: Coords | None = None
    dtype: str | None = None
    chunk_shape: Coords | None = None
    shard_shape: Coords | None = None
    chunks_per_shard: Coords | None = None
    chunk_grid_shape: Coords | None = None
    shard_grid_shape: Coords | None = None
    n_chunks: int = 0
    n_chunks_of_grid: int = 0
    n_objects: int = 0
    n_objects_of_grid: int = 0
    fill: float = 0.0
    stored_nbytes: int = 0
    chunk_nbytes: int = 0
    index_nbytes: int = 0
    dead_nbytes: int = 0
    smallest: int | None = None
    mean: float | None = None
    largest: int | None = None
    shares_objects: bool = False
    n_errors: int = 0
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_sharded(self) -> bool:
        """Whether chunks are packed into shards, as far as that is known here."""
        return self.chunks_per_shard is not None


@dataclass(frozen=True, slots=True)
class StoreInfo(Mapping[str, Any]):
    """How the arrays of a store are stored.

    As a mapping it is what `get_shard_info` of zarr-vectors gives: ``"sharded"``, whether any array
    is; ``"shard_count"``, shards that these may have; ``"arrays"``, for each sharded array its
    ``"name"``, ``"grid_shape"`` and ``"shard_shape"``, both in chunks, and ``"shard_count"``.

    Parameters
    ----------
    store : str
        The base store.
    arrays : tuple of ArrayInfo
        Sorted by path.
    """

    store: str
    arrays: tuple[ArrayInfo, ...]
    n_sharded: int = field(init=False)
    """Arrays with shards."""
    n_chunks: int = field(init=False)
    n_objects: int = field(init=False)
    stored_nbytes: int = field(init=False)
    chunk_nbytes: int = field(init=False)
    index_nbytes: int = field(init=False)
    dead_nbytes: int = field(init=False)
    n_errors: int = field(init=False)

    def __post_init__(self) -> None:
        counted = [array for array in self.arrays if not array.shares_objects]
        object.__setattr__(self, "n_sharded", sum(array.is_sharded for array in counted))
        for name in ("n_chunks", "n_objects", "stored_nbytes", "chunk_nbytes", "index_nbytes"):
            object.__setattr__(self, name, sum(getattr(array, name) for array in counted))
        for name in ("dead_nbytes", "n_errors"):
            object.__setattr__(self, name, sum(getattr(array, name) for array in counted))

    def __getitem__(self, key: str) -> Any:
        arrays = [_as_of_zarr_vectors(array) for array in self.arrays if _is_of_its_own(array)]
        match key:
            case "sharded":
                return bool(arrays)
            case "arrays":
                return arrays
            case "shard_count":
                return sum(array["shard_count"] for array in arrays)
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(("sharded", "arrays", "shard_count"))

    def __len__(self) -> int:
        return 3

    def as_dict(self) -> dict[str, Any]:
        """The same as objects that JSON knows, the totals under ``"totals"``."""
        totals = asdict(self)
        store = totals.pop("store")
        arrays: list[Any] = json.loads(json.dumps(totals.pop("arrays")))  # tuples become lists
        return {"store": store, "arrays": arrays, "totals": totals}


def _is_of_its_own(array: ArrayInfo) -> bool:
    return array.is_sharded and not array.shares_objects


def _as_of_zarr_vectors(array: ArrayInfo) -> dict[str, Any]:
    return {
        "name": array.path,
        "grid_shape": list(array.chunk_grid_shape or ()),
        "shard_shape": list(array.chunks_per_shard or ()),
        "shard_count": array.n_objects_of_grid,
    }


def is_sharded(
    store: BaseStoreLike,
    path: str | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> bool:
    """Whether the array at `path`, or any array of the store, is sharded.

    Also an array whose sharding codec is left to zarr is sharded. Only documents are read.

    Raises
    ------
    SpecError
        If there is no array at `path`, or what its document declares is not possible.
    UnsupportedError
        If it declares a transformer that is not known.
    """
    base = open_base(store, storage_options)
    found = find_arrays(base) if path is None else arrays_at(base, path)
    if path is not None and not found:
        raise SpecError(f"there is no array at {path!r} in {base.describe()}")
    return any(_is_sharded(array) for array in found)


def sharded_paths(store: BaseStoreLike, path: str = "") -> list[str]:
    """Paths of the arrays at or below a path that have shards here.

    Raises
    ------
    SpecError
        As `find_arrays`.
    """
    found = find_arrays(open_base(store), path or None)
    arrays = [read_array(array) for array in found]
    return sorted(
        {
            array.node.path
            for array in arrays
            if array.document.geometry is not None and ObjectGrid(array).layout is not None
        }
    )


def _is_sharded(found: FoundArray) -> bool:
    if has_sharding_codec(found.doc):
        return True
    array = read_array(found)
    return array.document.geometry is not None and ObjectGrid(array).layout is not None


def get_shard_info(
    store: BaseStoreLike,
    *,
    paths: Iterable[str] | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> StoreInfo:
    """Look at all arrays of a store, or at those at some paths.

    Shard indexes are read and sizes asked for; chunks are not read. An array whose document is
    bad, and a shard that cannot be read, is reported with its error and blocks nothing else.

    Parameters
    ----------
    store
        Whatever `ShardingStore` wraps, or such a store.
    paths
        Of arrays, of groups, or patterns as ``"raw/*"``; ``None``: all arrays.

    Raises
    ------
    SpecError
        If a path names no array.

    Examples
    --------
    >>> import zarr
    >>> from zarr_shardstore import ShardingStore
    >>> base = {}
    >>> z = zarr.create_array(
    ...     ShardingStore(base, chunks_per_shard=4), shape=(10,), chunks=(1,), dtype="u1"
    ... )
    >>> z[:3] = 1
    >>> (array,) = get_shard_info(base).arrays
    >>> array.n_chunks, array.n_chunks_of_grid, array.n_objects, array.n_objects_of_grid
    (3, 10, 1, 3)
    """
    base = open_base(store, storage_options)
    found = find_arrays(base, paths)
    by_node = {array.node: array for array in found}
    return StoreInfo(base.describe(), tuple(_info(base, array, by_node) for array in found))


def _info(
    base: BaseStoreHandle, found: FoundArray, by_node: Mapping[Node, FoundArray]
) -> ArrayInfo:
    node, doc = found.node, found.doc
    info = ArrayInfo(
        path=node.path, hierarchy=node.hierarchy, shape=_shape_of(doc), dtype=_dtype_of(doc)
    )
    try:
        array = read_array(found)
    except ShardStoreError as error:
        return replace(info, n_errors=1, errors=(str(error),))
    geometry = array.document.geometry
    if geometry is None or found.geometry is None:
        reason = "its chunk grid or its chunk keys are not known here: nothing was counted"
        return replace(info, notes=(reason,))
    twin = by_node.get(node.twin) if node.hierarchy == "v2" and node.twin else None
    grid = ObjectGrid(array)
    info = replace(
        info,
        declaration=array.document.declaration,
        chunk_shape=geometry.chunk_shape,
        chunk_grid_shape=array.grid_shape,
        n_chunks_of_grid=math.prod(array.grid_shape or ()),
        n_objects_of_grid=math.prod(grid.shape),
        shares_objects=twin is not None and found.geometry.has_same_chunks(twin.geometry),
        notes=_notes(array, grid, doc),
    )
    if grid.layout is not None:
        cps = grid.layout.spec.chunks_per_shard
        shard_shape = tuple(c * n for c, n in zip(geometry.chunk_shape, cps, strict=True))
        info = replace(
            info, shard_shape=shard_shape, chunks_per_shard=cps, shard_grid_shape=grid.shape
        )
    return _with_figures(base, grid, info)


def _with_figures(base: BaseStoreHandle, grid: ObjectGrid, info: ArrayInfo) -> ArrayInfo:
    n_chunks = n_objects = stored = chunk_nbytes = index_nbytes = dead = n_errors = 0
    smallest: int | None = None
    largest: int | None = None
    errors: list[str] = []
    for part in rounds_of_objects(base, grid):
        n_objects += len(part.object_nbytes)
        stored += sum(part.object_nbytes)
        if part.object_nbytes:
            smallest = min(part.object_nbytes + ([] if smallest is None else [smallest]))
            largest = max(part.object_nbytes + ([] if largest is None else [largest]))
        for cell in part.cells:
            n_chunks += cell.n_chunks or 0
            chunk_nbytes += cell.chunk_nbytes
            index_nbytes += cell.index_nbytes
            dead += cell.dead_nbytes
        n_errors += len(part.errors)
        errors += part.errors[: _MAX_ERRORS - len(errors)]
    return replace(
        info,
        n_chunks=n_chunks,
        n_objects=n_objects,
        fill=n_chunks / info.n_chunks_of_grid if info.n_chunks_of_grid else 0.0,
        stored_nbytes=stored,
        chunk_nbytes=chunk_nbytes,
        index_nbytes=index_nbytes,
        dead_nbytes=dead,
        smallest=smallest,
        mean=stored / n_objects if n_objects else None,
        largest=largest,
        n_errors=info.n_errors + n_errors,
        errors=(*info.errors, *errors),
    )


def _notes(array: StoredArray, grid: ObjectGrid, doc: Mapping[str, Any]) -> tuple[str, ...]:
    notes = []
    if has_sharding_codec(doc) and array.document.declaration is None:
        notes.append("its sharding codec is left to zarr: its shards are counted, not their chunks")
    if len(array.document.transformers) > 1 or (array.stack and grid.layout is None):
        names = ", ".join(spec.name for spec in array.document.transformers)
        notes.append(f"storage transformers, the nearest to the array first: {names}")
    return tuple(notes)


def _shape_of(doc: Mapping[str, Any]) -> Coords | None:
    shape = doc.get("shape")
    is_shape = isinstance(shape, list) and all(isinstance(n, int) for n in shape)
    return tuple(shape or ()) if is_shape else None


def _dtype_of(doc: Mapping[str, Any]) -> str | None:
    """The data type as text: as it is spelled if that is text, else as JSON."""
    dtype = doc.get("dtype" if doc.get("zarr_format") == 2 else "data_type")
    return dtype if dtype is None or isinstance(dtype, str) else json.dumps(dtype)
