"""Worker threads commit the updates of an event loop, and it never waits."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from zarr.core.buffer import cpu

from tests.support.async_calls import set_partial_values
from tests.support.kit import forget
from zarr_shardstore import ShardingMapping, ShardingStore
from zarr_shardstore.io import update_queue
from zarr_shardstore.io.concurrency import worker_pool
from zarr_shardstore.io.local import fs
from zarr_shardstore.io.local.locks import LOCK_SUFFIX, KeptLock
from zarr_shardstore.io.local.open_shards import ShardLock, open_shards

N = 16
SHARD = "data/root/a/c0"


def key(i: int) -> str:
    return f"data/root/a/c{i}"


def buffer(value: bytes) -> Any:
    return cpu.Buffer.from_bytes(value)


@pytest.fixture
def threads() -> Iterator[list[int]]:
    """Which thread made each write into a file."""
    seen: list[int] = []

    def write_at(*args: Any, write: Any = fs.write_at) -> None:
        seen.append(threading.get_ident())
        write(*args)

    with mock.patch.object(fs, "write_at", write_at):
        yield seen


def opened(path: Path, **options: Any) -> ShardingStore:
    """A store with a shard of two chunks that is open."""
    store = ShardingStore(path, chunks_per_shard=N, **options)
    for i in range(2):
        store.set_sync(key(i), buffer(b"old"))
    return store


async def until_nobody_leads() -> None:
    """A thread that went on with a commit looks once more whether others came."""
    async with asyncio.timeout(60):
        while update_queue._queues:
            await asyncio.sleep(0.001)


def contents(path: Path) -> dict[str, bytes]:
    """What another process finds."""
    forget(path)
    return {name: bytes(value) for name, value in ShardingMapping(path, chunks_per_shard=N).items()}


@pytest.mark.parametrize(
    "options",
    [{}, {"durability": "power"}, {"strategy": "rewrite"}],
    ids=lambda options: next(iter(options.values()), "append"),
)
@pytest.mark.parametrize("last", [b"new", bytes(300_000)], ids=len)
async def test_the_loop_waits_for_no_disk(
    options: dict[str, Any], last: bytes, tmp_path: Path, threads: list[int]
) -> None:
    """A worker thread writes."""
    store = opened(tmp_path, **options)
    for value in (b"newer", b"newest", last):
        threads.clear()
        await store.set(key(1), buffer(value))
        assert threads
        assert threading.get_ident() not in threads
    assert contents(tmp_path) == {key(0): b"old", key(1): last}


async def test_a_shard_that_is_not_open_takes_a_hop(tmp_path: Path, threads: list[int]) -> None:
    store = opened(tmp_path)
    forget(tmp_path)
    threads.clear()
    await store.set(key(1), buffer(b"new"))
    assert threads
    assert threading.get_ident() not in threads


async def test_a_shard_that_becomes_full_is_left_to_a_thread(
    tmp_path: Path, threads: list[int]
) -> None:
    """It is compacted and sealed: a thread does all of it, and nothing is written before."""
    store = opened(tmp_path)
    for i in range(N - 1):
        await store.set(key(i), buffer(bytes(2000)))
        await store.set(key(i), buffer(bytes([i])))
    await until_nobody_leads()
    threads.clear()
    await store.set(key(N - 1), buffer(b"last"))
    assert threads
    assert threading.get_ident() not in threads
    assert not os.path.exists(tmp_path / (SHARD + LOCK_SUFFIX)), "it is sealed"
    assert (tmp_path / SHARD).stat().st_size < 1000, "it is compacted"
    expected = {key(i): bytes([i]) for i in range(N - 1)}
    assert contents(tmp_path) == {**expected, key(N - 1): b"last"}
    await store.set(key(0), buffer(b"again"))
    assert contents(tmp_path) == {**expected, key(0): b"again", key(N - 1): b"last"}


async def test_a_commit_that_waits_for_a_worker_holds_no_shard(tmp_path: Path) -> None:
    """All worker threads may be waiting for that very shard."""
    store = opened(tmp_path)
    pool, may_end = worker_pool(), threading.Event()
    try:
        for _ in range(pool._max_workers):
            pool.submit(may_end.wait, 120)
        store.set_sync(key(1), buffer(b"new"))  # needs none
        task = asyncio.create_task(set_partial_values(store, [(key(1), 0, b"N")]))
        await asyncio.sleep(0.05)
        path = f"{os.path.realpath(tmp_path)}/{SHARD}"
        with ShardLock(path):
            assert not task.done()
    finally:
        may_end.set()
    await asyncio.wait_for(task, 60)
    assert contents(tmp_path) == {key(0): b"old", key(1): b"New"}


async def test_without_threads_all_is_done_in_the_loop(tmp_path: Path) -> None:
    """As at the end of the interpreter: nothing is lost, and nobody waits for ever."""
    store = opened(tmp_path)
    await store.set(key(0), buffer(b"old"))
    value = bytes(1001)
    with mock.patch.object(worker_pool(), "submit", side_effect=RuntimeError("no thread")):
        await store.set(key(1), buffer(value))
    assert contents(tmp_path) == {key(0): b"old", key(1): value}


async def test_many_flushes_wait_for_no_thread(tmp_path: Path) -> None:
    """Those that wait for a commit are not among the threads that make it."""
    store = opened(tmp_path)
    for _ in range(5):
        calls = [store.set(key(1), buffer(bytes(300_000)))]
        calls += [store.flush() for _ in range(2 * worker_pool()._max_workers)]
        await asyncio.wait_for(asyncio.gather(*calls), 60)
    assert contents(tmp_path) == {key(0): b"old", key(1): bytes(300_000)}


async def test_a_batch_is_published_by_a_thread(tmp_path: Path, threads: list[int]) -> None:
    """It may be a whole shard, of any size."""
    store = opened(tmp_path)
    async with store.batch():
        await store.set(key(1), buffer(b"new"))
        await until_nobody_leads()
        threads.clear()
    assert threads
    assert threading.get_ident() not in threads
    assert contents(tmp_path) == {key(0): b"old", key(1): b"new"}


async def test_the_loop_does_not_wait_for_a_lock(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with closing(KeptLock(str(tmp_path / (SHARD + LOCK_SUFFIX)))) as other:
        other.acquire(0)
        task = asyncio.create_task(store.set(key(1), buffer(b"new")))
        for _ in range(20):  # the loop runs
            await asyncio.sleep(0.001)
        assert not task.done()
    await asyncio.wait_for(task, 60)
    assert contents(tmp_path) == {key(0): b"old", key(1): b"new"}


async def test_what_another_process_wrote_is_seen_first(tmp_path: Path) -> None:
    """A shard that is open, but was changed elsewhere, is opened anew."""
    store = opened(tmp_path)
    path = f"{os.path.realpath(tmp_path)}/{SHARD}"
    file = open_shards.files.pop(path)  # then the next writer is another process, to this one
    ShardingMapping(tmp_path, chunks_per_shard=N)[key(3)] = b"other"
    open_shards.files[path].close_all()
    open_shards.files[path] = file
    await store.set(key(1), buffer(b"new"))
    assert contents(tmp_path) == {key(0): b"old", key(1): b"new", key(3): b"other"}


async def test_updates_of_one_turn_are_one_commit(tmp_path: Path, threads: list[int]) -> None:
    store = opened(tmp_path)
    threads.clear()
    await store.set(key(1), buffer(b"new"))
    n_alone = len(threads)
    threads.clear()
    await asyncio.gather(*(store.set(key(i), buffer(b"newer")) for i in range(8)))
    assert len(threads) == n_alone
    assert contents(tmp_path) == {key(i): b"newer" for i in range(8)}


async def test_an_error_reaches_the_caller_and_frees_the_shard(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with (
        mock.patch.object(fs, "write_at", side_effect=OSError("no room")),
        pytest.raises(OSError, match="no room"),
    ):
        await store.set(key(1), buffer(b"new"))
    assert contents(tmp_path) == {key(0): b"old", key(1): b"old"}
    await store.set(key(1), buffer(b"newer"))
    assert contents(tmp_path) == {key(0): b"old", key(1): b"newer"}


@pytest.mark.parametrize("call", ["fstat", "pread"])
def test_a_failing_look_at_a_shard_keeps_no_lock(call: str, tmp_path: Path) -> None:
    opened(tmp_path)
    path = f"{os.path.realpath(tmp_path)}/{SHARD}"
    with (
        mock.patch.object(os, call, side_effect=OSError("no disk")),
        pytest.raises(OSError, match="no"),
        ShardLock(path),
    ):
        pass
    assert not open_shards.is_locked_by_me(path)
    with closing(KeptLock(path + LOCK_SUFFIX)) as other:
        other.acquire(0, "it is not held any more")
    forget(tmp_path)


def test_a_lock_that_was_removed_is_none(tmp_path: Path) -> None:
    lock = KeptLock(str(tmp_path / "lock"))
    lock.acquire(0)
    lock.release()
    lock.acquire(0)
    lock.release()
    (tmp_path / "lock").unlink()
    lock.acquire(0)
    lock.remove()
