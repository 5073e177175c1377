"""Arrays of a store as sources of samples: arrays with a grid of chunks, and sparse matrices."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import zarr

from zarr_shardstore.access import EntryReader, ShardingMapping, ShardingStore, box_grids
from zarr_shardstore.errors import CorruptValueError, SpecError, UnsupportedError
from zarr_shardstore.interop.loader.copies import PLAIN_KINDS, Array, Source
from zarr_shardstore.interop.loader.frameworks import Converter
from zarr_shardstore.interop.loader.order import Ints, Samples


class Column(NamedTuple):
    """One value of each batch: an array, or rows of a sparse matrix."""

    sources: list[Source]
    """The array; or data and column numbers of the matrix."""
    n_columns: int = 0

    def value(self, arrays: Iterator[Array], starts: Ints, convert: Converter) -> Any:
        """Return the value of a batch, of the next arrays, for samples with these starts."""
        first = self.sources[0]
        if first.indptr is None:
            return convert.dense(next(arrays))
        data, indices = next(arrays), next(arrays)
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.n_columns:
            key = first.entries.chunks.node.path
            raise CorruptValueError(
                f"columns of the sparse matrix lie outside of its {self.n_columns}", key=key
            )
        shape = (len(starts), self.n_columns)
        fits = max(len(data), *shape) < 2**31
        indptr = np.zeros(len(starts) + 1, indices.dtype if fits else np.int64)
        indptr[1:] = np.cumsum(first.n_rows(starts))
        parts = map(convert.dense, (data, indices, indptr))
        return convert.sparse(*parts, shape)


def columns_of(store: Any, paths: Mapping[str, str], window: Any, axes: Any) -> dict[str, Column]:
    of = axes if isinstance(axes, Mapping) else dict.fromkeys(paths, axes)
    check(of.keys() <= paths.keys(), f"axes are of the arrays {[*paths]}", axes)
    columns = {n: _column(store, path, window, of.get(n)) for n, path in paths.items()}
    extents = {column.sources[0].extent for column in columns.values()}
    check(len(extents) == 1, "arrays are equally long along the sampled axes", extents)
    return columns


def nbytes_of(sources: Sequence[Source], samples: Samples, numbers: Ints, more: int = 0) -> Ints:
    """Return the sizes of samples with these numbers, and as many bytes `more` for each."""
    dense = more + sum(source.row_nbytes for source in sources if source.indptr is None)
    sizes = np.broadcast_to(np.int64(dense), len(numbers))
    for source in sources:
        if source.indptr is not None:
            sizes = sizes + source.n_rows(samples.starts(numbers)) * source.row_nbytes
    return sizes


def _column(store: Any, path: str, window: Any, axes: Any) -> Column:
    try:
        return Column([_source(store, path, window, axes)])
    except SpecError:
        group = None
        with suppress(Exception):
            group = zarr.open_group(store, path=path, mode="r")
        kind = None if group is None else group.attrs.get("encoding-type")
        if group is None or kind not in ("csr_matrix", "csc_matrix"):
            raise
    if kind == "csc_matrix":
        raise UnsupportedError(
            f"{path!r} is a sparse matrix that has its columns one by one, {kind}: store it as "
            "csr_matrix, which has its rows one by one"
        )
    check(window is None and axes in (None, 0), f"samples of {path!r} are its rows", window or axes)
    shape: Any = group.attrs.get("shape")
    n_rows, n_columns = shape if isinstance(shape, list) and len(shape) == 2 else (-1, -1)
    indptr = np.asarray(group["indptr"][...], np.int64).reshape(-1)  # type: ignore[index]
    indptr = indptr if len(indptr) else np.zeros(1, np.int64)
    names = [f"{path}/data".lstrip("/"), f"{path}/indices".lstrip("/")]
    sources = [_source(store, name, None, 0) for name in names]
    ends = [(len(indptr) - 1, *indptr[[0, -1]].tolist(), *s.shape) for s in sources]
    expected = [(n_rows, 0, *s.shape, *s.shape) for s in sources]
    if ends != expected or (np.diff(indptr) < 0).any() or sources[0].shape != sources[1].shape:
        raise SpecError(f"{path!r} is not a sparse matrix: its indptr does not fit its elements")
    data, indices = [replace(source, indptr=indptr) for source in sources]
    # Frameworks take these two types of columns, and would copy others.
    number = np.dtype(np.int32 if indices.itemsize <= 4 and n_columns < 2**31 else np.int64)
    indices = replace(indices, dtype=number, itemsize=number.itemsize)
    return Column([data, indices], n_columns)


def _text_nbytes(store: Any, path: str, source: Source) -> int:
    """Estimate the memory of an element of variable size, by the first, middle and last chunk."""
    last, largest = np.array(source.grid, np.int64) - 1, 0.0
    for coords in (last * 0, last // 2, last) if (last >= 0).all() else ():
        values = store.read_chunks(path, [coords]).reshape(-1).tolist()
        sizes = [len(v.encode()) if isinstance(v, str) else sys.getsizeof(v) for v in values]
        largest = max(largest, sum(sizes) / max(1, len(sizes)))
    if source.dtype.hasobject:
        return source.dtype.itemsize + sys.getsizeof("") + math.ceil(largest)
    return source.dtype.itemsize + math.ceil(1.25 * largest)  # numpy's texts grow in steps


def _source(store: Any, path: str, window: Any, axes: Any) -> Source:
    entries = EntryReader.of(store, path)
    reader, layout = entries.chunks, entries.layout
    is_plain = reader.dtype.kind in PLAIN_KINDS
    if not reader.is_even:
        raise UnsupportedError(f"the chunks of {path!r} have several lengths: take one for batches")
    shape = reader.array.shape
    are_rows = window is None and bool(shape)
    window = () if window is None and not shape else (1,) if window is None else window
    given = [*range(len(window))] if axes is None else np.atleast_1d(axes).tolist()
    check({*map(type, given)} <= {int}, f"axes of {path!r} are whole numbers", axes)
    sampled = tuple([axis + len(shape) if axis < 0 else int(axis) for axis in given])
    is_valid = len({*sampled} & {*range(len(shape))}) == len(sampled) == len(window)
    rule = (
        f"{path!r} has {len(shape)} dimensions, so `axes` are {len(window)} of these (axes={{…}})"
    )
    check(is_valid, rule, given)
    lengths = list(shape)
    for axis, length in zip(sampled, window, strict=True):
        lengths[axis] = int(length)
    source = Source(
        shape=shape,
        chunk_shape=reader.chunk_shape,
        itemsize=reader.dtype.itemsize,
        axes=sampled,
        lengths=tuple(lengths),
        shards=box_grids.BoxGrid((1,) * len(shape)) if layout is None else layout.spec.boxes,
        n_in_piece=1,
        joins_rows=is_plain,
        entries=entries,
        dtype=reader.dtype.newbyteorder("=") if is_plain else reader.dtype,
        sample_shape=tuple([n for i, n in enumerate(lengths) if not (are_rows and i in sampled)]),
    )
    if not is_plain:
        source = replace(source, itemsize=_text_nbytes(store, path, source))
    return source.in_pieces()


def check(is_valid: bool, rule: str, given: object) -> None:
    if not is_valid:
        raise SpecError(f"{rule}, got {given!r}")


def store_of(store: Any) -> Any:
    if isinstance(store, ShardingMapping):
        return store._store
    if isinstance(store, ShardingStore):
        return store
    if isinstance(store, str):
        store = store.removeprefix("shard::")
    return ShardingStore(store, None, read_only=True)
