"""Writers that share shards, and how many of their updates are there in the end.

An array of 8 shards is written in rounds, each time in another random order: chunk by chunk, or
as regions that begin and end within chunks. All values differ from element to element and from
round to round, so what is lost shows, also if an older shard came back whole.

``benchmarks/lost_updates.py`` and ``test_many_writers.py`` do this, also with native sharding.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import zarr
from zarr.storage import FsspecStore, MemoryStore

from tests.support.convert_once import open_store
from zarr_shardstore import ShardingStore

N_SHARDS = 8
LENGTH = 64
"""Elements of a chunk, of 4 bytes: with 512 chunks a shard has 140 kB."""

N_THREADS, N_PROCESSES, N_DASK_WORKERS = 8, 8, 4

MAX_START_S = 120

Way: TypeAlias = Literal["chunks", "regions"]
WAYS: tuple[Way, ...] = ("chunks", "regions")

Kind: TypeAlias = Literal["v3", "v2", "unsharded", "shards="]

_CHUNKS_PER_REGION = 4
"""On average: so three chunks in four lie in one region, and the others in two or more."""

_memory: dict[str, MemoryStore] = {}


def open_base(where: dict[str, Any]) -> Any:
    """The base store of a process; those of memory have names."""
    match where["kind"]:
        case "memory":
            return _memory.setdefault(where["path"], MemoryStore())
        case "fsspec memory":
            return FsspecStore.from_url(f"memory://{where['path']}")
        case "fsspec local":
            options = {"auto_mkdir": True}
            return FsspecStore.from_url(f"file://{where['path']}", storage_options=options)
    return open_store(where)


@dataclass(frozen=True, kw_only=True)
class SharedArray:
    """The array that all write: where it is, how it is opened, and what is in it.

    ``options`` are those of the `ShardingStore` of each writer; ``is_native``: zarr's own
    sharding instead, with no store between. Each chunk of an ``"unsharded"`` array is an object.
    """

    where: dict[str, Any]
    n_chunks: int
    options: dict[str, Any] = field(default_factory=dict)
    is_native: bool = False
    kind: Kind = "v3"

    @property
    def chunks_per_shard(self) -> int:
        return self.n_chunks // N_SHARDS

    def create(self) -> None:
        """Every second shard exists already, with the values of round 0."""
        base = open_base(self.where)
        cps = self.chunks_per_shard
        given = cps if self.kind in ("v3", "v2") else None
        z = zarr.create_array(
            base if self.is_native else ShardingStore(base, chunks_per_shard=given, **self.options),
            name="z",
            shape=(self.n_chunks * LENGTH,),
            chunks=(LENGTH,),
            shards=(cps * LENGTH,) if self.is_native or self.kind == "shards=" else None,
            dtype="u4",
            zarr_format=2 if self.kind == "v2" else 3,
            overwrite=True,
        )
        z[:] = self.values(0)

    def open(self) -> Any:
        base = open_base(self.where)
        store = base if self.is_native else ShardingStore(base, **self.options)
        return zarr.open_array(store, path="z", mode="r+")

    def values(self, round_: int) -> npt.NDArray[np.uint32]:
        """Of the whole array after a round; a chunk of zeros is one that is erased."""
        n = self.n_chunks * LENGTH
        values = np.arange(1 + round_ * n, 1 + (round_ + 1) * n, dtype="u4")
        chunks = values.reshape(self.n_chunks, LENGTH)
        numbers = np.arange(self.n_chunks)
        is_old = numbers // self.chunks_per_shard % 2 == 0
        # Those of two rounds differ, so that also an erasure that is lost shows.
        chunks[is_old & ((numbers + round_) % 7 == 3) if round_ else ~is_old] = 0
        return values

    def pieces(self, way: Way, round_: int) -> list[slice]:
        """What is written by one call each, in the order of the round."""
        n = self.n_chunks * LENGTH
        chance = random.Random(round_)
        if way == "chunks":
            cuts = list(range(0, n + 1, LENGTH))
        else:
            inside = [i for i in range(n) if i % LENGTH]
            cuts = [0, *sorted(chance.sample(inside, self.n_chunks // _CHUNKS_PER_REGION)), n]
        pieces = [slice(start, stop) for start, stop in pairwise(cuts)]
        chance.shuffle(pieces)
        return pieces

    def survivors(self, z: Any, way: Way, round_: int) -> npt.NDArray[np.bool_]:
        """For each chunk: is it as it was written, by one writer or by several?

        Without this package, what reads, changes and writes a part of a chunk is not looked at.
        """
        is_whole = np.full(self.n_chunks, not self.is_native)
        for piece in self.pieces(way, round_):
            is_whole[-(-piece.start // LENGTH) : piece.stop // LENGTH] = True
        is_equal = np.equal(z[:], self.values(round_)).reshape(self.n_chunks, LENGTH).all(axis=1)
        survivors: npt.NDArray[np.bool_] = is_equal[is_whole]
        return survivors


# ------------------------------------------------------------------------- writers


@dataclass(frozen=True)
class Writers:
    """Who writes: each gets an equal part of the pieces of a round, in ``n_parts`` calls."""

    executor: Executor
    n_parts: int
    share_a_store: bool = False

    def write(self, array: SharedArray, way: Way, round_: int) -> float:
        """Write one round; returns the seconds that it took.

        Raises
        ------
        TimeoutError
            If a writer takes much longer than the slowest server should need.
        """
        z = array.open() if self.share_a_store else None
        begun = time.monotonic()
        end = begun + 180 + array.n_chunks * 0.5  # longer than a shard may be fought for
        futures = [
            self.executor.submit(_write_part, array, z, way, round_, part, self.n_parts)
            for part in range(self.n_parts)
        ]
        for future in futures:
            future.result(timeout=max(0.0, end - time.monotonic()))
        return time.monotonic() - begun


def _write_part(array: SharedArray, z: Any, way: Way, round_: int, part: int, n_parts: int) -> None:
    z = array.open() if z is None else z
    values = array.values(round_)
    for piece in array.pieces(way, round_)[part::n_parts]:
        z[piece] = values[piece]


@contextmanager
def threads_with_one_store() -> Iterator[Writers]:
    with ThreadPoolExecutor(N_THREADS) as executor:
        yield Writers(executor, N_THREADS, share_a_store=True)


@contextmanager
def threads_with_a_store_each() -> Iterator[Writers]:
    with ThreadPoolExecutor(N_THREADS) as executor:
        yield Writers(executor, N_THREADS)


@contextmanager
def processes() -> Iterator[Writers]:
    context = multiprocessing.get_context("spawn")
    all_ready = context.Barrier(N_PROCESSES)  # otherwise one is done before the next begins
    with ProcessPoolExecutor(
        N_PROCESSES, mp_context=context, initializer=_warm_up, initargs=(all_ready,)
    ) as executor:
        for task in [executor.submit(int) for _ in range(N_PROCESSES)]:  # each starts a process
            task.result(timeout=MAX_START_S)
        yield Writers(executor, N_PROCESSES)


def _warm_up(all_ready: Any) -> None:
    """Import what is imported late, and wait for the others."""
    SharedArray(where={"kind": "memory", "path": "warm"}, n_chunks=N_SHARDS).create()
    all_ready.wait(MAX_START_S)


@contextmanager
def dask_workers(*, are_processes: bool = True) -> Iterator[Writers]:
    """Workers of a cluster on this machine, which take tasks as they come."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=N_DASK_WORKERS,
            threads_per_worker=1,
            processes=are_processes,
            protocol="tcp",
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",  # it listens somewhere in any case
            worker_dashboard_address="127.0.0.1:0",
            memory_limit=0,
        ) as cluster,
        Client(cluster, timeout=MAX_START_S) as client,
    ):
        client.wait_for_workers(N_DASK_WORKERS, timeout=MAX_START_S)
        yield Writers(client.get_executor(pure=False), 4 * N_DASK_WORKERS)


WRITERS: dict[str, Callable[[], AbstractContextManager[Writers]]] = {
    "8 threads, one store": threads_with_one_store,
    "8 threads, a store each": threads_with_a_store_each,
    "8 processes": processes,
    "4 dask workers": dask_workers,
    # In this process, which alone sees a base store in memory.
    "4 dask workers, threads": partial(dask_workers, are_processes=False),
}
