"""Listings are streams: a page of base keys and a round of shards at a time, whatever there is."""

from __future__ import annotations

import asyncio
import gc
import os
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import aclosing
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from tests.support.bases import BASES, put
from tests.support.full_shards import fill, shard_of
from tests.support.kit import tuned
from zarr_shardstore import CorruptShardError, ShardingMapping, ShardingStore

CPS = 40


class PagedStore(MemoryStore):
    """Counts keys that were listed, indexes that were read, and listings that are open."""

    n_listed = n_read = n_open = 0

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        self.n_open += 1
        try:
            async for key in super().list_prefix(prefix):
                await asyncio.sleep(0)
                self.n_listed += 1
                yield key
        finally:
            self.n_open -= 1

    async def get(self, key: str, *args: Any, **options: Any) -> Any:
        self.n_read += key.startswith("z/c/")
        return await super().get(key, *args, **options)


@pytest.fixture
def small() -> Iterator[None]:
    """Pages of six base keys, rounds of two shards."""
    with tuned(keys_per_page=6, indexes_per_round=2, names_at_once=4):
        yield


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", BASES)
async def test_every_key_comes_once(kind: str) -> None:
    """From every kind of base store, over many pages and rounds, with held shards among them."""
    base = BASES[kind]()
    expected = fill(base, 13, CPS)
    for i in range(9):
        put(base, f"other/{i}", b"passes through")
    expected |= {f"other/{i}" for i in range(9)}
    store = ShardingStore(base)
    mapping = ShardingMapping(store)
    buffer = default_buffer_prototype().buffer

    async def check() -> None:
        listed = [key async for key in store.list()]
        assert sorted(listed) == sorted(expected) == sorted(mapping)
        assert len(mapping.list()) == len(mapping) == len(expected)
        chunks = {key for key in expected if key.startswith("z/c/1")}
        assert sorted(mapping.list_prefix("z/c/1")) == sorted(chunks)
        below = {key async for key in store.list_prefix("z")}
        assert below >= {key for key in expected if key.startswith("z/")}

    await check()
    with store.batch():
        await store.set("z/c/1", buffer.from_bytes(b"in a shard that is there"))
        await store.set("new", buffer.from_bytes(b"document of nothing"))
        expected.add("new")
        await store.delete("z/c/7")
        expected.remove("z/c/7")
        await check()
    await check()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", BASES)
async def test_keys_may_be_erased_while_they_are_listed(kind: str) -> None:
    """As ``delete_dir`` of zarr's base class does."""
    base = BASES[kind]()
    fill(base, 5, CPS)
    for i in range(9):
        put(base, f"other/{i}", b"passes through")
    store = ShardingStore(base)
    async for key in store.list_prefix("z/c/"):
        await store.delete(key)
    async for key in store.list_prefix("other/"):
        await store.delete(key)
    assert [key async for key in store.list()] == ["z/zarr.json"]


@pytest.mark.usefixtures("small")
async def test_a_listing_holds_two_pages_at_most() -> None:
    """The one in use, and the next one."""
    base = PagedStore()
    fill(base, 50, CPS)
    n_ahead = 0
    n_keys = 0
    async for key in ShardingStore(base).list_prefix("z/"):
        n_keys += 1
        n_of_this = 1 + (n_keys - 1) // CPS if key != "z/zarr.json" else 1
        n_ahead = max(n_ahead, base.n_listed - n_of_this)
    assert n_keys == 50 * CPS + 1
    assert 6 <= n_ahead <= 12
    assert base.n_read == 50


@pytest.mark.usefixtures("small")
def test_a_blocking_listing_holds_one_page() -> None:
    base = PagedStore()
    fill(base, 50, CPS)
    keys = iter(ShardingMapping(base))
    next(keys)
    next(keys)
    assert base.n_listed == 6
    assert sum(1 for _ in keys) == 50 * CPS - 1


@pytest.mark.usefixtures("small")
async def test_the_next_round_is_read_while_the_last_one_is_used() -> None:
    """One, not more."""
    base = PagedStore()
    fill(base, 50, CPS)
    async with aclosing(ShardingStore(base).list_prefix("z/c/")) as keys:  # type: ignore[type-var]
        await anext(keys)
        for _ in range(100):
            await asyncio.sleep(0)
        assert base.n_read == 4


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("n_keys", [1, CPS + 1, 7 * CPS])
async def test_who_breaks_off_leaves_nothing_open(n_keys: int) -> None:
    """No listing of the base store, and no task."""
    base = PagedStore()
    fill(base, 50, CPS)
    async with aclosing(ShardingStore(base).list()) as keys:  # type: ignore[type-var]
        for _ in range(n_keys):
            await anext(keys)
        assert base.n_open == 1
    assert base.n_open == 0
    n_read = base.n_read
    assert asyncio.all_tasks() == {asyncio.current_task()}
    for _ in range(100):
        await asyncio.sleep(0)
    assert base.n_read == n_read


@pytest.mark.usefixtures("small")
async def test_who_breaks_off_does_not_wait_for_what_comes_next() -> None:
    """A base store that never replies keeps nobody."""

    class Hanging(PagedStore):
        async def get(self, key: str, *args: Any, **options: Any) -> Any:
            if key in ("z/c/2", "z/c/3"):
                await asyncio.Event().wait()
            return await super().get(key, *args, **options)

    base = Hanging()
    fill(base, 50, CPS)
    async with asyncio.timeout(60), aclosing(ShardingStore(base).list_prefix("z/c/")) as keys:  # type: ignore[type-var]
        await anext(keys)
        for _ in range(100):
            await asyncio.sleep(0)
    assert base.n_open == 0


@pytest.mark.usefixtures("small")
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux does")
async def test_who_breaks_off_leaves_no_directory_open(tmp_path: Path) -> None:
    """Async, and blocking."""
    fill(ShardingMapping(tmp_path).base, 50, CPS)
    store = ShardingStore(tmp_path)
    mapping = ShardingMapping(store)
    assert len([key async for key in store.list()]) == len(mapping)  # threads are there now
    before = len(os.listdir("/proc/self/fd"))
    async with aclosing(store.list()) as keys:  # type: ignore[type-var]
        await anext(keys)
    assert len(os.listdir("/proc/self/fd")) == before
    for _ in mapping:
        break
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", BASES)
async def test_errors_come_when_all_else_is_listed(kind: str) -> None:
    """The first one, which says how many there are."""
    base = BASES[kind]()
    expected = fill(base, 13, CPS)
    for i in (0, 7):
        put(base, f"z/c/{i}", shard_of(CPS)[:-1])
        expected -= {f"z/c/{j}" for j in range(i * CPS, (i + 1) * CPS)}
    store = ShardingStore(base)
    listed = []
    with pytest.raises(CorruptShardError) as caught:  # noqa: PT012
        async for key in store.list():
            listed.append(key)  # noqa: PERF401
    assert sorted(listed) == sorted(expected)
    assert caught.value.__notes__[1:] == ["and 1 more shards or keys could not be listed"]
    listed.clear()
    with pytest.raises(CorruptShardError):  # noqa: PT012
        for key in ShardingMapping(store):
            listed.append(key)  # noqa: PERF402
    assert sorted(listed) == sorted(expected)


async def test_a_failing_base_store_ends_a_listing() -> None:
    """With its own error, and no task is left."""

    class Failing(PagedStore):
        async def get(self, key: str, *args: Any, **options: Any) -> Any:
            if key.startswith("z/c/"):
                raise ConnectionError("lost")
            return await super().get(key, *args, **options)

    base = Failing()
    fill(base, 3, CPS)
    with pytest.raises(ConnectionError, match="lost"):
        async for _ in ShardingStore(base).list():
            pass
    assert base.n_open == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


def peak_of(run: Callable[[], int], n_keys: int) -> int:
    """Peak of the memory that a listing takes, in bytes."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        assert run() == n_keys
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def peaks_of_keys(top: Path) -> dict[str, list[int]]:
    peaks: dict[str, list[int]] = {}
    with tuned(keys_per_page=64, names_at_once=64):
        for n_shards in (150, 600):
            directory = top / str(n_shards)
            fill(ShardingMapping(directory).base, n_shards, 400)
            store = ShardingStore(directory)
            for name, count, n_keys in listings(store, n_shards * 400):
                if name not in peaks:
                    count()  # what is imported once
                peaks.setdefault(name, []).append(peak_of(count, n_keys))
    return peaks


def peaks_of_values(top: Path) -> dict[str, list[int]]:
    peaks: dict[str, list[int]] = {}
    with tuned(keys_per_page=64, names_at_once=64):
        for n_files in (500, 5_000):
            directory = top / str(n_files)
            (directory / "z").mkdir(parents=True)
            for i in range(n_files):
                (directory / "z" / f"name-{i}").touch()
            for name, count, n_keys in listings(ShardingStore(directory), n_files):
                if name != "sum":  # of the sizes: asks for that of each file
                    count()
                    peaks.setdefault(name, []).append(peak_of(count, n_keys - 1))
    return peaks


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_number_of_keys(tmp_path: Path, alone: Executor) -> None:
    """240,000 keys take as much as 60,000: async, blocking, and for the sum of their sizes."""
    for name, (few, many) in alone.submit(peaks_of_keys, tmp_path).result().items():
        assert many - few < 200_000, (name, few, many)  # the keys themselves: 15 MB
        assert many < 2_000_000, (name, many)


def test_memory_of_values_that_pass_through(tmp_path: Path, alone: Executor) -> None:
    """Ten times the files take as much."""
    for name, (few, many) in alone.submit(peaks_of_values, tmp_path).result().items():
        assert many - few < 50_000, (name, few, many)


@pytest.fixture
def alone() -> Iterator[Executor]:
    """A process without the threads and the state of other tests."""
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        yield executor


def listings(store: ShardingStore, n_chunks: int) -> list[tuple[str, Callable[[], int], int]]:
    """Ways to list the keys of an array, what they count, and how much that is."""

    async def count(keys: AsyncIterator[str]) -> int:
        n = 0
        async for _ in keys:
            n += 1
        return n

    return [
        ("async", lambda: asyncio.run(count(store.list())), n_chunks + 1),
        ("blocking", lambda: sum(1 for _ in ShardingMapping(store)), n_chunks + 1),
        ("sum", lambda: asyncio.run(store.getsize_prefix("z/c")), n_chunks),
    ]
