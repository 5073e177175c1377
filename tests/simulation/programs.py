"""Programs of simulated clients, and the judgement of what came of them.

What is judged, after every schedule:

1. The calls of all clients are linearizable, with each shard as one object. A call that failed, or
   whose process was killed, may have happened at one instant, also later, or never.
2. No error comes without a fault, and each is typed.
3. Every shard that is left is whole, for a strict reader that is not this package's: its index has
   its checksum, entries lie within the data and not over each other. What that reader finds is the
   last event of the history.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, repeat
from typing import Any

import pytest

from tests.simulation.scheduler import Chooser, RandomChooser, every_schedule
from tests.support.kit import Event, judge
from tests.support.shard_bytes import build_shard
from tests.support.shard_calls import (
    CHUNKS_PER_SHARD,
    DOCUMENTS,
    SHARDS,
    Call,
    Erase,
    Exists,
    Patch,
    Program,
    Read,
    Set,
    SetIfMissing,
    State,
    Update,
    is_read,
    restricted,
    step,
    value,
)
from tests.support.small_shards import SEED, Damaged, strict_entries

NAMES = ("inside", "at the edge", "without checksum")
SHARD_KEYS = {"inside": "z/c/0", "at the edge": "z/c/1", "without checksum": "data/root/a/c0"}
NEVER = 1 << 60
"""Instant of the reply to a call that got none."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A call whose result is not known."""

    call: Call


@dataclass(frozen=True, slots=True)
class Stranger:
    """A shard that another program stored as a whole, with these chunks."""

    name: str
    items: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True)
class Scenario:
    """Clients, their programs, and all that may go wrong."""

    programs: Sequence[Program]
    before: Set = Set(())  # noqa: RUF009
    processes: Sequence[int] = ()
    """Process of each client; by default one for each."""
    n_faults: int = 0
    n_kills: int = 0
    strangers: Sequence[Stranger] = ()
    is_warm: bool = False
    """Whether each process has read all shards before, and caches their indexes."""
    is_open: bool = False
    """Whether each process has appended to the shard before: it stored a chunk as it is."""
    faults: Sequence[str] | None = None
    """Of writes; by default all but "late"."""

    @cached_property
    def names(self) -> list[str]:
        """Shards of which a program, or what was there before, has chunks."""
        text = repr((self.programs, self.before, self.strangers))
        return [name for name in NAMES if any(key in text for key in SHARDS[name])]

    def process_of(self, client: int) -> int:
        return self.processes[client] if self.processes else client

    def __str__(self) -> str:
        return "\n".join(
            [
                f"before: {self.before}",
                *(f"client {i}: {program}" for i, program in enumerate(self.programs)),
                f"processes {list(self.processes)}, {self.n_faults} faults, {self.n_kills} kills, "
                f"warm: {self.is_warm}, open: {self.is_open}, {self.strangers}",
            ]
        )


class ViolationError(AssertionError):
    """A promise that a schedule has broken."""


# ----------------------------------------------------------------------- judgement


@dataclass(slots=True)
class History:
    """Events of a run, by a clock that counts them."""

    events: list[Event[Any]] = field(default_factory=list)
    now: int = 0
    open_calls: dict[str, tuple[int, Call]] = field(default_factory=dict)
    """By client."""

    def begin(self, client: str, call: Call) -> None:
        self.now += 1
        self.open_calls[client] = self.now, call

    def end(self, client: str, result: object) -> None:
        self.now += 1
        invoked, call = self.open_calls.pop(client)
        self.events.append(Event(client, call, invoked, self.now, result))

    def fail(self, client: str) -> None:
        """The call may have happened, may yet happen, or never does."""
        invoked, call = self.open_calls.pop(client)
        if not is_read(call):
            self.events.append(Event(client, Attempt(call), invoked, NEVER, None))

    def instant(self, client: str, call: Any) -> None:
        """A call by another program, in one step."""
        self.now += 2
        self.events.append(Event(client, call, self.now - 1, self.now, None))


def judge_history(history: History, scenario: Scenario, objects: Mapping[str, bytes]) -> None:
    """Raise `ViolationError` unless the history, and the objects that are left, are as promised."""
    for client in list(history.open_calls):
        history.fail(client)
    history.now += 1
    for name in scenario.names:
        keys = SHARDS[name]
        left = strictly_read(name, objects.get(SHARD_KEYS[name]))
        events = [e for event in history.events if (e := _restricted(event, name, keys))]
        everything = Read(tuple((key, 0, 1 << 20) for key in keys))
        final = tuple(left.get(key) for key in keys)
        events.append(Event("strict reader", everything, history.now, NEVER + 1, final))
        initial: State = frozenset(item for item in scenario.before.items if item[0] in keys)
        verdict = judge(events, initial, _step, is_read=_is_read)
        if not verdict.is_linearizable:
            raise ViolationError(f"the shard {name!r}\n{verdict}")


def strictly_read(name: str, data: bytes | None) -> dict[str, bytes]:
    """The chunks of a shard; raise `ViolationError` if it is not whole."""
    checksum = name != "without checksum"
    entries = strict_entries(data, CHUNKS_PER_SHARD, checksum=checksum, location="end")
    found: dict[str, bytes] = {}
    end = 0
    for i, entry in enumerate(entries):
        if isinstance(entry.value, Damaged):
            raise ViolationError(f"entry {i} of the shard {name!r}: {entry.value.why}")
        if entry.value is not None:
            if i >= len(SHARDS[name]):
                raise ViolationError(f"entry {i} of the shard {name!r} is no chunk of the array")
            found[SHARDS[name][i]] = entry.value
    for entry in sorted((e for e in entries if e.value), key=lambda e: e.offset):
        if entry.offset < end:
            raise ViolationError(f"entries of the shard {name!r} lie over each other")
        assert isinstance(entry.value, bytes)
        end = entry.offset + len(entry.value)
    return found


def _restricted(event: Event[Any], name: str, keys: Sequence[str]) -> Event[Any] | None:
    match event.call:
        case Stranger(of):
            return event if of == name else None
        case Attempt(call):
            inner = Event(event.client, call, event.invoked, event.responded, None)
            part = restricted(inner, keys)
            return part and Event(
                event.client, Attempt(part.call), event.invoked, event.responded, None
            )
    return restricted(event, keys)


def _step(state: State, call: Any) -> tuple[State, object]:
    match call:
        case Stranger(_, items):
            return frozenset(items), None
        case Attempt(inner):
            return step(state, inner)[0], None
    return step(state, call)


def _is_read(call: Any) -> bool:
    return is_read(call)


# ------------------------------------------------------------------------- programs


def shard_of(name: str, items: Sequence[tuple[str, bytes]]) -> bytes | None:
    """A shard with those of the chunks that are its own; ``None`` if it has none."""
    keys = SHARDS[name]
    values = {keys.index(key): value for key, value in items if key in keys}
    if not values:
        return None
    return build_shard(values, CHUNKS_PER_SHARD, checksum=name != "without checksum")


def random_scenario(rng: random.Random) -> Scenario:
    """Draw clients and programs: small ones, because these meet."""
    first = rng.randrange(len(NAMES))
    names = [NAMES[first], NAMES[first - 1]][: 1 if rng.random() < 0.9 else 2]
    keys = [key for name in names for key in SHARDS[name]]
    n_clients = rng.choice([*[2] * 14, *[3] * 5, 4])
    # Equal writes hide a mix of them, but only they show that one was taken for the other.
    numbers: Iterator[int] = repeat(1) if rng.random() < 0.1 else count(1)
    before = tuple((key, value(200 + i, 5)) for i, key in enumerate(keys) if rng.random() < 0.5)
    programs = [
        [_random_call(rng, names, next(numbers)) for _ in range(rng.choice([1, 1, 1, 1, 1, 1, 2]))]
        for _ in range(n_clients)
    ]
    processes = [i if rng.random() < 0.8 else 0 for i in range(n_clients)]
    kinds = [rng.random() < 0.5, rng.random() < 0.2, rng.random() < 0.2]
    strangers: tuple[Stranger, ...] = ()
    if kinds[2]:
        name = rng.choice(names)
        chosen = [key for key in SHARDS[name] if rng.random() < 0.5]
        strangers = (Stranger(name, tuple((key, value(150, 6)) for key in chosen)),)
    return Scenario(
        programs,
        Set(before),
        processes,
        n_faults=rng.choice([1, 2, 3]) if kinds[0] else 0,
        n_kills=1 if kinds[1] else 0,
        strangers=strangers,
        # A write whose reply was lost is not found behind one that read nothing.
        faults=("failed", "refused") if strangers or _replace_whole(programs) else None,
        is_warm=rng.random() < 0.3,
    )


def _replace_whole(programs: Sequence[Program]) -> bool:
    """Whether calls, or a group of them, may replace a shard whole, without reading it."""
    calls = [call for program in programs for call in program]
    replaced = {key for call in calls if isinstance(call, Erase) for key in call.keys}
    replaced |= {key for call in calls if isinstance(call, Set) for key, _ in call.items}
    return any(replaced.issuperset(SHARDS[name]) for name in NAMES)


def local_scenario(rng: random.Random) -> Scenario:
    """Draw a scenario for local files: each client is a process, and its blocking calls are few."""
    drawn = random_scenario(rng)
    programs = [
        [Set(((c.key, c.value),)) if isinstance(c, SetIfMissing) else c for c in program]
        for program in drawn.programs
    ]
    is_open = bool(drawn.before.items) and rng.random() < 0.5
    return replace(drawn, programs=programs, processes=(), strangers=(), is_open=is_open)


def _random_call(rng: random.Random, names: Sequence[str], number: int) -> Call:
    mine = SHARDS[rng.choice(names)]
    some = [key for key in mine if rng.random() < 0.5] or [rng.choice(mine)]
    key = some[0]
    new = value(number, rng.choice([0, 1, 7, 7, 40]))
    match rng.randrange(12):
        case 0 | 1:
            return Set(((key, new),))
        case 2:
            return Set(tuple((key, new) for key in some))
        case 3:
            return SetIfMissing(key, new)
        case 4:
            return Patch(((key, rng.choice([0, 0, 1, 5, -1]), new),))
        case 5 | 6:
            return Update(tuple(some), number)
        case 7:
            return Erase((key,))
        case 8:
            return Erase(tuple(some))
        case 9:
            return Exists(key)
        case 10:
            return Read(((key, 0, rng.choice([6, 1 << 20])),))
    return Read(tuple((key, 0, 1 << 20) for key in mine))


# ------------------------------------------------------------------------------ runs

Run = Callable[[Scenario, Chooser], Any]
"""Runs a scenario by the choices of a chooser, and raises `ViolationError`."""


def run_seed(
    run: Run, seed: int, draw: Callable[[random.Random], Scenario] = random_scenario
) -> None:
    """Run the scenario and the schedule that a seed gives."""
    rng = random.Random(seed)
    scenario = draw(rng)
    try:
        run(scenario, RandomChooser(rng))
    except Exception as error:
        raise ViolationError(f"{SEED}={seed}\n{scenario}\n{error}") from error


def cases(scenarios: Mapping[str, Scenario], long: Container[str]) -> list[Any]:
    """Return scenarios as parameters of a test; thorough runs have the long ones."""
    marks = {True: [pytest.mark.thorough], False: []}
    return [pytest.param(s, id=name, marks=marks[name in long]) for name, s in scenarios.items()]


def run_all(run: Run, scenario: Scenario) -> int:
    """Run every schedule of a scenario; return their number."""
    is_reduced = all(len(program) == 1 for program in scenario.programs)
    try:
        schedules = every_schedule(lambda chooser: run(scenario, chooser), is_reduced=is_reduced)
        return sum(1 for _ in schedules)
    except Exception as error:
        raise ViolationError(f"{scenario}\n{error}") from error


@contextmanager
def without_gc() -> Iterator[None]:
    """Collect no cyclic garbage in a block: it takes a quarter of the time."""
    if not gc.isenabled():  # within such a block
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


__all__ = [
    "DOCUMENTS",
    "NAMES",
    "SHARD_KEYS",
    "Attempt",
    "History",
    "Run",
    "Scenario",
    "Stranger",
    "ViolationError",
    "judge_history",
    "local_scenario",
    "random_scenario",
    "run_all",
    "run_seed",
    "shard_of",
    "strictly_read",
    "without_gc",
]
