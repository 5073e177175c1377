"""Byte ranges of a value, clipped to it: no range reaches into a neighbouring entry.

Source: Zarr v3 core, "Abstract store interface"; zarr-python, ``zarr.abc.store``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from zarr_shardstore.errors import SpecError

__all__ = ["ByteRange", "Range", "StartFrom", "Suffix", "column_of_ranges", "resolve_range"]


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes ``[start, stop)``."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StartFrom:
    """All bytes from `start` on."""

    start: int


@dataclass(frozen=True, slots=True)
class Suffix:
    """The last `nbytes` bytes, or all if there are fewer."""

    nbytes: int


ByteRange: TypeAlias = Range | StartFrom | Suffix


def resolve_range(byte_range: ByteRange | None, nbytes: int) -> tuple[int, int]:
    """Half-open range of a value of `nbytes` bytes; ``None`` means all of it.

    A range that reaches over the end is clipped; one that starts behind it is empty.

    Raises
    ------
    SpecError
        If a number is negative.
    """
    match byte_range:
        case None:
            return 0, nbytes
        case Range(start, stop) if start >= 0 and stop >= 0:
            start = min(start, nbytes)
            return start, max(start, min(stop, nbytes))
        case StartFrom(start) if start >= 0:
            return min(start, nbytes), nbytes
        case Suffix(n) if n >= 0:
            return max(0, nbytes - n), nbytes
    raise SpecError(f"a byte range has no negative numbers, got {byte_range}")


def column_of_ranges(
    byte_ranges: Sequence[ByteRange | None],
) -> Sequence[ByteRange | None] | None:
    """The same ranges, checked; ``None`` if each is ``None``: all values are wanted whole.

    Raises
    ------
    SpecError
        If a number is negative.
    """
    some = [byte_range for byte_range in byte_ranges if byte_range is not None]
    for byte_range in some:
        resolve_range(byte_range, 0)
    return byte_ranges if some else None
