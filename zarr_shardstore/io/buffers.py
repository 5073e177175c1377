"""Conversions between zarr's types and ours: buffers and bytes, byte requests and byte ranges.

Buffers on the CPU are not copied.
"""

from __future__ import annotations

from operator import index

import numpy as np
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from zarr_shardstore.format.ranges import ByteRange, Range, StartFrom, Suffix


def as_view(value: Buffer | bytes | bytearray | memoryview) -> memoryview:
    """Return a read-only view of the bytes of `value`."""
    if isinstance(value, Buffer):
        return value.as_numpy_array().view(np.uint8).data.toreadonly()
    if isinstance(value, bytes | bytearray | memoryview):
        view = memoryview(value)
        return (view if view.format == "B" and view.ndim == 1 else view.cast("B")).toreadonly()
    raise TypeError(
        f"`value` must be a Buffer instance or bytes. Got an instance of {type(value)} instead."
    )


def own_bytes(value: Buffer | bytes | bytearray | memoryview) -> bytes:
    """Return the bytes of `value`: a cancelled caller may reuse its buffer while a commit still
    writes the value."""
    return value if isinstance(value, bytes) else bytes(as_view(value))


def buffer_class_of(prototype: object) -> type[Buffer]:
    """Return the class of buffers that zarr asked for; ``None``: zarr's default."""
    try:
        cls: type[Buffer] = (prototype or default_buffer_prototype()).buffer  # type: ignore[attr-defined]
    except AttributeError:
        raise TypeError(f"prototype is a BufferPrototype of zarr, got {prototype!r}") from None
    return cls


def to_buffer_of(
    value: bytes | memoryview | None, prototype: BufferPrototype | None
) -> Buffer | None:
    """Return a value in the buffer that zarr asked for; ``None`` if there is no value."""
    return None if value is None else buffer_class_of(prototype).from_bytes(value)


def range_of(byte_request: ByteRequest | None) -> ByteRange | None:
    """Convert zarr's request for a part of a value; ``None``: all of the value."""
    match byte_request:
        case None:
            return None
        case RangeByteRequest(start, end):
            return Range(index(start), index(end))
        case OffsetByteRequest(offset):
            return StartFrom(index(offset))
        case SuffixByteRequest(suffix):
            return Suffix(index(suffix))
    raise TypeError(
        f"Unexpected byte_range, got {byte_request!r}. It is one of zarr's byte requests, such as "
        "zarr.abc.store.RangeByteRequest(start, stop), or None; the draft's (start, length) is "
        "for ShardingMapping.get_partial_values."
    )


def byte_request_of(byte_range: ByteRange | None) -> ByteRequest | None:
    """Convert a byte range for a store of zarr."""
    match byte_range:
        case None:
            return None
        case Range(start, stop):
            return RangeByteRequest(start, stop)
        case StartFrom(start):
            return OffsetByteRequest(start)
        case Suffix(nbytes):
            return SuffixByteRequest(nbytes)
