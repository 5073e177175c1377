"""Event loops of users that end, stop or block while a shard is committed: other writers go on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.abc.store import Store
from zarr.core.buffer import Buffer, cpu
from zarr.storage import LocalStore, MemoryStore, WrapperStore
from zarr.testing.store import LatencyStore

from zarr_shardstore import ShardConflictError, ShardingStore

Main = Callable[[], Coroutine[Any, Any, None]]

ONE = cpu.Buffer.from_bytes(b"\1")
ENDS: dict[str, Callable[[Main], None]] = {
    "run": lambda main: asyncio.run(main()),
    "closed": lambda main: in_own_loop(main).close(),
    "stopped": lambda main: LEFT.append(in_own_loop(main)),
}
LEFT: list[asyncio.AbstractEventLoop] = []


def in_own_loop(main: Main) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    return loop


def slow() -> Store:
    """A store of zarr, in which a write takes 0.2 s, as over a network."""
    return LatencyStore(MemoryStore(), set_latency=0.2)


class OfOneLoop(MemoryStore):
    """A store of another kind. What it uses may be of one event loop."""

    pause_s = 0.2

    def __init__(self) -> None:
        super().__init__()
        self.loops: list[asyncio.AbstractEventLoop] = []

    async def set(self, key: str, value: Buffer, byte_range: Any = None) -> None:
        self.loops.append(asyncio.get_running_loop())
        await asyncio.sleep(self.pause_s)
        await super().set(key, value, byte_range)


def opened(base: Any) -> tuple[ShardingStore, Any]:
    store = ShardingStore(base, chunks_per_shard=8)
    options: Any = {"shape": (8,), "chunks": (1,), "dtype": "u1", "compressors": None}
    return store, zarr.create_array(store, name="z", **options)


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(60)
    return not thread.is_alive()


def test_an_array_operation_is_not_of_the_loop_that_was_before_it_in_the_queue() -> None:
    """The loop ends in each of three ways, with its own write done or given up."""
    for end, is_given_up in [(end, given) for end in ENDS.values() for given in (True, False)]:
        store, z = opened(slow())

        async def main(store: ShardingStore = store, given_up: bool = is_given_up) -> None:
            try:
                await asyncio.wait_for(store.set("z/c/1", ONE), 0.1 if given_up else 60)
            except TimeoutError:
                assert given_up

        def write(z: Any = z) -> None:
            time.sleep(0.05)
            z[5] = 9

        thread = in_thread(write)
        end(main)
        assert ended(thread)
        assert (z[1], z[5]) == (1, 9)
    while LEFT:
        LEFT.pop().close()


def test_a_write_that_was_given_up_does_not_end_after_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread may be at the disk when its event loop ends."""
    at_disk, go_on, put = threading.Event(), threading.Event(), zarr.storage._local._put

    def slow_put(path: Path, *args: Any, **options: Any) -> Any:
        if at_disk.is_set() and path.match("z/c/0"):
            go_on.wait(60)
        return put(path, *args, **options)

    monkeypatch.setattr(zarr.storage._local, "_put", slow_put)
    store, z = opened(WrapperStore(LocalStore(tmp_path)))
    z[0] = 1

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(store.set("z/c/1", ONE), 0.3)

    def write() -> None:
        z[5] = 9

    at_disk.set()
    asyncio.run(main())
    thread = in_thread(write)
    time.sleep(0.3)
    go_on.set()
    assert ended(thread)
    assert np.array_equal(z[:], [1, 1, 0, 0, 0, 9, 0, 0])


def test_a_loop_may_block_while_a_task_of_it_waits_for_another_writer() -> None:
    store, z = opened(slow())

    async def main() -> None:
        task = asyncio.create_task(store.set("z/c/1", ONE))
        await asyncio.sleep(0.05)
        z[5] = 9
        await task

    first = in_thread(lambda: asyncio.run(store.set("z/c/0", ONE)))
    time.sleep(0.05)
    second = in_thread(lambda: asyncio.run(main()))
    assert ended(first)
    assert ended(second)
    assert np.array_equal(z[:], [1, 1, 0, 0, 0, 9, 0, 0])


@pytest.mark.parametrize("blocks", [False, True], ids=["stopped", "blocked"])
@pytest.mark.parametrize("kind", ["dict", "memory", "local", "async"])
def test_a_loop_that_lets_its_first_writer_wait_holds_no_shard(
    tmp_path: Path, kind: str, blocks: bool
) -> None:
    """A writer waits one turn of its loop for siblings; the next writer commits for both."""
    bases: dict[str, Any] = {
        "dict": {},
        "memory": MemoryStore(),
        "local": tmp_path,
        "async": slow(),
    }
    store, z = opened(bases[kind])
    z[0] = 1

    def write() -> None:
        z[5] = 9

    async def main() -> None:
        task = asyncio.create_task(store.set("z/c/1", ONE))
        if blocks:
            await asyncio.sleep(0)
            assert ended(in_thread(write))
            await task

    loop = in_own_loop(main)
    assert ended(in_thread(write))
    loop.run_until_complete(asyncio.sleep(0.1))
    loop.close()
    assert np.array_equal(z[:], [1, 1, 0, 0, 0, 9, 0, 0])


def test_connections_of_one_loop_are_used_in_it() -> None:
    """A commit that a loop takes along fails, and no other update does."""
    base = OfOneLoop()
    store, z = opened(base)
    z[0] = 1
    base.loops.clear()
    is_under_way = threading.Event()

    async def main() -> None:
        await store.set("z/c/1", ONE)
        assert set(base.loops) == {asyncio.get_running_loop()}
        base.pause_s = 3600
        task = asyncio.create_task(store.set("z/c/2", ONE))
        while len(base.loops) < 2:
            await asyncio.sleep(0.001)
        base.pause_s = OfOneLoop.pause_s
        is_under_way.set()
        await asyncio.sleep(0.1)  # the other writer joins
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    def write() -> None:
        assert is_under_way.wait(60)
        z[5] = 9

    thread = in_thread(write)
    asyncio.run(main())
    assert ended(thread)
    assert (z[1], z[5]) == (1, 9)


async def test_a_blocking_write_of_a_shard_that_its_own_loop_writes_is_refused() -> None:
    store, _ = opened(OfOneLoop())
    task = asyncio.create_task(store.set("z/c/1", ONE))
    await asyncio.sleep(0.05)
    with pytest.raises(ShardConflictError, match="await the async operation"):
        store.set_sync("z/c/5", ONE)
    await task


def test_connections_of_one_loop_are_used_in_it_beside_a_store_of_the_same_files(
    tmp_path: Path,
) -> None:
    """A thread that appends to a shard leads, and takes the wrapper's updates along."""
    loops = set()

    class Wrapper(WrapperStore[LocalStore]):
        async def set(self, key: str, value: Buffer) -> None:
            loops.add(asyncio.get_running_loop())
            await super().set(key, value)

    _, z = opened(tmp_path)
    store = ShardingStore(Wrapper(LocalStore(tmp_path)), chunks_per_shard=8)
    is_done: list[bool] = []

    def write() -> None:
        while not is_done:
            z[5] = 9

    async def main() -> None:
        for _ in range(100):
            await store.set("z/c/1", ONE)
        assert loops == {asyncio.get_running_loop()}

    thread = in_thread(write)
    try:
        asyncio.run(main())
    finally:
        is_done.append(True)
    assert ended(thread)
    assert (z[1], z[5]) == (1, 9)
