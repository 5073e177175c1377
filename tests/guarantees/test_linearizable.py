"""Shards are linearizable: what concurrent clients see is what some sequential order explains.

Each example is a few programs that clients perform side by side, on chunks of one or two shards.
What each got, and when, is a history. The part of it that is about one shard must be
linearizable, with the chunks of the shard as *one* object, which is the strongest claim of
``spec_notes/guarantees.md``:

- A call changes all its chunks of a shard at one instant between its begin and its end.
- A call reads all its chunks of a shard at one instant.
- A call that raises `SpecError`, because a piece starts outside its value, found such a value
  at one instant, and changed nothing of the shard. No other error is expected.

A call on chunks of two shards is two operations. After the clients somebody reads everything: a
lost update shows at the latest then.

``ZARR_SHARDSTORE_ROUNDS`` multiplies the number of examples.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from zarr.core.sync import sync

from tests.support.bases import BASES, put, temporary_directory
from tests.support.client_processes import Processes, client_processes
from tests.support.convert_once import open_store as open_base
from tests.support.kit import Event, judge, short
from tests.support.rounds import rounds
from tests.support.shard_calls import (
    DOCUMENTS,
    PLAIN,
    SHARDS,
    Call,
    Erase,
    Exists,
    GetSize,
    Options,
    Patch,
    Program,
    Read,
    Set,
    SetIfMissing,
    State,
    Update,
    is_read,
    open_store,
    perform,
    perform_blocking,
    performed,
    restricted,
    run_program,
    step,
    value,
)
from zarr_shardstore import ShardingStore

N_PROCESSES = 3
MAX_CLIENTS = 4
MAX_CALLS = 10

OPTIONS: dict[str, Sequence[Options]] = {
    "defaults": [{}],
    "several": [{"order": "F"}, {"max_gap_bytes": 0}, {"order": "C", "max_coalesced_bytes": 1}],
}
"""Options of the stores of the clients, in turn. What one writes all can read."""

LOCAL_OPTIONS = OPTIONS | {
    "lock files": [{"locking": "lockfile"}],
    "all strategies": [{"strategy": s} for s in ("append", "rewrite")],
}


def check_with(n_examples: int) -> settings:
    """Settings for tests of histories, which differ from run to run: nothing can be shrunk."""
    return settings(
        max_examples=rounds(n_examples),
        deadline=None,
        database=None,
        phases=[Phase.generate],
    )


# ------------------------------------------------------------------- programs

sizes = st.sampled_from([0, 1, 7, 40, 5000])
"""In bytes. The last is more than the gap that is read along: entries are read one by one."""


@st.composite
def calls(draw: st.DrawFn, shards: Sequence[Sequence[str]], number: int) -> Call:
    """A call on chunks of these shards; `number` is in the values that it writes."""
    mine = draw(st.sampled_from(shards))
    keys = [key for shard in shards for key in shard]
    some = st.lists(st.sampled_from(keys), min_size=1, max_size=3, unique=True).map(tuple)
    kinds = ["set", "set", "set some", "if missing", "patch", "patch", "erase", "erase some"]
    kinds += ["update", "update", "update plain", "patch plain"]
    kinds += ["get", "read", "read all", "exists", "size"]
    match draw(st.sampled_from(kinds)):
        case "set":
            return Set(((draw(st.sampled_from(keys)), value(number, draw(sizes))),))
        case "set some":
            return Set(tuple((key, value(number, draw(sizes))) for key in draw(some)))
        case "if missing":
            return SetIfMissing(draw(st.sampled_from(keys)), value(number, draw(sizes)))
        case "patch":
            patched = draw(st.lists(st.sampled_from(mine), min_size=1, max_size=2, unique=True))
            starts = st.sampled_from([0, 0, 0, 1, 5, 4500, -1, -3])
            return Patch(tuple((key, draw(starts), value(number, draw(sizes))) for key in patched))
        case "update":
            updated = draw(st.lists(st.sampled_from(mine), min_size=1, unique=True))
            return Update(tuple(updated), number)
        case "update plain":
            return Update(draw(st.sampled_from([*PLAIN.values()])), number)
        case "patch plain":
            (key,) = draw(st.sampled_from([*PLAIN.values()]))
            return Patch(((key, draw(st.sampled_from([0, 1, -1])), value(number, 7)),))
        case "erase":
            return Erase((draw(st.sampled_from(keys)),))
        case "erase some":
            return Erase(draw(some))
        case "get":
            return Read(((draw(st.sampled_from(keys)), 0, 6000),))
        case "read":
            bounds = st.sampled_from([(0, 6000), (0, 6000), (0, 1), (2, 9), (3000, 4600)])
            return Read(tuple((key, *draw(bounds)) for key in draw(some)))
        case "exists":
            return Exists(draw(st.sampled_from(keys)))
        case "size":
            return GetSize(draw(st.sampled_from(keys)))
    return read_all(mine)


def read_all(keys: Sequence[str]) -> Read:
    return Read(tuple((key, 0, 6000) for key in keys))


class Example:
    """Values that are there before, and what each client does."""

    def __init__(self, before: Set, programs: Sequence[Program]) -> None:
        self.before = before
        self.programs = programs

    def __repr__(self) -> str:
        clients = [f"client {i}: {short(program)}" for i, program in enumerate(self.programs)]
        return "\n".join([short(self.before), *clients])


@st.composite
def examples(draw: st.DrawFn) -> Example:
    names = st.lists(st.sampled_from(sorted(SHARDS)), min_size=1, max_size=2, unique=True)
    shards = [SHARDS[name] for name in draw(names)]
    keys = [key for shard in shards for key in shard]
    there = draw(st.lists(st.sampled_from(keys), max_size=4, unique=True))
    before = Set(tuple((key, value(255, draw(sizes))) for key in there))
    n_clients = draw(st.integers(2, MAX_CLIENTS))
    number = 0
    made: list[list[Call]] = []
    for _ in range(n_clients):
        program: list[Call] = []
        for _ in range(draw(st.integers(2, MAX_CALLS))):
            number += 1
            program.append(draw(calls(shards, number)))
        made.append(program)
    return Example(before, made)


# ------------------------------------------------------------------- histories


def check(
    base: Any,
    example: Example,
    options: Sequence[Options],
    run: Callable[[], list[Event[Call]]],
) -> None:
    """Let the clients run, and see that each shard was one object that went from state to state."""
    before = example.before
    for key, document in DOCUMENTS.items():
        put(base, key, document)
    if before.items:
        perform_blocking(open_store(base, options[0]), before)
    events = run()
    everything = read_all([key for keys in (SHARDS | PLAIN).values() for key in keys])
    after = open_store(base, options[-1])
    events += run_program("afterwards", [everything], lambda call: perform_blocking(after, call))
    for name, keys in (SHARDS | PLAIN).items():
        initial: State = frozenset(item for item in before.items if item[0] in keys)
        parts = [part for event in events if (part := restricted(event, keys)) is not None]
        verdict = judge(parts, initial, step, is_read=is_read)
        if not verdict.is_linearizable:
            raise AssertionError(f"the shard {name!r} with {options}\n{verdict}")


# --------------------------------------------------------- clients of one process


@pytest.fixture(scope="module", autouse=True)
def _threads_take_turns() -> Iterator[None]:
    """Within an operation, too: by default a thread goes on for 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(MAX_CLIENTS) as executor:
        yield executor


def run_threads(
    executor: ThreadPoolExecutor, stores: Sequence[ShardingStore], programs: Sequence[Program]
) -> list[Event[Call]]:
    """Each client a thread; one blocks, the next goes through zarr's event loop, and so on."""
    barrier = threading.Barrier(len(programs))

    def run(i: int) -> list[Event[Call]]:
        store = stores[i % len(stores)]

        def do(call: Call) -> object:
            return sync(perform(store, call)) if i % 2 else perform_blocking(store, call)

        barrier.wait(60)
        return run_program(f"thread {i}", programs[i], do)

    return [event for part in executor.map(run, range(len(programs))) for event in part]


def run_tasks(stores: Sequence[ShardingStore], programs: Sequence[Program]) -> list[Event[Call]]:
    """Each client a task of one event loop."""
    events: list[Event[Call]] = []

    async def run(i: int) -> None:
        store = stores[i % len(stores)]
        for call in programs[i]:
            invoked = time.monotonic_ns()
            result = await perform(store, call)
            events.append(performed(f"task {i}", call, invoked, result))

    async def run_all() -> None:
        async with asyncio.TaskGroup() as group:
            for i in range(len(programs)):
                group.create_task(run(i))

    asyncio.run(run_all())
    return events


@pytest.mark.thorough(of=5)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("base_name", BASES)
@pytest.mark.parametrize("clients", ["threads, one store", "threads, a store each", "tasks"])
@check_with(12)
@given(example=examples())
def test_clients_of_one_process(
    clients: str,
    base_name: str,
    options: Sequence[Options],
    example: Example,
    threads: ThreadPoolExecutor,
) -> None:
    """Threads and tasks, that share a store or only its base."""
    base = BASES[base_name]()
    n_stores = 1 if clients == "threads, one store" else len(example.programs)
    stores = [open_store(base, options[i % len(options)]) for i in range(n_stores)]

    def run() -> list[Event[Call]]:
        if clients == "tasks":
            return run_tasks(stores, example.programs)
        return run_threads(threads, stores, example.programs)

    check(base, example, options, run)


# ------------------------------------------------------------- several processes


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with client_processes(N_PROCESSES) as found:
        yield found


@pytest.mark.thorough(of=6)
@pytest.mark.parametrize(
    ("kind", "options"),
    [*(("local", options) for options in LOCAL_OPTIONS.values()), ("obstore local", [{}])],
    ids=[*(f"local, {name}" for name in LOCAL_OPTIONS), "obstore local"],
)
@check_with(25)
@given(example=examples())
def test_clients_of_several_processes(
    kind: str,
    options: Sequence[Options],
    example: Example,
    processes: Processes,
) -> None:
    """Of local files; the fourth client is a second thread of the first process."""
    where = {"kind": kind, "path": str(temporary_directory())}
    if kind != "local":
        pytest.importorskip("obstore")
    check(
        open_base(where), example, options, lambda: processes.run(where, example.programs, options)
    )
