"""Merge the byte ranges wanted from one object into few requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Span", "plan_spans"]


@dataclass(slots=True)
class Span:
    """Bytes ``[start, stop)`` that will be requested, and the positions of the ranges in it."""

    start: int
    stop: int
    members: list[int]


def plan_spans(
    ranges: Sequence[tuple[int, int]], *, max_gap_bytes: int, max_coalesced_bytes: int
) -> list[Span]:
    """Cover `ranges` with spans, in ascending order.

    Two ranges share a span if at most `max_gap_bytes` unwanted bytes lie between them and
    the span stays within `max_coalesced_bytes`. A single range is never cut. Empty ranges
    need no bytes and are in no span.

    >>> plan_spans([(0, 4), (30, 40), (4, 8)], max_gap_bytes=2, max_coalesced_bytes=100)
    [Span(start=0, stop=8, members=[0, 2]), Span(start=30, stop=40, members=[1])]
    """
    spans: list[Span] = []
    for i in sorted(range(len(ranges)), key=ranges.__getitem__):
        start, stop = ranges[i]
        if start >= stop:
            continue
        last = spans[-1] if spans else None
        if last is not None and (
            stop <= last.stop
            or (start - last.stop <= max_gap_bytes and stop - last.start <= max_coalesced_bytes)
        ):
            last.stop = max(last.stop, stop)
            last.members.append(i)
        else:
            spans.append(Span(start, stop, [i]))
    return spans
