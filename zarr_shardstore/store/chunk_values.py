"""Chunks of one array operation: cut out of the value, merged with what is stored, put in place."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import NDBuffer

__all__ = ["ChunkPart", "chunk_nbytes"]

Values: TypeAlias = NDBuffer | npt.NDArray[Any]


class ChunkPart(NamedTuple):
    """The part of one chunk that an array operation reads or writes.

    Parameters
    ----------
    key : str
        Of the chunk.
    spec : ArraySpec
        Shape, data type and fill value of the chunk.
    inside
        Which elements of the chunk.
    outside
        Which elements of the value of the operation.
    is_complete : bool
        All elements that lie in the array.
    """

    key: str
    spec: ArraySpec
    inside: Any
    outside: Any
    is_complete: bool

    def chunk_to_write(
        self, value: NDBuffer, old: NDBuffer | None, drop_axes: tuple[int, ...]
    ) -> NDBuffer | None:
        """The whole chunk with this part of `value` in it; ``None`` if it shall be missing.

        Always memory of its own: neither `value` nor `old` can change it afterwards.
        """
        spec, dtype = self.spec, self.spec.dtype.to_native_dtype()
        make = spec.prototype.nd_buffer
        part = value if value.shape == () or self.inside == () else value[self.outside]
        if old is not None:
            chunk = old.copy()
        elif self.is_complete and part.shape == spec.shape:
            chunk = make.empty(shape=spec.shape, dtype=dtype, order=spec.order)
        else:
            fill = fill_value_of(spec)
            chunk = make.create(shape=spec.shape, dtype=dtype, order=spec.order, fill_value=fill)
        if drop_axes and part is not value:
            axes = tuple(None if i in drop_axes else slice(None) for i in range(spec.ndim))
            part = part[axes]
        chunk[self.inside] = part
        return None if _is_empty(chunk, spec) else chunk

    def put(self, chunk: Values | None, out: Values, drop_axes: tuple[int, ...]) -> None:
        """Put this part of a chunk, or of the fill value, into the result of a read."""
        if chunk is None:
            out[self.outside] = fill_value_of(self.spec)
            return
        part = chunk[self.inside]
        out[self.outside] = part.squeeze(axis=drop_axes) if drop_axes else part


def fill_value_of(spec: ArraySpec) -> Any:
    """The value of missing elements; Zarr v2 may leave it open."""
    return spec.dtype.default_scalar() if spec.fill_value is None else spec.fill_value


def chunk_nbytes(spec: ArraySpec) -> int:
    """Size of a decoded chunk in bytes; of texts, that of the pointers to them."""
    return math.prod(spec.shape) * spec.dtype.to_native_dtype().itemsize


def _is_empty(chunk: NDBuffer, spec: ArraySpec) -> bool:
    """Whether a chunk is not stored, because the array is to have no chunks of fill values."""
    if spec.config.write_empty_chunks:
        return False
    fill = fill_value_of(spec)
    array = chunk.as_ndarray_like()
    if isinstance(array, np.ndarray) and array.dtype.kind in "biuf" and array.size:
        # Most chunks differ in their first element: 1 µs, where a look at all takes 20 µs.
        first = array[(0,) * array.ndim]
        is_nan = first != first
        if first != fill and not is_nan:
            return False
    return chunk.all_equal(fill)
