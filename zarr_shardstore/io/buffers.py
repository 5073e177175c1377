"""zarr buffers to bytes and back, without a copy on the CPU."""

from __future__ import annotations

import numpy as np
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.core.buffer.cpu import Buffer as CpuBuffer

__all__ = ["as_view", "own_bytes", "to_buffer", "to_buffer_of"]

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
