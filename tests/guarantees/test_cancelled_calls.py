"""Calls that are cancelled, in event loops that end: nothing is printed, and what was acknowledged
is stored."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import zarr_shardstore

CODE = """
import asyncio, sys
from itertools import count

import numpy as np
import obstore
import zarr
from obstore.store import MemoryStore
from zarr.core.sync import _get_loop
from zarr.storage import ObjectStore

from zarr_shardstore import ShardingStore

name, lag_s = sys.argv[1], 0
objects = MemoryStore()
prototype = zarr.core.buffer.default_buffer_prototype()


def new_store():
    store = ShardingStore(ObjectStore(objects), chunks_per_shard=4)
    zarr.open_array(store, path="z")[3]  # documents are cached
    return store


class Reply:
    # Its bytes are there: a future of obstore prints something if its loop has been closed.
    def __init__(self, reply):
        self.meta, self.attributes, self.value = reply.meta, reply.attributes, reply.bytes()

    async def bytes_async(self):
        await asyncio.sleep(0)
        return self.value


def in_turns(call, make=lambda reply: reply):
    async def slow(*args, **options):
        for _ in range(3):
            await asyncio.sleep(0)
        if asyncio.get_running_loop() is _get_loop():
            await asyncio.sleep(lag_s)
        return make(call(*args, **options))

    return slow


async def read(store, i):
    value = await store.get(f"z/c/{i}", prototype)
    assert value is None or len(value) == 1


async def read_array(store, i):
    z = await zarr.api.asynchronous.open_array(store=store, path="z")
    await z.getitem(slice(i, 64 - i))


async def write(store, i):
    await store.set(f"z/c/{i}", prototype.buffer.from_bytes(bytes([100 + i])))
    return i


async def write_array(store, i):
    z = await zarr.api.asynchronous.open_array(store=store, path="z")
    await z.setitem(slice(i, 64 - i), 100 + np.arange(i, 64 - i))
    return i


async def main(store, n_turns):
    asyncio.get_running_loop().slow_callback_duration = 1e9
    tasks = [asyncio.create_task(globals()[name](store, i)) for i in range(16)]
    for _ in range(n_turns):
        await asyncio.sleep(0)
    is_over = all(task.done() for task in tasks)
    for task in tasks[::2]:
        task.cancel()
    if n_turns % 2 or is_over:  # otherwise the loop ends with the others under way
        await asyncio.gather(*tasks, return_exceptions=True)
    return is_over, [t.result() for t in tasks if t.done() and not t.cancelled()]


_get_loop().slow_callback_duration = 1e9
options = dict(name="z", shape=(64,), chunks=(1,), dtype="u1", compressors=None)
zarr.create_array(ShardingStore(ObjectStore(objects), 4), **options)[:] = 1
obstore.get_async = in_turns(obstore.get, Reply)
obstore.put_async = in_turns(obstore.put)
obstore.head_async = in_turns(obstore.head)
for n_turns in count(0, 7):
    store = new_store()
    is_over, acknowledged = asyncio.run(main(store, n_turns))
    if "write" in name:
        values = zarr.open_array(new_store(), path="z")[:]
        assert all(values[i] == 100 + i for i in acknowledged), (n_turns, acknowledged, values)
    if is_over:
        break
assert n_turns > 5, n_turns
if "write" in name:
    lag_s = 0.2  # it is under way when the process ends
    for i in range(16):  # cancelled before its commit has begun
        async def begin():
            task = asyncio.create_task(write(store, 4 * i))
            await asyncio.sleep(0)
            task.cancel()
        asyncio.run(begin())
"""


@pytest.mark.thorough(of=3)
@pytest.mark.parametrize("debug", ["1", ""], ids=["debug", ""])
@pytest.mark.parametrize("name", ["read", "read_array", "write", "write_array"])
def test_nothing_is_printed(name: str, debug: str) -> None:
    """Wherever a call on obstore is cancelled, or its loop or the process ends amid it."""
    pytest.importorskip("obstore")
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", CODE, name],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(zarr_shardstore.__file__).parents[1]),
            "PYTHONASYNCIODEBUG": debug,
        },
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
