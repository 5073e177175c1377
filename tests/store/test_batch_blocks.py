"""Several blocks, threads, tasks, processes: who publishes, who drops; nothing is lost."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore

from tests.support.bases import BASES, temporary_directory
from tests.support.kit import wait_until_idle
from zarr_shardstore import (
    ShardingMapping,
    ShardingStore,
    SpecError,
    UnpublishedError,
    import_store,
    shard_store,
    unshard_store,
)

N = 64
CPS: Any = {"chunks_per_shard": 8}


class BoomError(Exception):
    """What a block ends by."""


def key(i: int) -> str:
    return f"data/root/a/c{i}"


def seen(base: Any) -> dict[str, bytes]:
    """What another store sees."""
    return dict(ShardingMapping(base, **CPS))


def buffer(value: bytes) -> Any:
    return default_buffer_prototype().buffer.from_bytes(value)


def write_and_fail(m: ShardingMapping, i: int) -> None:
    """A block that ends by an exception."""
    with m.batch():
        m[key(i)] = b"%d" % i
        raise BoomError


def in_thread(function: Callable[[], None]) -> None:
    """Run in a thread of its own, and raise what it raises."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result(timeout=60)


def test_a_nested_block_is_a_part_of_the_outer_one() -> None:
    """It publishes nothing when it ends, whether by an exception or not."""
    base: dict[str, bytes] = {}
    m = ShardingMapping(base, **CPS)
    with m.batch():
        m[key(0)] = b"0"
        with m.batch():
            m[key(1)] = b"1"
        with pytest.raises(BoomError):
            write_and_fail(m, 2)
        assert base == {}
        assert m[key(2)] == b"2"
    assert seen(base) == {key(i): b"%d" % i for i in range(3)}


def test_an_exception_of_the_outer_block_drops_what_nested_ones_held() -> None:
    """They were parts of it."""
    base: dict[str, bytes] = {}
    m = ShardingMapping(base, **CPS)

    def outer() -> None:
        with m.batch():
            with m.batch():
                m[key(1)] = b"1"
            raise BoomError

    with pytest.raises(BoomError):
        outer()
    assert base == {}
    assert key(1) not in m


def test_the_smallest_limit_counts() -> None:
    """Who asks for little memory gets it; afterwards the outer limit counts again."""
    base: dict[str, bytes] = {}
    m = ShardingMapping(base, **CPS)
    with m.batch():
        m[key(0)] = b"0"
        with m.batch(max_nbytes=0):
            m[key(1)] = b"1"
            assert seen(base).keys() == {key(0), key(1)}
        m[key(2)] = b"2"
        assert key(2) not in seen(base)


def test_batches_of_two_stores_are_two() -> None:
    """Also inside each other."""
    one: dict[str, bytes] = {}
    two: dict[str, bytes] = {}
    m, n = ShardingMapping(one, **CPS), ShardingMapping(two, **CPS)
    with m.batch():
        m[key(0)] = b"0"
        with n.batch():
            n[key(0)] = b"0"
        assert (list(one), list(two)) == ([], [key(0)])


@pytest.mark.parametrize("fails", [False, True])
def test_a_block_that_ended_well_has_published(fails: bool) -> None:
    """Another thread's block is open meanwhile, and ends by an exception or not."""
    base: dict[str, bytes] = {}
    m = ShardingMapping(base, **CPS)

    def other() -> None:
        with m.batch():
            m[key(1)] = b"1"
        assert seen(base)[key(1)] == b"1"

    with pytest.raises(BoomError) if fails else nullcontext(), m.batch():
        m[key(0)] = b"0"
        in_thread(other)
        m[key(2)] = b"2"
        if fails:
            raise BoomError
    expected = {key(0), key(1)} if fails else {key(0), key(1), key(2)}
    assert seen(base).keys() == m.keys() == expected


def test_a_block_that_fails_beside_another_drops_nothing() -> None:
    """It cannot be told whose values are whose."""
    base: dict[str, bytes] = {}
    m = ShardingMapping(base, **CPS)

    def other() -> None:
        with pytest.raises(BoomError):
            write_and_fail(m, 1)

    with m.batch():
        m[key(0)] = b"0"
        in_thread(other)
        assert m[key(1)] == b"1"
        assert base == {}
    assert seen(base).keys() == {key(0), key(1)}


def test_a_block_that_outlives_its_outer_one() -> None:
    """A task that was started inside goes on; the outer block publishes what is held."""
    base: dict[str, bytes] = {}
    store = ShardingStore(base, **CPS)

    async def main() -> None:
        inside, go_on = asyncio.Event(), asyncio.Event()

        async def task() -> None:
            async with store.batch():
                await store.set(key(1), buffer(b"1"))
                inside.set()
                await go_on.wait()
                await store.set(key(2), buffer(b"2"))
                assert key(2) not in seen(base)

        async with store.batch():
            running = asyncio.create_task(task())
            await inside.wait()
        assert seen(base).keys() == {key(1)}
        go_on.set()
        await running

    asyncio.run(main())
    assert seen(base).keys() == {key(1), key(2)}


@pytest.mark.parametrize("base_name", ["dict", "memory", "local", "fsspec"])
@pytest.mark.parametrize("max_nbytes", [None, 1000, 0])
def test_threads_and_tasks_lose_nothing(base_name: str, max_nbytes: int | None) -> None:
    """They write the same shards, blocking and async, with blocks of their own or without."""
    base = BASES[base_name]()
    store = ShardingStore(base, **CPS)
    m = ShardingMapping(store)

    def blocking(start: int, own: bool) -> None:
        for i in range(start, N, 4):
            if own:
                with m.batch(max_nbytes=max_nbytes):
                    m.set_partial_values([(key(i), 0, b"%d" % i)])
            else:
                m[key(i)] = b"first"
                m[key(i)] = b"%d" % i
                assert m[key(i)] == b"%d" % i

    async def tasks(start: int) -> None:
        async def one(i: int) -> None:
            await store.set(key(i), buffer(b"%d" % i))

        async with store.batch(max_nbytes=max_nbytes):
            await asyncio.gather(*(one(i) for i in range(start, N, 4)))

    with store.batch(max_nbytes=max_nbytes), ThreadPoolExecutor(4) as pool:
        done = [
            pool.submit(blocking, 0, False),
            pool.submit(blocking, 1, True),
            pool.submit(asyncio.run, tasks(2)),
            pool.submit(blocking, 3, False),
        ]
        for future in done:
            future.result(timeout=120)
        assert {k: m[k] for k in m} == {key(i): b"%d" % i for i in range(N)}
    assert seen(base) == {key(i): b"%d" % i for i in range(N)}
    assert not store._engine.operations.buffer.is_active
    wait_until_idle()


@pytest.mark.parametrize("base_name", ["dict", "local"])
def test_blocks_that_open_and_close_beside_writers(base_name: str) -> None:
    """A value is never replaced by one that was held before it."""
    base = BASES[base_name]()
    m = ShardingMapping(base, **CPS)
    stop = threading.Event()

    def toggle() -> None:
        while not stop.is_set():
            with m.batch(max_nbytes=300):
                m[key(60)] = b"t"

    def write(i: int) -> None:
        for n in range(150):
            m[key(i)] = b"%d" % n
            assert m[key(i)] == b"%d" % n

    with ThreadPoolExecutor(6) as pool:
        toggling = [pool.submit(toggle) for _ in range(2)]
        writing = [pool.submit(write, i) for i in (0, 1, 9, 17)]
        try:
            for future in writing:
                future.result(timeout=120)
        finally:
            stop.set()
        for future in toggling:
            future.result(timeout=120)
    found = seen(base)
    assert [found[key(i)] for i in (0, 1, 9, 17)] == [b"149"] * 4


def test_pieces_of_many_threads_all_survive() -> None:
    """Each writes another byte of one chunk, while its shard is published again and again."""
    base: dict[str, bytes] = {}
    m = ShardingMapping(base, **CPS)
    m[key(0)] = b"." * 200

    def write(part: int) -> None:
        for i in range(part, 200, 4):
            m.set_partial_values([(key(0), i, b"x")])

    with m.batch(max_nbytes=0), ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(write, part) for part in range(4)]:
            future.result(timeout=60)
    assert seen(base)[key(0)] == b"x" * 200


def test_one_of_those_who_store_if_missing_wins() -> None:
    """They are committed in the batch; another store replaces the values later."""
    base: dict[str, bytes] = {}
    m, other = ShardingMapping(base, **CPS), ShardingMapping(base, **CPS)
    with m.batch(), ThreadPoolExecutor(4) as pool:
        won = set(pool.map(lambda i: m.setdefault(key(0), b"%d" % i), range(8)))
        assert won == {m[key(0)]}
        m.erase(key(1))
        m.setdefault(key(1), b"mine")
        m.setdefault(key(2), b"mine")
        m.setdefault(key(3), b"mine")
        m.set_partial_values([(key(3), 0, b"MI")])
        assert [seen(base)[key(i)] for i in (1, 2, 3)] == [b"mine", b"mine", b"MIne"]
        for i in (1, 2, 3):
            other[key(i)] = b"theirs"
    assert [seen(base)[key(i)] for i in (1, 2, 3)] == [b"theirs"] * 3


class Gated(MemoryStore):
    """Holds back the end of the next write."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held = asyncio.Event()
        self.go_on = asyncio.Event()
        self.error: Exception | None = None

    async def set(self, key: str, value: Any, byte_range: Any = None) -> None:
        self.is_held.set()
        await self.go_on.wait()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        await super().set(key, value, byte_range)

    def __getattribute__(self, name: str) -> Any:
        if name in ("set_sync", "get_sync", "delete_sync"):
            raise AttributeError(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("fails", [False, True])
async def test_values_are_seen_while_they_are_published(fails: bool) -> None:
    """And newer ones before older ones, in memory and afterwards in the base store."""
    base = Gated()
    store = ShardingStore(base, chunks_per_shard=2)
    prototype = default_buffer_prototype()

    async def get(i: int, store: ShardingStore = store) -> bytes:
        value = await store.get(key(i), prototype)
        assert value is not None
        return bytes(value.to_bytes())

    async with store.batch():
        await store.set(key(0), buffer(b"0"))
        publishing = asyncio.create_task(store.set(key(1), buffer(b"1")))
        await base.is_held.wait()
        assert [await get(0), await get(1)] == [b"0", b"1"]
        await store.set(key(0), buffer(b"newer"))
        assert await get(0) == b"newer"
        base.error = OSError("gone") if fails else None
        base.go_on.set()
        if fails:
            with pytest.raises(OSError, match="gone"):
                await publishing
        else:
            await publishing
        assert [await get(0), await get(1)] == [b"newer", b"1"]
    fresh = ShardingStore(base, chunks_per_shard=2)
    assert [await get(i, fresh) for i in (0, 1)] == [b"newer", b"1"]


async def test_a_block_that_fails_drops_nothing_that_another_is_publishing() -> None:
    """More shards than are written at once: some are still held."""
    base = Gated()
    store = ShardingStore(base, chunks_per_shard=2)
    keys = [key(2 * i) for i in range(40)]

    async def well() -> None:
        async with store.batch():
            for k in keys:
                await store.set(k, buffer(b"x"))

    async def badly() -> None:
        async with store.batch():
            raise BoomError

    publishing = asyncio.create_task(well())
    await base.is_held.wait()
    with pytest.raises(BoomError):
        await badly()
    base.go_on.set()
    await publishing
    fresh = ShardingStore(base, chunks_per_shard=2)
    assert sorted([k async for k in fresh.list()]) == sorted(keys)


def test_the_last_one_who_leaves_drops_what_could_not_be_published() -> None:
    """Another that is still leaving tries it as well, and has to say so."""
    m = ShardingMapping({}, **CPS)
    buffer = m._engine.operations.buffer
    a, b = m.batch(), m.batch()
    buffer.enter(a)
    buffer.enter(b)
    m[key(0)] = b"0"
    assert buffer.leave(a) == buffer.leave(b) == [key(0)]
    buffer.end(a)
    assert buffer.nbytes > 0
    buffer.end(b)
    assert not buffer.is_active


async def test_a_cancelled_block_leaves_nothing_behind() -> None:
    """Cancelled while it publishes: its caller knows, the store goes on."""
    base = Gated()
    store = ShardingStore(base, chunks_per_shard=2)

    async def block() -> None:
        async with store.batch():
            await store.set(key(0), buffer(b"0"))

    task = asyncio.create_task(block())
    await base.is_held.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    base.go_on.set()
    assert not store._engine.operations.buffer.is_active
    await store.set(key(1), buffer(b"1"))
    fresh = ShardingStore(base, chunks_per_shard=2)
    assert [k async for k in fresh.list()] in ([key(1)], [key(0), key(1)])


async def test_leaving_by_with_while_a_task_of_the_loop_publishes_is_an_error() -> None:
    """It would never end; what is not published is named."""
    base = Gated()
    store = ShardingStore(base, chunks_per_shard=2)
    batch = store.batch()
    batch.__enter__()
    await store.set(key(0), buffer(b"0"))
    publishing = asyncio.create_task(store.set(key(1), buffer(b"1")))
    await base.is_held.wait()
    asyncio.get_running_loop().call_soon(base.go_on.set)
    with pytest.raises(UnpublishedError, match=key(0)):
        batch.__exit__(None, None, None)
    await publishing
    assert not store._engine.operations.buffer.is_active


def _child(store: ShardingStore, batch: Any) -> None:
    m = ShardingMapping(store)
    assert key(0) not in m
    m[key(8)] = b"child"
    batch.__exit__(None, None, None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork beside threads
def test_a_forked_child_has_no_batch() -> None:
    """It writes at once, and does not publish what the parent holds."""
    base = LocalStore(temporary_directory())
    store = ShardingStore(base, **CPS)
    m = ShardingMapping(store)
    with m.batch() as batch:
        m[key(0)] = b"parent"
        process = multiprocessing.get_context("fork").Process(target=_child, args=(store, batch))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert seen(base) == {key(8): b"child"}
    assert seen(base) == {key(0): b"parent", key(8): b"child"}


@pytest.mark.parametrize("base_name", ["dict", "local"])
def test_erasures_of_an_array_that_was_unsharded_meanwhile_are_named(
    base_name: str, tmp_path: Path
) -> None:
    """Of an array that was removed they are done."""
    base: Any = {} if base_name == "dict" else tmp_path / "s"
    store = ShardingStore(base, 4)
    z: Any = zarr.create_array(store, name="z", shape=(8,), chunks=(1,), dtype="i4")
    z[:] = 7

    def erase() -> None:
        with store.batch():
            z[:3] = 0
            unshard_store(base)

    with pytest.raises(UnpublishedError, match="z/c/0"):
        erase()
    z = zarr.open_array(ShardingStore(base, 4), path="z")
    assert z[:].tolist() == [7] * 8
    z = zarr.create_array(store, name="y", shape=(8,), chunks=(1,), dtype="i4")
    z[:] = 7
    with store.batch():
        z[:3] = 0
        sync(ShardingStore(base).delete_dir("y"))


def test_a_resize_in_a_block_that_fails_erases_what_it_has_cut_off() -> None:
    """Its document is stored at once, and so are its erasures."""
    store = ShardingStore({}, 2)
    z: Any = zarr.create_array(store, name="z", shape=(8,), chunks=(1,), dtype="i4")
    z[:] = 7

    def shorten() -> None:
        with store.batch():
            z.resize((5,))
            raise BoomError

    with pytest.raises(BoomError):
        shorten()
    again: Any = zarr.open_array(ShardingStore(store.base), path="z")
    again.resize((8,))
    assert again[:].tolist() == [7] * 5 + [0] * 3


@pytest.mark.parametrize("is_on_files", [True, False])
def test_flush_stores_what_is_buffered(tmp_path: Path, is_on_files: bool) -> None:
    """It is safe from an exception that ends the block later."""
    base: Any = tmp_path if is_on_files else {}
    store = ShardingStore(base, chunks_per_shard=4)
    z = zarr.create_array(store, name="z", shape=(8,), chunks=(1,), dtype="u1")

    def write() -> None:
        with store.batch():
            z[:4] = 7
            store.flush_sync()
            z[4:6] = 8
            raise BoomError

    with pytest.raises(BoomError):
        write()
    assert np.array_equal(z[:], [7] * 4 + [0] * 4)


def test_tools_refuse_a_store_with_an_open_batch() -> None:
    """They read the base store, where the values are still the former ones."""
    store = ShardingStore({}, chunks_per_shard=4)
    z = zarr.create_array(store, name="z", shape=(8,), chunks=(1,), dtype="u1")
    target: Any = {}
    with store.batch():
        z[:] = 7
        tools: tuple[Callable[..., Any], ...] = (shard_store, unshard_store, import_store)
        for tool in tools:
            with pytest.raises(SpecError, match="a batch of the store is open"):
                tool(store, target)
    shard_store(store, target, chunks_per_shard=2)
    assert np.array_equal(zarr.open_array(ShardingStore(target), path="z")[:], [7] * 8)


def test_an_index_is_consolidated_in_a_block(tmp_path: Path) -> None:
    """What is buffered is stored first; it would open the files of the shards again."""
    store = ShardingStore(tmp_path, chunks_per_shard=(1, 2))
    z = zarr.create_array(store, name="z", shape=(4, 8), chunks=(2, 2), dtype="u1")
    z[:] = 1
    store.flush_sync()
    with store.batch():
        z[:, ::3] = 2
        assert store.consolidate_index_sync() == ["z"]
