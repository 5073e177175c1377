"""Byte ranges: a range of a value is clipped to the value, and ranges of an object are coalesced.

A clipped range never reaches into a neighbouring entry. A *span* is one requested range that covers
several wanted ranges.

Source: Zarr v3 core, "Abstract store interface"; zarr-python, ``zarr.abc.store``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from zarr_shardstore.errors import SpecError


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
    """Clip a range, or ``None`` for the whole value, to a value of `nbytes` bytes. Return it
    half-open. `SpecError` for a negative number."""
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


def column_of_ranges(byte_ranges: Sequence[ByteRange | None]) -> Sequence[ByteRange | None] | None:
    """Check ranges and return them; ``None`` if all values are wanted whole."""
    some = [byte_range for byte_range in byte_ranges if byte_range is not None]
    for byte_range in some:
        resolve_range(byte_range, 0)
    return byte_ranges if some else None


@dataclass(slots=True)
class Span:
    """Bytes ``[start, stop)`` of one request, and the positions of the ranges in them."""

    start: int
    stop: int
    members: list[int]


def plan_spans(
    ranges: Sequence[tuple[int, int]], *, max_gap_bytes: int, max_coalesced_bytes: int
) -> list[Span]:
    """Cover `ranges` with spans, in ascending order.

    At most `max_gap_bytes` unwanted bytes lie between two ranges of a span. Only a single range is
    longer than `max_coalesced_bytes`. Empty ranges are in no span.

    >>> plan_spans([(0, 4), (30, 40), (4, 8)], max_gap_bytes=2, max_coalesced_bytes=100)
    [Span(start=0, stop=8, members=[0, 2]), Span(start=30, stop=40, members=[1])]
    """
    spans: list[Span] = []
    for i in sorted(range(len(ranges)), key=ranges.__getitem__):
        start, stop = ranges[i]
        if start >= stop:
            continue
        last = spans[-1] if spans else Span(start, start, [])
        is_near = start - last.stop <= max_gap_bytes and stop - last.start <= max_coalesced_bytes
        if last.members and (is_near or stop <= last.stop):
            last.stop = max(last.stop, stop)
            last.members.append(i)
        else:
            spans.append(Span(start, stop, [i]))
    return spans


def merge_spans(
    objects: Sequence[Sequence[Span]],
    n_spans: int,
    *,
    max_gap_bytes: int,
    max_unwanted_bytes: int,
    max_coalesced_bytes: int,
) -> list[list[Span]]:
    """Merge neighbouring spans of objects until `n_spans` are left in all, or limits are reached.
    The shortest gaps are closed first. Together they have at most `max_unwanted_bytes`."""
    gaps = sorted(
        (after.start - before.stop, i, j)
        for i, spans in enumerate(objects)
        for j, (before, after) in enumerate(pairwise(spans), 1)
    )
    n_closed = max(sum(map(len, objects)) - n_spans, 0)
    closed: set[tuple[int, int]] = set()
    for gap, i, j in gaps[:n_closed]:
        max_unwanted_bytes -= max(gap, 0)
        if gap > max_gap_bytes or max_unwanted_bytes < 0:
            break
        closed.add((i, j))
    merged: list[list[Span]] = []
    for i, spans in enumerate(objects):
        merged.append([])
        for j, span in enumerate(spans):
            last = merged[i][-1] if merged[i] else span
            if (i, j) in closed and span.stop - last.start <= max_coalesced_bytes:
                merged[i][-1] = Span(last.start, span.stop, last.members + span.members)
            else:
                merged[i].append(span)
    return merged
