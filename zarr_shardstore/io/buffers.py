"""zarr buffers to bytes and back, without a copy on the CPU.

Byte ranges as zarr asks for them, and as flows do.
"""

from __future__ import annotations

import numpy as np
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.core.buffer.cpu import Buffer as CpuBuffer

from zarr_shardstore.format.ranges import ByteRange, Range, StartFrom, Suffix

_BYTE = np.dtype("B")


def as_view(value: Buffer | bytes | bytearray | memoryview) -> memoryview:
    """Read-only view of the bytes of `value`.

    Raises
    ------
    TypeError
        If `value` holds no bytes.
    """
    if isinstance(value, Buffer):
        return value.as_numpy_array().view(np.uint8).data.toreadonly()
    if isinstance(value, bytes | bytearray | memoryview):
        view = memoryview(value)
        return (view if view.format == "B" and view.ndim == 1 else view.cast("B")).toreadonly()
    raise TypeError(
        f"`value` must be a Buffer instance or bytes. Got an instance of {type(value)} instead."
    )


def own_bytes(value: Buffer | bytes | bytearray | memoryview) -> bytes:
    """The bytes of `value`, which nobody else can change.

    For values that a commit may still hold when the caller was cancelled and goes on.

    Raises
    ------
    TypeError
        If `value` holds no bytes.
    """
    return value if isinstance(value, bytes) else bytes(as_view(value))


def to_buffer(value: bytes | memoryview) -> Buffer:
    """A CPU buffer that shares the memory of `value`."""
    return CpuBuffer.from_bytes(value)


def to_buffer_of(
    value: bytes | memoryview | None, prototype: BufferPrototype | None
) -> Buffer | None:
    """A value in the buffer that zarr asked for; ``None``: there is none."""
    if value is None:
        return None
    try:
        cls = (prototype or default_buffer_prototype()).buffer
    except AttributeError:
        raise TypeError(f"prototype is a BufferPrototype of zarr, got {prototype!r}") from None
    if cls is CpuBuffer:  # what from_bytes does, without 0.5 µs for parsing the data type
        return cls(np.frombuffer(value, _BYTE))
    return cls.from_bytes(value)


def range_of(byte_request: ByteRequest | None) -> ByteRange | None:
    """zarr's request for a part of a value, for flows; ``None``: all of it."""
    match byte_request:
        case None:
            return None
        case RangeByteRequest(start, end):
            return Range(start, end)
        case OffsetByteRequest(offset):
            return StartFrom(offset)
        case SuffixByteRequest(suffix):
            return Suffix(suffix)
    raise TypeError(
        f"Unexpected byte_range, got {byte_request!r}. It is one of zarr's byte requests, such as "
        "zarr.abc.store.RangeByteRequest(start, stop), or None; the draft's (start, length) is "
        "for ShardingMapping.get_partial_values."
    )


def byte_request_of(byte_range: ByteRange | None) -> ByteRequest | None:
    """A flow's range, for a store of zarr."""
    match byte_range:
        case None:
            return None
        case Range(start, stop):
            return RangeByteRequest(start, stop)
        case StartFrom(start):
            return OffsetByteRequest(start)
        case Suffix(nbytes):
            return SuffixByteRequest(nbytes)
