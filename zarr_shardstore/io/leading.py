"""Leading the queue of a shard: its updates are committed group by group, by whoever leads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from itertools import groupby
from typing import Any, TypeAlias

from zarr.core.sync import _get_loop

from zarr_shardstore.io import commits

__all__ = ["commit_blocking", "held_by_thread", "lead_async", "lead_blocking"]

_Outcome: TypeAlias = "Sequence[Exception | None] | Exception"


def lead_blocking(scope: Hashable, taken: list[commits.Pending]) -> None:
    """Commit what waits for a shard, group by group, until nothing does."""
    while taken:
        commit_blocking(scope, taken)
        taken = commits.take(scope)


def commit_blocking(scope: Hashable, taken: list[commits.Pending]) -> None:
    try:
        for runner, members in _groups(taken):
            try:
                with runner.backend.hold(members[0].request.shard.key) or nullcontext():
                    outcome: _Outcome = runner.run(runner.update_flow(members))
            except Exception as error:
                outcome = error
            _settle(members, outcome)
    except BaseException:
        commits.abandon(scope, taken)
        raise


async def lead_async(scope: Hashable, begun: asyncio.Event | None = None) -> None:
    """As `lead_blocking`, in an event loop in which somebody waits for it.

    Such a loop may end as soon as nobody does: whoever still waits then goes on in theirs.
    """
    if begun is not None:
        begun.set()
    loop = asyncio.get_running_loop()
    while True:
        elsewhere = commits.hand_over(scope, loop, _get_loop())
        if elsewhere is not None:
            asyncio.run_coroutine_threadsafe(lead_async(scope), elsewhere)
            return
        taken = commits.take(scope)
        if not taken:
            return
        try:
            for runner, members in _groups(taken):
                try:
                    outcome: _Outcome = await runner.update_async(members)
                except Exception as error:
                    outcome = error
                _settle(members, outcome)
        except BaseException:
            commits.abandon(scope, taken)
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
