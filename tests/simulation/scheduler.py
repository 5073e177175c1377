"""Scheduler of simulated clients: all that may come in one order or another is one choice.

A run asks a `Chooser` for each choice, among steps in a fixed order. So the list of the choices is
the schedule, and a run that gets the same list is the same run. `RandomChooser` draws from a seed,
`Replay` repeats a list, and `every_schedule` enumerates all lists, depth first.

Steps that commute need no second order. `every_schedule` leaves it out by sleep sets: a step that
was taken from a state stays asleep in what follows its siblings, until a step comes that does not
commute with it. The order in which *calls* end and begin is no part of the state. So this is for
clients with one call each, which all begin before the first step.

Source: Godefroid, "Partial-Order Methods for the Verification of Concurrent Systems" (1996),
chapter 5.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

__all__ = ["Chooser", "RandomChooser", "Replay", "Skipped", "Step", "every_schedule"]

_FAULT_RATE = 0.15
"""Of random choices, while faults are left."""


class Step(NamedTuple):
    """A step that can be taken now. Equal steps of two runs with one beginning do the same."""

    client: str
    number: int
    """Of the request, or of the system call, among those of this client."""
    name: str
    place: str = ""
    """Object that the step reads or changes; ``"*"``: it commutes with no other step."""
    is_read: bool = False
    is_fault: bool = False
    """Whether it is rare, and takes one of the faults that the run may have."""
    outcome: str = ""

    def commutes(self, other: Step) -> bool:
        """Whether both orders of two steps lead to one state, and neither prevents the other."""
        return (
            self.client != other.client
            and not (self.is_fault and other.is_fault)
            and "*" not in (self.place, other.place)
            and (self.place != other.place or (self.is_read and other.is_read))
        )

    def __str__(self) -> str:
        outcome = self.outcome and f", {self.outcome}"
        return f"{self.client} #{self.number}: {self.name}{outcome} {self.place}"


class Chooser(Protocol):
    """Source of choices."""

    def choose(self, steps: Sequence[Step]) -> int:
        """Return the position of the step that is taken."""


class Skipped(BaseException):
    """Every schedule that begins so is equivalent to one that was run."""


@dataclass(slots=True)
class RandomChooser:
    """Choices from a seed."""

    rng: random.Random

    def choose(self, steps: Sequence[Step]) -> int:
        """Draw a step; a fault is rare."""
        if len(steps) == 1:
            return 0
        wanted = faults = [i for i, step in enumerate(steps) if step.is_fault]
        if len(faults) < len(steps) and not (faults and self.rng.random() < _FAULT_RATE):
            wanted = [i for i, step in enumerate(steps) if not step.is_fault]
        return wanted[int(self.rng.random() * len(wanted))]


@dataclass(slots=True)
class Replay:
    """The choices of an earlier run, then always the first."""

    choices: list[int]
    taken: int = 0

    def choose(self, steps: Sequence[Step]) -> int:
        """Return the next choice of the list."""
        self.taken += 1
        return self.choices[self.taken - 1] if self.taken <= len(self.choices) else 0


@dataclass(slots=True)
class _State:
    steps: Sequence[Step]
    position: int
    asleep: set[Step]


@dataclass(slots=True)
class _Search:
    """Chooser of one run of a depth-first search."""

    is_reduced: bool
    path: list[_State] = field(default_factory=list)
    depth: int = 0

    def choose(self, steps: Sequence[Step]) -> int:
        """Repeat the path; behind it take the first step that is not asleep."""
        if self.depth == len(self.path):
            asleep: set[Step] = set()
            if self.path and self.is_reduced:
                before = self.path[-1]
                taken = before.steps[before.position]
                asleep = {step for step in before.asleep if step.commutes(taken)}
            self.path.append(_State(list(steps), _first_awake(steps, 0, asleep), asleep))
            if self.path[-1].position == len(steps):
                raise Skipped
        state = self.path[self.depth]
        assert list(steps) == state.steps, "a run depends on more than its choices"
        self.depth += 1
        return state.position

    def is_next_found(self) -> bool:
        """Go to the next path; false if there is none."""
        self.depth = 0
        while self.path:
            state = self.path[-1]
            if state.position < len(state.steps):
                state.asleep.add(state.steps[state.position])
                state.position = _first_awake(state.steps, state.position + 1, state.asleep)
            if state.position < len(state.steps):
                return True
            self.path.pop()
        return False


def _first_awake(steps: Sequence[Step], start: int, asleep: set[Step]) -> int:
    return next((i for i in range(start, len(steps)) if steps[i] not in asleep), len(steps))


def every_schedule(
    run: Callable[[Chooser], object], *, is_reduced: bool = True
) -> Iterator[list[int]]:
    """Run every schedule, or one of those that commuting steps make of each other; yield each."""
    search = _Search(is_reduced)
    while True:
        try:
            run(search)
        except Skipped:
            pass
        else:
            yield [state.position for state in search.path]
        if not search.is_next_found():
            return
