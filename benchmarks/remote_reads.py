"""Reads of shards behind a network: times in units of its latency, requests and bytes.

This store, zarr's native sharding and tensorstore read the same 8 shards of one array. Cold means
that no index is cached. Connections are open, because tensorstore keeps its own for a process.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import tensorstore as ts
import zarr
from latency_proxy import Asked, Proxy, latency_proxy
from measuring import (
    OUR_PIPELINE,
    ZARR_PIPELINES,
    Middle,
    Values,
    create,
    flush,
    fresh_directory,
    row,
    smooth_data,
    title,
)
from servers import BUCKET, file_server, objects_of
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import ObjectStore

from zarr_shardstore import ShardingStore, set_index_cache_nbytes

CHUNK = 8
MAX_CHUNKS_A_SIDE = 4
N_SHARDS = 8
N_TASKS = 64
PROTOTYPE = default_buffer_prototype()
CACHED = {"cache_pool": {"total_bytes_limit": 100_000_000}}

broken_promises: list[str] = []
"""What this store asked for more often than it may."""


@dataclass
class Remote:
    """An array of 2 x 2 x 2 shards behind a proxy."""

    directory: Path
    server: str
    proxy: Proxy
    objects: ObjectStore[Any]
    """As zarr reads them."""
    data: Values

    @property
    def chunks_per_shard(self) -> int:
        return len(self.data) // 2 // CHUNK

    @property
    def region(self) -> tuple[slice, ...]:
        """Return one octant of each shard, or less: in Morton order that is one span."""
        half = CHUNK * self.chunks_a_side
        middle = len(self.data) // 2
        return (slice(middle - half, middle + half),) * 3

    @property
    def chunks_a_side(self) -> int:
        """Return the edge of the cube of chunks that the region has in each shard."""
        return min(self.chunks_per_shard // 2, MAX_CHUNKS_A_SIDE)

    def ours(self) -> ShardingStore:
        """Open the array through this store with an empty index cache."""
        set_index_cache_nbytes(0)
        set_index_cache_nbytes(64 * 1024 * 1024)
        return ShardingStore(self.objects)

    def native(self) -> ObjectStore[Any]:
        return self.objects

    def open(self, make_store: Callable[[], Any], pipe: str) -> Any:
        with zarr.config.set({"codec_pipeline.path": pipe}):
            return zarr.open_array(make_store(), mode="r", zarr_format=3)

    def tensorstore(self, **context: Any) -> Any:
        s3 = {
            "driver": "s3",
            "bucket": BUCKET,
            "endpoint": f"http://127.0.0.1:{self.proxy.port}",
            "aws_region": "us-east-1",
            "aws_credentials": {"type": "anonymous"},
        }
        spec = {"driver": "zarr3", "kvstore": s3, "recheck_cached_metadata": "open"}
        return ts.open(spec, context=ts.Context(context)).result()

    def asked(self) -> Counts:
        """Return the requests for shards since the last call."""
        asked = [a for a in self.proxy.asked() if a.path.startswith(f"/{BUCKET}/c/")]
        n_indexes = sum(map(self._is_index, asked))
        return Counts(n_indexes, len(asked) - n_indexes, sum(a.nbytes for a in asked))

    def _is_index(self, asked: Asked) -> bool:
        file = self.directory / asked.path.removeprefix(f"/{BUCKET}/")
        data_nbytes = file.stat().st_size - self.chunks_per_shard**3 * 16 - 4
        first = asked.byte_range.removeprefix("bytes=").split("-")[0]
        return asked.byte_range != "" and (first == "" or int(first) >= data_nbytes)


@dataclass(frozen=True)
class Counts:
    n_indexes: int
    n_others: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.n_indexes} + {self.n_others}"


@contextmanager
def remote_array(side: int, latency_s: float) -> Iterator[Remote]:
    data = smooth_data((side,) * 3)
    with fresh_directory() as directory:
        store = ShardingStore(directory, chunks_per_shard=side // 2 // CHUNK)
        create(store, data.shape, (CHUNK,) * 3, OUR_PIPELINE)[...] = data
        flush(store)
        with file_server(directory) as server, latency_proxy(server.port, latency_s) as proxy:
            yield Remote(directory, server.name, proxy, objects_of(proxy.port), data)


def promise(text: str, counts: Counts, n_indexes: int, n_others: int) -> None:
    """Record a failure if there were more requests than promised."""
    if counts.n_indexes > n_indexes or counts.n_others > n_others:
        broken_promises.append(f"{text}: {counts}, at most {n_indexes} + {n_others}")


# ------------------------------------------------------------------------ times


def show_remote(side: int, latency_s: float, repeats: int, middle: Middle) -> None:
    with remote_array(side, latency_s) as remote:
        ours, native = {}, {}
        for name, pipe in ZARR_PIPELINES.items():
            ours[f"ours, {name}"] = partial(remote.open, remote.ours, pipe)
            native[f"native, {name}"] = partial(remote.open, remote.native, pipe)
        cases: dict[str, Callable[[], Any]] = {
            "ours, ShardedCodecPipeline": partial(remote.open, remote.ours, OUR_PIPELINE),
            **ours,
            **native,
            "tensorstore": remote.tensorstore,
            "tensorstore, keeps indexes and chunks": partial(remote.tensorstore, **CACHED),
        }
        seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        counts: dict[tuple[str, str], Counts] = {}
        for _ in range(repeats):
            for case in random.sample(list(cases), len(cases)):
                z = cases[case]()
                for state in ("cold", "warm"):
                    remote.asked()
                    start = perf_counter()
                    values = _read(z, remote.region)
                    seconds[state, case].append(perf_counter() - start)
                    counts[state, case] = remote.asked()
                    assert np.array_equal(values, remote.data[remote.region])
        n_chunks = remote.chunks_a_side**3 * N_SHARDS
        wait = f"{1e3 * latency_s:.0f} ms"
        for state in ("cold", "warm"):
            shards = f"{N_SHARDS} shards of {remote.chunks_per_shard**3}"
            text = f"{n_chunks} chunks of {shards}, {state}, {remote.server}"
            title(text, f"times {wait}", "this / ours", "index + spans", "kB")
            first = middle(seconds[state, next(iter(cases))])
            for case in cases:
                s, n = middle(seconds[state, case]), counts[state, case]
                row(case, s / latency_s, s / first, str(n), f"{n.nbytes / 1e3:.0f}")
            n_indexes = N_SHARDS if state == "cold" else 0
            for case in ours:
                promise(f"region, {state}, {case}", counts[state, case], n_indexes, n_chunks)
            own = counts[state, "ours, ShardedCodecPipeline"]
            promise(f"region, {state}, ShardedCodecPipeline", own, n_indexes, N_SHARDS)


def _read(z: Any, region: tuple[slice, ...]) -> Any:
    if isinstance(z, ts.TensorStore):
        return z[region].read().result()
    return z[region]


# --------------------------------------------------------------------- requests


Read = Callable[[Sequence[tuple[int, ...]]], list[Coroutine[Any, Any, Any]]]
"""Coroutines that read chunks, by their coordinates."""


async def _at_once(read: Read, coords: Sequence[tuple[int, ...]]) -> None:
    await asyncio.gather(*read(coords))


async def _one_by_one(read: Read, coords: Sequence[tuple[int, ...]]) -> None:
    for coro in read(coords):
        await coro


async def _in_different_turns(read: Read, coords: Sequence[tuple[int, ...]]) -> None:
    tasks = []
    for coro in read(coords):
        tasks.append(asyncio.create_task(coro))
        for _ in range(3):
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)


def show_requests(side: int, latency_s: float) -> None:
    with remote_array(side, latency_s) as remote:
        asyncio.run(_requests(remote))


async def _requests(remote: Remote) -> None:
    n = remote.chunks_per_shard
    shard = [(i, j, k) for i in range(n) for j in range(n) for k in range(n)][:N_TASKS]
    half = range(n - remote.chunks_a_side, n + remote.chunks_a_side)
    region = [(i, j, k) for i in half for j in half for k in half]

    async def ours() -> Read:
        store = remote.ours()
        await store.exists("c/0/0/9999")  # the document is read
        return lambda coords: [store.get(f"c/{i}/{j}/{k}", PROTOTYPE) for i, j, k in coords]

    async def native() -> Read:
        z = await zarr.api.asynchronous.open_array(store=remote.objects, mode="r")
        return lambda coords: [z.getitem(_region_of(at)) for at in coords]

    async def tensorstore() -> Read:
        t = remote.tensorstore(**CACHED)

        async def read_one(future: Any) -> Any:
            return await future

        return lambda coords: [read_one(t[_region_of(at)].read()) for at in coords]

    openers = {"ours": ours, "native": native, "tensorstore": tensorstore}
    operations: dict[str, tuple[Any, Any, Any, tuple[int, int]]] = {
        # Before, and what is counted: how, chunks; indexes and spans that are promised
        "one chunk, cold": (None, _at_once, shard[:1], (1, 1)),
        "another one of its shard, warm": (shard[:1], _at_once, shard[1:2], (0, 1)),
        "20 more, one by one": (shard[:1], _one_by_one, shard[1:21], (0, 20)),
        f"{N_TASKS} tasks of one shard, cold": (None, _at_once, shard, (1, N_TASKS)),
        f"{N_TASKS} tasks of one shard, warm": (shard[:1], _at_once, shard, (0, N_TASKS)),
        f"{N_TASKS} tasks in different turns": (None, _in_different_turns, shard, (1, N_TASKS)),
        "a region, a task for each chunk": (None, _at_once, region, (N_SHARDS, len(region))),
    }
    title("requests: indexes + others", *openers, "at most")
    for text, (before, start, coords, promised) in operations.items():
        cells = []
        for name, opener in openers.items():
            read = await opener()
            if before is not None:
                await _at_once(read, before)
            remote.asked()
            await start(read, coords)
            counts = remote.asked()
            cells.append(str(counts))
            if name == "ours":
                promise(text, counts, *promised)
        row(text, *cells, f"{promised[0]} + {promised[1]}")


def _region_of(at: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(CHUNK * c, CHUNK * (c + 1)) for c in at)
