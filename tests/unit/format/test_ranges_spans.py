"""Coalescing: every requested byte exactly once, and no more than the knobs allow."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore.format.ranges import Span, merge_spans, plan_spans

ranges_strategy = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 40)).map(lambda r: (r[0], r[0] + r[1]))
)


@given(ranges_strategy, st.integers(0, 30), st.integers(0, 100))
def test_laws_of_coalescing(
    ranges: list[tuple[int, int]], max_gap_bytes: int, max_coalesced_bytes: int
) -> None:
    """Each range lies in one span; spans hold no larger gap and are no larger than allowed."""
    spans = plan_spans(ranges, max_gap_bytes=max_gap_bytes, max_coalesced_bytes=max_coalesced_bytes)
    served = [i for span in spans for i in span.members]
    assert sorted(served) == [i for i, (a, b) in enumerate(ranges) if a < b]
    for span in spans:
        wanted = set()
        for i in span.members:
            start, stop = ranges[i]
            assert span.start <= start < stop <= span.stop
            wanted |= set(range(start, stop))
        assert {span.start, span.stop - 1} <= wanted, "no byte is read before or behind"
        largest = max(ranges[i][1] - ranges[i][0] for i in span.members)
        assert span.stop - span.start <= max(max_coalesced_bytes, largest)
        gap = 0
        for byte in range(span.start, span.stop):
            gap = 0 if byte in wanted else gap + 1
            assert gap <= max_gap_bytes


@given(ranges_strategy, st.randoms())
def test_order_independence(ranges: list[tuple[int, int]], random: object) -> None:
    """Law: the spans do not depend on the order of the ranges."""
    shuffled = list(ranges)
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    def plan(r: list[tuple[int, int]]) -> list[tuple[int, int]]:
        spans = plan_spans(r, max_gap_bytes=5, max_coalesced_bytes=60)
        return [(span.start, span.stop) for span in spans]

    assert plan(ranges) == plan(shuffled)


def test_everything_in_one_span_where_nothing_forbids_it() -> None:
    """Touching ranges need no gap."""
    (span,) = plan_spans([(10, 20), (0, 10), (20, 30)], max_gap_bytes=0, max_coalesced_bytes=30)
    assert (span.start, span.stop, span.members) == (0, 30, [1, 0, 2])


OBJECTS = st.lists(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 9)), max_size=12), max_size=4
)


@given(
    objects=OBJECTS,
    n=st.integers(0, 12),
    gap=st.integers(0, 40),
    limit=st.just(1000) | st.integers(1, 200),
    unwanted=st.just(10_000) | st.integers(0, 100),
)
def test_merged_spans(
    objects: list[list[tuple[int, int]]], n: int, gap: int, limit: int, unwanted: int
) -> None:
    """Each member stays in a span that covers it; what is merged is what is between the spans
    that are nearest to each other, and no more of them than needed."""
    ranges = [[(start, start + nbytes) for start, nbytes in wanted] for wanted in objects]
    spans = [plan_spans(r, max_gap_bytes=0, max_coalesced_bytes=limit) for r in ranges]
    merged = merge_spans(
        spans, n, max_gap_bytes=gap, max_unwanted_bytes=unwanted, max_coalesced_bytes=limit
    )
    left: list[int] = []
    closed: list[int] = []
    for wanted, before, after in zip(ranges, spans, merged, strict=True):
        members = [member for span in after for member in span.members]
        assert members == [member for span in before for member in span.members]
        for span in after:
            assert all(span.start <= wanted[m][0] for m in span.members)
            assert span.stop == max(wanted[m][1] for m in span.members)
            assert len(span.members) == 1 or span.stop - span.start <= limit or span in before
        starts = {span.start for span in after}
        for a, b in pairwise(before):
            (left if b.start in starts else closed).append(b.start - a.stop)
    n_before, n_after = sum(map(len, spans)), sum(map(len, merged))
    assert n_after == n_before - len(closed)
    assert len(closed) <= max(n_before - n, 0)
    assert all(g <= gap for g in closed)
    assert sum(g for g in closed if g > 0) <= unwanted
    if limit == 1000:
        assert max(closed, default=0) <= min(left, default=400)
        assert n_after <= n or not left or min(left) > gap or sum(closed) + min(left) > unwanted


def test_a_range_inside_another_needs_no_room() -> None:
    """It ends where the other does, or before; also if the other is larger than any span."""
    for inner in ((105, 110), (105, 109)):
        (span,) = plan_spans([(100, 110), inner], max_gap_bytes=0, max_coalesced_bytes=5)
        assert (span.start, span.stop, span.members) == (100, 110, [0, 1])


def test_spans_are_as_long_as_allowed_wherever_they_lie() -> None:
    ranges = [(1000, 1010), (1010, 1020), (1020, 1030)]
    spans = plan_spans(ranges, max_gap_bytes=0, max_coalesced_bytes=20)
    assert [(s.start, s.stop) for s in spans] == [(1000, 1020), (1020, 1030)]


@pytest.mark.parametrize(
    ("n_spans", "gap", "unwanted", "limit", "expected"),
    [
        (1, 9, 99, 99, [(1000, 1035)]),
        (2, 9, 99, 99, [(1000, 1012), (1020, 1035)]),  # the shorter gaps
        (3, 9, 99, 99, [(1000, 1012), (1020, 1025), (1030, 1035)]),
        (4, 9, 99, 99, [(1000, 1005), (1007, 1012), (1020, 1025), (1030, 1035)]),
        (5, 9, 99, 99, [(1000, 1005), (1007, 1012), (1020, 1025), (1030, 1035)]),
        (1, 5, 99, 99, [(1000, 1012), (1020, 1035)]),  # 8 bytes are too long a gap
        (1, 8, 99, 99, [(1000, 1035)]),
        (1, 9, 15, 99, [(1000, 1035)]),  # 2 + 5 + 8 unwanted bytes
        (1, 9, 14, 99, [(1000, 1012), (1020, 1035)]),
        (1, 9, 7, 99, [(1000, 1012), (1020, 1035)]),
        (1, 9, 6, 99, [(1000, 1012), (1020, 1025), (1030, 1035)]),
        (1, 9, 99, 35, [(1000, 1035)]),
        (1, 9, 99, 34, [(1000, 1025), (1030, 1035)]),
    ],
)
def test_merged_spans_by_hand(
    n_spans: int, gap: int, unwanted: int, limit: int, expected: list[tuple[int, int]]
) -> None:
    spans = [Span(start, start + 5, [i]) for i, start in enumerate((1000, 1007, 1020, 1030))]
    (merged,) = merge_spans(
        [spans],
        n_spans,
        max_gap_bytes=gap,
        max_unwanted_bytes=unwanted,
        max_coalesced_bytes=limit,
    )
    assert [(s.start, s.stop) for s in merged] == expected
    assert [member for s in merged for member in s.members] == [0, 1, 2, 3]


def test_spans_that_touch_have_no_unwanted_bytes() -> None:
    spans = [Span(0, 5, [0]), Span(5, 9, [1])]
    (merged,) = merge_spans(
        [spans], 1, max_gap_bytes=0, max_unwanted_bytes=0, max_coalesced_bytes=9
    )
    assert merged == [Span(0, 9, [0, 1])]
