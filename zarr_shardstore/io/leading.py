"""Leading the queue of a shard: its updates are committed group by group, by whoever leads.

A small change of a file that is open takes less time than a hop to a worker thread and back. So
an event loop makes it itself, and lets a thread go on where a step may take long.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Generator, Hashable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from itertools import groupby
from typing import Any, Literal, TypeAlias

from zarr.core.sync import _get_loop

from zarr_shardstore.io import commits
from zarr_shardstore.io.backend import MAX_LIGHT_NBYTES
from zarr_shardstore.plan.entries import nbytes_of

__all__ = [
    "commit_blocking",
    "held_by_thread",
    "lead_async",
    "lead_at_once",
    "lead_blocking",
    "lead_in_thread",
]

_Outcome: TypeAlias = "Sequence[Exception | None] | Exception"

_Pause: TypeAlias = Literal["free", "held"]
"""Whether the shard is held already where a commit pauses."""

_MAX_AT_ONCE_S = 0.001
"""What a commit in an event loop may take: several times what it does take on a local disk."""

_MAX_UPDATES_AT_ONCE = 64
"""Of one shard, together: each takes some µs."""

_PAUSE_PER_S = 100
"""Where one took longer (a network file system, a disk that lags behind) threads make all commits
for so many times as long, and the loop waits 1 % of the time."""


def lead_blocking(scope: Hashable, leader: object) -> None:
    """Commit what waits for a shard, group by group, until nothing does."""
    while taken := commits.take(scope, leader):
        commit_blocking(taken)


def commit_blocking(taken: list[commits.Pending]) -> None:
    """Commit updates that were taken, in this thread."""
    _exhaust(_commit(taken, at_once=False))


def lead_in_thread(
    scope: Hashable,
    leader: object,
    steps: Iterable[_Pause] = (),
    *,
    is_held: bool = False,
) -> None:
    """Pass the lead on to another thread.

    Parameters
    ----------
    steps
        The rest of a commit, which comes first.
    is_held
        The commit holds the shard. Then the thread is a new one: all worker threads may be waiting
        for this shard.
    """
    heir = object()

    def go_on() -> None:
        try:
            if commits.claim(scope, leader, heir):
                _exhaust(steps)
                lead_blocking(scope, heir)
        except BaseException:
            commits.abandon(scope, heir)
            raise

    def see_failure(done: Future[None]) -> None:
        if done.exception() is not None:
            commits.abandon(scope, leader)

    try:
        if is_held:
            threading.Thread(target=go_on).start()
        else:
            commits.worker_pool().submit(go_on).add_done_callback(see_failure)
    except RuntimeError:  # there is no thread any more, as the interpreter ends
        go_on()


def lead_at_once(scope: Hashable, leader: object) -> None:
    """As `lead_blocking`, for an event loop that must not wait: what may take long, and what
    comes after it, is done by another thread.
    """
    taken = commits.take(scope, leader)
    runner = taken[0].owner
    begun = time.monotonic()
    if begun < runner.at_once_from or not _are_small(taken):
        lead_in_thread(scope, leader, _commit(taken, at_once=False))
        return
    steps = _commit(taken, at_once=True)
    pause = next(steps, None)
    took = time.monotonic() - begun
    if took > _MAX_AT_ONCE_S:
        runner.at_once_from = begun + took * _PAUSE_PER_S
    if pause is None:
        if commits.has_waiting(scope, leader):
            lead_in_thread(scope, leader)
    else:
        lead_in_thread(scope, leader, steps, is_held=pause == "held")


def _are_small(taken: list[commits.Pending]) -> bool:
    """Whether updates are little work before and beside what is written, too."""
    runner = taken[0].owner
    updates = [update for pending in taken for update in pending.request.updates]
    return (
        len(updates) <= _MAX_UPDATES_AT_ONCE
        # Without an update what a batch holds is published: it may be all of a shard.
        and all(pending.owner is runner and pending.request.updates for pending in taken)
        and sum(map(nbytes_of, updates)) <= MAX_LIGHT_NBYTES
    )


def _exhaust(steps: Iterable[_Pause]) -> None:
    for _ in steps:
        pass


def _commit(taken: list[commits.Pending], *, at_once: bool) -> Generator[_Pause, None, None]:
    """Commit updates that were taken.

    Parameters
    ----------
    at_once
        Pause before what may take long. Any thread may go on.
    """
    for runner, members in _groups(taken):
        try:
            outcome: _Outcome = yield from _commit_group(runner, members, at_once=at_once)
        except Exception as error:
            outcome = error
        _settle(members, outcome)


def _commit_group(
    runner: Any, members: list[commits.Pending], *, at_once: bool
) -> Generator[_Pause, None, Sequence[Exception | None]]:
    key = members[0].request.shard.key
    held = runner.backend.hold_at_once(key) if at_once else None
    outcomes: Sequence[Exception | None]
    if held is None:
        if at_once:
            yield "free"
        with runner.backend.hold(key) or nullcontext():
            outcomes = runner.run(runner.update_flow(members))
        return outcomes
    with held:
        steps = runner.run_in_steps(runner.update_flow(members), held)
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                outcomes = stop.value
                return outcomes
            held.put_down()
            yield "held"
            held.take_up()


async def lead_async(scope: Hashable, former: object, begun: asyncio.Event | None = None) -> None:
    """As `lead_blocking` in the place of a former leader, in an event loop where a caller waits.

    Such a loop may end as soon as none does: callers that still wait then lead on in theirs.
    """
    leader = object()
    try:
        if begun is not None:
            begun.set()
        if not commits.claim(scope, former, leader):
            return
        loop = asyncio.get_running_loop()
        while True:
            elsewhere = commits.hand_over(scope, loop, _get_loop())
            if elsewhere is not None:
                asyncio.run_coroutine_threadsafe(lead_async(scope, leader), elsewhere)
                return
            taken = commits.take(scope, leader)
            if not taken:
                return
            for runner, members in _groups(taken):
                try:
                    outcome: _Outcome = await runner.update_async(members)
                except Exception as error:
                    outcome = error
                _settle(members, outcome)
    except BaseException:
        commits.abandon(scope, leader)
        raise


@asynccontextmanager
async def held_by_thread(hold: AbstractContextManager[None]) -> AsyncIterator[None]:
    """Wait for a lock without blocking the event loop."""
    entered = asyncio.get_running_loop().run_in_executor(commits.worker_pool(), hold.__enter__)
    try:
        await asyncio.shield(entered)
    except asyncio.CancelledError:
        entered.add_done_callback(lambda f: f.exception() or hold.__exit__(None, None, None))
        raise
    try:
        yield
    finally:
        hold.__exit__(None, None, None)


def _groups(taken: list[commits.Pending]) -> list[tuple[Any, list[commits.Pending]]]:
    """Updates to commit together: of one store, and of one mind about the layout."""
    groups = []
    for _, pending in groupby(taken, key=lambda p: (id(p.owner), p.request.shard, p.request.below)):
        members = list(pending)
        groups.append((members[0].owner, members))
    return groups


def _settle(members: list[commits.Pending], outcome: _Outcome) -> None:
    """Tell each waiting caller what became of its update."""
    errors = [outcome] * len(members) if isinstance(outcome, Exception) else outcome
    for pending, error in zip(members, errors, strict=True):
        pending.settle(error)
