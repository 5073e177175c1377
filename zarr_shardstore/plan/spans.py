"""Merge the byte ranges wanted from one object into few requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Span", "merge_spans", "plan_spans"]


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


def merge_spans(
    objects: Sequence[Sequence[Span]],
    n_spans: int,
    *,
    max_gap_bytes: int,
    max_unwanted_bytes: int,
    max_coalesced_bytes: int,
) -> list[list[Span]]:
    """Merge neighbouring spans until `n_spans` are left, the shortest gaps first.

    Parameters
    ----------
    objects
        Spans of each object, in ascending order.
    n_spans
        Of all objects together. More are left where gaps are longer than `max_gap_bytes`, spans
        would become larger than `max_coalesced_bytes`, or all that is read in vain would be
        more than `max_unwanted_bytes`.

    >>> spans = plan_spans([(0, 4), (10, 14), (16, 20)], max_gap_bytes=0, max_coalesced_bytes=99)
    >>> limits = {"max_gap_bytes": 9, "max_unwanted_bytes": 9, "max_coalesced_bytes": 99}
    >>> merge_spans([spans], 2, **limits)
    [[Span(start=0, stop=4, members=[0]), Span(start=10, stop=20, members=[1, 2])]]
    """
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
