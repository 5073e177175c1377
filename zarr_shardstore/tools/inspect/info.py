"""Reports on the arrays of a store: how they are sharded, and what their shards hold."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from zarr_shardstore.access import (
    BaseStoreHandle,
    box_grids,
    chunk_keys,
    declarations,
    metadata,
    open_base,
    resolve,
    stacks,
    stored_arrays,
    walks,
)
from zarr_shardstore.errors import (
    ShardStoreError,
    SpecError,
    UnfinishedConversionError,
    UnsupportedError,
)
from zarr_shardstore.tools.inspect.conversions import UnfinishedConversion, unfinished_conversions
from zarr_shardstore.tools.inspect.find import FoundArray, arrays_at, find_arrays, read_array
from zarr_shardstore.tools.inspect.occupancy import Round, rounds_of_objects
from zarr_shardstore.tools.inspect.readers import read_by, summarize

_TOTALS = (
    *("n_chunks", "n_objects", "stored_nbytes", "chunk_nbytes", "index_nbytes", "dead_nbytes"),
    "n_errors",
)

_MAX_ERRORS = 20
"""Most texts of errors for one array; `n_errors` counts all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayInfo:
    """One array. Shapes are in elements, grids in chunks or shards, sizes in bytes.

    A figure is ``None`` if the document lacks it, or if the array has no shards. Objects are the
    shards, or else the chunks.
    """

    path: str
    """``""`` is the root."""
    hierarchy: metadata.Hierarchy
    declaration: declarations.Declaration | None = None
    """The form in which its metadata declares sharding and other storage transformers."""
    read_by: str = ""
    """Programs that read it: ``"every v3 reader"``, ``"only through this package"``, …"""
    shape: chunk_keys.Coords | None = None
    dtype: str | None = None
    """As it is spelled in the document."""
    chunk_shape: chunk_keys.Coords | None = None
    shard_shape: chunk_keys.Coords | None = None
    chunks_per_shard: chunk_keys.Coords | None = None
    chunk_grid_shape: chunk_keys.Coords | None = None
    shard_grid_shape: chunk_keys.Coords | None = None
    n_chunks: int = 0
    n_chunks_of_grid: int = 0
    n_objects: int = 0
    n_objects_of_grid: int = 0
    fill: float = 0.0
    """Stored fraction of the chunks of the grid; 0 of an empty grid."""
    stored_nbytes: int = 0
    """Size of all objects: `chunk_nbytes` + `index_nbytes` + `dead_nbytes`, unless entries overlap
    or lie outside the array, shards cannot be read, or transformers add bytes."""
    chunk_nbytes: int = 0
    index_nbytes: int = 0
    dead_nbytes: int = 0
    """Bytes of shards that no entry and no index uses."""
    smallest: int | None = None
    mean: float | None = None
    largest: int | None = None
    """Sizes of objects; ``None`` without objects."""
    shares_objects: bool = False
    """True if the v3 array at the same path has the same objects, as after a migration of metadata.
    Totals count them once."""
    n_errors: int = 0
    """Damaged shards, and reasons why the array could not be read."""
    errors: tuple[str, ...] = ()
    """Texts of the first errors."""
    notes: tuple[str, ...] = ()
    """Facts that these figures do not show."""
    is_unknown: bool = False
    """True if the array is not understood and not counted; `notes` say why."""

    @property
    def is_sharded(self) -> bool:
        """True if chunks are known to be packed into shards."""
        return self.chunks_per_shard is not None


@dataclass(frozen=True, slots=True)
class StoreInfo(Mapping[str, Any]):
    """The arrays of a store, with totals.

    As a mapping it equals the result of `get_shard_info` of zarr-vectors. ``"sharded"`` is true if
    any array is sharded, ``"shard_count"`` is the number of shards in all grids. ``"arrays"`` has
    for each sharded array its ``"name"``, ``"grid_shape"`` and ``"shard_shape"``, both in chunks,
    and ``"shard_count"``.
    """

    store: str
    arrays: tuple[ArrayInfo, ...]
    """Sorted by path."""
    n_sharded: int
    n_chunks: int
    n_objects: int
    stored_nbytes: int
    chunk_nbytes: int
    index_nbytes: int
    dead_nbytes: int
    n_errors: int

    @property
    def n_unknown(self) -> int:
        """Number of arrays that are not understood."""
        return sum(array.is_unknown for array in self.arrays)

    @property
    def read_by(self) -> str:
        """Programs that read the arrays; if they differ, with the number of arrays of each."""
        return summarize(array.read_by for array in self.arrays if not array.shares_objects)

    def __getitem__(self, key: str) -> Any:
        return self._of_zarr_vectors()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._of_zarr_vectors())

    def __len__(self) -> int:
        return len(self._of_zarr_vectors())

    def _of_zarr_vectors(self) -> dict[str, Any]:
        arrays: list[dict[str, Any]] = [
            {
                "name": array.path,
                "grid_shape": list(array.chunk_grid_shape or ()),
                "shard_shape": list(array.chunks_per_shard or ()),
                "shard_count": array.n_objects_of_grid,
            }
            for array in self.arrays
            if array.is_sharded and not array.shares_objects
        ]
        count = sum(array["shard_count"] for array in arrays)
        return {"sharded": bool(arrays), "arrays": arrays, "shard_count": count}

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON has it, with `read_by`, and the totals under ``"totals"``."""
        totals = asdict(self)
        store = totals.pop("store")
        arrays: list[Any] = json.loads(json.dumps(totals.pop("arrays")))  # tuples become lists
        return {"store": store, "read_by": self.read_by, "arrays": arrays, "totals": totals}


def is_sharded(
    store: resolve.BaseStoreLike,
    path: str | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> bool:
    """Return whether the array at `path`, or any array of the store, is sharded.

    An array whose sharding codec is left to zarr counts as sharded. Only documents are read.

    Raises
    ------
    SpecError
        If there is no array at `path`, or its document declares something impossible.
    UnsupportedError
        If it declares an unknown transformer.
    """
    base = open_base(store, storage_options)
    found = find_arrays(base) if path is None else arrays_at(base, path)
    if path is not None and not found:
        raise SpecError(f"no array at {path!r} in {base.describe()}")
    return any(declarations.has_sharding_codec(array.doc) or _has_shards(array) for array in found)


def consolidated_paths(store: resolve.BaseStoreLike, path: str = "") -> list[str]:
    """Return the arrays that a consolidation takes: with a shard, and no transformer below it."""
    base = open_base(store)
    paths = set[str]()
    for found in filter(operator.attrgetter("doc"), find_arrays(base, path or None)):
        with suppress(UnsupportedError):  # the command leaves it out, too
            grid = walks.ObjectGrid.of_array(read_array(found))
            spelled = map(grid.layout.coords_of, base.keys(grid.prefix))
            if _has_shards(found) and not grid.below and any(c is not None for c in spelled):
                paths.add(found.node.path)
    return sorted(paths)


def _has_shards(found: FoundArray) -> bool:
    stack = read_array(found).stack
    return any(isinstance(transformer, stacks.ShardingTransformer) for transformer in stack)


def get_shard_info(
    store: resolve.BaseStoreLike,
    *,
    paths: Iterable[str] | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> StoreInfo:
    """Report on all arrays of a store, or on those that `paths` names.

    Shard indexes and sizes are read, but no chunk. A broken document, and a shard that cannot be
    read, is reported with its error; the report continues.

    Parameters
    ----------
    store
        Anything that `ShardingStore` wraps, or a sharding store.
    paths
        Paths of arrays and groups, or patterns as ``"raw/*"``; ``None``: all arrays.

    Raises
    ------
    SpecError
        If a path names no array.
    UnfinishedConversionError
        If there is no array yet, because a conversion into this store was interrupted.
    """
    base = open_base(store, storage_options)
    found = find_arrays(base, paths)
    by_node = {array.node: array for array in found}
    conversions = [*unfinished_conversions(base)]
    into = [each.text for each in conversions if each.state and each.prefix is not None]
    if into and not found and paths is None:
        raise UnfinishedConversionError(into[0])
    unfinished = {each.path: each for each in conversions if each.is_of_stored_array}
    infos = (_info(base, array, by_node) for array in found)
    arrays = tuple(_with_state(array, unfinished.get(array.path)) for array in infos)
    counted = [array for array in arrays if not array.shares_objects]
    totals = {name: sum(getattr(array, name) for array in counted) for name in _TOTALS}
    n_sharded = sum(array.is_sharded for array in counted)
    return StoreInfo(base.describe(), arrays, n_sharded, **totals)


def _with_state(info: ArrayInfo, unfinished: UnfinishedConversion | None) -> ArrayInfo:
    """Add that a conversion of the array goes on, or was interrupted."""
    if unfinished is None:
        return info
    if unfinished.is_running:
        return replace(info, notes=(*info.notes, unfinished.text))
    return replace(info, n_errors=info.n_errors + 1, errors=(unfinished.text, *info.errors))


def _info(
    base: BaseStoreHandle, found: FoundArray, by_node: Mapping[metadata.Node, FoundArray]
) -> ArrayInfo:
    node, doc = found.node, found.doc
    names: dict[str, Any] = {"path": node.path, "hierarchy": node.hierarchy}
    names |= {"shape": _shape_of(doc), "dtype": _dtype_of(doc)}
    info = ArrayInfo(**names, read_by=read_by([doc]))
    try:
        array = read_array(found)
    except UnsupportedError as error:
        return replace(info, is_unknown=True, notes=(str(error),))
    except ShardStoreError as error:
        return replace(info, n_errors=1, errors=(str(error),))
    geometry = array.document.geometry
    if geometry is None or found.geometry is None:
        return replace(info, is_unknown=True, notes=(metadata.unknown_geometry(doc),))
    v3 = by_node.get(node.other_format) if node.hierarchy == "v2" and node.other_format else None
    grid = walks.ObjectGrid.of_array(array)
    cps, is_sharded = grid.layout.spec.chunks_per_shard, grid.is_sharded
    shard_shape = geometry.in_boxes(grid.boxes).chunk_shape
    info = replace(
        info,
        declaration=array.document.declaration,
        chunk_shape=geometry.chunk_shape,
        shard_shape=shard_shape if is_sharded else None,
        chunks_per_shard=cps if is_sharded else None,
        chunk_grid_shape=array.grid_shape,
        shard_grid_shape=grid.shape if is_sharded else None,
        n_chunks_of_grid=math.prod(array.grid_shape or ()),
        n_objects_of_grid=math.prod(grid.shape),
        shares_objects=v3 is not None and found.geometry.has_same_chunks(v3.geometry),
        notes=_notes(array, grid, doc),
    )
    return _counted(info, rounds_of_objects(base, grid))


def _counted(info: ArrayInfo, rounds: Iterable[Round]) -> ArrayInfo:
    totals: dict[str, Any] = dict.fromkeys(_TOTALS, 0)
    extremes: list[int] = []
    errors: list[str] = []
    for sizes, cells in rounds:
        totals["n_objects"] += len(sizes)
        totals["stored_nbytes"] += sum(sizes)
        for name in ("n_chunks", "chunk_nbytes", "index_nbytes", "dead_nbytes"):
            totals[name] += sum(getattr(cell, name) or 0 for cell in cells)
        extremes += sizes
        extremes = [min(extremes), max(extremes)] if extremes else []
        found = [cell.error for cell in cells if cell.error]
        totals["n_errors"] += len(found)
        errors += found[: _MAX_ERRORS - len(errors)]
    if extremes:
        mean = totals["stored_nbytes"] / totals["n_objects"]
        totals |= {"smallest": extremes[0], "mean": mean, "largest": extremes[1]}
    n_in_grid = info.n_chunks_of_grid
    fill = totals["n_chunks"] / n_in_grid if n_in_grid else 0.0
    return replace(info, **totals, fill=fill, errors=tuple(errors))


def _notes(
    array: stored_arrays.StoredArray, grid: walks.ObjectGrid, doc: Mapping[str, Any]
) -> tuple[str, ...]:
    notes = []
    if declarations.has_sharding_codec(doc) and array.document.declaration is None:
        notes.append("its sharding codec is left to zarr: its shards are counted, not their chunks")
    if len(array.document.transformers) > 1 or (array.stack and not grid.is_sharded):
        names = ", ".join(spec.name for spec in array.document.transformers)
        notes.append(f"storage transformers, the nearest to the array first: {names}")
    spec, geometry = grid.layout.spec, array.document.geometry
    notes += _uneven("chunks have", "elements", geometry.sides if geometry else None)
    return (*notes, *_uneven("shards have", "chunks", spec.sides))


def _uneven(what: str, of: str, sides: tuple[box_grids.Side, ...] | None) -> list[str]:
    """Describe lengths that differ along a dimension."""
    return [
        f"{what} {min(side)} to {max(side)} {of} along dimension {dim}"
        for dim, side in enumerate(sides or ())
        if isinstance(side, tuple)
    ]


def _shape_of(doc: Mapping[str, Any]) -> chunk_keys.Coords | None:
    shape = doc.get("shape")
    is_shape = isinstance(shape, list) and all(isinstance(n, int) for n in shape)
    return tuple(shape or ()) if is_shape else None


def _dtype_of(doc: Mapping[str, Any]) -> str | None:
    """Return the data type as it is spelled: a str, or JSON."""
    dtype = doc.get("dtype" if doc.get("zarr_format") == 2 else "data_type")
    return dtype if dtype is None or isinstance(dtype, str) else json.dumps(dtype)
