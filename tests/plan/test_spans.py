"""Coalescing: every requested byte exactly once, and no more than the knobs allow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore.plan.spans import plan_spans

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
