"""Byte ranges as zarr asks for them, and as flows do."""

from __future__ import annotations

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest

from zarr_shardstore.plan.ranges import ByteRange, Range, StartFrom, Suffix

__all__ = ["byte_request_of", "range_of"]


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
