"""How many chunks survive when several writers share shards: here, and in zarr's native sharding.

4,096 chunks of 8 shards are written in random order, each by a call of its own (`z[i:j] = ...`), by
threads or by processes, and looked at afterwards.

    python benchmarks/lost_updates.py [--rounds 3] [--writers 8]
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.storage import LocalStore, MemoryStore

from zarr_shardstore import ShardingStore

N_SHARDS, CPS, LENGTH = 8, 512, 64
N_CHUNKS = N_SHARDS * CPS


def create(base: Any, is_native: bool) -> Any:
    store = base if is_native else ShardingStore(base, chunks_per_shard=CPS)
    return zarr.create_array(
        store,
        name="z",
        shape=(N_CHUNKS * LENGTH,),
        chunks=(LENGTH,),
        shards=(CPS * LENGTH,) if is_native else None,
        dtype="u4",
        overwrite=True,
    )


def write(base: Any, is_native: bool, rank: int, n: int, seed: int) -> None:
    """The part of one of n writers."""
    z: Any = zarr.open_array(base if is_native else ShardingStore(base), path="z", mode="r+")
    mine = list(range(rank, N_CHUNKS, n))
    random.Random(seed * n + rank).shuffle(mine)
    for i in mine:
        z[i * LENGTH : (i + 1) * LENGTH] = i + 1


def surviving(base: Any) -> float:
    """Share of the chunks that hold what was written, as zarr alone reads them."""
    found: Any = zarr.open_array(base, path="z", mode="r")[:]
    expected = np.arange(1, N_CHUNKS + 1)
    return float((found.reshape(N_CHUNKS, LENGTH) == expected[:, None]).all(1).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--writers", type=int, default=8)
    options = parser.parse_args()
    n = options.writers
    threads = ThreadPoolExecutor(n)
    processes = ProcessPoolExecutor(n, mp_context=get_context("spawn"))
    list(processes.map(time.sleep, [1.0] * n))
    with tempfile.TemporaryDirectory(prefix="lost-") as directory:
        cases: list[tuple[str, Executor, Callable[[], Any]]] = [
            (f"{n} threads, memory", threads, MemoryStore),
            (f"{n} threads, local files", threads, lambda: LocalStore(Path(directory))),
            (f"{n} processes, local files", processes, lambda: LocalStore(Path(directory))),
        ]
        print(f"{'':30} zarr native             ShardingStore")
        for name, executor, make in cases:
            print(f"{name:30}", end="", flush=True)
            for is_native in (True, False):
                shares, seconds = [], []
                for seed in range(options.rounds):
                    base = make()
                    create(base, is_native)
                    begun = time.perf_counter()
                    futures = [
                        executor.submit(write, base, is_native, rank, n, seed) for rank in range(n)
                    ]
                    for future in futures:
                        future.result()
                    seconds.append(time.perf_counter() - begun)
                    shares.append(surviving(base))
                low, high = 100 * min(shares), 100 * max(shares)
                print(f" {low:5.1f} to {high:5.1f} % {min(seconds):5.1f} s", end="  ", flush=True)
            print()


if __name__ == "__main__":
    main()
