"""Ten thousand calls at a time, as a zarr without a limit of its own makes them: requests, threads,
open files and shards in memory stay few."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import FsspecStore, LocalStore

from tests.support.bases import fsspec_memory
from zarr_shardstore import ShardingStore

N_CALLS = 10_000
MAX_REQUESTS, MAX_SHARDS, MAX_THREADS, MAX_FILES = 64, 16, 80, 400
SHARD_NBYTES = 4 * 25_000


class Meter:
    """The most requests that were under way together, and what the process then had."""

    def __init__(self) -> None:
        self.n_now = self.n_requests = self.n_threads = self.n_files = 0
        self.n_files_before = _n_open_files()

    def watch(self, call: Callable[..., Any]) -> Callable[..., Any]:
        async def watched(*args: Any, **options: Any) -> Any:
            self.n_now += 1
            self.n_requests = max(self.n_requests, self.n_now)
            try:
                await asyncio.sleep(0)  # all that can come at once does
                return await call(*args, **options)
            finally:
                self.n_now -= 1

        return watched

    def look(self) -> None:
        self.n_threads = max(self.n_threads, threading.active_count())
        self.n_files = max(self.n_files, _n_open_files() - self.n_files_before)


def _n_open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def _local(tmp_path: Path, _: Meter, __: pytest.MonkeyPatch) -> Any:
    return LocalStore(tmp_path)


def _fsspec(_: Path, meter: Meter, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("get", "set"):
        monkeypatch.setattr(FsspecStore, name, meter.watch(getattr(FsspecStore, name)))
    return fsspec_memory()


def _obstore(_: Path, meter: Meter, monkeypatch: pytest.MonkeyPatch) -> Any:
    obstore = pytest.importorskip("obstore")
    from zarr.storage import ObjectStore

    for name in ("get_async", "put_async"):
        monkeypatch.setattr(obstore, name, meter.watch(getattr(obstore, name)))
    return ObjectStore(obstore.store.MemoryStore())


KINDS = {"local": _local, "fsspec": _fsspec, "obstore": _obstore}


async def _watched(meter: Meter, calls: list[Any]) -> list[Any]:
    async def look() -> None:
        while True:
            meter.look()
            await asyncio.sleep(0.01)

    looking = asyncio.create_task(look())
    try:
        return list(await asyncio.gather(*calls))
    finally:
        looking.cancel()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:through fsspec nothing keeps")
@pytest.mark.parametrize("per_shard", [4, None], ids=["sharded", "flat"])
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_calls_at_a_time(
    kind: str, per_shard: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of another chunk: first writes, then reads."""
    meter = Meter()
    store = ShardingStore(KINDS[kind](tmp_path, meter, monkeypatch), per_shard)
    options: Any = {"chunks": (1,), "dtype": "u1", "compressors": None}
    zarr.create_array(store, name="z", shape=(N_CALLS,), **options)
    keys = [f"z/c/{i}" for i in range(N_CALLS)]
    values = [i.to_bytes(2, "little") for i in range(N_CALLS)]
    prototype = default_buffer_prototype()

    async def run() -> None:
        buffers = [prototype.buffer.from_bytes(value) for value in values]
        await _watched(meter, [store.set(*each) for each in zip(keys, buffers, strict=True)])
        found = await _watched(meter, [store.get(key, prototype) for key in keys])
        assert [each.to_bytes() for each in found] == values

    asyncio.run(run())
    if kind != "local":
        assert 1 < meter.n_requests <= MAX_REQUESTS
    assert 0 < meter.n_threads <= MAX_THREADS
    assert meter.n_files <= MAX_FILES


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:through fsspec nothing keeps")
@pytest.mark.parametrize("kind", ["obstore", "fsspec"])
def test_few_shards_are_in_memory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a thousand shards of which a part is written at a time."""
    n_shards = 1000
    meter = Meter()
    store = ShardingStore(KINDS[kind](tmp_path, meter, monkeypatch), 4)
    options: Any = {"chunks": (SHARD_NBYTES // 4,), "dtype": "u1", "compressors": None}
    zarr.create_array(store, name="z", shape=(n_shards * SHARD_NBYTES,), **options)
    old = default_buffer_prototype().buffer.from_bytes(bytes(SHARD_NBYTES // 4))

    async def run(n: int) -> None:
        keys = [f"z/c/{4 * i + n}" for i in range(n_shards)]
        await _watched(meter, [store.set(key, old) for key in keys])

    asyncio.run(run(0))
    tracemalloc.start()
    try:
        asyncio.run(run(1))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    own = n_shards * SHARD_NBYTES // 4  # of the values, which are copied
    stored = n_shards * SHARD_NBYTES // 2 if kind == "fsspec" else 0
    assert most < own + stored + 10 * MAX_SHARDS * SHARD_NBYTES + 20_000_000


FLUSHES = """
import asyncio, sys, time
import zarr

zarr.config.set({"threading.max_workers": 1})
from zarr.core.buffer import cpu
from zarr.core.sync import sync
from zarr_shardstore import ShardingStore

store = ShardingStore(sys.argv[1], chunks_per_shard=1000)
zarr.create_array(store, name="a", shape=(1000,), chunks=(1,), dtype="u1")
value, end = cpu.Buffer.from_bytes(b"1"), time.monotonic() + 2

async def repeat(call):
    i = 0
    while time.monotonic() < end:
        await call(i)
        i += 1

async def main():
    new = [lambda i, k=k: store.set_if_not_exists(f"new{k}/{i}", value) for k in range(40)]
    chunks = [lambda i, k=k: store.set(f"a/c/{(7 * i + k) % 1000}", value) for k in range(6)]
    await asyncio.gather(*map(repeat, [*new, *chunks, lambda _: store.flush()]))

sync(main())
"""


def test_a_flush_takes_no_thread_that_its_commits_need(tmp_path: Path) -> None:
    """Commits wait for zarr's event loop, which has one thread here."""
    command = [sys.executable, "-c", FLUSHES, str(tmp_path)]
    assert subprocess.run(command, timeout=60).returncode == 0
