"""Threads of one process: chunks that they read or write in a second, each in a shard of its own.

    os.stat          for comparison: a loop of one system call and a little Python
    get, set         one chunk by its key, `ShardingMapping`
    z[i, j:k] = …    one chunk, through zarr
    z[i]             64 chunks of 32² elements, one shard, through zarr
    z[i] = …         the same, written

CPython gives its lock away in each system call, and waits to get it back. So threads that do little
but system calls get less done than one thread, in any program: `os.stat` shows how much. Threads
gain where codecs or the kernel do most of the work.

    python benchmarks/threads.py [--seconds 1] [--threads 1 2 4 8] [--quick]
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from measuring import fresh_directory, row, title

from zarr_shardstore import ShardingMapping, ShardingStore

SIDE = 32
Work = Callable[[int, int], int]
"""Work of a thread in one of its turns: the number of chunks."""


def chunks_per_second(work: Work, n_threads: int, seconds: float) -> float:
    """Return what all threads together do in a second."""
    ready = threading.Barrier(n_threads + 1)
    is_over = threading.Event()
    counts = [0] * n_threads

    def run(thread: int) -> None:
        ready.wait()
        turn = 0
        while not is_over.is_set():
            counts[thread] += work(thread, turn)
            turn += 1

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n_threads)]
    for thread in threads:
        thread.start()
    ready.wait()
    start = time.perf_counter()
    time.sleep(seconds)
    is_over.set()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - start)


def works(directory: Path, n_threads: int) -> dict[str, Work]:
    """Make an array with a shard for each thread, and return what threads do with it."""
    store = ShardingStore(directory, chunks_per_shard=(1, 8, 8))
    shape, chunks = (n_threads, 8 * SIDE, 8 * SIDE), (1, SIDE, SIDE)
    z: Any = zarr.create_array(store, name="z", shape=shape, chunks=chunks, dtype="u2")
    values = np.random.default_rng(0).integers(0, 500, shape, dtype="u2")
    z[...] = values
    mapping = ShardingMapping(store)
    value = mapping["z/c/0/0/0"]
    time.sleep(0.05)  # files that are younger are read again

    def key(thread: int, turn: int) -> str:
        return f"z/c/{thread}/{turn % 8}/{turn // 8 % 8}"

    def stat(_: int, __: int) -> int:
        os.stat(directory)
        return 1

    def get(thread: int, turn: int) -> int:
        assert mapping[key(thread, turn)]
        return 1

    def set_one(thread: int, turn: int) -> int:
        mapping[key(thread, turn)] = value
        return 1

    def write_one(thread: int, turn: int) -> int:
        at = turn % 8 * SIDE
        z[thread, :SIDE, at : at + SIDE] = values[thread, :SIDE, :SIDE]
        return 1

    def read(thread: int, _: int) -> int:
        z[thread]
        return 64

    def write(thread: int, _: int) -> int:
        z[thread] = values[thread]
        return 64

    names = "os.stat", "get", "z[i]", "z[i] = …", "set", "z[i, j:k] = …"
    return dict(zip(names, (stat, get, read, write, set_one, write_one), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--quick", action="store_true", help="once, for a moment: does it run?")
    options = parser.parse_args()
    seconds, n_rounds = (0.02, 1) if options.quick else (options.seconds, 3)
    print(f"zarr {zarr.__version__}, {os.cpu_count()} cores; medians of {n_rounds}")
    title("1000 chunks/s, and ratio to the first", *(f"{n} threads" for n in options.threads))
    with fresh_directory() as directory:
        for name, work in works(directory, max(options.threads)).items():
            rates = []
            for n in options.threads:
                found = [chunks_per_second(work, n, seconds) for _ in range(n_rounds)]
                rates.append(statistics.median(found) / 1000)
            row(name, *(f"{rate:.1f}  {rate / rates[0]:.2f}" for rate in rates))


if __name__ == "__main__":
    main()
