"""Work in threads and tasks within a limit: in order, bounded, and over when it is over."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Sequence

import pytest
import zarr

from zarr_shardstore.io import concurrency
from zarr_shardstore.io.concurrency import Turns, backoff, map_in_threads, run_within

MUCH = 2**30


async def test_results_of_threads_come_in_order() -> None:
    with zarr.config.set({"threading.max_workers": 4}):
        texts = await map_in_threads(lambda run: list(map(str, run)), range(1000), MUCH)
    assert texts == [str(i) for i in range(1000)]


async def test_threads_are_as_many_as_zarr_was_told() -> None:
    seen, all_work = set(), threading.Barrier(3)

    def work(run: Sequence[int]) -> Sequence[int]:
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            all_work.wait(60)
        return run

    with zarr.config.set({"threading.max_workers": 3}):
        await map_in_threads(work, range(60), MUCH)
    assert len(seen) == 3
    assert threading.get_ident() not in seen


async def test_a_little_work_takes_no_hop() -> None:
    names = await map_in_threads(lambda run: [threading.get_ident() for _ in run], range(3), 1000)
    assert set(names) == {threading.get_ident()}


def is_in_the_module(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename != concurrency.__file__:
        frame = frame.f_back
    return frame is not None


async def test_after_an_error_no_thread_works_on() -> None:
    done: list[int] = []
    failing: list[int] = []

    def work(run: Sequence[int]) -> Sequence[int]:
        if 5 in run:
            failing.append(threading.get_ident())
            raise KeyError(5)
        done.extend(run)
        end = time.monotonic() + 60
        while run[0] > 5 and (not failing or is_in_the_module(failing[0])):
            assert time.monotonic() < end
            time.sleep(0.001)
        return run

    with (
        zarr.config.set({"threading.max_workers": 4}),
        pytest.raises(KeyError, match="5"),
    ):
        await map_in_threads(work, range(1000), MUCH)
    n_done = len(done)
    assert n_done < 50
    await asyncio.sleep(0.02)
    assert len(done) == n_done


async def test_kinds_of_tasks_take_turns() -> None:
    """Each waits for those of the other kind that began before it; also if one is cancelled."""
    turns, running, seen = Turns(), list[bool](), list[str]()

    async def work(name: str, kind: bool) -> None:
        async with turns.taken(kind):
            assert (not kind) not in running
            running.append(kind)
            await asyncio.sleep(0.001)
            running.remove(kind)
        seen.append(name)

    kinds = [("a", False), ("b", False), ("c", True), ("d", False), ("e", True), ("f", True)]
    tasks = [asyncio.create_task(work(*each)) for each in kinds]
    await asyncio.sleep(0)
    tasks[3].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert seen == ["a", "b", "c", "e", "f"]
    await work("g", False)


async def test_units_stay_within_the_limit_and_a_large_one_runs_alone() -> None:
    running: list[int] = []
    peaks: list[tuple[int, int]] = []

    async def run(size: int) -> None:
        running.append(size)
        peaks.append((sum(running), len(running)))
        await asyncio.sleep(0.001 * size)
        running.remove(size)

    sizes = [3, 4, 2, 50, 5, 5, 1]
    await run_within(10, [(size, size) for size in sizes], run)
    assert len(peaks) == len(sizes)
    assert all(total <= 10 or n == 1 for total, n in peaks)
    assert max(total for total, n in peaks if n > 1) == 10


async def test_an_error_is_raised_when_nothing_runs_on_and_nothing_else_begins() -> None:
    begun: list[str] = []
    ended: list[str] = []

    async def run(name: str) -> None:
        begun.append(name)
        await asyncio.sleep(0.001 if name == "bad" else 0.01)
        if name == "bad":
            raise KeyError(name)
        ended.append(name)

    with pytest.raises(KeyError, match="bad"):
        await run_within(2, [(1, "good"), (1, "bad"), (1, "late")], run)
    assert begun == ["good", "bad"]
    assert ended == ["good"]


async def test_units_end_with_a_cancelled_caller() -> None:
    ended: list[str] = []

    async def run(name: str) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(name)

    task = asyncio.create_task(run_within(2, [(1, "a"), (1, "b"), (1, "c")], run))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(60):
            await task
    assert sorted(ended) == ["a", "b"]


def test_an_attempt_follows_each_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the one in which the limit passed, as that of a process that was stopped meanwhile."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    attempts = []
    for pause in backoff(1, 2, 10):
        attempts.append(pause)
        now += 60
    assert len(attempts) == 2
