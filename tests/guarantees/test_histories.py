"""`judge` accepts the histories that are linearizable, and no others."""

from __future__ import annotations

from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kit import Event, judge

State = tuple[int, int]
Call = tuple[str, int]
"""Of two registers that start at 0: ("get", i) returns one, ("both", 0) both, ("set i", n) and
("set both", n) return ``None``; ("raise", n) sets both if register 0 is below n, and tells."""


def step(state: State, call: Call) -> tuple[State, object]:
    name, n = call
    match name:
        case "get":
            return state, state[n]
        case "both":
            return state, state
        case "set 0":
            return (n, state[1]), None
        case "set 1":
            return (state[0], n), None
        case "set both":
            return (n, n), None
        case "raise":
            return ((n, n), True) if state[0] < n else (state, False)
    raise AssertionError(name)


def is_read(call: Call) -> bool:
    return call[0] in ("get", "both")


def is_linearizable(*events: tuple[int, int, str, int, object]) -> bool:
    history = [Event("", (name, n), start, stop, r) for start, stop, name, n, r in events]
    verdicts = [judge(history, (0, 0), step), judge(history, (0, 0), step, is_read=is_read)]
    for verdict in verdicts:
        assert sorted(map(id, [*verdict.order, *verdict.rest])) == sorted(map(id, history))
        state: State = (0, 0)
        for event in verdict.order:
            state, result = step(state, event.call)
            assert result == event.result
        assert state == verdict.state
        assert str(verdict).count("->") == len(history)
    assert verdicts[0].is_linearizable == verdicts[1].is_linearizable
    return verdicts[0].is_linearizable


@pytest.mark.parametrize("seen", [0, 1])
def test_a_read_beside_a_write_sees_old_or_new(seen: int) -> None:
    assert is_linearizable((0, 10, "set 0", 1, None), (5, 6, "get", 0, seen))


def test_nothing_happened() -> None:
    assert is_linearizable()


def test_a_later_read_may_explain_an_earlier_one() -> None:
    """The order is not that of the invocations, nor that of the responses."""
    assert is_linearizable(
        (0, 10, "set 0", 1, None),
        (1, 30, "set 0", 2, None),
        (11, 20, "get", 0, 1),
        (31, 40, "get", 0, 2),
    )
    assert is_linearizable(
        (0, 10, "set 0", 1, None), (1, 30, "set 0", 2, None), (31, 40, "get", 0, 1)
    )


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([(0, 1, "set 0", 1, None), (2, 3, "get", 0, 0)], id="stale"),
        pytest.param([(0, 1, "get", 0, 1), (2, 3, "set 0", 1, None)], id="from the future"),
        pytest.param([(0, 1, "set 0", 1, None), (2, 3, "get", 0, 7)], id="out of nothing"),
        pytest.param(
            [(0, 9, "set 0", 1, None), (1, 2, "get", 0, 1), (3, 4, "get", 0, 0)],
            id="new, then old",
        ),
        pytest.param(
            [(0, 9, "set 0", 1, None), (0, 9, "set 1", 2, None), (10, 11, "both", 0, (0, 2))],
            id="lost update",
        ),
        pytest.param([(0, 9, "set both", 1, None), (1, 8, "both", 0, (0, 1))], id="torn write"),
        pytest.param(
            [(0, 9, "set both", 1, None), (1, 2, "get", 1, 1), (3, 4, "get", 0, 0)],
            id="torn write, seen by two reads",
        ),
        pytest.param([(0, 9, "raise", 1, True), (0, 9, "raise", 1, True)], id="two winners"),
        pytest.param([(0, 9, "raise", 1, False), (0, 9, "raise", 1, False)], id="no winner"),
        pytest.param(
            [
                *[(0, 9, "set 0", 1, None), (0, 9, "set 0", 2, None)],
                *[(10, 11, "get", 0, 1), (12, 13, "get", 0, 2)],
            ],
            id="changed by nobody",
        ),
    ],
)
def test_refused(events: list[tuple[int, int, str, int, object]]) -> None:
    assert not is_linearizable(*events)


calls = st.one_of(
    st.tuples(st.just("get"), st.integers(0, 1)),
    st.just(("both", 0)),
    st.tuples(st.sampled_from(["set 0", "set 1", "set both", "raise"]), st.integers(1, 3)),
)


@given(st.lists(st.tuples(calls, st.integers(0, 50), st.integers(0, 50)), max_size=12))
def test_stretched_sequential_runs_are_accepted(run: list[tuple[Call, int, int]]) -> None:
    """One operation every 10 instants, however long before and after its client waits."""
    state: State = (0, 0)
    events = []
    for i, (call, before, after) in enumerate(run):
        state, result = step(state, call)
        events.append((10 * i - before, 10 * i + after, *call, result))
    assert is_linearizable(*events)


@given(st.lists(calls, min_size=2, max_size=8), st.data())
def test_swapped_results_are_refused(run: list[Call], data: st.DataObject) -> None:
    """Of operations that do not overlap: their order is given, and so is each result."""
    state: State = (0, 0)
    results = []
    for call in run:
        state, result = step(state, call)
        results.append(result)
    i, j = data.draw(st.permutations(range(len(run))))[:2]
    swapped = list(results)
    swapped[i], swapped[j] = results[j], results[i]
    events = [(2 * n, 2 * n + 1, *call, swapped[n]) for n, call in enumerate(run)]
    assert is_linearizable(*events) == (results == swapped)


@given(st.lists(st.tuples(calls, st.integers(0, 6), st.integers(0, 4)), max_size=5), st.data())
def test_as_by_trying_all_orders(drawn: list[tuple[Call, int, int]], data: st.DataObject) -> None:
    """Of any small history, with results that could be."""
    events = []
    for call, start, length in drawn:
        seen = {step((a, b), call)[1] for a, b in product(range(4), repeat=2)}
        result = data.draw(st.sampled_from(sorted(seen, key=repr)))
        events.append((start, start + length, *call, result))

    def explains(order: tuple[tuple[int, int, str, int, object], ...]) -> bool:
        state: State = (0, 0)
        for n, (_, stop, name, number, seen) in enumerate(order):
            if any(stop < before[0] for before in order[:n]):
                return False
            state, result = step(state, (name, number))
            if result != seen:
                return False
        return True

    assert is_linearizable(*events) == any(map(explains, permutations(events)))
