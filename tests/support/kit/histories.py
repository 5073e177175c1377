"""Checker of concurrent histories: linearizability by the search of Wing and Gong.

::

    client 1   ├── set 1 ──┤      ├── get: 1 ──┤
    client 2        ├─────── set 2 ──────┤          linearizable: set 2, set 1, get

A history is linearizable if each operation can be given an instant between its invocation and its
response, such that a sequential object that performs the operations in this order replies with the
results that were seen. Small histories only: the search is exponential in the number
of operations that overlap.

Source: Wing and Gong, "Testing and verifying concurrent objects" (1993); Lowe, "Testing for
linearizability" (2017), section 3: tried states are cached.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

State = TypeVar("State", bound=Hashable)
Call = TypeVar("Call")


@dataclass(frozen=True, slots=True)
class Event(Generic[Call]):
    """An operation that was performed.

    Parameters
    ----------
    client
        Name of the client, for people who read the history.
    invoked, responded : int
        Instants, by a clock that all clients share.
    result
        Reply that the client got.
    """

    client: str
    call: Call
    invoked: int
    responded: int
    result: object


@dataclass(frozen=True, slots=True)
class Verdict(Generic[State, Call]):
    """Outcome of a search.

    Parameters
    ----------
    order
        An order that explains the results; if there is none for all events, the longest that
        was found for some of them.
    state
        Of the object after these.
    rest
        The events that do not fit behind them, in order of their invocation.
    """

    order: Sequence[Event[Call]]
    state: State
    rest: Sequence[Event[Call]]

    @property
    def is_linearizable(self) -> bool:
        """True if every event has a place in the order."""
        return not self.rest

    def __str__(self) -> str:
        """The whole history: what fits, the state that this leads to, and what does not fit."""
        events = [*self.order, *self.rest]
        origin = min((event.invoked for event in events), default=0)

        def line(event: Event[Call]) -> str:
            instants = f"{event.invoked - origin:>12,} {event.responded - origin:>12,}"
            return f"{instants}  {event.client}: {short(event.call)} -> {short(event.result)}"

        lines = [*map(line, self.order), f"{'state':>27}: {short(self.state)}"]
        if self.rest:
            lines += ["then none of these can be next:", *map(line, self.rest)]
        return "\n".join(lines)


def judge(
    events: Sequence[Event[Call]],
    initial: State,
    step: Callable[[State, Call], tuple[State, object]],
    *,
    is_read: Callable[[Call], bool] = lambda _: False,
) -> Verdict[State, Call]:
    """Find an order of the events that a sequential object explains.

    Parameters
    ----------
    initial
        State of the object before the first event.
    step
        The sequential object: the state after a call, and its result.
    is_read
        True if a call never changes the state. Such a call is placed as soon as it fits: it would
        fit later, too, so no other order needs a try.
    """
    events = sorted(events, key=lambda event: event.invoked)
    reads = [is_read(event.call) for event in events]
    reads_first = sorted(range(len(events)), key=lambda i: not reads[i])
    tried: set[tuple[int, State]] = set()
    order: list[Event[Call]] = []
    everything = (1 << len(events)) - 1
    best = list(order), initial, everything

    def search(left: int, state: State) -> bool:
        """Append the events of the set `left`; no set is tried twice in one state."""
        nonlocal best
        if (left, state) in tried:
            return False
        tried.add((left, state))
        if len(order) > len(best[0]):
            best = list(order), state, left
        if not left:
            return True
        open_events = [i for i in reads_first if left >> i & 1]
        # One that was invoked after another's response comes after it.
        first_response = min([events[i].responded for i in open_events])
        for i in open_events:
            event = events[i]
            if event.invoked > first_response:
                continue
            after, result = step(state, event.call)
            if result != event.result:
                continue
            order.append(event)
            if search(left & ~(1 << i), after):  # noqa: F821 - deleted below
                return True
            order.pop()
            if reads[i]:
                return False
        return False

    search(everything, initial)
    del search  # it refers to itself, and to the history
    found, state, left = best
    return Verdict(found, state, [event for i, event in enumerate(events) if left >> i & 1])


def short(value: object) -> str:
    """Return the repr, with "a*9" for nine times a."""
    return re.sub(r"(\\x..|\\.|.)\1{4,}", lambda m: f"{m[1]}*{len(m[0]) // len(m[1])}", repr(value))
